"""A plan that is there already is estimated for other machines, batches and constraints."""

import pytest
import torch

from tutorec.distributed.core.cache_params import CacheParams
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from tutorec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from tutorec.errors import PlannerError
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

CONFIGS = [
    EmbeddingBagConfig(4_000_000, 64, name, feature_names=[name]) for name in ("item", "user")
] + [EmbeddingBagConfig(50, 64, "day", feature_names=["day"])]
MODEL = EmbeddingBagCollection(CONFIGS, device=torch.device("meta"))


def planner(bag: float = 1.0, samples: int = 4096, machine: str = "2xH100"):
    told = {
        config.name: ParameterConstraints(pooling_factors=[bag], min_partition=32)
        for config in CONFIGS
    }
    return EmbeddingShardingPlanner(Topology.preset(machine), samples, constraints=told)


def by_hand(**words):
    return ShardingPlan({"": construct_module_sharding_plan(MODEL, words, world_size=2)})


def test_a_plan_is_estimated_as_its_planner_did():
    plan = planner().plan(MODEL)
    again = planner().estimate(plan, MODEL)
    assert plan.report is not None
    assert again.report is not None
    assert again == plan
    assert again.report.cost == plan.report.cost
    assert again.report.searched == "the plan was given"
    assert (again.report.rank_memory == plan.report.rank_memory).all()


def test_other_facts_make_it_slower_and_a_new_plan_is_at_least_as_fast():
    plan = planner().plan(MODEL)
    later = planner(bag=50.0).estimate(plan, MODEL)
    fresh = planner(bag=50.0).plan(MODEL)
    assert plan.report is not None
    assert later.report is not None
    assert fresh.report is not None
    assert later.report.cost > plan.report.cost
    assert fresh.report.cost <= later.report.cost


def test_a_cache_is_estimated_with_the_slots_of_the_plan():
    def with_caches(mib: int, **load_factors: float) -> EmbeddingShardingPlanner:
        told = {
            name: ParameterConstraints(
                sharding_types=["row_wise"],
                compute_kernels=["fused_uvm_caching"],
                cache_params=CacheParams(load_factor=load_factors.get(name)),
            )
            for name in ("item", "user")
        }
        machine = Topology(2, "cpu", ddr_cap=mib * 2**20)
        return EmbeddingShardingPlanner(machine, 512, constraints=told)

    for mib in (600, 1200):
        plan = with_caches(mib).plan(MODEL)
        factors = plan.load_factors()
        again = with_caches(mib).estimate(plan, MODEL)
        pinned = with_caches(mib, item=factors["item"], user=factors["user"]).plan(MODEL)
        assert plan.report is not None
        assert again.report is not None
        assert pinned.report is not None
        assert again.report.cost == plan.report.cost == pinned.report.cost

    small = with_caches(1200, item=0.05, user=0.05).plan(MODEL)
    with pytest.raises(PlannerError, match=r"'item'.*5 % of its rows in slots"):
        with_caches(1200, item=0.1, user=0.1).estimate(small, MODEL)


def test_a_plan_written_by_hand_has_an_estimate_for_each_way_to_cut():
    plan = by_hand(item=column_wise(ranks=[1, 0]), user=row_wise(), day=data_parallel())
    report = planner().estimate(plan, MODEL).report
    assert report is not None
    chosen = [choice.options[0].sharding_type for choice in report.choices]
    assert chosen == ["column_wise", "row_wise", "data_parallel"]
    assert report.placement.ranks[0].tolist() == [1, 0]


def test_what_the_planner_may_not_do_is_named_with_the_table():
    plan = by_hand(item=column_wise(ranks=[0, 1]), user=row_wise(), day=table_wise(rank=0))
    wide = EmbeddingShardingPlanner(Topology.preset("2xH100"))  # slices of 128 columns
    with pytest.raises(PlannerError, match=r"'item' is column_wise .*\[4000000, 32\].*constraints"):
        wide.estimate(plan, MODEL)


def test_other_ranks_and_missing_tables_are_refused():
    plan = planner().plan(MODEL)
    with pytest.raises(PlannerError):
        planner(machine="4xH100").estimate(by_hand_rows(), MODEL)
    missing = ShardingPlan({"": type(plan.plan[""])({"item": plan.plan[""]["item"]})})
    with pytest.raises(PlannerError, match="no entry for table 'user'"):
        planner().estimate(missing, MODEL)


def by_hand_rows():
    return by_hand(item=row_wise(), user=row_wise(), day=row_wise())


def test_a_plan_that_does_not_fit_is_refused_with_the_bytes():
    plan = by_hand(item=table_wise(rank=0), user=table_wise(rank=0), day=table_wise(rank=0))
    gib = 2**30
    small = EmbeddingShardingPlanner(Topology(2, "cuda", hbm_cap=2 * gib), 16)
    with pytest.raises(PlannerError, match=r"rank 0: .* bytes of HBM"):
        small.estimate(plan, MODEL)

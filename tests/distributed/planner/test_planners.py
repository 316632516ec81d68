"""From a model to a plan: alone, on several ranks, and when nothing fits."""

from __future__ import annotations

import copy
import pickle
import re
from itertools import product
from typing import Any

import pytest
import torch
from distributed.planner.models import MIB, Both, bags, only

from tutorec.distributed import comm
from tutorec.distributed.core.cache_params import CacheParams
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.hit_rate import RowPopularity
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.planner import EmbeddingShardingPlanner, OptimalPlanner, Topology
from tutorec.distributed.planner.enumerators import EmbeddingEnumerator
from tutorec.distributed.planner.options import ParameterConstraints, ShardingOption
from tutorec.distributed.planner.partitioners import (
    GreedyPerfPartitioner,
)
from tutorec.distributed.planner.proposers import (
    GreedyProposer,
    UniformProposer,
)
from tutorec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from tutorec.errors import PlannerError, PlannerErrorType

ALL = FixedPercentageStorageReservation(percentage=0.0)


def test_plan_has_every_table_of_every_collection_in_the_models_order():
    plan = EmbeddingShardingPlanner(Topology(2, "cpu"), batch_size=8).plan(Both())
    assert {path: list(of) for path, of in plan.plan.items()} == {
        "sparse.bags": ["t0", "t1"],
        "sparse.rows": ["s0", "s1"],
    }
    plan.check_fingerprint(Both())


def test_plan_of_a_model_without_tables_is_empty():
    plan = EmbeddingShardingPlanner(Topology(2, "cpu")).plan(torch.nn.Linear(2, 2))
    assert plan.plan == {}
    with pytest.raises(PlannerError, match=r"no table.*sharder"):
        plan.explain()


def test_plan_equals_the_plain_plan_and_survives_pickle_and_json():
    plan = EmbeddingShardingPlanner(Topology(2, "cpu"), batch_size=8).plan(Both())
    plain = ShardingPlan(plan.plan)
    assert plan == plain
    assert plain == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert len(pickle.dumps(plan)) < 200_000


def test_weights_do_not_travel_with_a_plan():
    model = bags((4000, 64))
    heavy = type(model)(model.embedding_bag_configs())
    plan = EmbeddingShardingPlanner(Topology(1, "cpu")).plan(heavy)
    assert len(pickle.dumps(plan)) < 4000 * 64


@pytest.mark.parametrize(
    "words",
    [
        {"proposer": GreedyProposer()},
        {"proposer": [UniformProposer(), GreedyProposer(use_depth=False)]},
        {"partitioner": GreedyPerfPartitioner()},
    ],
    ids=["greedy", "several", "partitioner"],
)
def test_proposers_and_partitioners_make_plans_that_fit_and_are_no_better_than_the_search(words):
    model = bags((40_000, 16), (30_000, 16), (500, 64))
    topology = Topology(2, "cpu", ddr_cap=4 * MIB)
    searched = EmbeddingShardingPlanner(topology, 16, storage_reservation=ALL).plan(model)
    proposed = EmbeddingShardingPlanner(topology, 16, storage_reservation=ALL, **words).plan(model)
    assert searched.report is not None
    assert proposed.report is not None
    assert searched.report.cost <= proposed.report.cost * (1 + 1e-9)
    assert searched.report.bound.ms <= searched.report.cost


def test_optimal_planner_reports_a_gap_and_is_no_worse_than_the_search():
    model = bags((40_000, 16), (30_000, 16), (20_000, 32), (500, 64), (10, 16))
    topology = Topology(2, "cpu", ddr_cap=8 * MIB)
    searched = EmbeddingShardingPlanner(topology, 16, storage_reservation=ALL).plan(model)
    optimal = OptimalPlanner(topology, 16, storage_reservation=ALL, time_limit=5.0).plan(model)
    assert searched.report is not None
    assert optimal.report is not None
    assert optimal.report.gap is not None
    assert 0 <= optimal.report.gap < 0.02
    assert optimal.report.cost <= searched.report.cost * (1 + 1e-9)


def test_pinned_tables_lie_on_their_ranks_and_colocated_ones_together():
    model = bags(*[(1000, 16)] * 6)
    constraints = {
        "t0": ParameterConstraints(sharding_types=["table_wise"], pin=[2]),
        "t1": ParameterConstraints(sharding_types=["table_wise"], colocate="pair"),
        "t4": ParameterConstraints(colocate="pair"),
    }
    plan = (
        EmbeddingShardingPlanner(Topology(4, "cpu"), 16, constraints=constraints)
        .plan(model)
        .plan[""]
    )
    assert plan["t0"].ranks == [2]
    assert plan["t1"].ranks == plan["t4"].ranks
    assert plan["t4"].sharding_type == "table_wise"


def test_callbacks_are_given_the_placed_options_and_may_move_them():
    def to_rank_1(placed: list[ShardingOption]) -> list[ShardingOption]:
        for option in placed:
            option.place([1] * option.num_shards)
        return placed

    constraints = only(["t0", "t1"], "table_wise")
    planner = EmbeddingShardingPlanner(
        Topology(2, "cpu"), constraints=constraints, callbacks=[to_rank_1]
    )
    plan = planner.plan(bags((10, 4), (20, 4)))
    assert [entry.ranks for entry in plan.plan[""].values()] == [[1], [1]]


def test_topology_is_not_changed_by_planning():
    topology = Topology(2, "cpu")
    before = copy.deepcopy(topology)
    EmbeddingShardingPlanner(topology).plan(bags((1000, 16)))
    assert repr(topology) == repr(before)


def test_table_that_fits_nowhere_is_named_with_a_change_that_works():
    model = bags((100_000, 64), prefix="item")
    topology = Topology(2, "cpu", ddr_cap=20 * MIB)
    constraints = only(["item0"], "table_wise")
    with pytest.raises(PlannerError, match=r"table 'item0' needs .* 20\.0 MiB") as caught:
        EmbeddingShardingPlanner(
            topology, 8, constraints=constraints, storage_reservation=ALL
        ).plan(model)
    assert caught.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS
    assert "row_wise" in str(caught.value)
    plan = EmbeddingShardingPlanner(
        topology, 8, constraints=only(["item0"], "row_wise"), storage_reservation=ALL
    ).plan(model)
    assert plan.plan[""]["item0"].ranks == [0, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"constraints": only(["absent"], "row_wise")}, "absent"),
        ({"constraints": only(["t0"], "diagonal")}, "diagonal"),
        ({"constraints": {"t0": ParameterConstraints(pin=[7])}}, r"rank.*7"),
        ({"constraints": {"t0": ParameterConstraints(compute_kernels=["quant_uvm"])}}, "t0"),
        ({"timeout_seconds": 0}, "timeout_seconds=0 must"),
        ({"batch_size": 0}, "batch_size=0 must"),
    ],
)
def test_what_contradicts_the_model_is_refused_by_name(words: dict[str, Any], message: str):
    with pytest.raises(PlannerError, match=message):
        EmbeddingShardingPlanner(Topology(2, "cpu"), **words).plan(bags((10, 4)))


def test_without_a_process_group_a_planner_asks_for_a_topology():
    with pytest.raises(PlannerError, match=r"pass topology=Topology\(world_size=2"):
        EmbeddingShardingPlanner()
    with pytest.raises(PlannerError, match=r"call plan\(module, sharders\)"):
        EmbeddingShardingPlanner(Topology(2, "cpu")).collective_plan(bags((10, 4)))


def collective(rank: int, world_size: int) -> tuple[str, int, str]:
    plan = EmbeddingShardingPlanner(batch_size=8).collective_plan(Both())
    return plan.to_json(), world_size, str(plan.explain()).splitlines()[0]


def test_collective_plan_is_rank_0s_on_every_rank(ranks):
    found = ranks(2).run(collective)
    assert len(set(found)) == 1
    assert "4 tables" in found[0][2]


def failing(rank: int, world_size: int) -> tuple[str, str, str]:
    # What the other ranks were told is of no consequence: rank 0 plans.
    topology = Topology(world_size, "cpu", ddr_cap=MIB if rank == 0 else None)
    planner = EmbeddingShardingPlanner(topology, storage_reservation=ALL)
    try:
        planner.collective_plan(bags((1_000_000, 64)))
    except PlannerError as error:
        return type(error).__name__, str(error), error.error_type.value
    return "", "", ""


def test_failure_on_rank_0_is_the_same_error_on_every_rank(ranks):
    first, second = ranks(2).run(failing)
    assert first == second
    assert first[0] == "PlannerError"
    assert "'t0'" in first[1]
    assert first[2] == "insufficient_storage"


def broken_model(rank: int, world_size: int) -> str:
    try:
        EmbeddingShardingPlanner(batch_size=8).collective_plan(None if rank == 0 else bags((10, 4)))  # type: ignore[arg-type]
    except Exception as error:
        return type(error).__name__ + str(error)
    return ""


def test_any_error_on_rank_0_reaches_the_other_ranks(ranks):
    first, second = ranks(2).run(broken_model)
    assert first == second != ""


def cuda_plan_on_cpu(rank: int, world_size: int) -> list[str]:
    """A plan for GPUs, used where there are none."""
    torch.manual_seed(0)
    model = type(bags((10, 4)))(bags((10, 4), (20, 4)).embedding_bag_configs())
    plan = EmbeddingShardingPlanner(Topology(world_size, "cuda"), batch_size=8).collective_plan(
        model
    )
    wrapped = DistributedModelParallel(model, plan=plan)
    assert comm.default_group() is not None
    return [str(parameter.device) for _, parameter in wrapped.named_parameters()]


def test_plan_for_gpus_is_placed_on_the_cpu_where_there_are_none(ranks):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    found = ranks(2).run(cuda_plan_on_cpu)
    assert {device for devices in found for device in devices} == {"cpu"}


def test_tables_that_do_not_fit_get_caches_and_the_story_says_what_others_would_cost():
    words = ParameterConstraints(compute_kernels=["fused", "fused_uvm_caching"])
    model = bags((100_000, 64), (100_000, 64))
    planner = EmbeddingShardingPlanner(
        Topology(1, "cpu", ddr_cap=40 * MIB),
        8,
        constraints={"t0": words, "t1": words},
        storage_reservation=ALL,
    )
    plan = planner.plan(model)
    entries = plan.plan[""].values()
    assert sorted(entry.compute_kernel for entry in entries) == ["fused", "fused_uvm_caching"]
    [cached] = [entry.cache_params for entry in entries if entry.cache_params is not None]
    assert cached.load_factor is not None and cached.load_factor > 0.3
    name = next(name for name, entry in plan.plan[""].items() if entry.cache_params is not None)
    assert re.search(r"^table_wise +1 % ", str(plan.explain(name)), re.MULTILINE)
    assert "36.6 MiB in files" in str(plan.explain())
    assert ShardingPlan.from_json(plan.to_json()).plan[""][name].cache_params == cached


@pytest.mark.parametrize("mib", [8, 12, 16, 24])
def test_caches_of_tables_used_in_different_ways_share_the_memory_best(mib):
    topology, model = Topology(1, "cpu", ddr_cap=mib * MIB), bags((100_000, 64), (100_000, 64))
    laws = [RowPopularity.power_law(100_000, exponent, ids=80) for exponent in (0.3, 1.3)]
    constraints = {
        f"t{index}": ParameterConstraints(
            sharding_types=["table_wise"],
            compute_kernels=["fused_uvm_caching"],
            cache_params=CacheParams(stats=law),
        )
        for index, law in enumerate(laws)
    }
    planner = EmbeddingShardingPlanner(
        topology, 8, constraints=constraints, storage_reservation=ALL
    )
    plan = planner.plan(model).plan[""]
    options = EmbeddingEnumerator(topology, 8, constraints).enumerate(
        model, [EmbeddingBagCollectionSharder()]
    )
    by_table = [[one for one in options if one.name == name] for name in ("t0", "t1")]
    fitting = [
        pair
        for pair in product(*by_table)
        if sum(one.shards[0].storage.ddr for one in pair) <= mib * MIB
    ]
    best = min(fitting, key=lambda pair: sum(one.shards[0].perf.total for one in pair))
    chosen = [plan[name].cache_params.load_factor for name in ("t0", "t1")]
    assert chosen == [one.cache_load_factor for one in best]
    assert len(fitting) < len(by_table[0]) * len(by_table[1])


def test_the_story_shows_every_size_of_a_cache_beside_the_longest_names():
    words = ParameterConstraints(
        sharding_types=["row_wise", "table_row_wise"],
        compute_kernels=["fused", "fused_uvm_caching"],
    )
    planner = EmbeddingShardingPlanner(
        Topology(2, "cpu", ddr_cap=8 * MIB), 8, constraints={"t0": words}, storage_reservation=ALL
    )
    story = str(planner.plan(bags((100_000, 64))).explain("t0"))
    sizes = re.findall(r"^table_row_wise +(\d+) % ", story, re.MULTILINE)
    assert sorted(map(int, sizes)) == [1, 2, 5, 10, 20, 50]
    assert "over by" in story and ".." not in story

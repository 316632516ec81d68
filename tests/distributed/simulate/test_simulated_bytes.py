"""Simulated bytes are those of the formulas and of real processes: any plan, any batch, by rank and
stage.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributed import byte_formulas
from distributed.byte_formulas import StepBatches, step_traffic
from distributed.sharding.test_any_plan import (
    Case,
    apply_optimizers,
    batch_of,
    collection,
    covering_cases,
    generator,
    with_drawn,
)
from distributed.sharding.test_any_plan_rows import collection as row_collection
from distributed.test_shard_traffic import cases_with_copies, count_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from tutorec.distributed.core.tables import SUPPORTED_KERNELS, SharderSupport, place_table
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.plan.plan import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel
from tutorec.distributed.simulate.simulation import simulate
from tutorec.distributed.simulate.step import Simulation
from tutorec.distributed.traffic import Traffic
from tutorec.modules.embedding_configs import get_embedding_names_by_table


def planned(case: Case, pooled: bool, world_size: int, local_size: int) -> tuple[Any, Any]:
    unsharded: Any = collection(case) if pooled else row_collection(case)
    apply_optimizers(case, unsharded.embedding_bags if pooled else unsharded.embeddings)
    words = {
        name: data_parallel() if word[0] == "dp" else generator(word)
        for name, word in case.words.items()
    }
    sharder = EmbeddingBagCollectionSharder() if pooled else EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        unsharded, words, sharder, local_size=local_size, world_size=world_size
    )
    return unsharded, plan


def matrices(bytes_sent: Any, world_size: int) -> dict[str, list[list[float]]]:
    """Stage -> [W, W], of those in which something is sent."""
    found: dict[str, list[list[float]]] = {}
    for (stage, source, destination), count in bytes_sent.items():
        if count:
            found.setdefault(stage, [[0.0] * world_size for _ in range(world_size)])[source][
                destination
            ] = count
    return found


def simulated_matrices(step: Simulation) -> dict[str, list[list[float]]]:
    found = {stage: step.matrix(stage).tolist() for stage in step.issues()}
    return {stage: matrix for stage, matrix in found.items() if np.any(matrix)}


@pytest.mark.parametrize(("world_size", "hosts"), [(2, 1), (2, 2), (4, 2), (6, 3), (3, 1)])
def test_bytes_of_any_plan_and_batch_are_those_of_the_formulas(world_size, hosts):
    local_size, kinds = world_size // hosts, set()

    def check(case: Case, pooled: bool, row_bytes: int) -> None:
        unsharded, plan = planned(case, pooled, world_size, local_size)
        batches = [batch_of(case, rank) for rank in range(world_size)]
        rules = SharderSupport(
            world_size,
            case.weighted and pooled,
            list(ShardingType),
            SUPPORTED_KERNELS,
            None,
            local_size=local_size,
        )
        configs = unsharded.embedding_bag_configs() if pooled else unsharded.embedding_configs()
        keys = get_embedding_names_by_table(configs)
        weights = dict(unsharded.named_parameters())
        placed = [
            place_table(
                config,
                key,
                next(w for n, w in weights.items() if f".{config.name}." in n),
                plan[config.name],
                rules,
            )
            for config, key in zip(configs, keys, strict=True)
        ]
        kinds.update(table.sharding_type for table in placed)
        topology = Topology(world_size, "cpu", local_world_size=local_size)
        numbers = StepBatches.of(batches)
        wanted = matrices(
            step_traffic(placed, numbers, local_size, row_bytes=row_bytes, gradient_bytes=2),
            world_size,
        )
        step = simulate(plan, topology, unsharded, batches, row_bytes=row_bytes, gradient_bytes=2)
        assert simulated_matrices(step) == wanted

    for case in covering_cases(world_size, local_size):
        check(case, pooled=True, row_bytes=4)
        check(case, pooled=False, row_bytes=2)
    assert kinds == set(ShardingType)
    drawn = given(cases_with_copies(world_size, local_size), st.booleans(), st.sampled_from([2, 4]))
    settings(max_examples=20)(drawn(check))()


@pytest.mark.parametrize(
    ("world_size", "hosts", "narrow", "pooled"),
    [
        (2, 1, False, True),
        (2, 2, True, True),
        (2, 2, False, False),
        pytest.param(4, 2, False, True, marks=pytest.mark.world4),
        pytest.param(4, 2, True, False, marks=[pytest.mark.world4, pytest.mark.slow]),
    ],
)
def test_bytes_of_any_plan_and_batch_are_those_that_real_processes_send(
    ranks, world_size, hosts, narrow, pooled
):
    local_size = world_size // hosts
    drawn = with_drawn(
        covering_cases(world_size, local_size), cases_with_copies(world_size, local_size), 12
    )
    of_ranks = ranks(world_size, hosts=hosts).run(count_cases, drawn, narrow, pooled)
    kinds, stages = set(), set()
    topology = Topology.hosts(hosts, local_size)
    wire = 2 if narrow else 4
    for index, case in enumerate(drawn):
        counted = Traffic.merge(of_rank[index][0] for of_rank in of_ranks)
        kinds |= {table.sharding_type for table in of_ranks[0][index][1]}
        stages |= {stage for (stage, _, _), count in counted.bytes.items() if count}
        unsharded, plan = planned(case, pooled, world_size, local_size)
        batches = [batch_of(case, rank) for rank in range(world_size)]
        step = simulate(
            ShardingPlan({"": EmbeddingModuleShardingPlan(plan)}),
            topology,
            unsharded,
            batches,
            row_bytes=wire,
            gradient_bytes=wire,
        )
        assert simulated_matrices(step) == matrices(counted.bytes, world_size), case
        # An exchange has a price even if nothing is in it, and the simulation has each of them
        # once.
        assert step.issues() == {
            stage: count for stage, count in counted.issues.items() if count
        }, case
        for crossing in (True, False, None):
            assert step.total(crossing=crossing) == counted.total(crossing=crossing)
        assert step.sent("output rows").tolist() == [
            sum(row) for row in counted.matrix(world_size, "output rows")
        ]
        columns = zip(*counted.matrix(world_size, "input ids"), strict=True)
        assert step.received("input ids").tolist() == [sum(column) for column in columns]
    assert kinds == set(ShardingType)
    covered = "SIZES STRIDES IDS ROWS GRADIENTS COPIES_SIZES COPIES_IDS COPIES_ROWS COPIES_SUMS"
    assert stages >= {getattr(byte_formulas, name) for name in covered.split()}

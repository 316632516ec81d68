"""What is no input: refused where it is given, with the name, the number and what to
give instead.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from distributed.planner.models import bags, only

from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.distributed.planner.partitioners import GreedyPerfPartitioner
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
from tutorec.distributed.planner.storage_reservations import FixedAbsoluteStorageReservation
from tutorec.distributed.planner.topology import CustomTopologyData, Topology
from tutorec.distributed.planner.types import Partitioner
from tutorec.errors import PlannerError, PlannerErrorType

NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Topology(True, "cpu"), "world_size=True"),
        (lambda: Topology(2, "cuda", hbm_cap=NAN), "hbm_cap=nan"),
        (lambda: Topology(2, "cuda", hbm_cap=math.inf), "hbm_cap=inf"),
        (lambda: Topology(2, "cuda", hbm_cap="80GB"), "hbm_cap='80GB'"),
        (lambda: Topology(2, "cpu", intra_host_bw="1"), "intra_host_bw='1'"),
        (lambda: Topology(2, "cpu", latency_ms="1"), "latency_ms='1'"),
        (lambda: Topology(4, "cpu", local_world_size=2, pod_size="1"), "pod_size='1'"),
        (lambda: Topology.laptop(0), "world_size=0"),
        (lambda: Topology.preset("8xH100x999999999"), "world_size=7999999992"),
        (
            lambda: Topology(
                2, "cuda", custom_topology_data=CustomTopologyData({"hbm_cap": [1, NAN]}, 2)
            ),
            "hbm_cap=nan",
        ),
        (lambda: FixedAbsoluteStorageReservation("1"), "hbm_reserved_bytes='1'"),
    ],
)
def test_parts_refuse_what_is_no_number_of_theirs(make, words):
    with pytest.raises(PlannerError, match=words) as caught:
        make()
    assert caught.value.error_type is PlannerErrorType.INPUT_VALIDATION


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch_size": NAN}, "batch_size=nan"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        ({"timeout_seconds": "5"}, "timeout_seconds='5'"),
        ({"constraints": {"t0": ParameterConstraints(device_group="gpu")}}, "device_group='gpu'"),
        ({"constraints": {"t0": ParameterConstraints(pin="1")}}, "names rank '1'"),
    ],
)
def test_planner_refuses_what_is_no_part_of_it(given, words):
    with pytest.raises(PlannerError, match=words) as caught:
        EmbeddingShardingPlanner(**{"topology": Topology(2, "cpu"), **given}).plan(bags((100, 16)))
    assert caught.value.error_type is PlannerErrorType.INPUT_VALIDATION


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        (2**52, {}),
        (100, {"batch_size": 10**15}),
        (100, {"constraints": {"t0": ParameterConstraints(pooling_factors=[1e300])}}),
    ],
)
def test_more_bytes_than_can_be_counted_are_refused(rows, given):
    # 2 ** 52 rows of 256 columns once came out as a plan: their bytes do not fit into 64 bits.
    with pytest.raises(PlannerError, match=r"table 't0', .* bytes on its rank") as caught:
        EmbeddingShardingPlanner(Topology(2, "cuda"), **given).plan(bags((rows, 256)))
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def test_tables_together_on_ranks_that_have_none_in_common_are_refused():
    words = {
        name: ParameterConstraints(sharding_types=["table_wise"], colocate="a", pin=[rank])
        for rank, name in enumerate(("t0", "t1"))
    }
    with pytest.raises(PlannerError, match=r"'t0', 't1'.* no rank in common"):
        EmbeddingShardingPlanner(Topology(2, "cpu"), constraints=words).plan(bags((8, 4), (8, 4)))
    words["t1"].pin = [0]
    plan = EmbeddingShardingPlanner(Topology(2, "cpu"), constraints=words).plan(
        bags((8, 4), (8, 4))
    )
    assert [entry.ranks for entry in plan.plan[""].values()] == [[0], [0]]


def one_less(options):
    return options[1:]


def far_away(options):
    for option in options:
        option.place([7] * option.num_shards)
    return options


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (one_less, "plan: table 't0' is not placed"),
        (far_away, r"plan: table 't0': ranks \[7\] of a world of 2 are not a placement"),
    ],
)
def test_callbacks_that_break_the_plan_are_named(callback, words):
    planner = EmbeddingShardingPlanner(
        Topology(2, "cpu"), constraints=only(["t0", "t1"], "table_wise"), callbacks=[callback]
    )
    with pytest.raises(PlannerError, match=f"what the callbacks returned is not a {words}"):
        planner.plan(bags((8, 4), (8, 4)))


class Outside(Partitioner):
    """Places where there is no rank."""

    def partition(self, proposal, storage_constraint, hbm_per_device=None):
        return far_away(proposal)


@pytest.mark.parametrize(
    ("partitioner", "words"),
    [
        (Outside(), "table 't0' as table_wise has a shard on rank 7, .* ranks 0 to 1"),
        # TorchRec's partitioners know of no pins: that broke an assertion.
        (
            GreedyPerfPartitioner(),
            r"GreedyPerfPartitioner placed is not a plan: table 't0': .*leave .* out",
        ),
    ],
)
def test_partitioner_that_breaks_the_plan_is_named(partitioner, words):
    constraints = {"t0": ParameterConstraints(sharding_types=["table_wise"], pin=[1])}
    planner = EmbeddingShardingPlanner(
        Topology(2, "cpu"), constraints=constraints, partitioner=partitioner
    )
    with pytest.raises(ValueError, match=words):
        planner.plan(bags((8, 4)))


def test_unknown_table_of_constraints_is_told_in_the_order_of_the_model():
    tables = [f"t{index}" for index in range(5)]
    planner = EmbeddingShardingPlanner(
        Topology(2, "cpu"), constraints={"zz": ParameterConstraints()}
    )
    with pytest.raises(PlannerError, match=", ".join(repr(name) for name in tables)):
        planner.plan(bags(*[(8, 4)] * 5))


def test_model_that_is_no_collection_has_an_empty_plan():
    assert EmbeddingShardingPlanner(Topology(2, "cpu")).plan(torch.nn.Linear(1, 1)).plan == {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_that_is_offered_is_enough_however_much_is_missing(ranks):
    # 1 MB where 300 MB are needed: no change was offered.
    module = bags((10**7, 8), (10**7, 8))
    with pytest.raises(PlannerError) as caught:
        EmbeddingShardingPlanner(Topology(ranks, "cuda", hbm_cap=10**6)).plan(module)
    [offered] = re.findall(r"hbm_cap=([0-9]+)", str(caught.value))
    assert EmbeddingShardingPlanner(Topology(ranks, "cuda", hbm_cap=int(offered))).plan(module).plan

"""What parts of a planner hand to one another and cannot be used: named, with the part, the table
and the number.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from distributed.planner.models import bags, only
from torch import nn

from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.planner.enumerators import EmbeddingEnumerator
from tutorec.distributed.planner.options import ParameterConstraints, Shard, ShardingOption
from tutorec.distributed.planner.partitioners import GreedyPerfPartitioner
from tutorec.distributed.planner.perf_models import NoopPerfModel
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner, to_sharding_plan
from tutorec.distributed.planner.proposers import GreedyProposer
from tutorec.distributed.planner.topology import BasicCommsBandwidths, Perf, Storage, Topology
from tutorec.distributed.planner.types import Proposer, ShardEstimator
from tutorec.errors import PlannerError

NAN = math.nan
TWO = Topology(2, "cuda")


def table(
    name: str = "t0", ms: float = 1.0, size: object = (1, 1), storage: object = None
) -> ShardingOption:
    """An option of one shard."""
    shard = Shard(size, [0, 0], Storage(9, 0) if storage is None else storage, Perf(ms, 0, 0, 0))  # type: ignore[arg-type]
    place = name, torch.empty(1, 1), ("", nn.Identity())
    return ShardingOption(*place, [1.0], 2, "table_wise", "device", "fused", [shard])


def plan(**parts):
    return EmbeddingShardingPlanner(TWO, stats=[], **parts).plan(bags((8, 4), (8, 4)))


class Once(Proposer):
    """Proposes one thing, whatever it is."""

    def __init__(self, proposal):
        self.proposal = proposal

    def load(self, search_space, enumerator=None):
        pass

    def propose(self):
        proposal, self.proposal = self.proposal, None
        return proposal

    def feedback(self, partitionable, plan=None, perf_rating=None, storage_constraint=None):
        pass


class Says(ShardEstimator):
    """The same time and storage of everything."""

    def __init__(self, ms, count):
        self.ms, self.count = ms, count

    def estimate(self, sharding_options, sharder_data_map=None):
        for option in sharding_options:
            times, counts = (
                np.full((option.num_shards, 6), self.ms),
                np.full((option.num_shards, 3), self.count),
            )
            option.set_estimates(perf=times, storage=counts)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"enumerator": EmbeddingEnumerator(TWO, estimator=[])},
            "'t0' as table_wise has no estimate of its time",
        ),
        (
            {"enumerator": EmbeddingEnumerator(TWO, estimator=Says(NAN, 1))},
            "'t0' as table_wise: shard 0 .* nan ms",
        ),
        ({"enumerator": EmbeddingEnumerator(TWO, estimator=Says(-1.0, 1))}, r"shard 0 .* -6.0 ms"),
        ({"enumerator": EmbeddingEnumerator(TWO, estimator=Says(1.0, -5))}, r"shard 0 .* -5 bytes"),
        (
            {"enumerator": EmbeddingEnumerator(Topology(4, "cuda"))},
            "cut into 4 shards, and there are 2 ranks",
        ),
        (
            {"storage_reservation": SimpleNamespace(reserve=lambda *_: Topology(4, "cuda"))},
            "cut into 2 shards, and there are 4 ranks",
        ),
        ({"proposer": Once([table(), table()])}, "what Once proposed has table 't0' twice"),
        (
            {"proposer": GreedyProposer(), "timeout_seconds": 1e-9},
            "timeout_seconds=1e-09 ended after 0 proposals",
        ),
    ],
)
def test_answers_of_parts_that_cannot_be_used_are_named(parts, words):
    with pytest.raises(PlannerError, match=words):
        plan(**parts)


def test_a_rating_without_an_upper_limit_is_a_rating():
    assert list(plan(performance_model=SimpleNamespace(rate=lambda _: math.inf)).plan[""]) == [
        "t0",
        "t1",
    ]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (table(ms=NAN), "'t0'.* nan ms"),
        (table(ms=-5.0), "'t0'.* -5.0 ms"),
        (table(storage=Storage(-5, 0)), "'t0'.* -5 bytes"),
    ],
)
def test_shards_that_hold_no_amounts_are_named(option, words):
    for use in (
        lambda: GreedyPerfPartitioner().partition([option], TWO),
        lambda: GreedyProposer().load([option]) or GreedyPerfPartitioner().partition([option], TWO),
    ):
        with pytest.raises(ValueError, match=words):
            use()


def test_an_option_without_shards_is_not_placed():
    option = table()
    option.shards = []
    with pytest.raises(PlannerError, match=r"'t0' as table_wise.* not been placed"):
        to_sharding_plan([option], TWO)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: GreedyPerfPartitioner().partition([table(), table()], TWO),
            "proposal has table 't0' twice",
        ),
        (
            lambda: Topology(2, "cuda", uneven_sharding_perf_multiplier=NAN),
            "uneven_sharding_perf_multiplier=nan",
        ),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(make, words):
    with pytest.raises(PlannerError, match=words):
        make()


def test_bandwidths_of_ones_own_are_taken():
    own = BasicCommsBandwidths(inter_host_bw=1.0, intra_host_bw=2.0)
    assert Topology(2, "cuda", generalized_comms_bandwidths=own).intra_host_bw == 2.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"feature_names": "tf0"}, "feature_names='tf0'.* is not a list"),
    ],
)
def test_constraints_of_the_wrong_kind_are_named(given, words):
    with pytest.raises(PlannerError, match=words):
        plan(constraints={"t0": ParameterConstraints(**given)})


def test_without_sharders_no_table_is_looked_for():
    constraints = only(["t0"], "row_wise")
    with pytest.warns(UserWarning, match="'t0': without sharders"):
        assert EmbeddingEnumerator(TWO, constraints=constraints).enumerate(bags((8, 4)), []) == []
    with pytest.raises(PlannerError, match=r"'t0', which no.* shard no table"):
        EmbeddingShardingPlanner(TWO, constraints=constraints).plan(
            bags((8, 4)), [EmbeddingCollectionSharder()]
        )


def placed(world_size):
    topology = Topology(world_size, "cuda")
    enumerator = EmbeddingEnumerator(topology, constraints=only(["t0"], "row_wise"))
    return GreedyPerfPartitioner().partition(
        enumerator.enumerate(bags((8, 4)), [EmbeddingBagCollectionSharder()]), topology
    )


@pytest.mark.parametrize(
    "use",
    [
        to_sharding_plan,
        lambda options, topology: NoopPerfModel(topology).rate(options),
    ],
)
def test_a_plan_for_more_ranks_than_there_are_is_refused(use):
    with pytest.raises(ValueError, match=r"'t0'.* shard on rank 3"):
        use(placed(4), TWO)


def test_options_become_no_plan_unless_each_is_placed_once():
    options = placed(2)
    with pytest.raises(PlannerError, match="has table 't0' twice"):
        to_sharding_plan([*options, *options], TWO)
    with pytest.raises(PlannerError, match=r"'t0' as table_wise.* not been placed"):
        to_sharding_plan([table()], TWO)
    with pytest.raises(ValueError, match="'t0': 3 ranks for 2 shards"):
        options[0].place([0, 1, 1])


@pytest.mark.parametrize(("what", "words"), [("total_storage", "storage"), ("total_perf", "time")])
def test_totals_of_what_is_not_estimated_are_refused(what, words):
    option = table()
    option.shards = [Shard([1, 1], [0, 0])]
    with pytest.raises(
        ValueError, match=f"'t0'.* has no estimate of its {words}: call .*populate_estimates"
    ):
        getattr(option, what)

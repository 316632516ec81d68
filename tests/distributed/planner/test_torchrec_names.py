"""What programs for TorchRec's planner use, with the root renamed."""

from __future__ import annotations

import torch
from distributed.planner.models import bags

from tutorec.distributed import planner
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.planner import types
from tutorec.distributed.planner.enumerators import EmbeddingEnumerator
from tutorec.distributed.planner.partitioners import GreedyPerfPartitioner
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner, to_sharding_plan
from tutorec.distributed.planner.types import (
    CustomTopologyData,
    Enumerator,
    ParameterConstraints,
    Perf,
    Shard,
    ShardEstimator,
    Storage,
    Topology,
)
from tutorec.distributed.planner.utils import (
    bytes_to_gb,
    sharder_name,
)
from tutorec.modules.embedding_modules import EmbeddingBagCollection

TYPES = """BasicCommsBandwidths CollectiveType CustomTopologyData DeviceHardware Enumerator GeneralizedCommsBandwidth
    ParameterConstraints PartitionByType Partitioner Perf PerfModel PlannerError PlannerErrorType Proposer Shard
    ShardEstimator ShardingOption Stats Storage StorageReservation Topology""".split()  # noqa: E501


def test_names_are_where_torchrec_has_them():
    assert [name for name in TYPES if not hasattr(types, name)] == []
    for name in (
        "EmbeddingShardingPlanner",
        "ParameterConstraints",
        "Topology",
        "bytes_to_gb",
        "sharder_name",
    ):
        assert hasattr(planner, name), name
    assert planner.ParameterConstraints is ParameterConstraints


class Flat(ShardEstimator):
    """Everything costs the same."""

    def __init__(self, topology, constraints=None):
        super().__init__(topology, constraints)

    def estimate(self, sharding_options, sharder_data_map=None):
        for option in sharding_options:
            for shard in option.shards:
                shard.perf, shard.storage = Perf(1, 1, 1, 1), Storage(1, 1)


def test_estimators_of_ones_own_pass_on_what_torchrecs_take():
    topology = Topology(2, "cuda")
    enumerator = EmbeddingEnumerator(topology, batch_size=8, estimator=[Flat(topology)])
    plan = EmbeddingShardingPlanner(topology, enumerator=enumerator).plan(bags((8, 4), (8, 4)))
    assert sorted(plan.plan[""]) == ["t0", "t1"]


class Fixed(Enumerator):
    """No options."""

    def __init__(self, topology, batch_size=8, constraints=None, estimator=None):
        super().__init__(topology, batch_size, constraints, estimator)

    def enumerate(self, module, sharders):
        return []

    def populate_estimates(self, sharding_options):
        pass


def test_enumerators_of_ones_own_pass_on_what_torchrecs_take():
    topology = Topology(2, "cpu")
    assert (
        EmbeddingShardingPlanner(topology, enumerator=Fixed(topology)).plan(bags((8, 4))).plan == {}
    )


def test_placed_options_become_a_sharding_plan():
    topology = Topology(2, "cuda")
    words = {"t0": ParameterConstraints(sharding_types=["row_wise"])}
    options = EmbeddingEnumerator(topology, constraints=words).enumerate(
        bags((8, 4)), [EmbeddingBagCollectionSharder()]
    )
    placed = GreedyPerfPartitioner().partition(options, topology)
    plan = to_sharding_plan(placed, topology)
    assert isinstance(plan, ShardingPlan)
    assert plan.plan[""]["t0"].ranks == [0, 1]


def test_constraints_hash_by_value():
    one, same = (ParameterConstraints(sharding_types=["row_wise"], pin=[0]) for _ in range(2))
    assert hash(one) == hash(same) and hash(one) != hash(ParameterConstraints())


def test_shards_print_as_torchrecs():
    text = (
        "Shard size: (8, 4), offset: (0, 0), storage: Storage(hbm=1, ddr=2, ssd=0), perf: None, "
        "rank: 1"
    )
    assert str(Shard([8, 4], [0, 0], Storage(1, 2), None, 1)) == text


def test_memory_of_each_device_is_its_own():
    data = CustomTopologyData(data={"hbm_cap": [1, 2], "ddr_cap": [3, 4]}, world_size=2)
    devices = Topology(2, "cuda", custom_topology_data=data).devices
    assert [(device.storage.hbm, device.storage.ddr) for device in devices] == [(1, 3), (2, 4)]


def test_bytes_are_told_in_gb_and_sharders_by_full_names():
    assert bytes_to_gb(2**31) == 2.0
    assert (
        sharder_name(EmbeddingBagCollection)
        == "tutorec.modules.embedding_modules.EmbeddingBagCollection"
    )
    assert sharder_name(torch.nn.Linear) == "torch.nn.modules.linear.Linear"

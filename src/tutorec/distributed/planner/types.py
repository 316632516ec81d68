"""TorchRec's ``torchrec.distributed.planner.types``: its names, gathered from where they are defined."""

from tutorec.distributed.planner.constraints import ParameterConstraints
from tutorec.distributed.planner.interfaces import (
    Enumerator,
    Partitioner,
    PerfModel,
    Proposer,
    ShardEstimator,
    Stats,
    StorageReservation,
)
from tutorec.distributed.planner.options import PartitionByType, Perf, Shard, ShardingOption, Storage
from tutorec.distributed.planner.topology import (
    BasicCommsBandwidths,
    CollectiveType,
    CustomTopologyData,
    DeviceHardware,
    GeneralizedCommsBandwidth,
    Topology,
)
from tutorec.errors import PlannerError, PlannerErrorType

__all__ = [
    "BasicCommsBandwidths",
    "CollectiveType",
    "CustomTopologyData",
    "DeviceHardware",
    "Enumerator",
    "GeneralizedCommsBandwidth",
    "ParameterConstraints",
    "PartitionByType",
    "Partitioner",
    "Perf",
    "PerfModel",
    "PlannerError",
    "PlannerErrorType",
    "Proposer",
    "Shard",
    "ShardEstimator",
    "ShardingOption",
    "Stats",
    "Storage",
    "StorageReservation",
    "Topology",
]

"""TorchRec's import path ``torchrec.distributed.planner.types``."""

from tutorec.distributed.cache_params import CacheParams, KeyValueParams
from tutorec.distributed.plan import BoundsCheckMode, EmbeddingComputeKernel, ShardingPlan
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
from tutorec.distributed.planner.options import (
    PartitionByType,
    Perf,
    Shard,
    ShardingOption,
    Storage,
)
from tutorec.distributed.planner.topology import (
    BasicCommsBandwidths,
    CollectiveType,
    CustomTopologyData,
    DeviceHardware,
    GeneralizedCommsBandwidth,
    Topology,
)
from tutorec.distributed.sharders import ModuleSharder
from tutorec.errors import PlannerError, PlannerErrorType

__all__ = [
    "BasicCommsBandwidths",
    "BoundsCheckMode",
    "CacheParams",
    "CollectiveType",
    "CustomTopologyData",
    "DeviceHardware",
    "EmbeddingComputeKernel",
    "Enumerator",
    "GeneralizedCommsBandwidth",
    "KeyValueParams",
    "ModuleSharder",
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
    "ShardingPlan",
    "Stats",
    "Storage",
    "StorageReservation",
    "Topology",
]

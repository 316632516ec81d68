"""The plan of a sharded model: its types, its file, its differences, its shards."""

from tutorec._lazy import lazy_package

_DEFINED_IN = {
    "EmbeddingComputeKernel": ".plan",
    "EmbeddingModuleShardingPlan": ".plan",
    "ParameterSharding": ".plan",
    "ShardingPlan": ".plan",
    "ShardingType": ".plan",
}

__getattr__, __dir__ = lazy_package(__name__, _DEFINED_IN)

"""TorchRec's import path ``torchrec.distributed.types``."""

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tutorec.awaitable import (
    Awaitable,
    GetItemLazyAwaitable,
    LazyAwaitable,
    LazyGetItemMixin,
    LazyNoWait,
    NoWait,
)
from tutorec.distributed.core.cache_params import (
    CacheAlgorithm,
    CacheParams,
    CacheStatistics,
    KeyValueParams,
)
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.qcomm import CommOp, QuantizedCommCodecs
from tutorec.distributed.core.sharded_module import ShardedModule
from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.plan.plan import (
    BoundsCheckMode,
    EmbeddingModuleShardingPlan,
    ModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tutorec.distributed.state.sharded_tensor import ShardedTensor
from tutorec.types import DataType

__all__ = [
    "Awaitable",
    "BoundsCheckMode",
    "CacheAlgorithm",
    "CacheParams",
    "CacheStatistics",
    "CommOp",
    "DataType",
    "EmbeddingModuleShardingPlan",
    "EnumerableShardingSpec",
    "GetItemLazyAwaitable",
    "KeyValueParams",
    "LazyAwaitable",
    "LazyGetItemMixin",
    "LazyNoWait",
    "ModuleSharder",
    "ModuleShardingPlan",
    "NoWait",
    "ParameterSharding",
    "QuantizedCommCodecs",
    "Shard",
    "ShardMetadata",
    "ShardedModule",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingType",
]

"""TorchRec's import path ``torchrec.distributed.embedding_types``."""

from tutorec.distributed.core.grouped_configs import GroupedEmbeddingConfig, ShardedEmbeddingTable
from tutorec.distributed.core.sharded_module import KJTList, ShardedModule
from tutorec.distributed.core.sharders import BaseEmbeddingSharder, ModuleSharder
from tutorec.distributed.embedding_base import ShardedEmbeddingModule
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ParameterSharding, ShardingType
from tutorec.distributed.quant_state import BaseQuantEmbeddingSharder
from tutorec.modules.embedding_configs import PoolingType
from tutorec.modules.feature_processor import BaseGroupedFeatureProcessor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import DataType

__all__ = [
    "BaseEmbeddingSharder",
    "BaseGroupedFeatureProcessor",
    "BaseQuantEmbeddingSharder",
    "DataType",
    "EmbeddingComputeKernel",
    "GroupedEmbeddingConfig",
    "KJTList",
    "KeyedJaggedTensor",
    "ModuleSharder",
    "ParameterSharding",
    "PoolingType",
    "ShardedEmbeddingModule",
    "ShardedEmbeddingTable",
    "ShardedModule",
    "ShardingType",
]

"""Names of TorchRec's ``torchrec.distributed.embedding_types``, from the modules that define them."""

from tutorec.distributed.plan import EmbeddingComputeKernel, ShardingType
from tutorec.distributed.sharded_module import KJTList
from tutorec.modules.feature_processor import BaseGroupedFeatureProcessor

__all__ = ["BaseGroupedFeatureProcessor", "EmbeddingComputeKernel", "KJTList", "ShardingType"]

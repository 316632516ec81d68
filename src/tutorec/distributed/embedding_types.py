"""Names of TorchRec's ``torchrec.distributed.embedding_types``, from the modules that define them."""

from tutorec.distributed.plan import EmbeddingComputeKernel, ShardingType

__all__ = ["EmbeddingComputeKernel", "ShardingType"]

"""TorchRec's import path ``torchrec.distributed.embedding_lookup``."""

from tutorec.distributed.lookup.grouped import GroupedPooledEmbeddingsLookup
from tutorec.distributed.lookup.quant import (
    InferGroupedEmbeddingsLookup,
    InferGroupedPooledEmbeddingsLookup,
)
from tutorec.distributed.lookup.rows import GroupedEmbeddingsLookup
from tutorec.distributed.plan.plan import EmbeddingComputeKernel

__all__ = [
    "EmbeddingComputeKernel",
    "GroupedEmbeddingsLookup",
    "GroupedPooledEmbeddingsLookup",
    "InferGroupedEmbeddingsLookup",
    "InferGroupedPooledEmbeddingsLookup",
]

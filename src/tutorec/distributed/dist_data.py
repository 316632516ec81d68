"""TorchRec's import path ``torchrec.distributed.dist_data``."""

from tutorec.distributed.collectives.kjt import KJTAllToAll
from tutorec.distributed.collectives.rows import (
    PooledEmbeddingsAllGather,
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsReduceScatter,
    SequenceEmbeddingsAllToAll,
)

__all__ = [
    "KJTAllToAll",
    "PooledEmbeddingsAllGather",
    "PooledEmbeddingsAllToAll",
    "PooledEmbeddingsReduceScatter",
    "SequenceEmbeddingsAllToAll",
]

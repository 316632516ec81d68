"""TorchRec's import path ``torchrec.distributed.dist_data``."""

from tutorec.distributed.collectives.kjt import KJTAllToAll
from tutorec.distributed.collectives.row_sums import (
    PooledEmbeddingsAllGather,
    PooledEmbeddingsReduceScatter,
)
from tutorec.distributed.collectives.rows import PooledEmbeddingsAllToAll
from tutorec.distributed.collectives.sequence import SequenceEmbeddingsAllToAll

__all__ = [
    "KJTAllToAll",
    "PooledEmbeddingsAllGather",
    "PooledEmbeddingsAllToAll",
    "PooledEmbeddingsReduceScatter",
    "SequenceEmbeddingsAllToAll",
]

"""Names of TorchRec's ``torchrec.distributed.dist_data``, from the modules that define them."""

from tutorec.distributed.collectives.all_gather import PooledEmbeddingsAllGather
from tutorec.distributed.collectives.kjt import KJTAllToAll
from tutorec.distributed.collectives.pooled import PooledEmbeddingsAllToAll, PooledEmbeddingsReduceScatter
from tutorec.distributed.collectives.sequence import SequenceEmbeddingsAllToAll

__all__ = [
    "KJTAllToAll",
    "PooledEmbeddingsAllGather",
    "PooledEmbeddingsAllToAll",
    "PooledEmbeddingsReduceScatter",
    "SequenceEmbeddingsAllToAll",
]

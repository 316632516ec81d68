"""A `FusedEmbeddingCollection` over several ranks: an `EmbeddingCollection` whose optimizer is its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tutorec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.fused_embeddingbag import FusedKernelsOnly
from tutorec.distributed.plan import ParameterSharding
from tutorec.modules.fused_embedding_modules import FusedEmbeddingCollection


class ShardedFusedEmbeddingCollection(ShardedEmbeddingCollection):
    """A sharded collection whose optimizer is that of the module.

    Args:
        module: The fused collection; its weights are copied.
        table_name_to_parameter_sharding: The plan of this module.
        env: The ranks.
        device: Where this rank's tables are to live, by default :func:`tutorec.spmd.device`.

    Source:
        TorchRec's ``torchrec.distributed.fused_embedding.ShardedFusedEmbeddingCollection``.
    """

    def __init__(
        self,
        module: FusedEmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, env, None, device)


class FusedEmbeddingCollectionSharder(FusedKernelsOnly, EmbeddingCollectionSharder):
    """Shards a `FusedEmbeddingCollection`.

    Args:
        fused_params: TorchRec's, and without effect there and here: the optimizer is the module's.
        qcomm_codecs_registry: Likewise: rows travel as float32.

    Source:
        TorchRec's ``torchrec.distributed.fused_embedding.FusedEmbeddingCollectionSharder``.
    """

    _module_type = FusedEmbeddingCollection
    _sharded_type = ShardedFusedEmbeddingCollection
    _arguments = ()

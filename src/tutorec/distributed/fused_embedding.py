"""`FusedEmbeddingCollection` sharded over several ranks; the module has its own optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from tutorec.distributed.fused_embeddingbag import FusedKernelsOnly
from tutorec.distributed.plan.plan import ParameterSharding
from tutorec.modules.fused_embedding_modules import FusedEmbeddingCollection


class ShardedFusedEmbeddingCollection(ShardedEmbeddingCollection):
    """A sharded `EmbeddingCollection` with the optimizer of its `FusedEmbeddingCollection`.

    Args:
        module: The fused collection; its weights are copied.
        table_name_to_parameter_sharding: The plan of this module.
        env: The ranks.
        device: Device of this rank's shards; :func:`tutorec.spmd.device` by default.

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
    """Sharder of `FusedEmbeddingCollection`.

    Args:
        fused_params: Has no effect, as in TorchRec: the module has its own optimizer.
        qcomm_codecs_registry: Has no effect, as in TorchRec: rows are sent as float32.

    Source:
        TorchRec's ``torchrec.distributed.fused_embedding.FusedEmbeddingCollectionSharder``.
    """

    unsharded_class = FusedEmbeddingCollection
    sharded_class = ShardedFusedEmbeddingCollection

    def shard(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        module: FusedEmbeddingCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFusedEmbeddingCollection:
        """Return the sharded module; every rank calls it. ``module_fqn`` has no effect."""
        return ShardedFusedEmbeddingCollection(module, params, env, device)

"""A `ManagedCollisionEmbeddingCollection` whose tables and mappings lie on several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from tutorec.distributed.collectives.kjt import ArrivedIds
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from tutorec.distributed.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollectionSharder,
    BaseShardedManagedCollisionEmbeddingCollection,
)
from tutorec.distributed.mc_modules import (
    ManagedCollisionCollectionContext,
    ManagedCollisionCollectionSharder,
    as_batch,
    rank_major,
)
from tutorec.distributed.plan.plan import ParameterSharding
from tutorec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection

# TorchRec has a class of its own for each collection; one holds what both need.
ManagedCollisionEmbeddingCollectionContext = ManagedCollisionCollectionContext


class ShardedManagedCollisionEmbeddingCollection(BaseShardedManagedCollisionEmbeddingCollection):
    """A `ManagedCollisionEmbeddingCollection` sharded over ranks: one row for each raw id.

    Its arguments are those of `BaseShardedManagedCollisionEmbeddingCollection`.

    Source:
        TorchRec's ``torchrec.distributed.mc_embedding.ShardedManagedCollisionEmbeddingCollection``.
    """

    @property
    def _embedding_collection(self) -> ShardedEmbeddingCollection:
        return cast(ShardedEmbeddingCollection, self._embedding_module)

    def _remapped(
        self, ctx: ManagedCollisionCollectionContext, dist_input: Sequence[ArrivedIds]
    ) -> list[ArrivedIds]:
        mappings, counts = self._managed_collision_collection, [ids.counts for ids in dist_input]
        batches = [
            as_batch(ids, keys) for ids, keys in zip(dist_input, mappings.slot_keys, strict=True)
        ]
        found = mappings.compute(ctx, batches)
        for batch, remapped in zip(batches, found, strict=True):
            ids, rows = batch.values().numel(), remapped.values().numel()
            if ids != rows:
                raise ValueError(
                    f"{ids} ids of {batch.keys()} are to have a row each, and their mappings have "
                    f"given {rows} of them one: use mappings that have a row for every id "
                    "(disable_fallback=False or no_bag=True)"
                )
        return [
            ArrivedIds(rank_major(each.values(), own), own)
            for each, own in zip(found, counts, strict=True)
        ]


class ManagedCollisionEmbeddingCollectionSharder(
    BaseManagedCollisionEmbeddingCollectionSharder[ManagedCollisionEmbeddingCollection]
):
    """Shards a `ManagedCollisionEmbeddingCollection`.

    Args:
        ec_sharder: Shards the tables; by default one of the next two arguments.
        mc_sharder: Shards the mappings.
        fused_params: The optimizer that runs inside backward, as of `EmbeddingCollectionSharder`.
        qcomm_codecs_registry: What rows and their gradients travel as; float32 by default.

    Source:
        TorchRec's ``torchrec.distributed.mc_embedding.ManagedCollisionEmbeddingCollectionSharder``.
    """

    unsharded_class = ManagedCollisionEmbeddingCollection
    sharded_class = ShardedManagedCollisionEmbeddingCollection

    def __init__(
        self,
        ec_sharder: EmbeddingCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(
            ec_sharder or EmbeddingCollectionSharder(fused_params, qcomm_codecs_registry),
            mc_sharder or ManagedCollisionCollectionSharder(),
            qcomm_codecs_registry,
        )

    def shard(
        self,
        module: ManagedCollisionEmbeddingCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedManagedCollisionEmbeddingCollection:
        """Return the sharded module; every rank calls it. ``module_fqn`` has no effect."""
        return ShardedManagedCollisionEmbeddingCollection(
            module, params, self.e_sharder, self.mc_sharder, env, device
        )

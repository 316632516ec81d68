"""A `ManagedCollisionEmbeddingCollection` whose tables and mappings are sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tutorec.distributed.collectives.kjt import ArrivedIds
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.embedding import EmbeddingCollectionSharder
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
from tutorec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection

# TorchRec has a class of its own for each collection; one holds what both need.
ManagedCollisionEmbeddingCollectionContext = ManagedCollisionCollectionContext


class ShardedManagedCollisionEmbeddingCollection(BaseShardedManagedCollisionEmbeddingCollection):
    """A `ManagedCollisionEmbeddingCollection` sharded over ranks: one row for each raw id.

    Its arguments are those of `BaseShardedManagedCollisionEmbeddingCollection`.

    Source:
        TorchRec's ``torchrec.distributed.mc_embedding.ShardedManagedCollisionEmbeddingCollection``.
    """

    def _remapped(
        self, ctx: ManagedCollisionCollectionContext, dist_input: Sequence[ArrivedIds]
    ) -> list[ArrivedIds]:
        mappings = self._managed_collision_collection
        batches = [
            as_batch(ids, keys) for ids, keys in zip(dist_input, mappings.slot_keys, strict=True)
        ]
        remapped = mappings.compute(ctx, batches, needs_all_rows=True)
        return [
            ArrivedIds(rank_major(rows.values(), ids.counts), ids.counts)
            for rows, ids in zip(remapped, dist_input, strict=True)
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

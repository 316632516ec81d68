"""A `ManagedCollisionEmbeddingCollection` whose tables and mappings are sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tutorec.distributed.collectives.kjt import ArrivedIds
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
        mappings = self._managed_collision_collection
        counts = [ids.counts for ids in dist_input]
        batches = [
            as_batch(ids, keys) for ids, keys in zip(dist_input, mappings.slot_keys, strict=True)
        ]
        remapped_batches = mappings.compute(ctx, batches)

        remapped_ids: list[ArrivedIds] = []
        for batch, remapped, rank_counts in zip(batches, remapped_batches, counts, strict=True):
            ids = batch.values().numel()
            rows = remapped.values().numel()
            if ids != rows:
                raise ValueError(
                    f"{ids} ids of {batch.keys()} are to have a row each, and their mappings have "
                    f"given {rows} of them one: use mappings that have a row for every id "
                    "(disable_fallback=False or no_bag=True)"
                )
            values = rank_major(remapped.values(), rank_counts)
            remapped_ids.append(ArrivedIds(values, rank_counts))

        return remapped_ids


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

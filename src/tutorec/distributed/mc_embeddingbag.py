"""A `ManagedCollisionEmbeddingBagCollection` whose tables and mappings are sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.sharded_module import KJTList
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollectionSharder,
    BaseShardedManagedCollisionEmbeddingCollection,
)
from tutorec.distributed.mc_modules import (
    ManagedCollisionCollectionContext,
    ManagedCollisionCollectionSharder,
)
from tutorec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

# TorchRec has a class of its own for each collection; one holds what both need.
ManagedCollisionEmbeddingBagCollectionContext = ManagedCollisionCollectionContext


class ShardedManagedCollisionEmbeddingBagCollection(BaseShardedManagedCollisionEmbeddingCollection):
    """A `ManagedCollisionEmbeddingBagCollection` sharded over ranks: a row for each bag.

    Its arguments are those of `BaseShardedManagedCollisionEmbeddingCollection`.

    Source:
        TorchRec's
        ``torchrec.distributed.mc_embeddingbag.ShardedManagedCollisionEmbeddingBagCollection``.
    """

    def _remapped(self, ctx: ManagedCollisionCollectionContext, dist_input: KJTList) -> KJTList:
        rows = self._managed_collision_collection.compute(
            ctx, dist_input.features, self._return_remapped_features
        )
        return KJTList(rows)


class ManagedCollisionEmbeddingBagCollectionSharder(
    BaseManagedCollisionEmbeddingCollectionSharder[ManagedCollisionEmbeddingBagCollection]
):
    """Shards a `ManagedCollisionEmbeddingBagCollection`.

    Args:
        ebc_sharder: Shards the tables; by default one of the next two arguments.
        mc_sharder: Shards the mappings.
        fused_params: The optimizer that runs inside backward, as of
            `EmbeddingBagCollectionSharder`.
        qcomm_codecs_registry: Data types in which pooled rows and their gradients are sent; float32
            by default.

    Source:
        TorchRec's
        ``torchrec.distributed.mc_embeddingbag.ManagedCollisionEmbeddingBagCollectionSharder``.
    """

    unsharded_class = ManagedCollisionEmbeddingBagCollection
    sharded_class = ShardedManagedCollisionEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(
            ebc_sharder or EmbeddingBagCollectionSharder(fused_params, qcomm_codecs_registry),
            mc_sharder or ManagedCollisionCollectionSharder(),
            qcomm_codecs_registry,
        )

"""Dists of shards with all rows: ids go to every shard of a table, columns are concatenated.

Table-wise, column-wise and table-column-wise sharding use them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.kjt import KJTAllToAll, KJTArrival
from tutorec.distributed.collectives.rows import PooledEmbeddingsAllToAll
from tutorec.distributed.core.orders import ColumnPiece
from tutorec.distributed.core.qcomm import CommOp, QuantizedCommCodecs
from tutorec.distributed.sharding.base import (
    EmbeddingShardingContext,
    PooledEmbeddingDist,
    PooledEmbeddingSharding,
    SparseFeaturesDist,
)
from tutorec.distributed.sharding.slots import PlacedSlots, Route, elements_in, elements_out
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


class TwSparseFeaturesDist(SparseFeaturesDist):
    """Local samples, all features -> all samples, the features of the local shards.

    Args:
        pg: The ranks.
        slots: The slots of every rank.
        route: How ids reach the slots.
    """

    def __init__(self, pg: dist.ProcessGroup | None, slots: PlacedSlots, route: Route) -> None:
        super().__init__()
        self._dist = KJTAllToAll(pg, slots.counts, order=route.order, ids_dtype=slots.ids_dtype)

    def forward(
        self, features: KeyedJaggedTensor, ctx: EmbeddingShardingContext
    ) -> Awaitable[KJTArrival]:
        """Send ``features``, which are in the order of the route."""
        ctx.batch_size_per_feature_pre_a2a = features.stride_per_key()
        return self._dist(features)


class TwPooledEmbeddingDist(PooledEmbeddingDist):
    """All samples, columns of the local shards -> local samples, all columns.

    Args:
        pg: The ranks.
        slots: The slots of every rank.
        route: How ids reached the slots.
        codecs: Data types in which rows are sent; float32 by default.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup | None,
        slots: PlacedSlots,
        route: Route,
        codecs: QuantizedCommCodecs | None,
    ) -> None:
        super().__init__()
        self._pg, self._slots, self._route, self._codecs = pg, slots, route, codecs
        self._dist: PooledEmbeddingsAllToAll | None = None

    def build(self) -> None:
        """Build the exchange."""
        if self._dist is None:
            self._dist = PooledEmbeddingsAllToAll(
                self._pg, self._slots.columns, codecs=self._codecs
            )

    def forward(
        self, pooled: torch.Tensor, ctx: EmbeddingShardingContext
    ) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D_local]`` -> awaitable of ``[B_local, sum of D_r]``."""
        assert self._dist is not None, "the first batch builds the exchange"
        if ctx.batch_size_per_rank_per_feature is None:
            return self._dist(pooled, ctx.batch_size_per_rank)
        ranks = range(self._slots.env.world_size)
        return self._dist.variable(
            pooled,
            elements_out(self._slots, ctx.batch_size_per_rank_per_feature),
            elements_in(self._slots, self._route, ctx.batch_size_per_feature_pre_a2a, ranks),
        )


class WholeRowsSharding(PooledEmbeddingSharding):
    """Base of pooled shardings whose shards have every row of their table."""

    def _find_route(self) -> Route:
        return Route.to_whole_rows(self._slots)

    def output_pieces(self) -> list[ColumnPiece]:
        """Columns in rank order."""
        return [slot.output() for of_rank in self._slots.per_rank for slot in of_rank]

    def output_features(self) -> list[int]:
        """For each output, its position in ``feature_names()``."""
        return self._route.order

    def create_input_dist(self) -> TwSparseFeaturesDist:
        """Build the input dist: ids to the shards of their tables."""
        return TwSparseFeaturesDist(self._slots.process_group(), self._slots, self._route)

    def create_output_dist(self) -> TwPooledEmbeddingDist:
        """Build the output dist: pooled rows to the ranks of their samples."""
        codecs = self._codecs.get(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name)
        return TwPooledEmbeddingDist(self._slots.process_group(), self._slots, self._route, codecs)

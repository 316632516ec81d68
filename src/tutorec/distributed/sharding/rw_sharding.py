"""Row-wise sharding (RW): every rank holds a range of rows of every table.

::

    local samples, all features  KJT [F x B]
      | input_dist    bucketize ids by row range, send each bucket to its rank  (all-to-all)
    all samples, local rows      KJT [F x W*B]
      | lookup        add the local rows: a partial sum of each bag             (no communication)
    all samples, partial sums    [W*B, D]
      | output_dist   add the partial sums of each sample on its rank           (reduce-scatter)
    local samples, all columns   [B, D]

    a table of 4 rows on two ranks           the bag [0, 3] of rank 0

        rank 0   row 0, row 1                rank 0 contributes row 0
        rank 1   row 2, row 3                rank 1 contributes row 3; rank 0 adds row 0 + row 3

Bytes that rank r sends in one step, with N_rs of r's ids in the rows of s and 4 bytes per id::

    input ids          sum over s != r of  4 * (F * B_r + N_rs)
    output rows        sum over s != r of  4 * B_s * D    partial sums: one row per sample and rank
    output gradients   sum over s != r of  4 * B_r * D    every rank has rows to update

Table-wise sharding sends each pooled row once. Here every rank sends a partial sum of it, so the
output costs W times as much. Use it for tables that are too large for one rank, and for an equal
load on all ranks.
"""

from __future__ import annotations

from typing import final

import torch

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.row_sums import PooledEmbeddingsReduceScatter
from tutorec.distributed.core.orders import ColumnPiece
from tutorec.distributed.core.qcomm import CommOp, QuantizedCommCodecs
from tutorec.distributed.sharding.base import (
    EmbeddingShardingContext,
    PooledEmbeddingDist,
)
from tutorec.distributed.sharding.rw_dist import Scaling, SplitRowsSharding
from tutorec.distributed.sharding.slots import PlacedSlots, elements_out


@final
class RwPooledEmbeddingDist(PooledEmbeddingDist):
    """All samples, partial sums -> local samples, sums.

    Args:
        slots: The slots of every rank.
        scaling: Divides sums by bag lengths for means.
        codecs: Data types in which rows are sent; float32 by default.
    """

    def __init__(
        self, slots: PlacedSlots, scaling: Scaling, codecs: QuantizedCommCodecs | None
    ) -> None:
        super().__init__()
        self._slots, self._scaling, self._codecs = slots, scaling, codecs
        self._dist: PooledEmbeddingsReduceScatter | None = None

    def build(self) -> None:
        """Build the exchange."""
        if self._dist is None:
            self._dist = PooledEmbeddingsReduceScatter(self._slots.process_group(), self._codecs)

    def forward(
        self, pooled: torch.Tensor, ctx: EmbeddingShardingContext
    ) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D]`` -> awaitable of ``[B_local, D]``."""
        assert self._dist is not None, "the first batch builds the exchange"
        if ctx.batch_size_per_rank_per_feature is None:
            arriving = self._dist(pooled, ctx.batch_size_per_rank)
        else:
            arriving = self._dist.variable(
                pooled, elements_out(self._slots, ctx.batch_size_per_rank_per_feature)
            )
        return self._scaling.apply(arriving, ctx)


@final
class RwPooledEmbeddingSharding(SplitRowsSharding):
    """The row-wise tables of a collection of pooled embeddings: one shard per rank."""

    def output_pieces(self) -> list[ColumnPiece]:
        """All columns: every rank has the same ones."""
        return [slot.output() for slot in self._slots.per_rank[0]]

    def output_features(self) -> list[int]:
        """For each output, its position in ``feature_names()``."""
        return self._route.positions[0]

    def create_output_dist(self) -> RwPooledEmbeddingDist:
        """Build the output dist: partial sums to the ranks of their samples."""
        codecs = self._codecs.get(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name)
        return RwPooledEmbeddingDist(self._slots, self._scaling(), codecs)

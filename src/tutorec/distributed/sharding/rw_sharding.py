"""Row-wise sharding (RW): every rank has a range of rows of every table.

    my samples, every feature    KJT [F x B]
      | input_dist    ids fall into W buckets by row range, each travels to its rank    (all-to-all)
    every sample, my row ranges  KJT [F x W*B]
      | lookup        add up the rows that I have: a part of each bag's sum             (no traffic)
    every sample, partial sums   [W*B, D]
      | output_dist   parts of one sample meet on its rank and are added                (reduce-scatter)
    my samples, every column     [B, D]

    a table of 4 rows on two ranks           the bag [0, 3] of rank 0

        rank 0   row 0, row 1                rank 0 gives row 0
        rank 1   row 2, row 3                rank 1 gives row 3, added on rank 0: row 0 + row 3

Bytes that rank r sends in one step, with N_rs of r's ids in the ranges of s and 4 bytes an id:

    input ids          sum over s != r of  4 * (F * B_r + N_rs)
    output rows        sum over s != r of  4 * B_s * D        partial sums: a whole row for every sample of every rank
    output gradients   sum over s != r of  4 * B_r * D        every rank has rows to move

Table-wise, a pooled row travels once; here every rank sends a part of it, so that the way home costs W times as much.
That is the price for a table that no rank can hold alone, and for a load that is the same on every rank.
"""

from __future__ import annotations

from typing import final

import torch

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.rows import PooledEmbeddingsReduceScatter
from tutorec.distributed.layout import ColumnPiece
from tutorec.distributed.qcomm import CommOp, QuantizedCommCodecs
from tutorec.distributed.sharding.base import EmbeddingShardingContext, PooledEmbeddingDist, PooledEmbeddingSharding
from tutorec.distributed.sharding.rw_dist import RwSparseFeaturesDist, Scaling
from tutorec.distributed.sharding.slots import PlacedSlots, Route, elements_out


@final
class RwPooledEmbeddingDist(PooledEmbeddingDist):
    """Every sample, partial sums -> my samples, sums.

    Args:
        slots: Who looks up what.
        scaling: What makes means of sums.
        codecs: What rows travel as; float32 by default.
    """

    def __init__(self, slots: PlacedSlots, scaling: Scaling, codecs: QuantizedCommCodecs | None) -> None:
        super().__init__()
        self._slots, self._scaling, self._codecs = slots, scaling, codecs
        self._dist: PooledEmbeddingsReduceScatter | None = None

    def build(self) -> None:
        """Make the exchange."""
        if self._dist is None:
            self._dist = PooledEmbeddingsReduceScatter(self._slots.process_group(), self._codecs)

    def forward(self, pooled: torch.Tensor, ctx: EmbeddingShardingContext) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D]`` -> promise of ``[B_mine, D]``."""
        assert self._dist is not None, "the exchange is built at the first batch, before anything comes home"
        if ctx.batch_size_per_rank_per_feature is None:
            arriving = self._dist(pooled, ctx.batch_size_per_rank)
        else:
            arriving = self._dist.variable(pooled, elements_out(self._slots, ctx.batch_size_per_rank_per_feature))
        return self._scaling.apply(arriving, ctx)


@final
class RwPooledEmbeddingSharding(PooledEmbeddingSharding):
    """The row-wise tables of a collection of pooled embeddings: a shard for each rank."""

    def _find_route(self) -> Route:
        return Route.to_split_rows(self._slots)

    def output_pieces(self) -> list[ColumnPiece]:
        """Every column: all ranks have the same ones."""
        return [slot.output() for slot in self._slots.per_rank[0]]

    def output_features(self) -> list[int]:
        """Which feature each piece comes from."""
        return self._route.positions[0]

    def create_input_dist(self) -> RwSparseFeaturesDist:
        """Ids to the ranks that have their rows."""
        return RwSparseFeaturesDist(self._slots.process_group(), self._slots, self._route)

    def create_output_dist(self) -> RwPooledEmbeddingDist:
        """Partial sums to the ranks of their samples."""
        scaling = Scaling([piece.columns for piece in self.output_pieces()], self.output_features())
        codecs = self._codecs.get(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name)
        return RwPooledEmbeddingDist(self._slots, scaling, codecs)

"""Sharding types whose shards have all rows of a table: table-, column- and table-column-wise.

The ids of a feature go to every shard of the tables that read it, and the columns of the pooled
rows are concatenated on the rank of the sample.

Table-wise sharding (TW): every table lives whole on one rank.

::

    local samples, all features  KJT [F x B]
      | input_dist    send ids to the rank that owns their table         (all-to-all)
    all samples, local features  KJT [F_local x W*B]
      | lookup        pool rows of the local tables                      (no communication)
    all samples, local columns   [W*B, D_local]
      | output_dist   return pooled rows to the rank of their sample     (all-to-all)
    local samples, all columns   [B, D]

Bytes that rank r sends in one step, with F_s features and D_s columns on rank s, N_rs of r's ids
for s, and 4 bytes per id (8 if a table has 2 ** 31 rows or more), beside 24 bytes of sizes::

    input ids          sum over s != r of  4 * (F_s * B_r + N_rs)
    output rows        sum over s != r of  4 * B_s * D_r
    output gradients   sum over s != r of  4 * B_r * D_s

Do not use it for a table that is too large for one rank, or that is read far more often than the
others.

Column-wise sharding (CW): every rank holds some columns of a table, with all its rows.

::

    local samples, all features  KJT [F x B]
      | input_dist    send ids to every rank with a column shard of a table   (all-to-all)
    all samples, local shards    KJT [S_local x W*B]
      | lookup        pool partial rows from the local shards                 (no communication)
    all samples, local columns   [W*B, D_local]
      | output_dist   return partial rows, concatenate their columns          (all-to-all)
    local samples, all columns   [B, D]

    a table of 4 columns on two ranks       its pooled row after output_dist

        rank 0    rank 1                    from 0  from 1
        | | |     | | |                     | | |   | | |   ->  | | | | |

Ids are sent once per column shard, pooled columns once. With k shards the ids cost k times the
bytes of table-wise sharding; the rows cost the same. Pooling and SGD give the same result as for
the unsharded table. Row-wise Adagrad does not: it keeps one accumulator per row *and column shard*,
the mean square over that shard's columns.

Use it for wide tables, and for tables whose lookups would overload a single rank.

Table-column-wise sharding (TWCW): all column shards of a table are on one host.

::

    host 0: rank 0, rank 1          host 1: rank 2, rank 3
      table a   | |..                 table b   | |..
                ..| |                           ..| |

The exchanges are those of column-wise sharding; the placement differs. The ids of a
bag are sent once per column shard. With all shards on one host, these ids go to that host only, and
between hosts fewer bytes are sent.
"""

from __future__ import annotations

from itertools import chain
from typing import final

import torch
import torch.distributed as dist

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.kjt import KJTAllToAll, KJTArrival
from tutorec.distributed.collectives.rows import PooledEmbeddingsAllToAll
from tutorec.distributed.core.orders import OutputColumns
from tutorec.distributed.core.qcomm import CommOp, QuantizedCommCodecs
from tutorec.distributed.sharding.base import (
    EmbeddingShardingContext,
    PlacedSlots,
    PooledEmbeddingDist,
    PooledEmbeddingSharding,
    Route,
    SparseFeaturesDist,
    elements_in,
    elements_out,
)
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
        self._pg = pg
        self._slots = slots
        self._route = route
        self._codecs = codecs
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

    def output_columns(self) -> list[OutputColumns]:
        """Columns in rank order."""
        return [slot.output() for slot in chain.from_iterable(self._slots.per_rank)]

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


@final
class TwPooledEmbeddingSharding(WholeRowsSharding):
    """The table-wise tables of a collection of pooled embeddings: one shard per table."""


@final
class CwPooledEmbeddingSharding(WholeRowsSharding):
    """The column-wise tables of a pooled collection: one shard per range of columns."""


@final
class TwCwPooledEmbeddingSharding(WholeRowsSharding):
    """The table-column-wise tables of a collection: column shards on the ranks of one host."""

"""Sharding types whose rows are split over the ranks of a host: table-row-wise and grid.

The output dist has two steps::

    1. inside a host    rank j adds the partial sums of the samples of all ranks with local number j
       (reduce-scatter)
    2. between hosts    ranks with local number j exchange sums
       (all-to-all)

Between hosts each sample's row is sent once, not once per rank of the host that has a partial sum.

Table-row-wise sharding (TWRW): each table's rows are split over the ranks of one host.

::

    local samples, all features  KJT [F x B]
      | input_dist    send ids to the rank with their row on their table's host  (all-to-all)
    all samples, local rows      KJT [F_host x W*B]
      | lookup        add the local rows: a partial sum of each bag             (no communication)
    all samples, partial sums    [W*B, D_host]
      | output_dist   1. partial sums are added inside the host     (reduce-scatter of L ranks)
      |               2. sums are sent to their sample's host       (all-to-all of H ranks)
    local samples, all columns   [B, D]

    host 0: rank 0, rank 1           host 1: rank 2, rank 3
      table a   rows 0-1  rows 2-3     table b   rows 0-4  rows 5-9

Bytes of pooled rows that leave a host in one step, with H hosts of L ranks and B samples per rank::

    row-wise          L * (W - L) * 4 * B * D         a partial sum per rank and sample outside
    table-row-wise    (W - L) * 4 * B * D_host        one sum per sample outside

A table uses the memory of all ranks of its host, and the bytes between hosts are those of
table-wise sharding.

Grid sharding: a table is split by columns over hosts, and by rows over the ranks of a host.

::

    a table of 4 rows and 4 columns        host 0            host 1
                                        rank 0  rank 1    rank 2  rank 3
                                        rows    rows      rows    rows
                                        0-1     2-3       0-1     2-3
                                        | columns 0-1 |   | columns 2-3 |

Each column shard is exchanged like a table-row-wise table: ids go to the rank of
its host that holds their row, partial sums are added inside the host, and sums are sent between
hosts. The columns of a row are then concatenated, as in column-wise sharding. Ids are sent once per
column shard.

Use it for tables that are too large for one host.
"""

from __future__ import annotations

from typing import final

import torch

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.host_groups import host_groups
from tutorec.distributed.collectives.row_sums import HostPooledEmbeddings
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.orders import OutputColumns
from tutorec.distributed.core.qcomm import CommOp, QuantizedCommCodecs
from tutorec.distributed.sharding.base import (
    EmbeddingShardingContext,
    PlacedSlots,
    PooledEmbeddingDist,
    Route,
    elements_in,
    elements_out,
)
from tutorec.distributed.sharding.rw_sharding import Scaling, SplitRowsSharding


class TwRwPooledEmbeddingDist(PooledEmbeddingDist):
    """All samples, partial sums of this host's tables -> local samples, sums of all tables.

    Args:
        slots: The slots of every rank.
        route: How ids reached the slots.
        scaling: Divides sums by bag lengths for means.
        codecs: Data types in which rows are sent; float32 by default.
    """

    def __init__(
        self, slots: PlacedSlots, route: Route, scaling: Scaling, codecs: QuantizedCommCodecs | None
    ) -> None:
        super().__init__()
        self._slots = slots
        self._route = route
        self._scaling = scaling
        self._codecs = codecs
        self._dist: HostPooledEmbeddings | None = None

    def build(self) -> None:
        """Build the subgroups and the exchanges; every rank does so at the same point."""
        if self._dist is not None:
            return

        env = self._slots.env
        group = self._slots.process_group()
        hosts = host_groups(group, env.local_size) if group is not None else None
        columns = [self._slots.columns[first] for first in first_ranks(env)]
        self._dist = HostPooledEmbeddings(hosts, env.rank, env.local_size, columns, self._codecs)

    def forward(
        self, pooled: torch.Tensor, ctx: EmbeddingShardingContext
    ) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D_host]`` -> awaitable of ``[B_local, sum of D_host]``."""
        assert self._dist is not None, "the first batch builds the exchange"
        if ctx.batch_size_per_rank_per_feature is None:
            arriving = self._dist(pooled, ctx.batch_size_per_rank)
        else:
            ranks = first_ranks(self._slots.env)
            arriving = self._dist.variable(
                pooled,
                elements_out(self._slots, ctx.batch_size_per_rank_per_feature),
                elements_in(self._slots, self._route, ctx.batch_size_per_feature_pre_a2a, ranks),
            )
        return self._scaling.apply(arriving, ctx)


class HostRowsSharding(SplitRowsSharding):
    """Base of pooled shardings whose rows are split inside a host."""

    def output_columns(self) -> list[OutputColumns]:
        """Columns in host order: all ranks of a host have the same ones."""
        return [
            slot.output()
            for rank in first_ranks(self._slots.env)
            for slot in self._slots.per_rank[rank]
        ]

    def output_features(self) -> list[int]:
        """For each output, its position in ``feature_names()``."""
        return [
            index for rank in first_ranks(self._slots.env) for index in self._route.positions[rank]
        ]

    def create_output_dist(self) -> TwRwPooledEmbeddingDist:
        """Build the output dist: partial sums inside the host, sums between hosts."""
        codecs = self._codecs.get(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name)
        return TwRwPooledEmbeddingDist(self._slots, self._route, self._scaling(), codecs)


def first_ranks(env: ShardingEnv) -> range:
    """The first rank of each host."""
    return range(0, env.world_size, env.local_size)


@final
class TwRwPooledEmbeddingSharding(HostRowsSharding):
    """The table-row-wise tables of a collection: one shard per rank of a table's host."""


@final
class GridPooledEmbeddingSharding(HostRowsSharding):
    """The grid-sharded tables of a collection: one shard per rank of each column shard's host."""

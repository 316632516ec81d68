"""Dists of shards whose rows are split over the ranks of one host.

Table-row-wise and grid sharding use them. The output dist has two steps::

    1. inside a host    rank j adds the partial sums of the samples of all ranks with local number j
       (reduce-scatter)
    2. between hosts    ranks with local number j exchange sums
       (all-to-all)

Between hosts each sample's row is sent once, not once per rank of the host that has a partial sum.
"""

from __future__ import annotations

import torch

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.host_groups import host_groups
from tutorec.distributed.collectives.row_sums import HostPooledEmbeddings
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.orders import ColumnPiece
from tutorec.distributed.core.qcomm import CommOp, QuantizedCommCodecs
from tutorec.distributed.sharding.base import (
    EmbeddingShardingContext,
    PooledEmbeddingDist,
)
from tutorec.distributed.sharding.rw_dist import Scaling, SplitRowsSharding
from tutorec.distributed.sharding.slots import PlacedSlots, Route, elements_in, elements_out


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
        self._slots, self._route, self._scaling, self._codecs = slots, route, scaling, codecs
        self._dist: HostPooledEmbeddings | None = None

    def build(self) -> None:
        """Build the subgroups and the exchanges; every rank does so at the same point."""
        if self._dist is not None:
            return
        env, group = self._slots.env, self._slots.process_group()
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

    def output_pieces(self) -> list[ColumnPiece]:
        """Columns in host order: all ranks of a host have the same ones."""
        return [
            slot.output()
            for rank in first_ranks(self._slots.env)
            for slot in self._slots.per_rank[rank]
        ]

    def output_features(self) -> list[int]:
        """For each output, its position in ``feature_names()``."""
        return [
            place for rank in first_ranks(self._slots.env) for place in self._route.positions[rank]
        ]

    def create_output_dist(self) -> TwRwPooledEmbeddingDist:
        """Build the output dist: partial sums inside the host, sums between hosts."""
        codecs = self._codecs.get(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name)
        return TwRwPooledEmbeddingDist(self._slots, self._route, self._scaling(), codecs)


def first_ranks(env: ShardingEnv) -> range:
    """The first rank of each host."""
    return range(0, env.world_size, env.local_size)

"""Sharding of unpooled embeddings: a row per id, returned to the rank that sent the id.

::

    local samples, all features  KJT [F x B]
      | input_dist    send ids to the ranks that hold their rows                 (all-to-all)
    ids of all ranks, local slots [N]
      | lookup        a row, or some of its columns, per id, in order of arrival (no communication)
    their rows                   [N, D_slot]
      | output_dist   return rows to the ranks that sent the ids                 (all-to-all)
    local ids, all columns       [N_feature, D] for each feature

Nothing is added on the way back, so all sharding types share this implementation. A type decides
which slots there are, and thereby how the rows of a feature are reassembled::

    whole rows (tw)                 one segment, no reassembly
    column shards (cw, twcw)        one segment per column shard, concatenated
    row ranges (rw, twrw)           one segment per range of rows, reordered to the order of the ids
    column shards and ranges (grid) both

Bytes that rank r sends in one step. N_rf are its ids of feature f, D_sf the columns of f on rank s.
For split rows only ids in the range of s count::

    input ids          sum over s != r, slots f of s  4 * (B_r + N_rf)    (8 from 2 ** 31 rows)
    output rows        sum over s != r, slots f of r  4 * N_sf * D_rf
    output gradients   sum over s != r, slots f of s  4 * N_rf * D_sf
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.sequence import SequenceEmbeddingsAllToAll
from tutorec.distributed.core.qcomm import CommOp, QuantizedCommCodecs
from tutorec.distributed.lookup.grouped import ShardRows
from tutorec.distributed.lookup.rows import GroupedEmbeddingsLookup
from tutorec.distributed.sharding.base import (
    EmbeddingSharding,
    EmbeddingShardingContext,
    SparseFeaturesDist,
)
from tutorec.distributed.sharding.row_order import RowOrder
from tutorec.distributed.sharding.rw_dist import RwSparseFeaturesDist
from tutorec.distributed.sharding.slots import PlacedSlots, Route
from tutorec.distributed.sharding.tw_dist import TwSparseFeaturesDist


@dataclass
class SequenceShardingContext(EmbeddingShardingContext):
    """State of one sharding and one batch; ``arrived_counts`` are always counted.

    Source:
        TorchRec's ``torchrec.distributed.sharding.sequence_sharding.SequenceShardingContext``.
    """


class SequenceEmbeddingDist(nn.Module, ABC):
    """Output dist: sends rows to the ranks of their ids."""

    @abstractmethod
    def build(self) -> None:
        """Build the exchange, at the first batch.

        A sharded module that never runs a batch needs no process group.
        """

    @abstractmethod
    def forward(self, rows: torch.Tensor, ctx: SequenceShardingContext) -> Awaitable[torch.Tensor]:
        """Output of the lookup -> awaitable of the rows of local ids, flat."""

    @abstractmethod
    def by_key(self, arrived: torch.Tensor, ctx: SequenceShardingContext) -> list[torch.Tensor]:
        """Return the rows ``[N, D]``, all columns, of each of the sharding's ``output_keys()``."""


class SequenceEmbeddingSharding(EmbeddingSharding):
    """A sharding whose lookups return a row per id.

    ``create_lookup`` builds a lookup from `ArrivedIds` to flat rows.
    """

    @abstractmethod
    def output_keys(self) -> list[str]:
        """Names of the results, in the order in which they are returned."""

    @abstractmethod
    def create_output_dist(self) -> SequenceEmbeddingDist:
        """Build the output dist."""


@final
class SlotSequenceEmbeddingDist(SequenceEmbeddingDist):
    """Rows of all ranks' ids in local slots -> rows of local ids in every rank's slots.

    Args:
        slots: The slots of every rank.
        route: How ids reached the slots.
        codecs: Data types in which rows are sent; float32 by default.
    """

    def __init__(
        self, slots: PlacedSlots, route: Route, codecs: QuantizedCommCodecs | None
    ) -> None:
        super().__init__()
        self._slots, self._codecs = slots, codecs
        self._columns = [
            [slot.shard.piece.columns for slot in of_rank] for of_rank in slots.per_rank
        ]
        self._order = RowOrder(slots, route)
        self._dist: SequenceEmbeddingsAllToAll | None = None

    def build(self) -> None:
        """Build the exchange."""
        if self._dist is None:
            self._dist = SequenceEmbeddingsAllToAll(
                self._slots.process_group(), codecs=self._codecs
            )

    def forward(self, rows: torch.Tensor, ctx: SequenceShardingContext) -> Awaitable[torch.Tensor]:
        """Flat rows of each rank and local slot -> awaitable of flat rows of each rank's slots."""
        assert self._dist is not None, "the first batch builds the exchange"
        mine = self._columns[self._slots.env.rank]
        out = [_elements(of_rank, mine) for of_rank in ctx.arrived_counts]
        into = [
            _elements(of_rank, columns)
            for of_rank, columns in zip(ctx.sent_counts, self._columns, strict=True)
        ]
        return self._dist.flat(rows, out, into)

    def by_key(self, arrived: torch.Tensor, ctx: SequenceShardingContext) -> list[torch.Tensor]:
        """The tables of one sharding type, except data-parallel, of an unpooled collection."""
        return self._order.by_key(arrived, ctx.sent_counts, ctx.places)


@final
class SlotSequenceEmbeddingSharding(SequenceEmbeddingSharding):
    """The tables of one sharding type, except data-parallel, of an unpooled collection."""

    def _find_route(self) -> Route:
        return (Route.to_split_rows if self._splits_rows() else Route.to_whole_rows)(self._slots)

    def _splits_rows(self) -> bool:
        return self._slots.tables[0].splits_rows

    def output_keys(self) -> list[str]:
        """Names of the results, table by table."""
        return [key for table in self._slots.tables for key in table.output_keys]

    def create_input_dist(self) -> SparseFeaturesDist:
        """Build the input dist: ids to the ranks that hold their rows."""
        group = self._slots.process_group()
        if self._splits_rows():
            return RwSparseFeaturesDist(group, self._slots, self._route, keep_places=True)
        return TwSparseFeaturesDist(group, self._slots, self._route)

    def create_lookup(self, rows_of: ShardRows, device: torch.device) -> GroupedEmbeddingsLookup:
        """Build the lookup of this rank's shards."""
        return GroupedEmbeddingsLookup(
            self._slots.mine, rows_of, device, self._slots.env.world_size
        )

    def create_output_dist(self) -> SlotSequenceEmbeddingDist:
        """Build the output dist: rows to the ranks of their ids."""
        codecs = self._codecs.get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
        return SlotSequenceEmbeddingDist(self._slots, self._route, codecs)


def _elements(counts: Sequence[int], columns: Sequence[int]) -> int:
    return sum(count * width for count, width in zip(counts, columns, strict=True))


__all__ = [
    "SequenceEmbeddingDist",
    "SequenceEmbeddingSharding",
    "SequenceShardingContext",
    "SlotSequenceEmbeddingDist",
    "SlotSequenceEmbeddingSharding",
]

"""Rows that are not pooled: a row for each id, which goes home by the way that its id came.

    my samples, every feature    KJT [F x B]
      | input_dist    ids travel to the ranks that hold their rows                    (all-to-all)
    ids of every rank, my slots  [N]
      | lookup        a row, or a part of one, for each id, in order of arrival       (no traffic)
    their rows                   [N, D_slot]
      | output_dist   rows travel back, to the ranks that sent the ids                (all-to-all)
    my ids, every column         [N_feature, D] for each feature

Nothing is added up on the way home, so that all types of sharding share this one. What a type decides is which slots
there are, and with that how the rows of a feature come home:

    whole rows (tw)             one piece, ready to use
    cut by columns (cw, twcw)   a piece for each slice, put side by side
    cut by rows (rw, twrw)      a piece for each range of rows; each row is put where its id stood
    both (grid)                 both

Bytes that rank r sends in one step, with N_rf ids of its feature f, and D_sf the columns of f that rank s holds, where
rows are split only ids in the range of s being counted:

    input ids          sum over s != r, slots f of s  4 * (B_r + N_rf)          (8 where a table has 2 ** 31 rows)
    output rows        sum over s != r, slots f of r  4 * N_sf * D_rf
    output gradients   sum over s != r, slots f of s  4 * N_rf * D_sf
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import nn

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.rows import SequenceEmbeddingsAllToAll
from tutorec.distributed.lookup.grouped import ShardRows
from tutorec.distributed.lookup.rows import GroupedEmbeddingsLookup
from tutorec.distributed.qcomm import CommOp, QuantizedCommCodecs
from tutorec.distributed.sharding.base import EmbeddingSharding, EmbeddingShardingContext, SparseFeaturesDist
from tutorec.distributed.sharding.row_order import RowOrder
from tutorec.distributed.sharding.rw_dist import RwSparseFeaturesDist
from tutorec.distributed.sharding.slots import PlacedSlots, Route
from tutorec.distributed.sharding.tw_dist import TwSparseFeaturesDist


@dataclass
class SequenceShardingContext(EmbeddingShardingContext):
    """What the way home must know of the way in: one sharding, one batch.

    Args:
        arrived_counts: Ids that have arrived from each rank for each slot of mine, ``[W][slots]``.
        sent_counts: Ids that I sent to each rank, for each of its slots, ``[W][slots of the rank]``.

    Source:
        TorchRec's ``torchrec.distributed.sharding.sequence_sharding.SequenceShardingContext``.
    """

    arrived_counts: list[list[int]] = field(default_factory=list)
    sent_counts: list[list[int]] = field(default_factory=list)


class SequenceEmbeddingDist(nn.Module, ABC):
    """The way home: rows to the ranks of their ids."""

    @abstractmethod
    def build(self) -> None:
        """Make the exchange, at the first batch: a sharded module that is only looked at needs no process group."""

    @abstractmethod
    def forward(self, rows: torch.Tensor, ctx: SequenceShardingContext) -> Awaitable[torch.Tensor]:
        """What the lookup gave -> promise of what is mine of it, flat."""

    @abstractmethod
    def by_key(self, arrived: torch.Tensor, ctx: SequenceShardingContext) -> list[torch.Tensor]:
        """What has arrived -> ``[N, D]``, all columns, for each of the sharding's ``output_keys()``."""


class SequenceEmbeddingSharding(EmbeddingSharding):
    """A sharding whose lookups give a row for each id: ``create_lookup`` makes flat rows of `ArrivedIds`."""

    @abstractmethod
    def output_keys(self) -> list[str]:
        """Names of the results that come home, in that order."""

    @abstractmethod
    def create_output_dist(self) -> SequenceEmbeddingDist:
        """The way home."""


@final
class SlotSequenceEmbeddingDist(SequenceEmbeddingDist):
    """Rows of every rank's ids in my slots -> rows of my ids in every rank's slots.

    Args:
        slots: Who looks up what.
        route: How ids found the slots.
        codecs: What rows travel as; float32 by default.
    """

    def __init__(self, slots: PlacedSlots, route: Route, codecs: QuantizedCommCodecs | None) -> None:
        super().__init__()
        self._slots, self._codecs = slots, codecs
        self._columns = [[slot.shard.piece.columns for slot in of_rank] for of_rank in slots.per_rank]
        self._order = RowOrder(slots, route)
        self._dist: SequenceEmbeddingsAllToAll | None = None

    def build(self) -> None:
        """Make the exchange."""
        if self._dist is None:
            self._dist = SequenceEmbeddingsAllToAll(self._slots.process_group(), self._codecs)

    def forward(self, rows: torch.Tensor, ctx: SequenceShardingContext) -> Awaitable[torch.Tensor]:
        """``rows``: of each rank and slot of mine, flat -> promise of those of each rank and its slots, flat."""
        assert self._dist is not None, "the exchange is built at the first batch, before anything comes home"
        mine = self._columns[self._slots.env.rank]
        out = [_elements(of_rank, mine) for of_rank in ctx.arrived_counts]
        into = [_elements(of_rank, columns) for of_rank, columns in zip(ctx.sent_counts, self._columns, strict=True)]
        return self._dist(rows, out, into)

    def by_key(self, arrived: torch.Tensor, ctx: SequenceShardingContext) -> list[torch.Tensor]:
        """What has arrived -> ``[N, D]``, all columns, for each of the sharding's ``output_keys()``."""
        return self._order.by_key(arrived, ctx.sent_counts, ctx.places)


@final
class SlotSequenceEmbeddingSharding(SequenceEmbeddingSharding):
    """The tables of one sharding type of a collection whose rows are not pooled, for every type that cuts tables up."""

    def _find_route(self) -> Route:
        return (Route.to_split_rows if self._splits_rows() else Route.to_whole_rows)(self._slots)

    def _splits_rows(self) -> bool:
        return self._slots.tables[0].splits_rows

    def output_keys(self) -> list[str]:
        """Names of the results, table by table."""
        return [key for table in self._slots.tables for key in table.output_keys]

    def create_input_dist(self) -> SparseFeaturesDist:
        """Ids to the ranks that have their rows."""
        group = self._slots.process_group()
        if self._splits_rows():
            return RwSparseFeaturesDist(group, self._slots, self._route, keep_places=True)
        return TwSparseFeaturesDist(group, self._slots, self._route)

    def create_lookup(self, rows_of: ShardRows, device: torch.device) -> GroupedEmbeddingsLookup:
        """My shards."""
        return GroupedEmbeddingsLookup(self._slots.mine, rows_of, device, self._slots.env.world_size)

    def create_output_dist(self) -> SlotSequenceEmbeddingDist:
        """Rows to the ranks of their ids."""
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

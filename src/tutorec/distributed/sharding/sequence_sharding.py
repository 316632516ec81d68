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

Rows arrive in lookup order: rank after rank, slot after slot, in one flat tensor. The rows of one
feature may arrive in several segments, one per column shard of its table and range of rows::

    table split into 2 column shards and 2 ranges of rows, ids [5, 0, 4]; rows 0-3 are in range 0

        arrives from     range 0   range 1
        shard 0          [0]       [5, 4]     concatenate, then reorder      row 5 | row 5
        shard 1          [0]       [5, 4]     column shards side by side     row 0 | row 0
                                                                             row 4 | row 4
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, cast, final

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.sequence import SequenceEmbeddingsAllToAll
from tutorec.distributed.core.initial_rows import InitialRows
from tutorec.distributed.core.qcomm import CommOp, QuantizedCommCodecs
from tutorec.distributed.lookup.rows import GroupedEmbeddingsLookup
from tutorec.distributed.sharding.base import (
    EmbeddingSharding,
    EmbeddingShardingContext,
    PlacedSlots,
    Route,
    SparseFeaturesDist,
)
from tutorec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from tutorec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from tutorec.sparse.layout import ints_on_device


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
        self._slots = slots
        self._codecs = codecs
        self._columns = [[slot.shard.columns for slot in members] for members in slots.per_rank]
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

        local_columns = self._columns[self._slots.env.rank]
        elements_out = [_elements(slot_counts, local_columns) for slot_counts in ctx.arrived_counts]
        elements_in = [
            _elements(slot_counts, columns)
            for slot_counts, columns in zip(ctx.sent_counts, self._columns, strict=True)
        ]
        return self._dist.flat(rows, elements_out, elements_in)

    def by_key(self, arrived: torch.Tensor, ctx: SequenceShardingContext) -> list[torch.Tensor]:
        """Return the rows of each output key."""
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

    def create_lookup(
        self, initial_rows: InitialRows, device: torch.device
    ) -> GroupedEmbeddingsLookup:
        """Build the lookup of this rank's shards."""
        return GroupedEmbeddingsLookup(
            self._slots.local_groups, initial_rows, device, self._slots.env.world_size
        )

    def create_output_dist(self) -> SlotSequenceEmbeddingDist:
        """Build the output dist: rows to the ranks of their ids."""
        codecs = self._codecs.get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
        return SlotSequenceEmbeddingDist(self._slots, self._route, codecs)


def _elements(counts: Sequence[int], columns: Sequence[int]) -> int:
    return sum(count * width for count, width in zip(counts, columns, strict=True))


class RowOrder:
    """Computes each feature's rows from the rows that have arrived.

    Args:
        slots: The slots of every rank.
        route: How the ids reached the slots.
        columns: Columns that return for an id, if other than those of its slot.
    """

    def __init__(self, slots: PlacedSlots, route: Route, columns: int | None = None) -> None:
        arriving = list(chain.from_iterable(slots.per_rank))
        self.keys: list[str] = [key for table in slots.tables for key in table.output_keys]
        self._columns = [slot.shard.columns if columns is None else columns for slot in arriving]
        # Row-split features are sent once per table that reads them, so there are as many as keys.
        self._segments = route.order
        self._buckets = len(route.bounds[0]) - 1 if route.bounds else 1

        slices: list[dict[int, dict[int, int]]] = [{} for _ in self.keys]
        position = {key: index for index, key in enumerate(self.keys)}
        for number, slot in enumerate(arriving):
            bucket = route.order[number] // len(route.features) if self._buckets > 1 else 0
            slices[position[slot.key]].setdefault(slot.shard.column_offset, {})[bucket] = number

        # Key -> column shard, from the left -> range of rows -> index of the arriving segment.
        self._pieces = [
            [
                [segments[bucket] for bucket in range(self._buckets)]
                for _, segments in sorted(layers.items())
            ]
            for layers in slices
        ]

    def by_key(
        self, arrived: torch.Tensor, counts: Sequence[Sequence[int]], places: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Return the rows ``[N, D]`` of each key.

        Args:
            arrived: Rows of each rank and slot, flat.
            counts: Number of rows, ``[W][slots of the rank]``.
            places: For split rows, the position of each local id among the ids sent.
        """
        flat_counts = list(chain.from_iterable(counts))
        sizes = [count * columns for count, columns in zip(flat_counts, self._columns, strict=True)]

        segments = [
            segment.view(count, columns)
            for segment, count, columns in zip(
                arrived.split_with_sizes(sizes), flat_counts, self._columns, strict=True
            )
        ]

        if places is None:
            sliced = [[segments[numbers[0]] for numbers in layers] for layers in self._pieces]
        else:
            sliced = self._put_back(arrived, segments, flat_counts, places)
        return [slices[0] if len(slices) == 1 else torch.cat(slices, dim=1) for slices in sliced]

    def _put_back(
        self,
        arrived: torch.Tensor,
        parts: list[torch.Tensor],
        counts: list[int],
        places: torch.Tensor,
    ) -> list[list[torch.Tensor]]:
        """Rows of each key and column shard in id order: one gather per shard width."""
        orders = self._orders(counts, places)
        ordered: dict[tuple[int, int], torch.Tensor] = {}

        for columns in dict.fromkeys(self._columns):
            same_width = [
                (key, layer)
                for key, layer in orders
                if self._columns[self._pieces[key][layer][0]] == columns
            ]
            blocks = [
                block for block, width in zip(parts, self._columns, strict=True) if width == columns
            ]
            rows = arrived.view(-1, columns) if len(blocks) == len(parts) else torch.cat(blocks)
            order = torch.cat([orders[slice_] for slice_ in same_width])
            moved = cast(torch.Tensor, _Reordered.apply(rows, order))
            lengths = [orders[slice_].numel() for slice_ in same_width]
            ordered |= zip(same_width, moved.split_with_sizes(lengths), strict=True)

        return [
            [ordered[key, layer] for layer in range(len(layers))]
            for key, layers in enumerate(self._pieces)
        ]

    def _orders(
        self, counts: list[int], places: torch.Tensor
    ) -> dict[tuple[int, int], torch.Tensor]:
        """By key and shard: the index of each id's row among the rows of that width ``[N]``."""
        keys = len(self.keys)
        sizes = [0] * (self._buckets * keys)
        for segment, count in zip(self._segments, counts, strict=True):
            sizes[segment] = count

        segment_starts = [*accumulate(sizes, initial=0)]
        starts = self._starts(counts)
        key_counts = [sum(sizes[key::keys]) for key in range(keys)]

        orders: dict[tuple[int, int], torch.Tensor] = {}
        for layer in range(max(map(len, self._pieces))):
            shifts = [0] * len(sizes)
            for key, layers in enumerate(self._pieces):
                for bucket, number in enumerate(layers[layer]) if layer < len(layers) else ():
                    segment = bucket * keys + key
                    shifts[segment] = starts[number] - segment_starts[segment]

            order = places
            if any(shifts):
                by_segment = ints_on_device([shifts, sizes], torch.int64, places.device)
                shift = by_segment[0].repeat_interleave(by_segment[1], output_size=places.numel())
                order = places + shift.index_select(0, places)
            for key, key_order in enumerate(order.split_with_sizes(key_counts)):
                if layer < len(self._pieces[key]):
                    orders[key, layer] = key_order
        return orders

    def _starts(self, counts: list[int]) -> list[int]:
        """The index of each arriving segment's first row among all rows of its width."""
        starts: list[int] = []
        ends: dict[int, int] = {}
        for count, columns in zip(counts, self._columns, strict=True):
            starts.append(ends.get(columns, 0))
            ends[columns] = starts[-1] + count
        return starts


class _Reordered(torch.autograd.Function):
    """Permutation of rows; backward applies the inverse permutation, without additions."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        (order,) = ctx.saved_tensors
        back = torch.empty_like(order).index_copy_(
            0, order.long(), torch.arange(order.numel(), dtype=order.dtype, device=order.device)
        )
        return gradients[0].index_select(0, back), None


__all__ = [
    "RowOrder",
    "SequenceEmbeddingDist",
    "SequenceEmbeddingSharding",
    "SequenceShardingContext",
    "SlotSequenceEmbeddingDist",
    "SlotSequenceEmbeddingSharding",
]

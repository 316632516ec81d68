"""Reordering of unpooled rows that have returned, into the order of their ids.

Rows arrive in lookup order: rank after rank, slot after slot, in one flat tensor. The rows of one
feature may arrive in several segments, one per column shard of its table and range of rows::

    table split into 2 column shards and 2 ranges of rows, ids [5, 0, 4]; rows 0-3 are in range 0

        arrives from     range 0   range 1
        shard 0          [0]       [5, 4]     concatenate, then reorder      row 5 | row 5
        shard 1          [0]       [5, 4]     column shards side by side     row 0 | row 0
                                                                             row 4 | row 4
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from tutorec.distributed.sharding.slots import PlacedSlots, Route
from tutorec.sparse.layout import ints_on_device


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
        self._columns = [
            slot.shard.piece.columns if columns is None else columns for slot in arriving
        ]
        # Row-split features are sent once per table that reads them, so there are as many as keys.
        self._segments = route.order
        self._buckets = len(route.bounds[0]) - 1 if route.bounds else 1
        slices: list[dict[int, dict[int, int]]] = [{} for _ in self.keys]
        place = {key: index for index, key in enumerate(self.keys)}
        for number, slot in enumerate(arriving):
            bucket = route.order[number] // len(route.features) if self._buckets > 1 else 0
            slices[place[slot.key]].setdefault(slot.shard.piece.column_offset, {})[bucket] = number
        # Key -> column shard, from the left -> range of rows -> index of the arriving segment.
        self._pieces = [
            [
                [of_slice[bucket] for bucket in range(self._buckets)]
                for _, of_slice in sorted(of_key.items())
            ]
            for of_key in slices
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
        parts = [
            part.view(count, columns)
            for part, count, columns in zip(
                arrived.split_with_sizes(sizes), flat_counts, self._columns, strict=True
            )
        ]
        if places is None:
            sliced = [[parts[of_ranges[0]] for of_ranges in of_key] for of_key in self._pieces]
        else:
            sliced = self._put_back(arrived, parts, flat_counts, places)
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
        rows_of: dict[tuple[int, int], torch.Tensor] = {}
        for columns in dict.fromkeys(self._columns):
            alike = [
                (key, layer)
                for key, layer in orders
                if self._columns[self._pieces[key][layer][0]] == columns
            ]
            of_width = [
                part for part, width in zip(parts, self._columns, strict=True) if width == columns
            ]
            rows = arrived.view(-1, columns) if len(of_width) == len(parts) else torch.cat(of_width)
            order = torch.cat([orders[slice_] for slice_ in alike])
            moved = cast(torch.Tensor, _Reordered.apply(rows, order))
            lengths = [orders[slice_].numel() for slice_ in alike]
            rows_of |= zip(alike, moved.split_with_sizes(lengths), strict=True)
        return [
            [rows_of[key, layer] for layer in range(len(of_key))]
            for key, of_key in enumerate(self._pieces)
        ]

    def _orders(
        self, counts: list[int], places: torch.Tensor
    ) -> dict[tuple[int, int], torch.Tensor]:
        """By key and shard: the index of each id's row among the rows of that width ``[N]``."""
        keys = len(self.keys)
        of_segments = [0] * (self._buckets * keys)
        for segment, count in zip(self._segments, counts, strict=True):
            of_segments[segment] = count
        segment_starts = [*accumulate(of_segments, initial=0)]
        starts = self._starts(counts)
        of_keys = [sum(of_segments[key::keys]) for key in range(keys)]
        orders: dict[tuple[int, int], torch.Tensor] = {}
        for layer in range(max(map(len, self._pieces))):
            shifts = [0] * len(of_segments)
            for key, of_key in enumerate(self._pieces):
                for bucket, number in enumerate(of_key[layer]) if layer < len(of_key) else ():
                    segment = bucket * keys + key
                    shifts[segment] = starts[number] - segment_starts[segment]
            order = places
            if any(shifts):
                by_segment = ints_on_device([shifts, of_segments], torch.int64, places.device)
                shift = by_segment[0].repeat_interleave(by_segment[1], output_size=places.numel())
                order = places + shift.index_select(0, places)
            for key, own in enumerate(order.split_with_sizes(of_keys)):
                if layer < len(self._pieces[key]):
                    orders[key, layer] = own
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


__all__ = ["RowOrder"]

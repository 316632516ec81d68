"""Which rows of large tables are in memory: slots, hits, misses, and who makes room.

The rows of all tables of a group are counted through, table after table, and so are the slots. Each table has slots of
its own. This file knows numbers of rows and slots; ``tbe_cached.py`` copies what stands in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tutorec._kernels.row_file import CacheAlgorithm

__all__ = ["CacheCounts", "Held", "Move", "RowCache", "Rows"]

_NEVER = torch.iinfo(torch.int64).max
# A miss that finds no free slot frees so many at once: choosing them costs a pass over the table's slots, which a step
# should not pay for each of its few misses. The rows that are least likely to be missed give their slots early for it.
_FREED_AT_ONCE = 1 / 32


@dataclass
class CacheCounts:
    """What a cache has done: ids looked up, rows that had to be read for them, rows written back."""

    lookups: int = 0
    read: int = 0
    written: int = 0

    @property
    def hit_rate(self) -> float:
        """The part of the ids whose rows were in memory; an id that repeats in a batch is read once."""
        return 1 - self.read / self.lookups if self.lookups else 0.0


class Rows(NamedTuple):
    """Rows of one table [N], and their slots [N]."""

    rows: Tensor
    slots: Tensor


class Move(NamedTuple):
    """Of one table: changed rows that leave their slots and must be written back, then rows to read into slots."""

    table: int
    written: Rows
    read: Rows


_NOTHING = Rows(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


class RowCache:
    """The slots of several tables.

    Args:
        rows: R of each table.
        slots: Of each table, at least 1 and at most R (0 where R is 0).
        algorithm: ``"lru"`` makes room by the row that was not used for longest, ``"lfu"`` by the row that was used
            least often since the beginning.

    Example:
        >>> import torch
        >>> cache = RowCache(rows=[100], slots=[2], algorithm="lru")
        >>> for ids in ([7, 7, 9], [9, 3]):
        ...     moves = list(cache.place(torch.tensor(ids)))
        >>> moves[0].read.rows.tolist(), cache.find(torch.tensor([3, 7, 9])).tolist()  # 3 has taken the slot of 7
        ([3], [0, -1, 1])
    """

    def __init__(self, rows: Sequence[int], slots: Sequence[int], algorithm: CacheAlgorithm) -> None:
        self.row_bounds = [*accumulate(rows, initial=0)]
        self.slot_bounds = [*accumulate(slots, initial=0)]
        # The slot of each row, -1 where it is not in memory; the row of each slot, -1 where it is free.
        self._slot_of = torch.full((self.row_bounds[-1],), -1, dtype=torch.int32)
        self._row_of = torch.full((self.slot_bounds[-1],), -1)
        self._last_use = torch.zeros(self.slot_bounds[-1], dtype=torch.int64)
        self._uses = torch.zeros(self.row_bounds[-1], dtype=torch.int32) if algorithm == "lfu" else None
        self._changed = torch.zeros(self.slot_bounds[-1], dtype=torch.bool)
        self._free = [torch.arange(*bounds) for bounds in pairwise(self.slot_bounds)]
        self._held: dict[int, Tensor] = {}
        self._batches = 0
        self.counts = CacheCounts()

    def find(self, rows: Tensor) -> Tensor:
        """Slots of rows ``[N]``; -1 where a row is not in memory."""
        return self._slot_of[rows].long()

    def place(self, rows: Tensor, counted: bool = True) -> Iterator[Move]:
        """Give every row of a batch ``[N]`` a slot: yields, table by table, what the caller must copy before going on.

        Rows of the batch and rows that are held keep their slots. Where the slots of a table are too few it ends early:
        ``find`` then still gives -1 for some rows.

        Args:
            rows: Of all tables, in any order, repeated as they come.
            counted: Whether the batch counts as used: one that is prefetched counts when it is looked up.
        """
        found = self._slot_of[rows]
        missing = rows[found < 0]
        self._batches += 1
        self._last_use[found[found >= 0] if missing.numel() else found] = self._batches
        if counted:
            self.counts.lookups += rows.numel()
            if self._uses is not None:
                self._uses.index_add_(0, rows, torch.ones((), dtype=torch.int32).expand(rows.numel()))
        for table, own in _cut(missing.unique(), self.row_bounds):
            slots, gone = self._free[table], _NOTHING
            if slots.numel() < own.numel():
                room = self._make_room(table, own.numel() - slots.numel())
                if room is None:
                    return
                slots, gone = torch.cat([slots, room[0]]), room[1]
            slots, self._free[table] = slots[: own.numel()], slots[own.numel() :]
            yield Move(table, gone, Rows(own, slots))
            self._row_of[slots] = own
            self._slot_of[own] = slots.int()
            self._last_use[slots] = self._batches
            self.counts.read += own.numel()

    def hold(self, slots: Tensor) -> Held:
        """Keep rows in their slots ``[N]`` until ``release()``, or until the result is garbage."""
        return Held(self._held, slots)

    def change(self, slots: Tensor) -> None:
        """Note that the rows in these slots are updated."""
        self._changed[slots] = True

    def take_changed(self, rows: Tensor | None = None) -> Iterator[tuple[int, Rows]]:
        """What must be written back for the far tier to be up to date, table by table; it counts as written.

        Args:
            rows: Of these distinct rows; by default of all.
        """
        slots = self._changed.nonzero().view(-1) if rows is None else self.find(rows)
        slots = slots[self._changed[slots] & (slots >= 0)].sort().values
        self._changed[slots] = False
        self.counts.written += slots.numel()
        yield from self._slots_by_table(slots)

    def take_all(self, rows: Tensor | None = None) -> Iterator[tuple[int, Rows]]:
        """What must be read again after the far tier was written by others: of these distinct rows, or of all."""
        slots = (self._row_of >= 0).nonzero().view(-1) if rows is None else self.find(rows)
        slots = slots[slots >= 0].sort().values
        self._changed[slots] = False
        yield from self._slots_by_table(slots)

    def _slots_by_table(self, slots: Tensor) -> Iterator[tuple[int, Rows]]:
        for table, own in _cut(slots, self.slot_bounds):
            yield table, Rows(self._row_of[own], own)

    def _make_room(self, table: int, wanted: int) -> tuple[Tensor, Rows] | None:
        """Free slots of a table: (slots, the rows in them that were changed); None where too few can be freed."""
        first, last = self.slot_bounds[table], self.slot_bounds[table + 1]
        used, rows = self._last_use[first:last], self._row_of[first:last]
        worth = used.clone() if self._uses is None else self._uses[rows.clamp(min=0)].long()
        worth[(used == self._batches) | (rows < 0)] = _NEVER
        for slots in list(self._held.values()):
            worth[slots[(slots >= first) & (slots < last)] - first] = _NEVER
        able = int((worth != _NEVER).sum())
        if able < wanted:
            return None
        number = min(able, max(wanted, int(_FREED_AT_ONCE * (last - first))))
        slots = worth.topk(number, largest=False).indices + first
        changed = slots[self._changed[slots]]
        gone = Rows(self._row_of[changed], changed)
        self._slot_of[self._row_of[slots]] = -1
        self._row_of[slots] = -1
        self._changed[slots] = False
        self.counts.written += changed.numel()
        return slots, gone


class Held:
    """Slots whose rows stay."""

    def __init__(self, held: dict[int, Tensor], slots: Tensor) -> None:
        self._held = held
        held[id(self)] = slots

    def release(self) -> None:
        """Let the rows go; a second time nothing."""
        self._held.pop(id(self), None)

    def __del__(self) -> None:
        self.release()


def _cut(numbers: Tensor, bounds: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Ascending numbers, cut at bounds: (number of the range, its own), where there are some."""
    places = torch.searchsorted(numbers, torch.tensor(bounds)).tolist()
    for index, (first, last) in enumerate(pairwise(places)):
        if last > first:
            yield index, numbers[first:last]

"""Which rows of large tables have a slot in memory, which give theirs up, and how many lookups hit.

A table is its R rows and, behind them, its slots. A row has a *place*: its slot while it has one,
else itself. Places are numbered through all tables of a group. This file knows numbers;
``cached_tables.py`` copies the contents of the rows.

A row without a slot is read and updated in place. That is why a miss need not lead to a move,
and few do:

- ``"lru"`` is q-LRU [Garetto, Leonardi and Martina 2016]: of one batch in 1/q, drawn at random, the
  missing rows take the slots that were not used for longest. What is used once hardly ever pushes
  out what is used often.
- ``"lfu"`` draws batches, too, and gives those of the missing rows a slot that as many batches used
  as the row in it.

While a table has free slots, every missing row gets one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from tutorec._check import require_int

__all__ = [
    "ADMITTED",
    "CacheAlgorithm",
    "CacheCounts",
    "CacheSpec",
    "CachedRows",
    "Move",
    "PinnedRows",
    "RowCache",
]

CacheAlgorithm = Literal["lru", "lfu"]

# q: the share of batches whose missing rows may take slots of others. A batch that moves rows takes
# two or three times as long; under LFU few move once the counts are settled.
ADMITTED: dict[CacheAlgorithm, float] = {"lru": 1 / 32, "lfu": 1 / 16}
# Rows copied at once, so that saving a table needs the same memory whatever the size of its cache:
# 4 MiB more at 64 columns, 16 MiB at 256.
_AT_ONCE = 1 << 14
_NEVER = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class CacheSpec:
    """Tables of a group that are stored in a file; on CUDA, in the memory of the host.

    Args:
        rows: Of each table, how many of its rows are in memory, or in that of the GPU; none: the
            tables are used where they are stored, and the system keeps those pages of the file in
            memory that it has room for.
        algorithm: Which rows leave first: ``"lru"``, those unused for longest; ``"lfu"``, those
            used least often.
        folder: Where the file is; the system's folder for temporary files by default.
        reserved_memory: Bytes of the GPU's memory that a cache leaves free; on CUDA only.
        prefetch_pipeline: Whether rows of coming batches are brought into the cache ahead of time;
            on CUDA only.
    """

    rows: tuple[int, ...] = ()
    algorithm: CacheAlgorithm = "lru"
    folder: str | None = None
    reserved_memory: float = 0.0
    prefetch_pipeline: bool = False


@dataclass
class CacheCounts:
    """What a cache has done: ids looked up, rows read from the file for them, rows written to it.

    A row is counted once for each batch that reads or updates it in the file, and once when it
    gives up its slot and has to be written back.
    """

    lookups: int = 0
    read: int = 0
    written: int = 0

    @property
    def hits(self) -> int:
        """Ids whose row had a slot or was already read by the batch.

        Example:
            >>> CacheCounts(lookups=10, read=3).hits
            7
        """
        return self.lookups - self.read

    @property
    def hit_rate(self) -> float:
        """Hit rate: the share of ids whose row had a slot or was already read by the batch."""
        return 1 - self.read / self.lookups if self.lookups else 0.0

    def since(self, before: CacheCounts) -> CacheCounts:
        """What was done after earlier counts.

        Example:
            >>> CacheCounts(lookups=10, read=3).since(CacheCounts(lookups=6, read=2))
            CacheCounts(lookups=4, read=1, written=0)
        """
        return CacheCounts(
            self.lookups - before.lookups, self.read - before.read, self.written - before.written
        )


class CachedRows(NamedTuple):
    """Rows of one table [N], and their slots [N], numbered from R; both within the table."""

    rows: Tensor
    slots: Tensor


class Move(NamedTuple):
    """Of one table: changed rows to write back from their slots, then rows to read into slots."""

    table: int
    written: CachedRows
    read: CachedRows


class RowCache:
    """The places of the rows of several tables.

    Args:
        rows: R of each table.
        slots: Of each table, at least 1.
        algorithm: Who gives up a slot: ``"lru"`` the row that was not used for longest, ``"lfu"``
            the row that was used by the fewest batches since the beginning.
        admitted: The share of batches whose missing rows may take slots of others; by default that
            of ``ADMITTED``.

    Example:
        >>> import torch
        >>> cache = RowCache(rows=[100], slots=[2], algorithm="lru", admitted=1)
        >>> for ids in ([7, 7, 9], [9, 3]):
        ...     places, moves, _ = cache.place(torch.tensor(ids))
        >>> (
        ...     moves[0].read.rows.tolist(),
        ...     cache.find(torch.tensor([3, 7, 9])).tolist(),
        ... )  # 3 has taken the slot of 7
        ([3], [100, 7, 101])
    """

    def __init__(
        self,
        rows: Sequence[int],
        slots: Sequence[int],
        algorithm: CacheAlgorithm,
        admitted: float | None = None,
    ) -> None:
        self.rows = tuple(rows)
        self.slots = tuple(slots)
        # The first place of each table, and behind its rows the first of its slots.
        self.bases = [*accumulate((r + s for r, s in zip(rows, slots, strict=True)), initial=0)]
        self._first_slots = [base + r for base, r in zip(self.bases, rows, strict=False)]
        total = self.bases[-1]

        # Of a row its place; of a slot the row in it, or itself while it is free.
        self._place_of = torch.arange(total, dtype=torch.int32 if total <= _NEVER else torch.int64)
        # of each place, the number of the batch
        self._last_use = torch.full((total,), -1, dtype=torch.int32)
        self._uses = torch.zeros(total, dtype=torch.int32) if algorithm == "lfu" else None
        self._written_back = [
            torch.full((s,), -1, dtype=torch.int32) for s in slots
        ]  # up to which batch a slot is written back

        self._last_change = -1
        self._free = [*slots]
        self._admitted = ADMITTED[algorithm] if admitted is None else admitted
        self._draw = random.Random(0)
        self._pinned: dict[int, int] = {}
        self._batches = 0
        self.counts = CacheCounts()

    def find(self, rows: Tensor) -> Tensor:
        """Places of rows ``[N]``."""
        return self._place_of.index_select(0, rows).long()

    def place(self, rows: Tensor) -> tuple[Tensor, list[Move], int]:
        """Slots of a batch's rows ``[N]``, copies to make first, and the number of rows without.

        Args:
            rows: Of all tables, in any order, repeated as they come.
        """
        row_places = self.find(rows)
        missing = rows.masked_select(row_places == rows)
        used_before = self._last_use.index_select(0, missing) if self._pinned else None

        # Of the numbers that are written for one row, one stays.
        numbers = torch.arange(missing.numel(), dtype=torch.int32)
        self._last_use.index_copy_(0, missing, numbers)
        first = self._last_use.index_select(0, missing) == numbers
        read = int(first.sum())

        self.counts.lookups += rows.numel()
        self.counts.read += read
        self._batches += 1
        self._last_use.index_fill_(0, row_places, self._batches)
        if self._uses is not None:
            self._uses.index_copy_(0, rows, self._uses.index_select(0, rows) + 1)

        drawn = self._draw.random() < self._admitted
        if not missing.numel() or not (drawn or any(self._free)):
            return row_places, [], read
        # a lookup that waits for its backward will update them where they are
        if used_before is not None:
            first &= used_before < min(self._pinned.values())
        moves = [*self._moves(missing.masked_select(first), drawn)]
        return (
            (self.find(rows) if moves else row_places),
            moves,
            read - sum(move.read.rows.numel() for move in moves),
        )

    @overload
    def replay(
        self, batches: Iterable[Tensor | Sequence[int]], *, settle: int = 0, every: None = None
    ) -> CacheCounts: ...

    @overload
    def replay(
        self, batches: Iterable[Tensor | Sequence[int]], *, settle: int = 0, every: int
    ) -> list[float]: ...

    def replay(
        self,
        batches: Iterable[Tensor | Sequence[int]],
        *,
        settle: int = 0,
        every: int | None = None,
    ) -> CacheCounts | list[float]:
        """Do with each batch of a log what a training step does, but for the rows themselves.

        This measures how often a cache of these sizes hits, without a table and in a fraction of
        the time of training.

        Args:
            batches: Ids ``[N]`` of each batch. With several tables, the ids of table t are rows
                that begin at ``bases[t]``.
            settle: So many batches at the beginning fill the cache and are not counted.
            every: One hit rate for so many batches, instead of counts over all of them; batches
                that are left over at the end are not counted.

        Returns:
            What the cache did in the batches that count; with ``every`` the hit rates, from 0 to 1.

        Raises:
            ValueError: An id is not a row of a table, or a number of batches is out of range.

        Example:
            >>> log = [torch.tensor([7, 7, 9]), torch.tensor([9, 3]), torch.tensor([3, 7])]
            >>> cache = RowCache(rows=[100], slots=[2], algorithm="lru", admitted=1)
            >>> counts = cache.replay(log)
            >>> counts.hits, counts.lookups
            (3, 7)
            >>> RowCache([100], [2], "lru", admitted=1).replay(log, every=1)
            [0.33..., 0.5, 0.5]
        """
        require_int("RowCache.replay: settle", settle, 0)
        if every is not None:
            require_int("RowCache.replay: every", every, 1)

        rates: list[float] = []
        before = replace(self.counts)
        for number, batch in enumerate(batches, start=1 - settle):
            rows = torch.as_tensor(batch)
            self._require_rows(rows)
            _, _, in_file = self.place(rows)
            self.change(in_file)

            if number <= 0:
                before = replace(self.counts)
            elif every is not None and number % every == 0:
                rates.append(self.counts.since(before).hit_rate)
                before = replace(self.counts)
        return self.counts.since(before) if every is None else rates

    def _require_rows(self, rows: Tensor) -> None:
        """Refuse numbers that are not rows of a table: those of slots, or of nothing."""
        if not rows.numel():
            return

        table = torch.searchsorted(torch.tensor(self.bases), rows, right=True) - 1
        first_slots = torch.tensor([*self._first_slots, -1])  # -1: beyond the last table
        wrong = (table < 0) | (rows >= first_slots[table])

        if bool(wrong.any()):
            tables = [
                f"{base} to {slot - 1}"
                for base, slot in zip(self.bases, self._first_slots, strict=False)
            ]
            raise ValueError(
                f"id {int(rows[wrong][0])} is not a row of this cache, whose tables have the rows "
                f"{', '.join(tables)}: make the cache with as many rows as the table has"
            )

    def pin(self) -> PinnedRows:
        """Pin the rows of this batch until ``release()``, or until the result is garbage."""
        return PinnedRows(self._pinned, self._batches)

    def change(self, in_file: int) -> None:
        """Count the updated rows of a batch, all of which have slots: so many rows of the file."""
        self._last_change = self._batches
        self.counts.written += in_file

    def take_changed(self) -> Iterator[tuple[int, CachedRows]]:
        """The rows to write back to bring the file up to date, table by table; marks them clean."""
        for table, written_back in enumerate(self._written_back):
            changed = self._changed(table).nonzero().view(-1) + self._first_slots[table]
            # Pinned rows may still be updated.
            written_back.fill_(min(self._pinned.values()) - 1 if self._pinned else self._batches)
            self.counts.written += changed.numel()
            yield from self._parts(table, changed)

    def missing(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The distinct rows of ``[N]`` that have no slot, table by table, numbered within it."""
        missing = rows.masked_select(self.find(rows) == rows).unique()
        for table, table_rows in self._by_table(missing):
            yield table, table_rows - self.bases[table]

    def in_slots(self) -> Iterator[tuple[int, CachedRows]]:
        """Every row that has a slot, of one table after another."""
        for table, (first, last) in enumerate(zip(self._first_slots, self.bases[1:], strict=True)):
            occupied = self._place_of[first:last] != torch.arange(first, last)
            yield from self._parts(table, occupied.nonzero().view(-1) + first)

    def _changed(self, table: int) -> Tensor:
        """For each slot of a table, whether its row was used since it was copied."""
        written_back = self._written_back[table]
        used = self._last_use[self._first_slots[table] : self.bases[table + 1]]
        return (used > written_back) & (written_back < self._last_change)

    def _parts(self, table: int, slots: Tensor) -> Iterator[tuple[int, CachedRows]]:
        """The rows in slots, in parts whose copies need little memory."""
        for chunk in slots.split(_AT_ONCE):
            if chunk.numel():
                yield table, self._rows_in(table, chunk)

    def _rows_in(self, table: int, slots: Tensor) -> CachedRows:
        return CachedRows(self.find(slots) - self.bases[table], slots - self.bases[table])

    def _moves(self, missing: Tensor, drawn: bool) -> Iterator[Move]:
        """Give slots to distinct rows: all tables if the batch is admitted, else to free slots."""
        for table, table_rows in self._by_table(missing.sort().values):
            rows = table_rows if drawn else table_rows[: self._free[table]]
            if rows.numel():
                rows, slots = self._choose(table, rows)
                if rows.numel():
                    yield self._give(table, rows, slots)

    def _by_table(self, rising: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Rising rows, cut where a table begins: (table, its own), where there are some."""
        cuts = torch.searchsorted(rising, torch.tensor(self.bases)).tolist()
        for table, (first, last) in enumerate(pairwise(cuts)):
            if last > first:
                yield table, rising[first:last]

    def _choose(self, table: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Which of a table's missing rows get a slot, and which slots."""
        first = self._first_slots[table]
        last = self.bases[table + 1]
        used = self._last_use[first:last]

        offered = None
        if self._uses is None:
            worth = used
        else:
            worth = self._uses.index_select(0, self._place_of[first:last])
            offered, order = self._uses.index_select(0, rows).sort(descending=True)
            rows = rows[order]

        oldest = min(self._pinned.values(), default=self._batches)
        worth = worth.masked_fill(used >= oldest, _NEVER)
        victims = worth.topk(min(rows.numel(), last - first), largest=False)
        fits = (
            victims.values < _NEVER
            if offered is None
            else victims.values <= offered[: victims.values.numel()]
        )

        number = int(fits.sum())
        if offered is None and number < rows.numel():
            # not the first ones, so that no row is favoured by its number
            rows = rows[(2 * torch.arange(number) + 1) * rows.numel() // max(1, 2 * number)]
        return rows[:number], victims.indices[:number] + first

    def _give(self, table: int, rows: Tensor, slots: Tensor) -> Move:
        before = self.find(slots)
        base = self.bases[table]
        numbers = slots - self._first_slots[table]
        written = self._rows_in(
            table, slots.masked_select(self._changed(table).index_select(0, numbers))
        )

        self._free[table] -= int((before == slots).sum())
        self.counts.written += written.rows.numel()
        self._written_back[table].index_fill_(0, numbers, self._batches - 1)

        # The rows that were in the slots become their rows place; then rows and slots are linked.
        for keys, values in ((before, before), (slots, rows), (rows, slots)):
            self._place_of.index_copy_(0, keys, values.to(self._place_of.dtype))
        self._last_use.index_fill_(0, slots, self._batches)
        return Move(table, written, CachedRows(rows - base, slots - base))


class PinnedRows:
    """Rows that stay in their places: those of one batch, and of the batches after it."""

    def __init__(self, pinned: dict[int, int], batch: int) -> None:
        self._pinned = pinned
        pinned[id(self)] = batch

    def release(self) -> None:
        """Let the rows go; a second time nothing."""
        self._pinned.pop(id(self), None)

    def __del__(self) -> None:
        self.release()

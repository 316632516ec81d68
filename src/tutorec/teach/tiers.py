"""One batch of a cached table: hits, rows that are read, and rows that are written back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tutorec._kernels.caches.row_cache import RowCache
from tutorec.teach.canvas import ACCENT, Chart
from tutorec.teach.diagram import WIDTH, Diagram

__all__ = ["CachedBatch", "tiers"]

_LEFT = 18.0
_PANEL = 15.4
# Lines from the top of a panel.
_LINES = {
    "ids of the batch": 1.4,
    "slots before it": 4.2,
    "rows in the file": 8.4,
    "slots after it": 12.6,
}


@dataclass(frozen=True)
class CachedBatch:
    """What a training step with these ids does in a cache of one table; :meth:`of` runs it.

    Attributes:
        ids: Of the batch.
        held: Slot -> the row in it, before the batch.
        read: Slot -> the row that is read into it.
        written: Slot -> the row that is written back from it.
    """

    ids: Sequence[int]
    held: Mapping[int, int]
    read: Mapping[int, int]
    written: Mapping[int, int]

    @classmethod
    def of(cls, cache: RowCache, ids: Sequence[int]) -> CachedBatch:
        """Look the ids up in the cache of one table, update their rows, and note what moved."""
        [rows] = cache.rows

        def by_slot(*moved: torch.Tensor) -> dict[int, int]:
            """The cache numbers slots from R."""
            pairs = zip(*(numbers.tolist() for numbers in moved), strict=True)
            return {slot - rows: row for row, slot in pairs}

        held: dict[int, int] = {}
        for _, in_slots in cache.in_slots():
            held |= by_slot(in_slots.rows, in_slots.slots)
        _, moves, in_file = cache.place(torch.tensor(ids))
        batch = cache.pin()
        cache.change(in_file)
        batch.release()

        read: dict[int, int] = {}
        written: dict[int, int] = {}
        for move in moves:
            read |= by_slot(move.read.rows, move.read.slots)
            written |= by_slot(move.written.rows, move.written.slots)
        return cls(ids, held, read, written)

    @property
    def hits(self) -> int:
        """Ids for which no row is read: the row has a slot, or the id came earlier in the batch."""
        return len(self.ids) - len(set(self.ids) - set(self.held.values()))


def tiers(cache: RowCache, batches: Sequence[Sequence[int]]) -> Chart:
    """A panel for each batch: its ids, the slots before, the rows of the file, the slots after.

    The batches are looked up and trained in the cache, one after another. Hits are filled and
    misses are hollow; what holds a row, or has a slot, has a thick frame. All arrows point down: a
    dashed one from a slot to the row that is written back, a solid one from a row to the slot that
    it is read into.

    Args:
        cache: Of one small table.
        batches: Ids of each batch.

    Example:
        >>> cache = RowCache(rows=[16], slots=[4], algorithm="lru", admitted=1)
        >>> tiers(cache, [[7, 2, 7, 11], [7, 2, 5, 7, 3]]).claim
        '4 of 9 ids hit; 5 rows read, 1 written back'
    """
    cached = [CachedBatch.of(cache, ids) for ids in batches]
    diagram = Diagram(lines=_PANEL * len(cached))
    for number, batch in enumerate(cached):
        top = _PANEL * number
        diagram.text(0, top + 0.4, f"batch {number + 1}", bold=True)
        _panel(diagram, top, batch, cache.rows[0], cache.slots[0])
    return diagram.chart(
        "{hits} of {ids} ids hit; {read} rows read, {written} written back",
        hits=sum(batch.hits for batch in cached),
        ids=sum(len(batch.ids) for batch in cached),
        read=sum(len(batch.read) for batch in cached),
        written=sum(len(batch.written) for batch in cached),
    )


def _panel(diagram: Diagram, top: float, batch: CachedBatch, rows: int, slots: int) -> None:
    ids, before, file, after = (top + line for line in _LINES.values())
    for name, line in _LINES.items():
        diagram.text(_LEFT - 1, top + line + 0.6, name, align="right")

    cell = min(3.6, (WIDTH - _LEFT) / rows)
    in_memory = set(batch.held.values())
    is_hit = [
        row in in_memory or row in batch.ids[:position] for position, row in enumerate(batch.ids)
    ]
    fill = [ACCENT if hit else None for hit in is_hit]
    diagram.strip(_LEFT, ids, batch.ids, rank=fill, cell=cell)
    diagram.strip(_LEFT, file, range(rows), marked=in_memory, cell=cell)
    for y, held in ((before, batch.held), (after, {**batch.held, **batch.read})):
        cells = [held.get(slot, "") for slot in range(slots)]
        diagram.strip(_LEFT, y, cells, marked=held, cell=cell)

    def middle(position: int) -> float:
        return _LEFT + cell * (position + 0.5)

    for slot, row in batch.written.items():
        diagram.arrow((middle(slot), before + 1.2), (middle(row), file), dashed=True)
    for slot, row in batch.read.items():
        diagram.arrow((middle(row), file + 1.2), (middle(slot), after), rank=ACCENT)

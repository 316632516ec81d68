"""One batch of a cached table: hits, rows that are read, and rows that are written back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from matplotlib.patches import Rectangle

from tutorec._kernels.caches.row_cache import RowCache
from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style

__all__ = ["CachedBatch", "tiers"]

# Heights of the four lines of a panel.
_IDS = 0.0
_BEFORE = 1.7
_FILE = 4.2
_AFTER = 6.7


@dataclass(frozen=True)
class CachedBatch:
    """What a training step with these ids does in a cache of one table; :meth:`of` runs it.

    Attributes:
        rows: R of the table.
        held: Slot -> the row in it, before the batch.
        slots: How many there are.
        ids: Of the batch.
        read: Slot -> the row that is read into it.
        written: Slot -> the row that is written back from it.
    """

    rows: int
    slots: int
    held: Mapping[int, int]
    ids: Sequence[int]
    read: Mapping[int, int] = field(default_factory=dict)
    written: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: RowCache, ids: Sequence[int]) -> CachedBatch:
        """Look the ids up in the cache of one table, update their rows, and note what moved."""
        [rows] = cache.rows
        [slots] = cache.slots
        cached = {s: r for _, in_slots in cache.in_slots() for r, s in _pairs(in_slots, rows)}
        _, moves, in_file = cache.place(torch.tensor(ids))
        batch = cache.pin()
        cache.change(in_file)
        batch.release()

        read = {s: r for move in moves for r, s in _pairs(move.read, rows)}
        return cls(
            rows,
            slots,
            cached,
            ids,
            read,
            {s: r for move in moves for r, s in _pairs(move.written, rows)},
        )

    @property
    def hits(self) -> int:
        """Ids for which no row is read: the row has a slot, or the id came earlier in the batch."""
        return len(self.ids) - len(set(self.ids) - set(self.held.values()))

    @property
    def held_after(self) -> Mapping[int, int]:
        """Slot -> the row in it, after the batch."""
        return {**self.held, **self.read}


def tiers(
    cache: RowCache,
    batches: Sequence[Sequence[int]] | Mapping[str, Sequence[int]],
    *,
    claim: str | None = None,
) -> Chart:
    """A panel for each batch: its ids, the slots before, the rows of the file, the slots after.

    The batches are looked up and trained in the cache, one after another. Hits are filled and
    misses have a dashed frame. All arrows point down: a dashed one from a slot to the row that is
    written back, a solid one from a row to the slot that it is read into.

    Args:
        cache: Of one small table.
        batches: Ids of each batch; with titles, or "batch 1" and so on.
        claim: Title; may use {hits}, {ids}, {read} and {written} of all batches, {rows} and
            {slots}.

    Raises:
        ValueError: There is no batch, or the cache has several tables.

    Example:
        >>> cache = RowCache(rows=[16], slots=[4], algorithm="lru", admitted=1)
        >>> tiers(cache, [[7, 2, 7, 11], [7, 2, 5, 7, 3]]).claim
        '4 of 9 ids hit; 5 rows read, 1 written back'
    """
    if len(cache.rows) != 1 or not batches:
        raise ValueError(
            f"{len(batches)} batches of {len(cache.rows)} tables: draw at least one batch of one "
            "table"
        )

    if not isinstance(batches, Mapping):
        batches = {f"batch {number}": ids for number, ids in enumerate(batches, start=1)}
    cached = {title: CachedBatch.of(cache, ids) for title, ids in batches.items()}
    all_batches = [*cached.values()]
    fields: dict[str, Any] = {
        "hits": sum(batch.hits for batch in all_batches),
        "ids": sum(len(batch.ids) for batch in all_batches),
        "read": sum(len(batch.read) for batch in all_batches),
        "written": sum(len(batch.written) for batch in all_batches),
        "rows": all_batches[0].rows,
        "slots": all_batches[0].slots,
    }

    with style():
        figure = canvas(0.9 + 3.1 * len(batches))
        grid = figure.subplots(len(batches), 1, squeeze=False)[:, 0]
        for axes, (title, batch) in zip(grid, cached.items(), strict=True):
            _panel(axes, batch)
            axes.set_title(title, loc="left")
        return finish(
            figure,
            claim,
            "{hits} of {ids} ids hit; {read} rows read, {written} written back",
            fields,
        )


def _panel(axes: Any, one: CachedBatch) -> None:
    in_memory = set(one.held.values())
    for position, identifier in enumerate(one.ids):
        again = identifier in one.ids[:position]
        _box(
            axes,
            position,
            _IDS,
            str(identifier),
            "hit" if identifier in in_memory or again else "miss",
        )

    for height, contents in ((_BEFORE, one.held), (_AFTER, one.held_after)):
        for slot in range(one.slots):
            _box(
                axes,
                slot,
                height,
                str(contents.get(slot, "")),
                "filled" if slot in contents else "empty",
            )
    for row in range(one.rows):
        _box(axes, row, _FILE, str(row), "filled" if row in in_memory else "empty")
    for slot, row in one.written.items():
        _arrow(axes, (slot, _BEFORE), (row, _FILE), color=INK, ls="--")
    for slot, row in one.read.items():
        _arrow(axes, (row, _FILE), (slot, _AFTER), color=ACCENT, ls="-")

    names = {
        _IDS: "ids of the batch",
        _BEFORE: "slots before it",
        _FILE: "rows in the file",
        _AFTER: "slots after it",
    }
    for height, name in names.items():
        axes.text(-0.3, height + 0.5, name, ha="right", va="center", fontsize=11)
    axes.set(xlim=(-6.2, one.rows + 0.1), ylim=(_AFTER + 1.2, -0.2))
    axes.axis("off")


def _arrow(axes: Any, start: tuple[int, float], end: tuple[int, float], **line: Any) -> None:
    """From the lower edge of a box, (place, height), to the upper edge of another."""
    axes.annotate(
        "",
        xy=(end[0] + 0.5, end[1] - 0.05),
        xytext=(start[0] + 0.5, start[1] + 1.05),
        arrowprops={"arrowstyle": "->", "lw": 1.8, **line},
    )


def _box(axes: Any, left: float, top: float, text: str, look: str) -> None:
    style: dict[str, Any] = {
        "hit": {"facecolor": ACCENT, "edgecolor": ACCENT},
        "miss": {"facecolor": "none", "edgecolor": ACCENT, "lw": 1.6, "ls": "--"},
        "filled": {"facecolor": "none", "edgecolor": ACCENT, "lw": 2.0},
        "empty": {"facecolor": "none", "edgecolor": INK, "lw": 0.8},
    }[look]

    axes.add_patch(Rectangle((left + 0.06, top), 0.88, 1.0, **style))
    color = "white" if look == "hit" else INK
    axes.text(left + 0.5, top + 0.52, text, ha="center", va="center", fontsize=10, color=color)


def _pairs(cached: Any, rows: int) -> list[tuple[int, int]]:
    """(row, slot from 0) of what the cache numbers from R."""
    return [
        (row, slot - rows)
        for row, slot in zip(cached.rows.tolist(), cached.slots.tolist(), strict=True)
    ]

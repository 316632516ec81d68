"""Where rows are stored: in parts of a compressed table, in slots of a cache, for raw ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tutorec._kernels.caches.row_cache import RowCache
from tutorec.modules.compressions import QR, Block
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.mc_modules import MCHManagedCollisionModule
from tutorec.sparse.jagged import JaggedTensor
from tutorec.teach.canvas import ACCENT, INK, Chart
from tutorec.teach.diagram import WIDTH, Diagram, Node

_CELL = 4.4
_LINE = 1.2
_LEFT = 3.0  # of the table
_LABELS = 22.0  # room between a table and its parts
_BETWEEN = 2.6  # lines between two parts


def stored(
    table: EmbeddingBagConfig,
    how: QR | Block,
    ids: Sequence[int],
    *,
    sign: str = "+",
    claim: str,
) -> Chart:
    """The table that a model sees, what is stored for it, and the rows of two ids in both.

    A part with fewer columns than the table is followed by the matrix that widens it.

    Args:
        table: R rows and D columns, small enough to draw every row.
        how: The compression.
        ids: One or two; the first is in the accent colour, the second in ink.
        sign: The sign between two parts.
        claim: Title; may use {whole} and {stored}, numbers in the table and in its parts.
    """
    parts = how.parts(table)
    columns = table.embedding_dim
    heights = [part.table.num_embeddings * _LINE + _BETWEEN for part in parts]
    lines = max(table.num_embeddings * _LINE, sum(heights) - _BETWEEN)

    colors = dict(zip(ids, (ACCENT, INK), strict=False))
    diagram = Diagram(lines=lines + 1.8)
    owners = {row: [color] for row, color in colors.items()}
    whole = _grid(diagram, _LEFT, 1.4, table.name, (table.num_embeddings, columns), owners)
    for row in ids:
        diagram.text(_LEFT - 0.8, 2 + _LINE * row, str(row), align="right")

    left = whole.right[0] + _LABELS
    top = 1.4
    count = 0
    for part, height in zip(parts, heights, strict=True):
        if part is not parts[0]:
            diagram.text(left + columns * _CELL / 2, top - 1.7, sign, align="center", bold=True)
        [id_map] = part.maps
        readers: dict[int, list[int]] = {}
        for one in ids:
            row = one if id_map.rows is None else int(id_map.rows(torch.tensor([one])))
            readers.setdefault(row, []).append(one)

        shape = part.table.num_embeddings, part.table.embedding_dim
        owners = {row: [colors[one] for one in row_ids] for row, row_ids in readers.items()}
        name = part.table.name.removeprefix(f"{table.name}_")
        grid = _grid(diagram, left, top, name, shape, owners)
        count += shape[0] * shape[1]

        for row, row_ids in readers.items():
            # how each id becomes the row, such as 7 // 4 = 1
            computed = [re.sub(r"(\W+)", r" \1 ", f"{one}{id_map.suffix}") for one in row_ids]
            label = " = ".join([*(computed if id_map.suffix else []), str(row)])
            y = top + _LINE * row + 0.6
            diagram.text(left - 0.8, y, label, align="right")
            for one in row_ids:
                start = whole.right[0], 2 + _LINE * one
                diagram.arrow(start, (left - 1.4 - 0.85 * len(label), y), rank=colors[one])

        if shape[1] < columns:
            sign_x = grid.right[0] + max(2.5, len(name) + 8 - grid.width)
            diagram.text(sign_x, top + 0.6, "x", align="center", bold=True)
            _grid(diagram, sign_x + 2.5, top, "matrix", (shape[1], columns), {})
            count += shape[1] * columns
        top += height
    return diagram.chart(claim, whole=table.num_embeddings * columns, stored=count)


def _grid(
    diagram: Diagram,
    x: float,
    y: float,
    name: str,
    shape: tuple[int, int],
    owners: Mapping[int, Sequence[str]],
) -> Node:
    """A table cell by cell; a row that several ids use is divided among their colours."""
    rows, columns = shape
    diagram.text(x, y - 0.7, f"{name} [{rows} x {columns}]")
    for row in range(rows):
        colors = owners.get(row, [None])
        fill = [colors[len(colors) * column // columns] for column in range(columns)]
        diagram.strip(x, y + _LINE * row, [""] * columns, rank=fill, cell=_CELL)
    return Node(x, y, columns * _CELL, rows * _LINE)


_SLOTS_LEFT = 18.0
_CACHE_PANEL = 15.4
# Lines from the top of a panel.
_CACHE_LINES = {
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
        hits: For each id whether no row is read: the row has a slot, or the id came earlier in the
            batch.
        held: Slot -> the row in it, before the batch.
        read: Slot -> the row that is read into it.
        written: Slot -> the row that is written back from it.
    """

    ids: Sequence[int]
    hits: Sequence[bool]
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
        hits = [row in {*held.values(), *ids[:position]} for position, row in enumerate(ids)]
        return cls(ids, hits, held, read, written)


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
    diagram = Diagram(lines=_CACHE_PANEL * len(cached))
    for number, batch in enumerate(cached):
        top = _CACHE_PANEL * number
        diagram.text(0, top + 0.4, f"batch {number + 1}", bold=True)
        _cache_panel(diagram, top, batch, cache.rows[0], cache.slots[0])
    return diagram.chart(
        "{hits} of {ids} ids hit; {read} rows read, {written} written back",
        hits=sum(sum(batch.hits) for batch in cached),
        ids=sum(len(batch.ids) for batch in cached),
        read=sum(len(batch.read) for batch in cached),
        written=sum(len(batch.written) for batch in cached),
    )


def _cache_panel(diagram: Diagram, top: float, batch: CachedBatch, rows: int, slots: int) -> None:
    ids, before, file, after = (top + line for line in _CACHE_LINES.values())
    for name, line in _CACHE_LINES.items():
        diagram.text(_SLOTS_LEFT - 1, top + line + 0.6, name, align="right")

    cell = min(3.6, (WIDTH - _SLOTS_LEFT) / rows)
    fill = [ACCENT if hit else None for hit in batch.hits]
    diagram.strip(_SLOTS_LEFT, ids, batch.ids, rank=fill, cell=cell)
    diagram.strip(_SLOTS_LEFT, file, range(rows), marked=set(batch.held.values()), cell=cell)
    for y, held in ((before, batch.held), (after, {**batch.held, **batch.read})):
        cells = [held.get(slot, "") for slot in range(slots)]
        diagram.strip(_SLOTS_LEFT, y, cells, marked=held, cell=cell)

    def middle(position: int) -> float:
        return _SLOTS_LEFT + cell * (position + 0.5)

    for slot, row in batch.written.items():
        diagram.arrow((middle(slot), before + 1.2), (middle(row), file), dashed=True)
    for slot, row in batch.read.items():
        diagram.arrow((middle(row), file + 1.2), (middle(slot), after), rank=ACCENT)


_IDS_LEFT = 13.0
_MAPPING_PANEL = 11.0


@dataclass(frozen=True)
class RemappedBatch:
    """What a forward in training mode with these ids does to a mapping; :meth:`of` runs it.

    Attributes:
        ids: Of the batch.
        rows: The row that each of them reads.
        size: R, the shared row included.
        before: Row -> the id that has it, before the batch.
        after: The same after it.
    """

    ids: Sequence[int]
    rows: Sequence[int]
    size: int
    before: Mapping[int, int]
    after: Mapping[int, int]

    @classmethod
    def of(cls, mapping: MCHManagedCollisionModule, ids: Sequence[int]) -> RemappedBatch:
        """Remap the ids, and note who has which row."""
        before = _held(mapping)
        values = torch.tensor(ids, device=mapping.device)
        lists = JaggedTensor(values, lengths=torch.tensor([len(ids)], device=mapping.device))
        rows = mapping({"": lists})[""].values().tolist()
        return cls(ids, rows, mapping.output_size(), before, _held(mapping))

    @property
    def evicted(self) -> Mapping[int, int]:
        """Row -> the id that lost it."""
        return {row: old for row, old in self.before.items() if self.after.get(row) != old}

    @property
    def shared(self) -> int:
        """Ids of the batch that read the shared row."""
        return self.rows.count(self.size - 1)


def remapping(batches: Mapping[str, RemappedBatch], *, claim: str) -> Chart:
    """A panel for each batch: ids above, rows and their ids below, an arrow for each id.

    A filled id has a row of its own. A row with a thick frame was taken from another id.

    Args:
        batches: Title to what a batch did.
        claim: Title; may use {ids}, {shared} (ids that read the shared row) and {evicted}, of all
            batches.
    """
    diagram = Diagram(lines=_MAPPING_PANEL * len(batches))
    for position, (title, batch) in enumerate(batches.items()):
        _mapping_panel(diagram, _MAPPING_PANEL * position, title, batch)
    return diagram.chart(
        claim,
        ids=sum(len(batch.ids) for batch in batches.values()),
        shared=sum(batch.shared for batch in batches.values()),
        evicted=sum(len(batch.evicted) for batch in batches.values()),
    )


def _mapping_panel(diagram: Diagram, top: float, title: str, batch: RemappedBatch) -> None:
    shared = batch.size - 1
    cell = min(8.0, (WIDTH - _IDS_LEFT) / max(len(batch.ids), batch.size))
    diagram.text(0, top + 0.6, title, bold=True)
    for name, y in {"raw ids": 2.2, "id of the row": 6.4, "row": 8.0}.items():
        diagram.text(0, top + y, name)

    names = [batch.after.get(row, "") for row in range(shared)]
    cells = [*names, "all others"]
    diagram.strip(_IDS_LEFT, top + 5.8, cells, marked=batch.evicted.keys(), cell=cell)
    notes = {row: f"was {old}" for row, old in batch.evicted.items()} | {shared: "shared"}
    for row in range(batch.size):
        x = _IDS_LEFT + cell * (row + 0.5)
        diagram.text(x, top + 8.0, str(row), align="center")
        diagram.text(x, top + 9.0, notes.get(row, ""), align="center")

    for position, (identifier, row) in enumerate(zip(batch.ids, batch.rows, strict=True)):
        rank = None if row == shared else ACCENT
        x = _IDS_LEFT + cell * position
        node = diagram.strip(x, top + 1.6, [identifier], rank=rank, cell=cell)
        diagram.arrow(node.bottom, (_IDS_LEFT + cell * (row + 0.5), top + 5.8))


def _held(mapping: MCHManagedCollisionModule) -> dict[int, int]:
    """Row -> the id that has it."""
    rows = mapping._mch_remapped_ids_mapping.tolist()
    ids = mapping._mch_sorted_raw_ids.tolist()
    empty = torch.iinfo(torch.int64).max
    return {row: old for row, old in zip(rows, ids, strict=True) if old != empty}

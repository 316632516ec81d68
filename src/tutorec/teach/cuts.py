"""Which part of which table is on which rank, drawn from a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tutorec.teach.canvas import (
    INK,
    Chart,
    canvas,
    finish,
    legend,
    rank_color,
    rectangle,
    style,
)
from tutorec.teach.units import decimal_size

__all__ = ["cuts", "one_table", "resharding", "shard_boxes"]

_BYTES = 4  # of a weight
_GAP = 0.35  # between tables, in units of the widest
_COPY = 1.06  # from a copy to the one next to it, in widths of the table
_STEP = 0.1  # of a copy to the one behind it
_ROOM = 0.2  # a shard that is so high, in units of the highest, has its offsets inside
_LINES = 9  # of text that a whole table has room for
_APART = 0.06  # between two shards, in heights of a table

#: Rank, first row, first column, rows, columns.
Box = tuple[int, int, int, int, int]


def shard_boxes(entry: Any) -> list[Box]:
    """Where each shard of a table is; a copy is the whole table.

    Args:
        entry: With `shards()`, `table_shape()` and `ranks`.
    """
    if entry.shards():
        return [
            (shard.placement.rank(), *shard.shard_offsets, *shard.shard_sizes)
            for shard in entry.shards()
        ]
    return [(rank, 0, 0, *entry.table_shape()) for rank in entry.ranks]


@style()
def cuts(plans: Mapping[str, Mapping[str, Any]], *, claim: str) -> Chart:
    """Two plans in a row: a box for each shard, with height by rows and width by columns.

    A shard has the colour of its rank and, where there is room, its offsets. Copies of one table
    overlap.

    Args:
        plans: Name to the plan of one module: table name -> entry with `shards()`, `table_shape()`
            and `ranks`.
        claim: The title.
    """
    entries = [entry for plan in plans.values() for entry in plan.values()]
    scale = [max(sizes) for sizes in zip(*(e.table_shape() for e in entries), strict=True)]
    ranks = sorted({box[0] for entry in entries for box in shard_boxes(entry)})

    lines = -(-len(plans) // 2)
    figure = canvas(0.8 + 2.5 * lines)
    panels = [figure.add_subplot(lines, min(2, len(plans)), n + 1) for n in range(len(plans))]
    right = bottom = 0.0
    for axes, (name, plan) in zip(panels, plans.items(), strict=True):
        left = 0.0
        for table, entry in plan.items():
            end, low = _table(axes, table, entry, left, scale)
            left = end + _GAP
            right = max(right, end)
            bottom = max(bottom, low)
        axes.set_title(name)
        axes.axis("off")

    for axes in panels:  # one scale: a table is as wide in every panel
        axes.set(xlim=(-0.1, right + _GAP), ylim=(bottom + 0.55, -0.02))
    legend(figure, {f"rank {rank}": {"color": rank_color(rank)} for rank in ranks}, len(ranks))
    return finish(figure, claim)


def _table(axes: Any, name: str, entry: Any, left: float, scale: list[int]) -> tuple[float, float]:
    """Draw the shards of one table; return where it ends on the right and below."""
    boxes = shard_boxes(entry)
    copies = len(boxes) > 1 and not entry.shards()
    right = bottom = 0.0
    for position, (rank, row, column, rows, columns) in enumerate(boxes):
        shift = _STEP * position if copies else 0.0
        x = left + column / scale[1] + shift
        y = row / scale[0] + shift
        wide = columns / scale[1]
        high = rows / scale[0]
        upright = wide <= 0.9
        has_room = not copies and high >= (2 * _ROOM if upright else _ROOM)
        text = f"[{row}, {column}]" if has_room else ""
        look = {"color": rank_color(rank), "edge": "white", "width": 1.0}
        turned = 90 if upright else 0
        rectangle(axes, (x, y, wide, high), text, **look, size=8, rotation=turned)
        right = max(right, x + wide)
        bottom = max(bottom, y + high)

    rows, columns = entry.table_shape()
    label = f"{name.replace('_', '_' + chr(10), 1)}\n{rows} x {columns}"
    axes.text(left, bottom + 0.04, label, fontsize=9, va="top")
    return right, bottom


@style()
def one_table(plans: Mapping[str, Any], *, mark: int, claim: str) -> Chart:
    """One table under several plans, a large panel for each, and the row of an id.

    Rows go down, columns across. A shard has its rank and, where there is room, what is cut. Copies
    are next to each other, each as large as the whole table.

    Args:
        plans: Name of a plan to its entry for the table, with `shards()`, `table_shape()` and
            `ranks`.
        mark: The id whose row has a thick line, near the top where it is small.
        claim: Title; may use the names of the plans, for the ranks that read the row, such as ``0``
            or ``0 and 1``.
    """
    lines = -(-len(plans) // 2)
    figure = canvas(2.5 * lines)
    # widths of the panels, in tables
    widths = [
        1.0 if entry.shards() else 1 + _COPY * (len(entry.ranks) - 1) for entry in plans.values()
    ]
    ratios = [max(widths[side::2], default=1.0) for side in (0, 1)]
    grid = figure.add_gridspec(lines, 2, width_ratios=ratios)
    readers = {}

    for number, (name, entry) in enumerate(plans.items()):
        share = widths[number] / ratios[number % 2]
        place = grid[divmod(number, 2)]
        if share < 1:
            place = place.subgridspec(1, 2, width_ratios=[share, 1 - share])[0]
        axes = figure.add_subplot(place)

        boxes = shard_boxes(entry)
        columns = entry.table_shape()[1]
        copies = not entry.shards()
        reading = [str(rank) for rank, row, _, high, _ in boxes if row <= mark < row + high]
        readers[name] = " and ".join(reading)
        for position, box in enumerate(boxes):
            shift = _COPY * columns * position if copies else 0
            _shard(axes, box, shift, mark, entry.table_shape())

        axes.set_title(f"{name}: row {mark} on rank {readers[name]}", fontsize=10, loc="left")
        ticks = sorted({edge for box in boxes for edge in (box[2], box[2] + box[4])})
        axes.set_xticks([] if copies else ticks)
        axes.set_yticks(sorted({edge for box in boxes for edge in (box[1], box[1] + box[3])}))
        axes.set_xlabel(f"{len(boxes)} copies of {columns} columns" if copies else "column")
        axes.set_ylabel("row")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.autoscale_view()
        axes.invert_yaxis()
        axes.set_xlim(0, columns * widths[number])
    return finish(figure, claim, **readers)


def _shard(axes: Any, box: Box, shift: float, mark: int, shape: tuple[int, int]) -> None:
    """A shard in the colour of its rank, what it holds written in it, and the line of a row."""
    rank, row, column, high, wide = box
    rows, columns = shape
    gap = "\n" if wide < columns else " "  # narrow shards have narrow lines
    row_text = f"\nrows{gap}{row:,} to {row + high - 1:,}" if high < rows else ""
    column_text = f"\ncolumns{gap}{column} to {column + wide - 1}" if wide < columns else ""
    text = f"rank {rank}" + (row_text + column_text or "\nwhole")
    if high * _LINES < (text.count("\n") + 1) * rows:
        text = f"rank {rank}"

    left = column + shift
    look = {"color": rank_color(rank), "edge": "white", "width": 2}
    rectangle(axes, (left, row, wide, high), text, **look, size=8.5)
    if row <= mark < row + high:
        ends = [left + 0.02 * wide, left + 0.98 * wide]  # the row of a shard ends with the shard
        axes.plot(ends, [mark] * 2, color=INK, linewidth=5, solid_capstyle="butt", zorder=3)


@style()
def resharding(saved: Any, loaded: Mapping[str, Any], *, claim: str) -> Chart:
    """The shards of a table, each part in the colour of the rank whose file has it.

    Args:
        saved: The table in the plan under which it was written: an entry with `shards()` and
            `table_shape()`.
        loaded: Title to the table in a plan under which it is read.
        claim: Title; may use {files}, and by position of a plan {reads_1}, {reads_2}, ...: the
            parts that are read.
    """
    files = shard_boxes(saved)
    panels = {f"saved by {len(files)} ranks": saved, **loaded}
    figure = canvas(3.4)
    grid = figure.subplots(1, len(panels), sharex=True, sharey=True)
    reads = {}
    for position, (axes, (name, entry)) in enumerate(zip(grid, panels.items(), strict=True)):
        boxes = shard_boxes(entry)
        reads[f"reads_{position}"] = sum(_parts(axes, box, files, entry) for box in boxes)
        axes.set_title(name)
        axes.axis("off")

    grid[0].autoscale_view()
    grid[0].invert_yaxis()
    keys = {f"from rank {rank}'s file": {"color": rank_color(rank)} for rank, *_ in files}
    legend(figure, keys, len(keys))
    return finish(figure, claim, files=len(files), **reads)


def _parts(axes: Any, shard: Box, files: list[Box], entry: Any) -> int:
    """Draw one shard, and return the number of parts that it is read in."""
    rank, top, left, rows, columns = shard
    all_rows, all_columns = entry.table_shape()
    shift_x = _APART * round(left / columns)
    shift_y = _APART * round(top / rows)

    def place(row: int, column: int, high: int, wide: int) -> tuple[float, float, float, float]:
        x = column / all_columns + shift_x
        y = row / all_rows + shift_y
        return x, y, wide / all_columns, high / all_rows

    parts = 0
    for file, row, column, height, width in files:
        first = max(top, row)
        start = max(left, column)
        high = min(top + rows, row + height) - first
        wide = min(left + columns, column + width) - start
        if high > 0 and wide > 0:
            turned = 90 if wide < all_columns / 2 else 0
            text = decimal_size(_BYTES * high * wide)
            box = place(first, start, high, wide)
            rectangle(axes, box, text, color=rank_color(file), width=0, size=9, rotation=turned)
            parts += 1

    x, y, wide, high = box = place(top, left, rows, columns)
    rectangle(axes, box, width=1.2)
    if wide < 0.9:
        axes.text(x + wide / 2, y + high + 0.06, f"rank {rank}", ha="center", va="center", size=8)
    else:
        axes.text(x + wide + 0.03, y + high / 2, f"rank {rank}", va="center", size=8, rotation=270)
    return parts

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
_GAP = 0.35  # between tables, in widths of the widest
_COPY = 1.06  # from a copy to the one next to it, in widths of the table
_LINES = 9  # of text that a whole table has room for
_APART = 0.06  # between two shards, of the size of a table

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

    A shard has the colour of its rank and, where there is room, its offsets.

    Args:
        plans: Name to the plan of one module: table name -> entry with `shards()` and
            `table_shape()`.
        claim: The title.
    """
    lines = -(-len(plans) // 2)
    figure = canvas(0.8 + 2.5 * lines)
    panels = [*figure.subplots(lines, 2, sharex=True, sharey=True, squeeze=False).flat]
    shapes = [entry.table_shape() for plan in plans.values() for entry in plan.values()]
    most_rows = max(rows for rows, _ in shapes)
    widest = max(columns for _, columns in shapes)
    ranks = set()
    for axes in panels:
        axes.axis("off")
    for axes, (name, plan) in zip(panels, plans.items(), strict=False):
        axes.set_title(name)
        left = 0.0
        for table, entry in plan.items():
            all_rows, all_columns = entry.table_shape()
            label = f"{table.replace('_', '_' + chr(10), 1)}\n{all_rows} x {all_columns}"
            axes.text(left, all_rows + 0.04 * most_rows, label, fontsize=9, va="top")
            for rank, row, column, rows, columns in shard_boxes(entry):
                turned = 90 if columns <= 0.9 * widest else 0
                has_room = rows >= most_rows * (0.4 if turned else 0.2)
                text = f"[{row}, {column}]" if has_room else ""
                look = {"color": rank_color(rank), "edge": "white", "width": 1.0}
                box = left + column, row, columns, rows
                rectangle(axes, box, text, **look, size=8, rotation=turned)
                ranks.add(rank)
            left += all_columns + _GAP * widest
            axes.set(xlim=(0, left), ylim=(1.5 * most_rows, 0))

    legend(figure, {f"rank {rank}": {"color": rank_color(rank)} for rank in sorted(ranks)})
    return finish(figure, claim)


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
    # away from the shard before it
    right = _APART * all_columns * round(left / columns)
    down = _APART * all_rows * round(top / rows)
    parts = 0
    for file, row, column, height, width in files:
        first = max(top, row)
        start = max(left, column)
        high = min(top + rows, row + height) - first
        wide = min(left + columns, column + width) - start
        if high > 0 and wide > 0:
            turned = 90 if wide < all_columns / 2 else 0
            text = decimal_size(_BYTES * high * wide)
            box = start + right, first + down, wide, high
            rectangle(axes, box, text, color=rank_color(file), width=0, size=9, rotation=turned)
            parts += 1

    x = left + right
    y = top + down
    rectangle(axes, (x, y, columns, rows), width=1.2)
    look = {"va": "center", "size": 8}
    if columns < 0.9 * all_columns:
        below = y + rows + 0.06 * all_rows
        axes.text(x + columns / 2, below, f"rank {rank}", ha="center", **look)
    else:
        beside = x + 1.03 * columns
        axes.text(beside, y + rows / 2, f"rank {rank}", rotation=270, **look)
    return parts

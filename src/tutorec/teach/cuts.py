"""Which part of which table is on which rank, drawn from a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.patches import Patch, Rectangle

from tutorec.teach.canvas import INK, Chart, canvas, finish, rank_color, style
from tutorec.teach.units import size

__all__ = ["cuts", "one_table"]

_BYTES = 4  # of a weight
_GAP = 0.35  # between tables, in units of the widest
_COPY = 1.06  # from a copy to the one next to it, in widths of the table
_STEP = 0.1  # of a copy to the one behind it
_ROOM = 0.2  # a shard that is so high, in units of the highest, has its offsets inside
_NAME = 0.55  # room for a name under its table, in units of the highest
_LINES = 9  # of text that a whole table has room for


def cuts(plans: Mapping[str, Mapping[str, Any]], *, claim: str | None = None) -> Chart:
    """Two plans in a row: a box for each shard, with height by rows and width by columns.

    A shard has the colour of its rank and, where there is room, its offsets. Copies of one table
    overlap.

    Args:
        plans: Name to the plan of one module: table name -> entry with `shards()`, `table_shape()`
            and `ranks`.
        claim: Title; may use {least} and {most}: bytes that a rank holds under any of the plans.

    Raises:
        ValueError: There is no plan, or a plan without tables.
    """
    if not plans or not all(plans.values()):
        raise ValueError(f"cuts needs plans that have tables, got {[*map(len, plans.values())]}")

    boxes = {
        name: {table: shard_boxes(entry) for table, entry in plan.items()}
        for name, plan in plans.items()
    }
    rank_bytes = {
        name: [
            sum(
                rows * columns * _BYTES
                for table_boxes in tables.values()
                for owner, _, _, rows, columns in table_boxes
                if owner == rank
            )
            for rank in sorted({box[0] for table_boxes in tables.values() for box in table_boxes})
        ]
        for name, tables in boxes.items()
    }
    fields = {
        "held": rank_bytes,
        "least": size(min(map(min, rank_bytes.values()))),
        "most": size(max(map(max, rank_bytes.values()))),
    }

    shapes = [entry.table_shape() for plan in plans.values() for entry in plan.values()]
    highest = max(rows for rows, _ in shapes)
    widest = max(columns for _, columns in shapes)
    ranks = sorted(
        {
            box[0]
            for tables in boxes.values()
            for table_boxes in tables.values()
            for box in table_boxes
        }
    )

    with style():
        lowest = farthest = 0.0
        lines = -(-len(plans) // 2)
        figure = canvas(0.8 + 2.5 * lines)
        grid = figure.subplots(lines, min(2, len(plans)), squeeze=False).flatten()
        for axes in grid[len(plans) :]:
            axes.remove()
        for axes, (name, tables) in zip(grid, boxes.items(), strict=False):
            left = 0.0
            for table, table_boxes in tables.items():
                left, bottom = _table(axes, table, table_boxes, left, highest, widest)
                lowest = max(lowest, bottom)
            farthest = max(farthest, left - _GAP)
            axes.set_title(name)
            axes.axis("off")

        for axes in figure.axes:
            axes.set_xlim(-0.1, farthest + _GAP)  # one scale: a table is as wide in every panel
            axes.set_ylim(lowest + _NAME, -0.02)
        keys = [Patch(color=rank_color(rank), label=f"rank {rank}") for rank in ranks]
        figure.legend(handles=keys, loc="outside lower center", ncols=len(ranks))
        return finish(figure, claim, "a rank holds between {least} and {most}", fields)


def one_table(plans: Mapping[str, Any], *, mark: int, claim: str) -> Chart:
    """One table under several plans, a large panel for each: rows down, columns across, and the row of an id.

    A shard has its rank and, where there is room, what is cut. Copies are next to each other, each
    as large as the whole table.

    Args:
        plans: Name of a plan to its entry for the table, with `shards()`, `table_shape()` and
            `ranks`.
        mark: The id whose row has a thick line, near the top where it is small.
        claim: Title; may use the names of the plans, for the ranks that read the row, such as ``0``
            or ``0 and 1``.
    """  # noqa: E501
    with style():
        lines = -(-len(plans) // 2)
        figure = canvas(2.5 * lines)
        across = [_width(entry) for entry in plans.values()]
        ratios = [max(across[side::2], default=1.0) for side in (0, 1)]
        grid = figure.add_gridspec(lines, 2, width_ratios=ratios)
        readers = {}

        for number, (name, entry) in enumerate(plans.items()):
            axes = _panel(figure, grid[divmod(number, 2)], across[number] / ratios[number % 2])
            boxes = shard_boxes(entry)
            rows, columns = entry.table_shape()
            reading_ranks = [
                str(rank) for rank, row, _, high, _ in boxes if row <= mark < row + high
            ]
            readers[name] = " and ".join(reading_ranks)
            copies = not entry.shards()
            axes.set_title(f"{name}: row {mark} on rank {readers[name]}", fontsize=10, loc="left")
            for position, box in enumerate(boxes):
                text = _written(box, rows, columns)
                _shard(axes, box, _COPY * columns * position if copies else 0, mark, text)

            ticks = sorted({edge for box in boxes for edge in (box[2], box[2] + box[4])})
            axes.set_xticks(ticks if not copies else [])
            axes.set_yticks(sorted({edge for box in boxes for edge in (box[1], box[1] + box[3])}))
            axes.set_xlabel("column" if not copies else f"{len(boxes)} copies of {columns} columns")
            axes.set_ylabel("row")
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.autoscale_view()
            axes.set_xlim(0, columns * across[number])
            axes.invert_yaxis()
        return finish(figure, claim, "", readers)


def _panel(figure: Any, place: Any, share: float) -> Any:
    """Axes at the left of a place, as wide as a share of it."""
    if share == 1:
        return figure.add_subplot(place)
    return figure.add_subplot(place.subgridspec(1, 2, width_ratios=[share, 1 - share])[0])


def _width(entry: Any) -> float:
    """How wide the panel of an entry is, in tables."""
    return 1.0 if entry.shards() else 1 + _COPY * (len(entry.ranks) - 1)


def _written(box: tuple[int, int, int, int, int], rows: int, columns: int) -> str:
    """The rank of a shard, and what is cut where there is room: its rows, its columns, or both."""
    rank, row, column, high, wide = box
    gap = "\n" if wide < columns else " "  # narrow shards have narrow lines
    row_text = f"\nrows{gap}{row:,} to {row + high - 1:,}" if high < rows else ""
    column_text = f"\ncolumns{gap}{column} to {column + wide - 1}" if wide < columns else ""

    text = f"rank {rank}" + (row_text + column_text or "\nwhole")
    lines = text.count("\n") + 1
    return text if high * _LINES >= lines * rows else f"rank {rank}"


def _shard(
    axes: Any, box: tuple[int, int, int, int, int], shift: float, mark: int, text: str
) -> None:
    """A shard in the colour of its rank, what it holds written in it, and the line of a row."""
    rank, row, column, high, wide = box
    left = column + shift

    axes.add_patch(
        Rectangle(
            (left, row), wide, high, facecolor=rank_color(rank), edgecolor="white", linewidth=2
        )
    )
    axes.text(
        left + wide / 2, row + high / 2, text, color="white", fontsize=8.5, ha="center", va="center"
    )

    if row <= mark < row + high:
        inset = 0.02 * wide  # the row of a shard ends with the shard
        axes.plot(
            [left + inset, left + wide - inset],
            [mark, mark],
            color=INK,
            linewidth=5,
            solid_capstyle="butt",
        )


def shard_boxes(entry: Any) -> list[tuple[int, int, int, int, int]]:
    """(rank, first row, first column, rows, columns) of each shard; a copy is the whole table.

    Args:
        entry: With `shards()`, `table_shape()` and `ranks`.
    """
    if entry.shards():
        return [
            (shard.placement.rank(), *shard.shard_offsets, *shard.shard_sizes)
            for shard in entry.shards()
        ]
    return [(rank, 0, 0, *entry.table_shape()) for rank in entry.ranks]


def _table(
    axes: Any,
    name: str,
    boxes: list[tuple[int, int, int, int, int]],
    left: float,
    highest: int,
    widest: int,
) -> tuple[float, float]:
    """Draw the shards of one table from `left` on; return where the next begins, and its end."""
    copies = len({box[1:] for box in boxes}) == 1 and len(boxes) > 1
    right = left
    bottom = 0.0

    for position, (rank, row, column, rows, columns) in enumerate(boxes):
        shift = _STEP * position if copies else 0.0
        x = left + column / widest + shift
        y = row / highest + shift
        wide = columns / widest
        high = rows / highest
        axes.add_patch(
            Rectangle(
                (x, y), wide, high, facecolor=rank_color(rank), edgecolor="white", linewidth=1.0
            )
        )

        across = wide > 0.9
        if not copies and high >= (_ROOM if across else 2 * _ROOM):
            center = x + wide / 2, y + high / 2
            rotation = 0 if across else 90
            axes.text(
                *center,
                f"[{row}, {column}]",
                color="white",
                fontsize=8,
                ha="center",
                va="center",
                rotation=rotation,
            )
        right = max(right, x + wide)
        bottom = max(bottom, y + high)

    rows, columns = (max(box[first] + box[first + 2] for box in boxes) for first in (1, 2))
    label = f"{name.replace('_', '_' + chr(10), 1)}\n{rows} x {columns}"
    axes.text(left, bottom + 0.04, label, fontsize=9, va="top")
    return right + _GAP, bottom

"""Which part of which table lies on which rank, drawn from a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.patches import Patch, Rectangle

from tutorec.teach.canvas import Chart, canvas, finish, rank_color, style
from tutorec.teach.units import size

__all__ = ["cuts"]

_BYTES = 4  # of a weight
_GAP = 0.35  # between tables, in units of the widest
_STEP = 0.12  # by which one copy stands out behind another


def cuts(plans: Mapping[str, Mapping[str, Any]], *, claim: str | None = None) -> Chart:
    """Plans side by side: a box for each piece, as high as it has rows and as wide as it has columns.

    A piece has the colour of its rank. Copies of one table stand behind each other.

    Args:
        plans: Name to the plan of one module: table name -> entry with `shards()`, `table_shape()` and `ranks`.
        claim: Title; may use {least} and {most}: bytes that a rank holds under any of the plans.

    Raises:
        ValueError: There is no plan, or a plan without tables.
    """
    if not plans or not all(plans.values()):
        raise ValueError(f"cuts needs plans that have tables, got {[len(plan) for plan in plans.values()]} tables")
    boxes = {name: {table: _boxes(entry) for table, entry in plan.items()} for name, plan in plans.items()}
    held = {
        name: [
            sum(rows * columns * _BYTES for of in tables.values() for on, _, _, rows, columns in of if on == rank)
            for rank in sorted({box[0] for of in tables.values() for box in of})
        ]
        for name, tables in boxes.items()
    }
    facts = {
        "held": held,
        "least": size(min(map(min, held.values()))),
        "most": size(max(map(max, held.values()))),
    }
    shapes = [entry.table_shape() for plan in plans.values() for entry in plan.values()]
    highest, widest = max(rows for rows, _ in shapes), max(columns for _, columns in shapes)
    ranks = sorted({box[0] for tables in boxes.values() for of in tables.values() for box in of})
    with style():
        figure = canvas(2.6)
        grid = figure.subplots(1, len(plans), squeeze=False)[0]
        for axes, (name, tables) in zip(grid, boxes.items(), strict=True):
            left = 0.0
            for of in tables.values():
                left = _table(axes, of, left, highest, widest)
            axes.set(xlim=(-0.1, left - _GAP + _STEP), ylim=(1.02 + _STEP * (len(ranks) - 1), -0.02))
            axes.set_title(name)
            axes.axis("off")
        keys = [Patch(color=rank_color(rank), label=f"rank {rank}") for rank in ranks]
        figure.legend(handles=keys, loc="outside lower center", ncols=len(ranks))
        return finish(figure, claim, "a rank holds between {least} and {most}", facts)


def _boxes(entry: Any) -> list[tuple[int, int, int, int, int]]:
    """(rank, first row, first column, rows, columns) of each piece; of copies the whole table on each rank."""
    if entry.shards():
        return [(shard.placement.rank(), *shard.shard_offsets, *shard.shard_sizes) for shard in entry.shards()]
    return [(rank, 0, 0, *entry.table_shape()) for rank in entry.ranks]


def _table(axes: Any, boxes: list[tuple[int, int, int, int, int]], left: float, highest: int, widest: int) -> float:
    """Draw the pieces of one table from `left` on; where the next table begins."""
    copies = len({box[1:] for box in boxes}) == 1 and len(boxes) > 1
    right = left
    for place, (rank, row, column, rows, columns) in enumerate(boxes):
        shift = _STEP * place if copies else 0.0
        corner = left + column / widest + shift, row / highest + shift
        wide, high = columns / widest, rows / highest
        axes.add_patch(Rectangle(corner, wide, high, facecolor=rank_color(rank), edgecolor="white", linewidth=1.0))
        right = max(right, corner[0] + wide)
    return right + _GAP

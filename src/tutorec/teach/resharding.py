"""A table under the plan that saved it and plans that load it: each shard's source file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.patches import Patch, Rectangle

from tutorec.teach.canvas import INK, Chart, canvas, finish, rank_color, style
from tutorec.teach.cuts import shard_boxes
from tutorec.teach.units import decimal_size

__all__ = ["resharding"]

_BYTES = 4  # of a weight
_GAP = 0.06  # between two shards, in heights of a table


def resharding(saved: Any, loaded: Mapping[str, Any], *, claim: str | None = None) -> Chart:
    """The shards of a table, each part in the colour of the rank whose file has it.

    Args:
        saved: The table in the plan under which it was written: an entry with `shards()` and
            `table_shape()`.
        loaded: Title to the table in a plan under which it is read.
        claim: Title; may use {files}, and by position of a plan {reads_1} (parts that are read),
            {part_1} (bytes of the largest part) and {most_1} (parts that one rank reads at most),
            {reads_2}, ...

    Raises:
        ValueError: A plan is for a table of another shape.
    """
    if wrong := {
        name: e.table_shape()
        for name, e in loaded.items()
        if e.table_shape() != saved.table_shape()
    }:
        raise ValueError(
            f"the table was saved as {saved.table_shape()}, and a plan has another shape: {wrong}"
        )

    files = shard_boxes(saved)
    panels = {
        f"saved by {len(files)} ranks": files,
        **{name: shard_boxes(entry) for name, entry in loaded.items()},
    }
    fields: dict[str, Any] = {"files": len(files)}

    with style():
        figure = canvas(3.4)
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for position, (axes, (name, shards)) in enumerate(zip(grid, panels.items(), strict=True)):
            reads = [_panel(axes, shard, files, saved.table_shape()) for shard in shards]
            axes.set_title(name)
            axes.axis("off")
            fields |= {
                f"reads_{position}": sum(map(len, reads)),
                f"part_{position}": decimal_size(max(max(part_sizes) for part_sizes in reads)),
                f"most_{position}": max(map(len, reads)),
            }

        limits = [axes.dataLim for axes in grid]
        for axes in grid:
            axes.set_xlim(-0.02, max(box.x1 for box in limits) + 0.02)
            axes.set_ylim(max(box.y1 for box in limits) + 0.14, -0.02)
        keys = [
            Patch(color=rank_color(rank), label=f"from rank {rank}'s file") for rank, *_ in files
        ]
        figure.legend(handles=keys, loc="outside lower center", ncols=len(keys))
        return finish(figure, claim, "{reads_1} parts are read from {files} files", fields)


def _panel(
    axes: Any, shard: tuple[int, ...], files: list[tuple[int, int, int, int, int]], shape: Any
) -> list[int]:
    """Draw one shard, and return the bytes of the parts that it is read in."""
    rank, top, left, rows, columns = shard
    shift_x, shift_y = (
        _GAP * (begin > 0) * round(begin / extent)
        for begin, extent in ((left, columns), (top, rows))
    )

    sizes = []
    for file, row, column, height, width in files:
        r0 = max(top, row)
        r1 = min(top + rows, row + height)
        c0 = max(left, column)
        c1 = min(left + columns, column + width)
        if r0 >= r1 or c0 >= c1:
            continue
        sizes.append(_BYTES * (r1 - r0) * (c1 - c0))

        x = c0 / shape[1] + shift_x
        y = r0 / shape[0] + shift_y
        wide = (c1 - c0) / shape[1]
        high = (r1 - r0) / shape[0]
        axes.add_patch(Rectangle((x, y), wide, high, facecolor=rank_color(file), edgecolor="none"))
        rotation = 90 if wide < 0.5 else 0
        label = {
            "ha": "center",
            "va": "center",
            "color": "white",
            "fontsize": 9,
            "rotation": rotation,
        }
        axes.text(x + wide / 2, y + high / 2, decimal_size(sizes[-1]), **label)

    x = left / shape[1] + shift_x
    y = top / shape[0] + shift_y
    wide = columns / shape[1]
    high = rows / shape[0]
    axes.add_patch(Rectangle((x, y), wide, high, facecolor="none", edgecolor=INK, linewidth=1.2))
    if wide < 0.9:
        axes.text(
            x + wide / 2, y + high + 0.06, f"rank {rank}", ha="center", va="center", fontsize=8
        )
    else:
        axes.text(
            x + wide + 0.03,
            y + high / 2,
            f"rank {rank}",
            ha="left",
            va="center",
            fontsize=8,
            rotation=270,
        )
    return sizes

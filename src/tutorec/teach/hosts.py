"""Traffic between ranks, and between hosts: what stays inside a machine, what leaves it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from tutorec.teach.canvas import INK, Chart, canvas, finish, rank_color, style
from tutorec.teach.units import decimal_size, size

__all__ = ["hosts", "traffic"]

_PANELS_A_ROW = 2


def traffic(matrix: Sequence[Sequence[int]], *, claim: str | None = None) -> Chart:
    """Counted bytes from every rank (row) to every rank (column); the longest bar is the maximum.

    Args:
        matrix: W rows of W numbers, such as `Trace.bytes_between` gives.
        claim: Title; may use {total}, {most}, {largest_sender}, {largest_share}.
    """
    counted = np.asarray(matrix, dtype=float)
    world = len(counted)
    out = counted.sum(axis=1)

    fields = {
        "total": size(float(out.sum())),
        "most": size(float(counted.max())),
        "largest_sender": int(out.argmax()),
        "largest_share": float(out.max() / out.sum()) if out.sum() else 0.0,
    }

    with style():
        figure = canvas(1.7 + 0.5 * world)
        axes = figure.add_subplot()
        peak = counted.max() or 1.0
        for row, column in itertools.product(range(world), repeat=2):
            sent = float(counted[row, column])
            _field(axes, row, column, sent, peak, written=size(sent))
        _name_ranks(axes, world, "rank ")
        return finish(
            figure, claim, "rank {largest_sender} sends {largest_share:.0%} of {total}", fields
        )


def hosts(
    matrices: Mapping[str, Sequence[Sequence[int]]], *, local_size: int, claim: str | None = None
) -> Chart:
    """Bytes from every rank to every rank, a panel for each matrix, with hosts shaded.

    A field has the colour of the rank that sends, and a bar on the same scale in all panels.

    Args:
        matrices: Name to W rows of W numbers, such as `Traffic.matrix` gives.
        local_size: L: that many consecutive ranks share a host.
        claim: Title; may use {most}, {least}: names of those whose bytes cross hosts most and
            least; {most_bytes}, {least_bytes}; {most_share}: which part of the former's bytes
            crosses; {ratio}.

    Raises:
        ValueError: There is no matrix, or the ranks do not divide into such hosts.
    """
    worlds = {len(matrix) for matrix in matrices.values()}
    if len(worlds) != 1 or next(iter(worlds)) % local_size:
        raise ValueError(
            f"hosts needs matrices of equally many ranks, hosts of {local_size}: {sorted(worlds)}"
        )

    world = worlds.pop()
    pairs = [pair for pair in itertools.product(range(world), repeat=2) if pair[0] != pair[1]]
    crossing = {
        name: sum(matrix[a][b] for a, b in pairs if a // local_size != b // local_size)
        for name, matrix in matrices.items()
    }
    totals = {name: sum(matrix[a][b] for a, b in pairs) for name, matrix in matrices.items()}
    most = max(crossing, key=crossing.__getitem__)
    least = min(crossing, key=crossing.__getitem__)

    fields = {
        "crossing": crossing,
        "total": totals,
        "most": most,
        "least": least,
        "most_bytes": decimal_size(crossing[most]),
        "least_bytes": decimal_size(crossing[least]),
        "most_share": crossing[most] / totals[most] if totals[most] else 0.0,
        "ratio": crossing[most] / crossing[least] if crossing[least] else float("inf"),
    }
    peak = max(matrix[a][b] for matrix in matrices.values() for a, b in pairs) or 1
    across = min(_PANELS_A_ROW, len(matrices))
    down = -(-len(matrices) // across)

    with style():
        figure = canvas(0.6 + down * (0.8 + 0.5 * world))
        grid = figure.subplots(down, across, squeeze=False)
        for axes in list(grid.flat)[len(matrices) :]:
            axes.axis("off")
        for axes, (name, matrix) in zip(grid.flat, matrices.items(), strict=False):
            _panel(axes, matrix, local_size, peak)
            title = f"{name}: {decimal_size(crossing[name])} cross"
            axes.set_title(title if len(matrices) > 1 else "")
        return finish(
            figure,
            claim,
            "{most_share:.0%} of what {most} sends crosses hosts, {most_bytes}",
            fields,
        )


def _panel(axes: Any, matrix: Sequence[Sequence[int]], local_size: int, peak: int) -> None:
    world = len(matrix)
    for first in range(0, world, local_size):
        corner = first - 0.5, first - 0.5
        axes.add_patch(
            Rectangle(corner, local_size, local_size, facecolor=INK, alpha=0.16, linewidth=0)
        )

    for row, column in itertools.product(range(world), repeat=2):
        if row == column:
            continue
        sent = matrix[row][column]
        _field(axes, row, column, sent, peak, written=decimal_size(sent), fontsize=9)

    for wall in range(local_size, world, local_size):
        axes.axhline(wall - 0.5, color=INK, linewidth=1.2, linestyle="--")
        axes.axvline(wall - 0.5, color=INK, linewidth=1.2, linestyle="--")
    _name_ranks(axes, world)


def _field(
    axes: Any, row: int, column: int, nbytes: float, peak: float, *, written: str, **text: Any
) -> None:
    """The bytes from one rank to another, and a bar in the sender's colour."""
    left = column - 0.45
    top = row - 0.4
    axes.add_patch(Rectangle((left, top), 0.9, 0.8, facecolor="none", edgecolor=INK, alpha=0.4))
    width = 0.9 * nbytes / peak
    axes.add_patch(Rectangle((left, top + 0.58), width, 0.22, facecolor=rank_color(row)))
    axes.text(column, row - 0.1, written, ha="center", va="center", **text)


def _name_ranks(axes: Any, world: int, noun: str = "") -> None:
    """Receivers below the columns, senders next to the rows, no frame."""
    axes.set(xlim=(-0.5, world - 0.5), ylim=(world - 0.5, -0.5))
    axes.set_xticks(range(world), [f"to {noun}{rank}" for rank in range(world)])
    axes.set_yticks(range(world), [f"from {noun}{rank}" for rank in range(world)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)

"""Traffic between ranks, and between hosts: what stays inside a machine, what leaves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any

from tutorec.teach.canvas import INK, Chart, canvas, finish, rank_color, rectangle, style
from tutorec.teach.units import decimal_size, size

__all__ = ["hosts", "traffic"]

Matrix = Sequence[Sequence[int]]


@style()
def traffic(matrix: Matrix) -> Chart:
    """Counted bytes from every rank (row) to every rank (column); the longest bar is the maximum.

    Args:
        matrix: W rows of W numbers, such as `Trace.bytes_between` gives.
    """
    sent = [sum(row) for row in matrix]
    share = max(sent) / sum(sent)
    figure = canvas(1.7 + 0.5 * len(matrix))
    _panel(figure.add_subplot(), matrix, len(matrix), max(map(max, matrix)), size)
    return finish(figure, f"rank {sent.index(max(sent))} sends {share:.0%} of {size(sum(sent))}")


@style()
def hosts(matrices: Mapping[str, Matrix], *, local_size: int, claim: str) -> Chart:
    """Bytes from every rank to every rank, a panel for each matrix, with hosts shaded.

    A field has the colour of the rank that sends, and a bar on the same scale in all panels.

    Args:
        matrices: Name to W rows of W numbers, such as `Traffic.matrix` gives.
        local_size: L: that many consecutive ranks share a host.
        claim: Title; may use {most_bytes}: the most bytes that cross hosts in any panel.
    """
    crossing = {
        name: sum(matrix[a][b] for a, b in _pairs(matrix) if a // local_size != b // local_size)
        for name, matrix in matrices.items()
    }
    peak = max(matrix[a][b] for matrix in matrices.values() for a, b in _pairs(matrix))
    across = min(2, len(matrices))
    down = -(-len(matrices) // across)

    figure = canvas(0.6 + down * (0.8 + 0.5 * len(next(iter(matrices.values())))))
    for number, (name, matrix) in enumerate(matrices.items(), start=1):
        axes = figure.add_subplot(down, across, number)
        _panel(axes, matrix, local_size, peak, decimal_size)
        if len(matrices) > 1:
            axes.set_title(f"{name}: {decimal_size(crossing[name])} cross")
    most = decimal_size(max(crossing.values()))
    return finish(figure, claim, crossing=crossing, most_bytes=most)


def _pairs(matrix: Matrix) -> permutations[tuple[int, ...]]:
    """A rank that sends, and one that receives."""
    return permutations(range(len(matrix)), 2)


def _panel(
    axes: Any, matrix: Matrix, local_size: int, peak: float, text: Callable[[float], str]
) -> None:
    """For each pair of ranks the bytes, and a bar in the sender's colour; walls between hosts."""
    world = len(matrix)
    font = 9 if local_size < world else 12
    for wall in range(local_size, world, local_size):
        axes.axhline(wall - 0.5, color=INK, linewidth=1.2, linestyle="--")
        axes.axvline(wall - 0.5, color=INK, linewidth=1.2, linestyle="--")
    for first in range(0, world, local_size) if local_size < world else ():
        ends = first - 0.5, first + local_size - 0.5
        axes.fill_between(ends, *ends, facecolor=INK, alpha=0.16, linewidth=0)

    for sender, receiver in _pairs(matrix):
        sent = matrix[sender][receiver]
        left = receiver - 0.45
        rectangle(axes, (left, sender - 0.4, 0.9, 0.58), text(sent), width=0, size=font)
        rectangle(axes, (left, sender - 0.4, 0.9, 0.8), edge="#75757566")
        bar = left, sender + 0.18, 0.9 * sent / peak, 0.22
        rectangle(axes, bar, color=rank_color(sender), width=0)

    axes.set(xlim=(-0.5, world - 0.5), ylim=(world - 0.5, -0.5))
    axes.set_xticks(range(world), [f"to {rank}" for rank in range(world)])
    axes.set_yticks(range(world), [f"from {rank}" for rank in range(world)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)

"""Charts of measured numbers: bars, curves, points, matrices of bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from tutorec._kernels.packed_layout import RowLayout, lines_of_row
from tutorec._style import EXCHANGE
from tutorec.teach.canvas import (
    ACCENT,
    INK,
    PAPER,
    Chart,
    canvas,
    finish,
    legend,
    rank_color,
    rectangle,
    style,
)
from tutorec.teach.units import decimal_size, number, seconds, size

_DASHES = ("-", "--", ":", "-.")
# A prediction and its measured points.
_PAIRS = ((ACCENT, "-", "o"), (INK, "--", "s"), (ACCENT, ":", "^"))


@style()
def bars(
    values: Mapping[str, float],
    *,
    unit: str,
    ranks: Sequence[int] | None = None,
    claim: str = "{largest}: {most}, {ratio:.3g} times {smallest}",
) -> Chart:
    """One horizontal bar per entry, with its number.

    Args:
        values: Label to number, drawn from the top.
        unit: Of the numbers; "s" is scaled in the labels.
        ranks: The rank whose colour each bar has; without it all bars have the neutral colour.
        claim: Title; may use {largest}, {smallest} (labels), {most}, {least} (numbers), {ratio}.
    """
    largest = max(values, key=values.__getitem__)
    smallest = min(values, key=values.__getitem__)
    most = values[largest]
    least = values[smallest]
    labelled = seconds if unit == "s" else number
    scale, unit = (1e3, "ms") if unit == "s" and most < 1 else (1.0, unit)

    figure = canvas(1.1 + 0.42 * len(values))
    axes = figure.add_subplot()
    colors = [ACCENT] if ranks is None else [rank_color(rank) for rank in ranks]
    widths = [scale * value for value in values.values()]
    drawn = axes.barh(list(values), widths, color=colors, height=0.62)
    axes.bar_label(drawn, [labelled(value) for value in values.values()], padding=5)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel(unit)
    if max(widths) >= 1e5:
        axes.xaxis.set_major_formatter("{x:,.0f}")  # in place of a lone 1e6
        axes.locator_params(axis="x", nbins=5)

    ratio = most / least if least else math.inf
    facts = {"largest": largest, "smallest": smallest, "ratio": ratio}
    return finish(figure, claim, most=labelled(most), least=labelled(least), **facts)


@style()
def rank_frequency(
    ids: Any,
    *,
    what: str,
    claim: str = "",
    marks: Sequence[float] = (),
    rows: int | None = None,
) -> Chart:
    """Frequencies of ids in descending order, on two logarithmic axes.

    Args:
        ids: A tensor or an array of ids.
        what: What is counted ("product").
        claim: Title; may use {marked}: the share of the occurrences that the ids up to each mark
            have, by its percentage: {marked[5]}. By default it says the share of the first percent.
        marks: Percentages of the ids, the most frequent first. Each gets a vertical line, with the
            percentage of the occurrences that are left of it.
        rows: The number of ids that 100 % are, those that do not occur included; by default those
            that occur.

    Example:
        >>> ids = torch.tensor([7, 7, 7, 1])
        >>> rank_frequency(ids, what="id", marks=(1, 50), rows=4).facts["marked"]
        {1: 0.75, 50: 1.0}
    """
    counts = torch.as_tensor(ids).unique(return_counts=True)[1].sort(descending=True).values
    total = int(counts.sum())

    def head(percent: float, distinct: int) -> tuple[int, float]:
        """How many ids a percentage of them is, and their share of the occurrences."""
        size = max(1, math.ceil(distinct * percent / 100))
        return size, counts[:size].sum().item() / total

    figure = canvas(3.6)
    axes = figure.add_subplot()
    axes.loglog(np.arange(1, len(counts) + 1), counts.numpy(), color=ACCENT)
    shares = {}
    for line, percent in enumerate(marks):
        position, shares[percent] = head(percent, rows or len(counts))
        axes.axvline(position, color=INK, ls=":", lw=1)
        text = f" {percent:g} %: {100 * shares[percent]:.0f} %"
        height = 0.96 - 0.07 * line
        across = axes.get_xaxis_transform()
        axes.text(position, height, text, size=10, va="top", transform=across)

    axes.set_xlabel(f"{what}s, the most frequent first (position)")
    axes.set_ylabel(f"occurrences of the {what}")
    axes.grid(True)
    top = f"{head(1, len(counts))[1]:.0%} of {total:,} occurrences"
    default = f"the most frequent 1% of {what}s make up {top}"
    return finish(figure, claim or default, marked=shares)


@style()
def curves(
    series: Mapping[str, Sequence[float]],
    *,
    quantity: str,
    claim: str,
    steps: Sequence[float] | None = None,
    step_name: str = "step",
) -> Chart:
    """Curves of a quantity, over the steps of training or another number.

    Args:
        series: Label to values. One that ends in ", measured" is drawn as points, in the colour of
            the curve before it, which is its prediction; each such pair has a look of its own.
        quantity: Name and unit of the vertical axis ("AUC").
        claim: The title.
        steps: Where the values were taken; 1, 2, ... without it.
        step_name: Name of the horizontal axis.
    """
    figure = canvas(3.6)
    axes = figure.add_subplot()
    measured = [label for label in series if label.endswith(", measured")]
    for index, (label, values) in enumerate(series.items()):
        positions = range(1, len(values) + 1) if steps is None else steps
        color = ACCENT
        look = _DASHES[index % 4]
        if measured:
            color, look, point = _PAIRS[index // 2 % len(_PAIRS)]
            look = point if label in measured else look
            axes.set_xticks(positions)
        axes.plot(positions, values, look, color=color, label=label)

    if not measured:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(step_name)
    axes.set_ylabel(quantity)
    axes.legend()
    return finish(figure, claim)


# Parts are not ranks, so they do not use rank colours. The two tones are of about the same
# brightness, so neighbours differ by a pattern, too.
_HATCHES = ("", "///", "...", "xx", "\\\\\\", "oo")
_LEGEND_LINE = 64  # characters of a line of the legend; a key takes as much as six of them


@style()
def parts(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]],
    *,
    unit: str,
    claim: str,
    marked: Mapping[str, float] | None = None,
    exchanges: Collection[str] = (),
) -> Chart:
    """One stacked horizontal bar for each entry, with its sum; panels share one scale.

    Args:
        panels: Title of a panel to label of a bar to name of a part to number; all bars have the
            same parts.
        unit: Of the numbers.
        claim: The title.
        marked: Name -> number of a line across all bars, such as a bound.
        exchanges: Names of the parts that are exchanges between ranks: these have one colour, and
            all other parts another. Without them, colours alternate.
    """
    marked = marked or {}
    bars = [bar for panel in panels.values() for bar in panel.values()]
    longest = max(sum(bar.values()) for bar in bars)
    looks = {}
    for position, (name, hatch) in enumerate(zip(bars[0], _HATCHES, strict=False)):
        color = INK if position % 2 else ACCENT
        if exchanges:
            color = EXCHANGE if name in exchanges else ACCENT
        looks[name] = {"facecolor": color, "hatch": hatch, "edgecolor": "white", "lw": 0}

    heights = [len(panel) for panel in panels.values()]
    figure = canvas(1.2 + 0.36 * sum(heights) + 0.4 * len(panels))
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, panel) in zip(grid, panels.items(), strict=True):
        axes.set_title(title, loc="left")
        for label, bar in panel.items():
            left = 0.0
            for name, value in bar.items():
                axes.barh(label, value, left=left, height=0.66, **looks[name])
                left += value
            axes.text(left + 0.01 * longest, label, f"{number(left)} {unit}", va="center")
        axes.invert_yaxis()
        for value in marked.values():
            axes.axvline(value, color="white", linewidth=3.5)  # so that bars do not hide it
            axes.axvline(value, color=INK, linestyle="--", linewidth=1.5)

    grid[-1].set_xlim(0, 1.17 * longest)
    grid[-1].set_xlabel(unit)
    keys: list[Artist] = [Patch(**look, label=name) for name, look in looks.items()]
    keys += [Line2D([], [], color=INK, ls="--", lw=1.5, label=name) for name in marked]
    # A legend of several lines is filled column by column, so all keys are on one line if they fit.
    fits = sum(len(name) + 6 for name in (*looks, *marked)) <= _LEGEND_LINE
    columns = len(keys) if fits else min(4, len(keys))
    figure.legend(handles=keys, loc="outside lower center", ncols=columns)
    return finish(figure, claim)


_MARKS: tuple[dict[str, Any], ...] = (
    {"marker": "|", "color": INK, "ms": 22, "mew": 3},
    {"marker": "o", "color": ACCENT, "ms": 10},
    {"marker": "s", "mec": ACCENT, "mfc": "none", "ms": 10, "mew": 2},
)


@style()
def dots(rows: Mapping[str, Mapping[str, float]], *, unit: str, claim: str) -> Chart:
    """A line for each row, with a mark for each of its numbers; the first is written on the right.

    Args:
        rows: Label of a row to name to number; all rows have the same names, three at most.
        unit: Of the numbers.
        claim: The title.
    """
    names = list(next(iter(rows.values())))
    lines = range(len(rows))
    figure = canvas(1.3 + 0.42 * len(rows))
    axes = figure.add_subplot()
    for name, look in zip(names, _MARKS, strict=False):
        axes.plot([row[name] for row in rows.values()], lines, ls="none", label=name, **look)
    for line, row in enumerate(rows.values()):
        axes.hlines(line, min(row.values()), max(row.values()), color=INK, lw=0.7, zorder=0)
        written = number(row[names[0]])
        axes.text(1.02, line, written, va="center", transform=axes.get_yaxis_transform())

    axes.set_yticks(lines, list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(True, axis="x")
    axes.set_xlabel(f"{unit}; numbers on the right: {names[0]}")
    figure.legend(loc="outside lower center", ncols=len(names))
    return finish(figure, claim)


@style()
def ratios(measured: Mapping[str, tuple[float, float, float]], *, axis: str, claim: str) -> Chart:
    """A point for each ratio, drawn from the top, with a bar over its interval.

    The axis is logarithmic.

    Args:
        measured: Label to (median, low, high).
        axis: What is divided by what.
        claim: Title; may use {above} (how many intervals are above 1) and {count}.
    """
    medians, lows, highs = np.array([*measured.values()]).T
    heights = range(len(measured))
    figure = canvas(0.9 + 0.34 * len(measured))
    axes = figure.add_subplot()
    axes.axvline(1, color=INK, linewidth=1.2, linestyle=":")
    axes.hlines(heights, lows, highs, color=ACCENT, linewidth=3)
    axes.plot(medians, heights, "o", color=ACCENT, markersize=7)
    for height, median, high in zip(heights, medians, highs, strict=True):
        axes.text(1.03 * high, height, f" {number(median, 2)}", va="center")

    axes.set_xscale("log")
    axes.set(xlim=(min(0.7, 0.85 * min(lows)), 1.7 * max(highs)), ylim=(len(measured) - 0.5, -0.5))
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(heights, list(measured))
    axes.set_xlabel(f"{axis}, logarithmic")
    return finish(figure, claim, above=int((lows > 1).sum()), count=len(measured))


_SHOWN = 16  # levels of a panel


@style()
def levels(
    row: torch.Tensor, grids: Mapping[str, tuple[float, float, int]], *, claim: str
) -> Chart:
    """A panel for each grid: numbers above, levels below, a line from each to its level.

    A grid with more than 16 levels is shown where 16 of them hold most of the row's numbers.

    Args:
        row: Numbers [D].
        grids: Title to (scale, bias, number of levels); level q is at bias + scale * q.
        claim: Title; may use {ratio}, of the last scale by the first.
    """
    scales = [scale for scale, _, _ in grids.values()]
    figure = canvas(0.9 + 1.25 * len(grids))
    panels = figure.subplots(len(grids), 1, squeeze=False)[:, 0]
    for axes, (name, (scale, bias, count)) in zip(panels, grids.items(), strict=True):
        codes = ((row - bias) / scale).round().clamp(0, count - 1).long()
        # numbers on the 16 levels from each one on; the best of these windows is shown
        held = codes.bincount(minlength=count).unfold(0, min(_SHOWN, count), 1).sum(1)
        first = int(held.argmax())
        window = range(first, min(first + _SHOWN, count))

        for weight, code in zip(row.tolist(), codes.tolist(), strict=True):
            if code in window:
                axes.plot([weight, bias + scale * code], [1, 0], color=ACCENT, linewidth=0.9)
                axes.plot([weight], [1], "o", color=ACCENT, markersize=4)

        positions = [bias + scale * code for code in window]
        axes.plot(positions, [0] * len(positions), "|", color=INK, markersize=12)
        axes.set_xticks(positions, [str(code) for code in window])
        axes.set_yticks([1, 0], ["weights", "levels"])
        axes.set(ylim=(-0.35, 1.3), xlim=(positions[0] - 0.7 * scale, positions[-1] + 0.7 * scale))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        title = f"{name}: codes {window[0]} to {window[-1]} of {count}, {scale:.5f} apart"
        axes.set_title(title, loc="left")
    return finish(figure, claim, ratio=scales[-1] / scales[0])


_LINE = 64
_END = 6 * _LINE
_LINE_LOOKS: dict[str, dict[str, Any]] = {
    "prefetched": {"facecolor": ACCENT, "edgecolor": "white"},
    "not prefetched": {"facecolor": "none", "edgecolor": INK, "hatch": "////"},
    "padding": {"facecolor": "none", "edgecolor": INK},
}


@style()
def lines(layouts: Mapping[str, RowLayout], *, claim: str = "") -> Chart:
    """A strip for each layout: a table's first rows over six cache lines of 64 bytes.

    Args:
        layouts: Name of a strip to the layout of its rows.
        claim: Title; may use {missed} (name of a strip to the lines of a row that are not
            prefetched, the mean over all rows) and {whole} (the strips in which all are
            prefetched).
    """
    missed = {name: _missed(row) for name, row in layouts.items()}
    figure = canvas(1.3 + 0.5 * len(layouts))
    axes = figure.subplots()
    for height, row in enumerate(layouts.values()):
        for index in range(_END // row.row_bytes + 1):
            _draw_row(axes, height, row, index)

    for border in range(0, _END + 1, _LINE):
        axes.axvline(border, color=INK, lw=1.2, ls=":")
    axes.set_yticks(range(len(layouts)), list(layouts))
    axes.set_xticks(range(0, _END + 1, _LINE))
    axes.set(xlim=(0, _END), ylim=(len(layouts) - 0.4, -0.6))
    axes.set_xlabel("byte; numbers are rows; dotted: a line of 64 bytes begins")
    legend(figure, _LINE_LOOKS)
    whole = ", ".join(name for name, count in missed.items() if count == 0) or "none"
    return finish(figure, claim, missed=missed, whole=whole)


def _missed(row: RowLayout) -> float:
    """Cache lines of a row that are not prefetched, averaged over all offsets of a row."""
    pairs = [lines_of_row(row, index) for index in range(_LINE)]
    return sum(len(touched - prefetched) for touched, prefetched in pairs) / len(pairs)


def _draw_row(axes: Any, height: int, row: RowLayout, index: int) -> None:
    """The parts of a row in each of its cache lines, its padding, its index in the widest part."""
    start = index * row.row_bytes
    payload_end = start + row.scale_bytes + row.payload_bytes
    touched, prefetched = lines_of_row(row, index)
    spans = []
    for line in sorted(touched):
        look = "prefetched" if line in prefetched else "not prefetched"
        spans.append((max(start, line * _LINE), min(payload_end, (line + 1) * _LINE), look))

    for left, right, look in [*spans, (payload_end, start + row.row_bytes, "padding")]:
        if left < right:
            axes.barh(height, right - left, left=left, height=0.6, lw=1.0, **_LINE_LOOKS[look])

    left, right, look = max(spans, key=lambda span: span[1] - span[0])
    if right < _END:
        hatched = look == "not prefetched"
        plate = {"facecolor": PAPER, "edgecolor": "none", "pad": 2.0} if hatched else None
        color = INK if hatched else "white"
        middle = (left + right) / 2
        axes.text(
            middle, height, str(index), color=color, ha="center", va="center", size=9, bbox=plate
        )


@style()
def roofline(
    work: Mapping[str, tuple[float, float, float]], *, bandwidth: float, peak: float, claim: str
) -> Chart:
    """Measured speeds below a machine's memory and arithmetic limits, on two logarithmic axes.

    Args:
        work: Name to (operations, bytes moved, seconds), as measured.
        bandwidth: Bytes a second that the machine's memory moves, as measured: the slope of the
            roof.
        peak: Operations a second that it computes, as measured: the flat part.
        claim: Title; may use, of the first work, {intensity}: its operations per byte, and
            {of_roof}: the share of what its intensity allows.
    """
    ridge = peak / bandwidth
    points = {
        name: (operations / moved, operations / seconds)
        for name, (operations, moved, seconds) in work.items()
    }
    # Ten on each side of the ridge, for what is written there.
    left = min(ridge / 10, *(x / 3 for x, _ in points.values()))
    right = max(ridge * 10, *(x * 3 for x, _ in points.values()))
    intensities = np.geomspace(left, right, 200)

    figure = canvas(3.6)
    axes = figure.add_subplot()
    axes.loglog(intensities, np.minimum(peak, bandwidth * intensities) / 1e9, color=INK)
    axes.axvline(ridge, color=INK, linestyle=":", linewidth=1.2)
    at_ridge = axes.get_xaxis_transform()
    axes.text(ridge, 0.03, f"  {ridge:.2g}", transform=at_ridge)
    axes.text(ridge, 0.98, "memory is the limit ", va="top", ha="right", transform=at_ridge)
    axes.text(ridge, 0.98, " arithmetic is the limit", va="top", transform=at_ridge)
    for name, (x, y) in points.items():
        axes.plot([x], [y / 1e9], "o", color=ACCENT, markersize=8)
        fits = x < left * (right / left) ** 0.75  # a name on the right of its point
        offset, side = (9, "left") if fits else (-9, "right")
        axes.annotate(name, (x, y / 1e9), (offset, -14), textcoords="offset points", ha=side)

    axes.set_xlabel("arithmetic intensity: operations for each byte that is moved")
    axes.set_ylabel("billion operations a second")
    axes.margins(y=0.15)  # room for a name below the lowest point, and limits above the roof
    axes.grid(True)
    intensity, speed = next(iter(points.values()))
    roof = min(peak, bandwidth * intensity)
    return finish(figure, claim, intensity=intensity, of_roof=speed / roof)


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
    _matrix_panel(figure.add_subplot(), matrix, len(matrix), max(map(max, matrix)), size)
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
    for panel, (name, matrix) in enumerate(matrices.items(), start=1):
        axes = figure.add_subplot(down, across, panel)
        _matrix_panel(axes, matrix, local_size, peak, decimal_size)
        if len(matrices) > 1:
            axes.set_title(f"{name}: {decimal_size(crossing[name])} cross")
    most = decimal_size(max(crossing.values()))
    return finish(figure, claim, crossing=crossing, most_bytes=most)


def _pairs(matrix: Matrix) -> permutations[tuple[int, ...]]:
    """A rank that sends, and one that receives."""
    return permutations(range(len(matrix)), 2)


def _matrix_panel(
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

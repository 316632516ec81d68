"""Charts of measured numbers: bars, rank and frequency, curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator

from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, rank_color, style
from tutorec.teach.units import number, seconds

__all__ = ["bars", "curves", "rank_frequency"]

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

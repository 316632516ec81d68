"""Paired ratios with their intervals, next to the line at which two libraries take equally long."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style
from tutorec.teach.units import number

__all__ = ["ratios"]


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

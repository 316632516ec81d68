"""Paired ratios with their intervals, next to the line at which two libraries take equally long."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.ticker import FuncFormatter, NullFormatter

from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style
from tutorec.teach.units import number

__all__ = ["ratios"]

_TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


def ratios(
    measured: Mapping[str, tuple[float, float, float]], *, axis: str, claim: str | None = None
) -> Chart:
    """A point for each ratio, drawn from the top, with a bar over its interval; the axis is logarithmic.

    Args:
        measured: Label to (median, low, high).
        axis: What is divided by what.
        claim: Title; may use {least}, {most} (ratios), {smallest}, {largest} (labels), {above} (how
            many intervals are above 1), {count}.

    Example:
        >>> ratios(
        ...     {"forward": (2.0, 1.9, 2.1), "step": (0.9, 0.8, 1.1)}, axis="theirs / ours"
        ... ).claim
        '1 of 2 intervals lies above 1, from 0.9 to 2'
    """  # noqa: E501
    medians = {label: median for label, (median, _, _) in measured.items()}
    smallest = min(medians, key=medians.__getitem__)
    largest = max(medians, key=medians.__getitem__)
    fields = {
        "least": number(medians[smallest], 2),
        "most": number(medians[largest], 2),
        "smallest": smallest,
        "largest": largest,
        "above": sum(low > 1 for _, low, _ in measured.values()),
        "count": len(measured),
    }

    with style():
        figure = canvas(0.9 + 0.34 * len(measured))
        axes = figure.add_subplot()
        axes.axvline(1, color=INK, linewidth=1.2, linestyle=":")
        for height, (median, low, high) in enumerate(measured.values()):
            axes.plot(
                [low, high], [height, height], color=ACCENT, linewidth=3, solid_capstyle="butt"
            )
            axes.plot([median], [height], "o", color=ACCENT, markersize=7)
            axes.annotate(
                number(median, 2),
                (high, height),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
            )

        lows = [low for _, low, _ in measured.values()]
        highs = [high for *_, high in measured.values()]
        axes.set_xscale("log")
        axes.set_xlim(min(0.7, 0.85 * min(lows)), 1.7 * max(highs))
        axes.set_xticks(
            [tick for tick in _TICKS if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
        )
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks(range(len(measured)), list(measured))
        axes.set_ylim(len(measured) - 0.5, -0.5)
        axes.set_xlabel(f"{axis}, logarithmic")

        return finish(
            figure,
            claim,
            "{above} of {count} intervals lies above 1, from {least} to {most}",
            fields,
        )

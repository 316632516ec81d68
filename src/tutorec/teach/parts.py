"""Stacked bars: what a whole consists of, and which part stays when the whole shrinks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tutorec._style import EXCHANGE
from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style
from tutorec.teach.units import number

__all__ = ["parts"]

# Parts are not ranks, so they do not use rank colours. The two tones are of about the same
# brightness, so neighbours differ by a pattern, too.
_LOOKS = ((ACCENT, ""), (INK, "///"), (ACCENT, "..."), (INK, "xx"), (ACCENT, "\\\\\\"), (INK, "oo"))
_LEGEND_LINE = 64  # characters of a line of the legend; a key takes as much as six of them


def parts(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]],
    *,
    unit: str,
    marked: Mapping[str, float] | None = None,
    exchanges: Collection[str] = (),
    claim: str | None = None,
) -> Chart:
    """One stacked horizontal bar for each entry, with its sum; panels share one scale.

    Args:
        panels: Title of a panel to label of a bar to name of a part to number; all bars have the
            same parts.
        unit: Of the numbers.
        marked: Name -> number of a line across all bars, such as a bound; one at most.
        exchanges: Names of the parts that are exchanges between ranks: these have one colour, and
            all other parts another. Without them, colours alternate.
        claim: Title; may use, of the first panel, {first} and {last} (sums of its first and last
            bar), {ratio} (the last sum by the first), {largest} (the largest part of the last bar),
            {share} (its share of that bar), {least} and {best} (the smallest sum, and whose it is);
            with two panels {first_2}, ... of the second.

    Raises:
        ValueError: There is nothing to draw, bars have different parts, two lines are marked, or
            an exchange is not a part.
    """
    if len(marked or {}) > 1:
        raise ValueError(f"parts marks one line, got {list(marked or {})}")
    bars = [bar for panel in panels.values() for bar in panel.values()]
    names = {tuple(bar) for bar in bars}
    if len(names) != 1 or not all(panels.values()):
        raise ValueError(f"parts needs bars that all have the same parts, got {sorted(names)}")
    if not set(exchanges) <= set(bars[0]):
        raise ValueError(f"parts has no {sorted(set(exchanges) - set(bars[0]))}: {list(bars[0])}")

    fields: dict[str, Any] = {}
    for position, panel in enumerate(panels.values()):
        suffix = f"_{position + 1}" if position else ""
        fields |= {f"{key}{suffix}": value for key, value in _facts(panel).items()}
    looks = dict(zip(names.pop(), _LOOKS, strict=False))
    if exchanges:
        looks = {
            name: (EXCHANGE if name in exchanges else ACCENT, hatch)
            for name, (_, hatch) in looks.items()
        }

    longest = max(sum(bar.values()) for bar in bars)
    heights = [len(panel) for panel in panels.values()]
    with style():
        figure = canvas(1.2 + 0.36 * sum(heights) + 0.4 * len(panels))
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[
            :, 0
        ]

        for axes, (title, panel) in zip(grid, panels.items(), strict=True):
            for line, bar in enumerate(panel.values()):
                left = 0.0
                for name, value in bar.items():
                    color, hatch = looks[name]
                    axes.barh(
                        line,
                        value,
                        left=left,
                        height=0.66,
                        color=color,
                        hatch=hatch,
                        edgecolor="white",
                        lw=0,
                    )
                    left += value
                axes.text(left + 0.01 * longest, line, f"{number(left)} {unit}", va="center")
            axes.set_yticks(range(len(panel)), list(panel))
            axes.invert_yaxis()
            axes.set_xlim(0, 1.17 * longest)
            axes.set_title(title, loc="left")
            for value in (marked or {}).values():
                axes.axvline(value, color="white", linewidth=3.5)  # so that bars do not hide it
                axes.axvline(value, color=INK, linestyle="--", linewidth=1.5)

        grid[-1].set_xlabel(unit)
        _add_legend(figure, looks, marked or {})
        return finish(
            figure,
            claim,
            "the last is {ratio:.3g} times the first, {share:.0%} of it {largest}",
            fields,
        )


def _add_legend(
    figure: Figure, looks: Mapping[str, tuple[str, str]], marked: Mapping[str, float]
) -> None:
    """Name the parts, and the line."""
    keys: list[Artist] = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", lw=0, label=name)
        for name, (color, hatch) in looks.items()
    ]
    for name in marked:
        keys.append(Line2D([], [], color=INK, linestyle="--", linewidth=1.5, label=name))

    # A legend of several lines is filled column by column, so all keys are on one line if they fit.
    names = [*looks, *marked]
    fits = sum(len(name) + 6 for name in names) <= _LEGEND_LINE
    columns = len(keys) if fits else min(4, len(keys))
    figure.legend(handles=keys, loc="outside lower center", ncols=columns)


def _facts(panel: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """What a claim may say about one panel."""
    sums = {label: sum(bar.values()) for label, bar in panel.items()}
    first = next(iter(sums.values()))
    last = list(sums.values())[-1]
    end = list(panel.values())[-1]
    largest = max(end, key=end.__getitem__)
    best = min(sums, key=sums.__getitem__)

    return {
        "sums": sums,
        "first": first,
        "last": last,
        "ratio": last / first if first else float("inf"),
        "largest": largest,
        "share": end[largest] / last if last else 0.0,
        "best": best,
        "least": sums[best],
    }

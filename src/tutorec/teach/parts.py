"""Stacked bars: what a whole consists of, and which part stays when the whole shrinks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tutorec._style import EXCHANGE
from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style
from tutorec.teach.units import number

__all__ = ["parts"]

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

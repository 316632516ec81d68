"""What is gained for the bytes that are spent: several methods, each at several sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style
from tutorec.teach.units import size

__all__ = ["tradeoff"]

# Methods are not ranks, so they do not use rank colours.
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", "-", "--", "--", ":", ":", "-.", "-.")
Side = Literal["above", "below", "left", "right"]
_SIDES: dict[Side, dict[str, Any]] = {
    "above": {"xytext": (0, 5), "ha": "center", "va": "bottom"},
    "below": {"xytext": (0, -5), "ha": "center", "va": "top"},
    "left": {"xytext": (-8, 0), "ha": "right", "va": "center"},
    "right": {"xytext": (8, 0), "ha": "left", "va": "center"},
}


def tradeoff(
    methods: Mapping[str, Mapping[float, Sequence[float]]],
    *,
    quantity: str,
    optimum: float | None = None,
    labels: Mapping[tuple[str, float], tuple[str, Side]] | None = None,
    second: Collection[str] = (),
    budgets: Sequence[float] = (),
    claim: str | None = None,
) -> Chart:
    """A line for each method through its mean at each size, with bars over all values.

    Labels beside points replace the legend.

    Args:
        methods: Name to bytes to the values of several runs; a method of one size is a point.
        quantity: Name of the vertical axis ("AUC").
        optimum: A line for the best possible value.
        labels: Text beside some points, and the side it stands on, by method and bytes.
        second: The methods of a second family, drawn in the second colour.
        budgets: Bytes that are marked by a dotted line.
        claim: Title; may use {best} and {worst}: the methods with the largest and the smallest mean
            at any size, {most} and {least}: these means, {at_most} and {at_least}: their bytes,
            {optimum}.

    Raises:
        ValueError: There is nothing to draw, or a size without a value.
    """
    means = {
        (name, nbytes): fmean(values) if values else None
        for name, sizes in methods.items()
        for nbytes, values in sizes.items()
    }
    empty = [point for point, mean in means.items() if mean is None]
    if not means or empty:
        raise ValueError(
            f"tradeoff needs at least one value for each size of each method, got none for {empty}"
        )
    known = {point: mean for point, mean in means.items() if mean is not None}
    best, worst = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    facts = {
        "means": known,
        "best": best[0],
        "worst": worst[0],
        "most": known[best],
        "least": known[worst],
        "at_most": size(best[1]),
        "at_least": size(worst[1]),
        "optimum": optimum,
    }
    with style():
        figure = canvas(4.8)
        axes = figure.add_subplot()
        for place, (name, sizes) in enumerate(methods.items()):
            look = (
                _MARKS[place % len(_MARKS)],
                _DASHES[place % len(_DASHES)],
                INK if name in second else ACCENT,
            )
            _method(axes, name, sizes, look)
        for (name, x), (text, side) in (labels or {}).items():
            values = methods[name][x]
            y = {"above": max(values), "below": min(values)}.get(side, known[name, x])
            axes.annotate(text, (x, y), textcoords="offset points", fontsize=10, **_SIDES[side])
        every = sorted({x for sizes in methods.values() for x in sizes})
        left = _logarithmic(axes, every, 2.4 if labels else 1.3)
        for budget in budgets:
            axes.axvline(budget, ymax=0.6, color=INK, linestyle=":", linewidth=1)
        if optimum is not None:
            line = axes.axhline(
                optimum,
                color=INK,
                linestyle="--",
                linewidth=1.5,
                label=f"best possible {optimum:.3f}",
            )
            if labels:
                axes.text(left * 1.03, optimum, f"{line.get_label()}", va="bottom", fontsize=10)
        axes.set_ylabel(quantity)
        axes.grid(True, axis="y")
        if not labels:
            figure.legend(loc="outside lower center", ncols=3)
        return finish(figure, claim, "{best} reaches {most:.3f}, {worst} {least:.3f}", facts)


def _logarithmic(axes: Any, every: Sequence[float], room: float) -> float:
    """Set the axis of bytes, with room for labels on its left; returns its left end."""
    left = every[0] / room
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, every[-1] * 1.5)
    ticks = [2**power for power in range(60) if every[0] / 1.3 <= 2**power <= every[-1] * 1.3]
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.set_xlabel("bytes, logarithmic")
    return left


def _method(
    axes: Any, name: str, sizes: Mapping[float, Sequence[float]], look: tuple[str, str, str]
) -> None:
    """One method: its means, and bars from its lowest to its highest values."""
    mark, dash, color = look
    where = sorted(sizes)
    heights = [fmean(sizes[x]) for x in where]
    axes.plot(where, heights, dash, marker=mark, markersize=8, color=color, label=name)
    down = [height - min(sizes[x]) for x, height in zip(where, heights, strict=True)]
    up = [max(sizes[x]) - height for x, height in zip(where, heights, strict=True)]
    # The caps are wider than the marks, so that a short range is seen.
    axes.errorbar(
        where, heights, (down, up), fmt="none", color=color, capsize=8, elinewidth=1, capthick=1
    )

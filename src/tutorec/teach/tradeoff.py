"""What is gained for the bytes that are spent: several methods, each at several sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style
from tutorec.teach.units import size

__all__ = ["tradeoff"]

# Methods are not ranks, so they do not use rank colours.
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", "-", "--", "--", ":", ":", "-.", "-.")


def tradeoff(
    methods: Mapping[str, Mapping[float, Sequence[float]]],
    *,
    quantity: str,
    optimum: float | None = None,
    labels: Mapping[tuple[str, float], str] | None = None,
    claim: str | None = None,
) -> Chart:
    """A line for each method through the means at its sizes, on a logarithmic axis of bytes; bars reach all values.

    Args:
        methods: Name to bytes to the values of several runs; a method of one size is a point.
        quantity: Name of the vertical axis ("AUC").
        optimum: A line for the best possible value.
        labels: Text below some points, by method and bytes.
        claim: Title; may use {best} and {worst}: the methods with the largest and the smallest mean at any size, {most}
            and {least}: these means, {at_most} and {at_least}: their bytes, {optimum}.

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
        raise ValueError(f"tradeoff needs at least one value for each size of each method, got none for {empty}")
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
            where = sorted(sizes)
            color = (ACCENT, INK)[place % 2]
            mark, dash = _MARKS[place % len(_MARKS)], _DASHES[place % len(_DASHES)]
            heights = [known[name, x] for x in where]
            axes.plot(where, heights, dash, marker=mark, markersize=5, color=color, label=name)
            down = [known[name, x] - min(sizes[x]) for x in where]
            up = [max(sizes[x]) - known[name, x] for x in where]
            # The caps are wider than the marks, so that a short range is seen.
            axes.errorbar(where, heights, (down, up), fmt="none", color=color, capsize=6, elinewidth=1, capthick=1)
        for (name, x), text in (labels or {}).items():
            below = {"xytext": (0, -4), "textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 9}
            axes.annotate(text, (x, min(methods[name][x])), **below)
        if optimum is not None:
            axes.axhline(optimum, color=INK, linestyle="--", linewidth=1.5, label=f"best possible {optimum:.3f}")
        every = sorted({x for sizes in methods.values() for x in sizes})
        axes.set_xscale("log", base=2)
        axes.set_xlim(every[0] / 1.3, every[-1] * 1.3)
        ticks = [2.0**power for power in range(60) if every[0] / 1.3 <= 2.0**power <= every[-1] * 1.3]
        axes.set_xticks(ticks, [size(tick) for tick in ticks])
        axes.set_xlabel("bytes, logarithmic")
        axes.set_ylabel(quantity)
        axes.grid(True, axis="y")
        figure.legend(loc="outside lower center", ncols=3)
        return finish(figure, claim, "{best} reaches {most:.3f}, {worst} {least:.3f}", facts)

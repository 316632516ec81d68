"""Several numbers of the same thing on one scale: estimates next to a clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style
from tutorec.teach.units import number

__all__ = ["dots"]

_LOOKS: tuple[dict[str, Any], ...] = (
    {"marker": "|", "color": INK, "markersize": 22, "markeredgewidth": 3},
    {"marker": "o", "color": ACCENT, "markersize": 10},
    {
        "marker": "s",
        "markeredgecolor": ACCENT,
        "markerfacecolor": "none",
        "markersize": 10,
        "markeredgewidth": 2,
    },
)


def dots(rows: Mapping[str, Mapping[str, float]], *, unit: str, claim: str | None = None) -> Chart:
    """A line for each row, with a mark for each of its numbers.

    Args:
        rows: Label of a row to name to number; all rows have the same names, three at most.
        unit: Of the numbers.
        claim: Title; may use {first} and {second} (the first two names) and {most} (the row in
            which the second number is the most times the first), {ratio} (how many times that is).

    Raises:
        ValueError: There is nothing to draw, or rows have different names.
    """
    names = {tuple(row) for row in rows.values()}
    if len(names) != 1 or not 2 <= len(next(iter(names))) <= len(_LOOKS):
        raise ValueError(f"dots needs rows of the same two or three names, got {sorted(names)}")
    order = names.pop()
    ratios = {label: row[order[1]] / row[order[0]] for label, row in rows.items()}
    most = max(ratios, key=ratios.__getitem__)
    fields = {"first": order[0], "second": order[1], "most": most, "ratio": ratios[most]}

    with style():
        figure = canvas(1.3 + 0.42 * len(rows))
        axes = figure.add_subplot()
        for name, look in zip(order, _LOOKS, strict=False):
            values = [row[name] for row in rows.values()]
            axes.plot(values, range(len(rows)), linestyle="none", label=name, **look)

        for line, row in enumerate(rows.values()):
            axes.plot(
                [min(row.values()), max(row.values())],
                [line, line],
                color=INK,
                linewidth=0.7,
                zorder=0,
            )
            axes.text(
                1.02, line, number(row[order[0]]), va="center", transform=axes.get_yaxis_transform()
            )

        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.grid(True, axis="x")
        axes.set_xlabel(f"{unit}; numbers on the right: {order[0]}")
        figure.legend(loc="outside lower center", ncols=len(order))
        return finish(figure, claim, "{most}: {second} is {ratio:.2g} times {first}", fields)

"""Several numbers of the same thing on one scale: estimates next to a clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style
from tutorec.teach.units import number

__all__ = ["dots"]

_LOOKS: tuple[dict[str, Any], ...] = (
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
    for name, look in zip(names, _LOOKS, strict=False):
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

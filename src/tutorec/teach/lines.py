"""Packed rows over cache lines, and which of these lines fbgemm's CPU kernel prefetches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tutorec._kernels.packed_layout import RowLayout, lines_of_row
from tutorec.teach.canvas import ACCENT, INK, PAPER, Chart, canvas, finish, legend, style

__all__ = ["lines"]

_LINE = 64
_END = 6 * _LINE
_LOOKS: dict[str, dict[str, Any]] = {
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
        for number in range(_END // row.row_bytes + 1):
            _draw_row(axes, height, row, number)

    for border in range(0, _END + 1, _LINE):
        axes.axvline(border, color=INK, lw=1.2, ls=":")
    axes.set_yticks(range(len(layouts)), list(layouts))
    axes.set_xticks(range(0, _END + 1, _LINE))
    axes.set(xlim=(0, _END), ylim=(len(layouts) - 0.4, -0.6))
    axes.set_xlabel("byte; numbers are rows; dotted: a line of 64 bytes begins")
    legend(figure, _LOOKS)
    whole = ", ".join(name for name, count in missed.items() if count == 0) or "none"
    return finish(figure, claim, missed=missed, whole=whole)


def _missed(row: RowLayout) -> float:
    """Cache lines of a row that are not prefetched, averaged over all offsets of a row."""
    pairs = [lines_of_row(row, number) for number in range(_LINE)]
    return sum(len(touched - prefetched) for touched, prefetched in pairs) / len(pairs)


def _draw_row(axes: Any, height: int, row: RowLayout, number: int) -> None:
    """The parts of a row in each of its cache lines, its padding, its index in the widest part."""
    start = number * row.row_bytes
    payload_end = start + row.scale_bytes + row.payload_bytes
    touched, prefetched = lines_of_row(row, number)
    spans = []
    for line in sorted(touched):
        look = "prefetched" if line in prefetched else "not prefetched"
        spans.append((max(start, line * _LINE), min(payload_end, (line + 1) * _LINE), look))

    for left, right, look in [*spans, (payload_end, start + row.row_bytes, "padding")]:
        if left < right:
            axes.barh(height, right - left, left=left, height=0.6, lw=1.0, **_LOOKS[look])

    left, right, look = max(spans, key=lambda span: span[1] - span[0])
    if right < _END:
        hatched = look == "not prefetched"
        plate = {"facecolor": PAPER, "edgecolor": "none", "pad": 2.0} if hatched else None
        color = INK if hatched else "white"
        middle = (left + right) / 2
        axes.text(
            middle, height, str(number), color=color, ha="center", va="center", size=9, bbox=plate
        )

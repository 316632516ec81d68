"""The look of every figure: one palette (a colour is a rank), text that reads on a light and on a dark page.

Figures are made without pyplot, so that nothing is displayed twice and nothing global is changed.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["ACCENT", "INK", "RANK_COLORS", "Chart", "Picture", "canvas", "finish", "rank_color", "show", "style"]

#: A mid grey with more than 4:1 contrast on white and on the dark page.
INK = "#7a7a7a"
#: For data that belong to no rank.
ACCENT = "#8468c8"
#: Rank r is drawn in `RANK_COLORS[r % 8]` on every page.
RANK_COLORS = ("#3b7cc9", "#cf6420", "#2b9060", "#c34f88", "#1f8c9c", "#a3742c", "#c0504a", "#7f8a1e")

_WIDTH_INCHES = 7.0
_PIXELS = 700
_STYLE: dict[Any, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.size": 12.0,
    "axes.titlesize": 12.0,
    "axes.labelsize": 12.0,
    "xtick.labelsize": 11.0,
    "ytick.labelsize": 11.0,
    "legend.fontsize": 11.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "hatch.linewidth": 1.0,
}


def rank_color(rank: int) -> str:
    """The colour of a rank, the same on every page."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


@contextmanager
def style() -> Iterator[None]:
    """The book's look, for figures that a chapter draws itself."""
    with matplotlib.rc_context(_STYLE):
        yield


@dataclass
class Chart:
    """A figure, the claim that is its title, and the numbers that the claim was computed from."""

    figure: Figure
    claim: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Picture:
    """A rendered chart with its alternative text; a notebook shows it as the last expression of a cell."""

    png: bytes
    alt: str
    claim: str

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        """The bytes and what Jupyter needs to show them at reading width with alternative text."""
        return self.png, {"width": _PIXELS, "alt": self.alt}

    def __repr__(self) -> str:
        """What a reader without images sees."""
        return f"<figure: {self.alt}>"

    def save(self, path: str) -> None:
        """Write the PNG to a file."""
        with open(path, "wb") as out:
            out.write(self.png)


def canvas(height: float) -> Figure:
    """An empty figure as wide as the text column and `height` inches high; call it inside `style()`."""
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def finish(figure: Figure, template: str | None, default: str, facts: dict[str, Any]) -> Chart:
    """Set the title: `template`, or the default claim, filled from the facts.

    Args:
        figure: The drawn figure.
        template: What the caller wants to claim, with facts in braces; None for the default.
        default: The claim that a drawing function makes by itself.
        facts: Numbers computed from the drawn data, by name.

    Raises:
        KeyError: The template asks for a number that the data does not give.
    """
    wanted = default if template is None else template
    try:
        claim = wanted.format(**facts)
    except KeyError as error:
        raise KeyError(f"claim {wanted!r} asks for {error}; this figure knows {', '.join(sorted(facts))}") from None
    figure.suptitle("\n".join(textwrap.wrap(claim, 70)), x=0.012, ha="left", fontsize=13)
    return Chart(figure, claim, facts)


def show(chart: Chart, alt: str | None = None) -> Picture:
    """Render a chart for a notebook cell.

    Args:
        chart: What a `draw` function returned.
        alt: What the picture says to a reader who cannot see it; the claim is put before it. The cell's metadata
            `mystnb: {image: {alt: ...}}` repeats it for the built book.
    """
    text = chart.claim if not alt else f"{chart.claim}. {alt}"
    buffer = io.BytesIO()
    with style():
        chart.figure.savefig(buffer, format="png", dpi=200, transparent=True)
    return Picture(buffer.getvalue(), text, chart.claim)

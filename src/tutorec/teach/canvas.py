"""The style of every figure: one palette (a colour is a rank), legible on light and dark pages.

Figures are made without pyplot, so that nothing is displayed twice and nothing global is changed.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from tutorec._style import ACCENT, INK, RANK_COLORS, STYLE, rank_color
from tutorec._text import spaced_percents

__all__ = [
    "ACCENT",
    "INK",
    "PAPER",
    "RANK_COLORS",
    "Chart",
    "Picture",
    "canvas",
    "caption",
    "finish",
    "legend",
    "rank_color",
    "rectangle",
    "show",
    "style",
]

#: Behind letters on a pattern: the background of the page, white where there is none.
PAPER = "#fffffe"
_WIDTH_INCHES = 7.0
_PIXELS = 700


@contextmanager
def style() -> Iterator[None]:
    """The book's look: a block, or a decorator of what draws a figure."""
    with matplotlib.rc_context(STYLE):
        yield


@dataclass
class Chart:
    """A figure, the claim that is its title, and the numbers that the claim was computed from."""

    figure: Figure
    claim: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Picture:
    """A rendered figure with alternative text; a notebook shows it as a cell's last expression.

    A page shows inline SVG with the claim as its caption. Where HTML is not shown, the PNG has the
    claim as its title.
    """

    png: bytes
    svg: str
    alt: str
    claim: str

    def _repr_html_(self) -> str:
        """What a page shows."""
        figcaption = f"<figcaption>{caption(self.claim)}</figcaption>"
        return f'<figure class="drawn">{self.svg}{figcaption}</figure>'

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        """The bytes and what Jupyter needs to show them at reading width with alternative text."""
        return self.png, {"width": _PIXELS, "alt": self.alt}

    def __repr__(self) -> str:
        """What a reader without images sees."""
        return f"<figure: {self.alt}>"


def caption(claim: str) -> str:
    """A claim as HTML with a capital; a name from the code that opens it keeps its first letter.

    Example:
        >>> caption("a < b"), caption("item_table is read once")
        ('A &lt; b', 'item_table is read once')
    """
    name = "_" in claim.split(" ", 1)[0]
    return html.escape(claim if name else claim[:1].upper() + claim[1:])


def canvas(height: float) -> Figure:
    """An empty figure of the text's width and `height` inches; call it inside `style()`."""
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def rectangle(
    axes: Any,
    box: tuple[float, float, float, float],
    text: str = "",
    *,
    color: str | None = None,
    edge: str = INK,
    width: float = 0.7,
    **look: Any,
) -> None:
    """A rectangle with text in its middle.

    Args:
        axes: Where it is drawn.
        box: Left, top, width and height, where the vertical axis points down.
        text: White on a colour, in ink where there is none.
        color: What the rectangle is filled with.
        edge: The colour of its frame.
        width: Of its frame; a thicker one is above the frames next to it.
        look: Of the text.
    """
    x, y, wide, high = box
    axes.add_patch(
        Rectangle((x, y), wide, high, fc=color or "none", ec=edge, lw=width, zorder=2 + width / 10)
    )
    if text:
        look = {"ha": "center", "va": "center", "color": "white" if color else INK, **look}
        axes.text(x + wide / 2, y + high / 2, text, **look)


def legend(figure: Figure, keys: Mapping[str, Mapping[str, Any]], columns: int = 4) -> None:
    """Below a figure, a patch for each name, which looks as given."""
    patches = [Patch(**look, label=name) for name, look in keys.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(columns, len(patches)))


def finish(figure: Figure, claim: str, **facts: Any) -> Chart:
    """A drawn figure with its title: the claim, filled from numbers of the drawn data."""
    claim = spaced_percents(claim.format(**facts))
    _set_title(figure, textwrap.fill(claim, 70))
    return Chart(figure, claim, facts)


def _set_title(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=0.012, ha="left", fontsize=13)


def show(chart: Chart, alt: str | None = None) -> Picture:
    """Render a chart for a notebook cell.

    Args:
        chart: What a `draw` function returned.
        alt: What the picture says to a reader who cannot see it; the claim is put before it. The
            cell's metadata `mystnb: {image: {alt: ...}}` repeats it for the built book.
    """
    text = f"{chart.claim}. {alt}" if alt else chart.claim
    png = _rendered(chart.figure, "png", dpi=200)
    title = chart.figure.get_suptitle()
    _set_title(chart.figure, "")  # the page writes the claim below the figure
    drawing = _rendered(chart.figure, "svg", metadata={"Date": None}).decode()
    _set_title(chart.figure, title)
    return Picture(png, _inline(drawing, text), text, chart.claim)


def _rendered(figure: Figure, kind: str, **options: Any) -> bytes:
    """The file of a figure; letters of an SVG stay letters, and equal figures give equal files."""
    buffer = io.BytesIO()
    with style(), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tutorec"}):
        figure.savefig(buffer, format=kind, transparent=True, **options)
    return buffer.getvalue()


def _inline(drawing: str, alt: str) -> str:
    """A drawing as inline SVG, in the page's colour and font, with ids unique on the page."""
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--pst-font-family-base, sans-serif)", drawing)
    drawing = drawing.replace(INK, "currentColor")

    # white hatches on the page's ink would vanish on a dark page
    hatches = re.compile(r"<pattern.*?</pattern>", re.DOTALL)
    drawing = hatches.sub(lambda hatch: hatch[0].replace("#ffffff", PAPER), drawing)
    drawing = drawing.replace(PAPER, "var(--pst-color-background, #ffffff)")

    prefix = "f" + hashlib.sha256(drawing.encode()).hexdigest()[:8]
    drawing = re.sub(r'\bid="', f'id="{prefix}-', drawing)
    drawing = re.sub(r'(url\(|href=")#', rf"\1#{prefix}-", drawing)

    # as wide as the column, in place of a width in points
    width = f' role="img" aria-label="{html.escape(alt)}" style="width: 100%"'
    return re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', lambda _: width, drawing, count=1)

"""The style of every figure: one palette (a colour is a rank), legible on light and dark pages.

Figures are made without pyplot, so that nothing is displayed twice and nothing global is changed.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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
    "rank_color",
    "show",
    "style",
]

#: Behind letters on a pattern: the background of the page, white where there is none.
PAPER = "#fffffe"
_WIDTH_INCHES = 7.0
_PIXELS = 700


@contextmanager
def style() -> Iterator[None]:
    """The book's look, for figures that a chapter draws itself."""
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

    def save(self, path: str) -> None:
        """Write the PNG to a file."""
        with open(path, "wb") as out:
            out.write(self.png)


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
    pattern = default if template is None else template
    try:
        claim = spaced_percents(pattern.format(**facts))
    except KeyError as error:
        raise KeyError(
            f"claim {pattern!r} asks for {error}; this figure knows {', '.join(sorted(facts))}"
        ) from None

    figure.suptitle("\n".join(textwrap.wrap(claim, 70)), x=0.012, ha="left", fontsize=13)
    return Chart(figure, claim, facts)


def show(chart: Chart, alt: str | None = None) -> Picture:
    """Render a chart for a notebook cell.

    Args:
        chart: What a `draw` function returned.
        alt: What the picture says to a reader who cannot see it; the claim is put before it. The
            cell's metadata `mystnb: {image: {alt: ...}}` repeats it for the built book.
    """
    text = chart.claim if not alt else f"{chart.claim}. {alt}"
    png = _rendered(chart.figure, "png", dpi=200)
    title = chart.figure.get_suptitle()
    chart.figure.suptitle("")  # the page writes the claim below the figure
    drawing = _rendered(chart.figure, "svg", metadata={"Date": None}).decode()
    chart.figure.suptitle(title, x=0.012, ha="left", fontsize=13)

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

    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing)
    assert size is not None, "matplotlib writes the size of a drawing"
    head = (
        f'<svg viewBox="{size[0][9:-1]}" role="img" aria-label="{html.escape(alt)}" style="width: '
        '100%" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return head + drawing[drawing.index(">") + 1 :]

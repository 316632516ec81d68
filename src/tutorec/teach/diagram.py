"""Diagrams of mechanisms: boxes, strips of cells and arrows, filled from a chapter's own objects.

A diagram is laid out on a grid of characters and lines: 78 characters wide, as high as it needs to
be. What it shows is passed in as values, ids or shapes, so that the drawing says what the objects
say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tutorec.teach.canvas import INK, Chart, canvas, finish, rank_color, style

__all__ = ["Diagram", "Node"]

#: Characters of the text's size across a figure.
WIDTH = 78
_LINE_INCHES = 0.235
_POINTS = 10.0


@dataclass(frozen=True)
class Node:
    """Position of a box or a strip: left, top, width and height, in characters and lines."""

    x: float
    y: float
    width: float
    height: float

    @property
    def top(self) -> tuple[float, float]:
        """The middle of its upper edge."""
        return self.x + self.width / 2, self.y

    @property
    def bottom(self) -> tuple[float, float]:
        """The middle of its lower edge."""
        return self.x + self.width / 2, self.y + self.height

    @property
    def left(self) -> tuple[float, float]:
        """The middle of its left edge."""
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> tuple[float, float]:
        """The middle of its right edge."""
        return self.x + self.width, self.y + self.height / 2


class Diagram:
    """Boxes, strips and arrows; each call draws at once, above what was drawn before.

    Args:
        lines: Height of the diagram in lines of text.

    Example:
        >>> from tutorec.teach.diagram import Diagram
        >>> diagram = Diagram(lines=6)
        >>> ids = diagram.strip(2, 1, [7, 7, 2], rank=1, title="ids")
        >>> rows = diagram.box(40, 1, "rows [3, 64]", rank=1)
        >>> diagram.arrow(ids.right, rows.left, "lookup")
        >>> diagram.chart("3 ids select 3 rows").claim
        '3 ids select 3 rows'
    """

    def __init__(self, lines: float) -> None:
        with style():
            self._figure = canvas(lines * _LINE_INCHES)
            self._axes: Any = self._figure.add_subplot()
        self._axes.set_xlim(0, WIDTH)
        self._axes.set_ylim(lines, 0)
        self._axes.axis("off")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        align: str = "left",
        bold: bool = False,
        color: str = INK,
    ) -> None:
        """One line or several; (x, y) is its middle in height, and its left, center or right."""
        weight = "bold" if bold else "normal"
        self._axes.text(
            x, y, text, ha=align, va="center", fontsize=_POINTS, color=color, fontweight=weight
        )

    def box(
        self,
        x: float,
        y: float,
        text: str,
        *,
        rank: int | None = None,
        width: float = 0,
        lines: float = 1.4,
    ) -> Node:
        """A box around text in a rank's colour; as wide as the text unless a width is given."""
        from matplotlib.patches import FancyBboxPatch

        node = Node(x, y, width or len(max(text.split("\n"), key=len)) + 2, lines)
        color = INK if rank is None else rank_color(rank)
        self._axes.add_patch(
            FancyBboxPatch(
                (x, y),
                node.width,
                lines,
                boxstyle="square,pad=0",
                edgecolor=color,
                facecolor="none",
                linewidth=1.5,
            )
        )

        text_lines = text.split("\n")
        # line by line: a page's font is narrower than the one that is measured
        for position, text_line in enumerate(text_lines):
            self.text(
                x + node.width / 2,
                y + lines / 2 + 0.9 * (position - (len(text_lines) - 1) / 2),
                text_line,
                align="center",
            )
        return node

    def strip(
        self,
        x: float,
        y: float,
        cells: Sequence[Any],
        *,
        rank: int | str | Sequence[int | None] | None = None,
        title: str = "",
        marked: Collection[int] = (),
        cell: float = 3,
    ) -> Node:
        """Cells side by side, each filled with the colour of a rank.

        Args:
            x: Left edge of the first cell, in characters.
            y: Upper edge, in lines; a title is above it.
            cells: What is written into them.
            rank: Whose colour, of all cells or of each; a colour by its name for what belongs to no
                rank; None: an empty cell in the page's ink.
            title: Written above the strip.
            marked: Positions of the cells with a thick frame.
            cell: Width of one.
        """
        from matplotlib.patches import Rectangle

        ranks: Sequence[int | str | None] = (
            [rank] * len(cells) if rank is None or isinstance(rank, int | str) else rank
        )
        if title:
            self.text(x, y - 0.6, title)

        for position, (value, cell_rank) in enumerate(zip(cells, ranks, strict=True)):
            left = x + position * cell
            filled = cell_rank is not None
            thick = position in marked
            self._axes.add_patch(
                Rectangle(
                    (left, y), cell, 1.2, facecolor=rank_color(cell_rank) if isinstance(cell_rank, int) else cell_rank or "none",  # noqa: E501
                    edgecolor=INK, linewidth=2.5 if thick else 0.7, zorder=3 if thick else 2,
                )
            )  # fmt: skip
            self._axes.text(
                left + cell / 2, y + 0.6, str(value), ha="center", va="center", fontsize=_POINTS, zorder=4,  # noqa: E501
                color="white" if filled else INK, fontweight="bold" if thick else "normal",
            )  # fmt: skip

        return Node(x, y, cell * len(cells), 1.2)

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        text: str = "",
        *,
        rank: int | None = None,
        right: bool = True,
    ) -> None:
        """An arrow, and what it carries, written next to its head: on the right, or on the left."""
        from matplotlib.patches import FancyArrowPatch

        color = INK if rank is None else rank_color(rank)
        self._axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="-|>",
                mutation_scale=12,
                color=color,
                linewidth=1.6,
                shrinkA=2,
                shrinkB=2,
            )
        )

        slanting = abs(start[0] - end[0]) > 0.1 and abs(start[1] - end[1]) > 0.1
        x, y = (a + (0.7 if slanting else 0.5) * (b - a) for a, b in zip(start, end, strict=True))
        y -= 0.5 * slanting  # on the side that the arrow leaves free
        if text:
            align = "left" if right else "right"
            self.text(x + (1 if right else -1), y, text, align=align, color=color)

    def chart(self, claim: str, **facts: Any) -> Chart:
        """The diagram as a figure whose title is the claim, filled from the facts."""
        with style():
            return finish(self._figure, claim, "", facts)

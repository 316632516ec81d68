"""Diagrams of mechanisms: boxes, strips of cells and arrows, filled from a chapter's own objects.

A diagram is laid out on a grid of characters and lines: 78 characters wide, as high as it needs to
be. What it shows is passed in as values, ids or shapes, so that the drawing says what the objects
say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from matplotlib.patches import FancyArrowPatch

from tutorec.teach.canvas import INK, Chart, canvas, finish, rank_color, rectangle, style

#: Characters of the text's size across a figure.
WIDTH = 78
_LINE_INCHES = 0.235
_CELL_LINES = 1.2

#: Whose colour: a rank's, a colour by its name for what belongs to no rank, or None, the ink.
Owner = int | str | None
Point = tuple[float, float]


class Node(NamedTuple):
    """Position of a box or a strip: left, top, width and height, in characters and lines."""

    x: float
    y: float
    width: float
    height: float

    @property
    def top(self) -> Point:
        """The middle of its upper edge."""
        return self.x + self.width / 2, self.y

    @property
    def bottom(self) -> Point:
        """The middle of its lower edge."""
        return self.x + self.width / 2, self.y + self.height

    @property
    def left(self) -> Point:
        """The middle of its left edge."""
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> Point:
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

    @style()
    def __init__(self, lines: float) -> None:
        self._figure = canvas(lines * _LINE_INCHES)
        self._axes: Any = self._figure.add_subplot()
        self._axes.set(xlim=(0, WIDTH), ylim=(lines, 0))
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
        self._axes.text(x, y, text, ha=align, va="center", size=10, color=color, weight=weight)

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
        texts = text.split("\n")
        node = Node(x, y, width or max(map(len, texts)) + 2, lines)
        rectangle(self._axes, node, edge=_color(rank) or INK, width=1.5)
        # line by line: a page's font is narrower than the one that is measured
        for position, text_line in enumerate(texts):
            middle = y + lines / 2 + 0.9 * (position - (len(texts) - 1) / 2)
            self.text(x + node.width / 2, middle, text_line, align="center")
        return node

    def strip(
        self,
        x: float,
        y: float,
        cells: Sequence[Any],
        *,
        rank: Owner | Sequence[Owner] = None,
        title: str = "",
        marked: Collection[int] = (),
        cell: float = 3,
    ) -> Node:
        """Cells side by side, each filled with the colour of a rank.

        Args:
            x: Left edge of the first cell, in characters.
            y: Upper edge, in lines; a title is above it.
            cells: What is written into them.
            rank: Whose colour, of all cells or of each; None: an empty cell in the page's ink.
            title: Written above the strip.
            marked: Positions of the cells with a thick frame.
            cell: Width of one.
        """
        if not isinstance(rank, Sequence) or isinstance(rank, str):
            rank = [rank] * len(cells)
        if title:
            self.text(x, y - 0.6, title)

        for position, (value, owner) in enumerate(zip(cells, rank, strict=True)):
            frame, weight = (2.5, "bold") if position in marked else (0.7, "normal")
            box = x + position * cell, y, cell, _CELL_LINES
            color = _color(owner)
            rectangle(self._axes, box, str(value), color=color, width=frame, size=10, weight=weight)
        return Node(x, y, cell * len(cells), _CELL_LINES)

    def arrow(
        self,
        start: Point,
        end: Point,
        text: str = "",
        *,
        rank: Owner = None,
        right: bool = True,
        dashed: bool = False,
    ) -> None:
        """An arrow, and what it carries, written next to its head: on the right, or on the left."""
        color = _color(rank) or INK
        look = {"color": color, "lw": 1.6, "ls": "--" if dashed else "-"}
        arrow = FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, **look)
        self._axes.add_patch(arrow)

        slanting = abs(start[0] - end[0]) > 0.1 and abs(start[1] - end[1]) > 0.1
        x, y = (a + (0.7 if slanting else 0.5) * (b - a) for a, b in zip(start, end, strict=True))
        y -= 0.5 * slanting  # on the side that the arrow leaves free
        if text:
            align = "left" if right else "right"
            self.text(x + (1 if right else -1), y, text, align=align, color=color)

    @style()
    def chart(self, claim: str, **facts: Any) -> Chart:
        """The diagram as a figure whose title is the claim, filled from the facts."""
        return finish(self._figure, claim, **facts)


def _color(owner: Owner) -> str | None:
    return rank_color(owner) if isinstance(owner, int) else owner

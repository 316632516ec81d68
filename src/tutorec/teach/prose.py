"""Sentences and tables with measured numbers, shown in the page's own font."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Prose", "Table", "say", "table"]

_IN_NAME = re.compile(r"(?<=[A-Za-z])(?=[._][A-Za-z])")  # a long name may go on in the next line
_SHORT = 16  # letters of a cell that stays in one line
# With its unit, and a remark.
_NUMBER = re.compile(r"[<>~+-]?\d[\d.,:e+-]*( ?[%A-Za-z/]+)?( \(.*\))?")


@dataclass(frozen=True)
class Prose:
    """Markdown that a notebook shows as a cell's last expression; a terminal shows the source."""

    text: str

    def _repr_markdown_(self) -> str:
        """What Jupyter and the book render."""
        return self.text

    def __repr__(self) -> str:
        """What a terminal shows."""
        return self.text


def say(text: str) -> Prose:
    """A paragraph with measured numbers: ``say(f"The lookup took {ms:.1f} ms.")``.

    Example:
        >>> say("The lookup took **2.1 ms**.")
        The lookup took **2.1 ms**.
    """
    return Prose(text)


@dataclass(frozen=True)
class Table:
    """A table: HTML as the last expression of a notebook cell, Markdown in a terminal."""

    lines: tuple[tuple[str, ...], ...]

    def _repr_html_(self) -> str:
        """What Jupyter and the book render: words on the left, numbers on the right."""
        (head, *rows), sides = self.lines, self._sides()
        parts = [f"<thead><tr>{self._cells('th', head, sides)}</tr></thead>", "<tbody>"]
        parts += [*(f"<tr>{self._cells('td', row, sides)}</tr>" for row in rows), "</tbody>"]
        return (
            f'<div style="overflow-x: auto"><table class="dataframe">{"".join(parts)}</table></div>'
        )

    def _sides(self) -> list[str]:
        """The side of each column: names and words left, mostly numbers right."""
        sides = ["left"]
        for place in range(1, len(self.lines[0])):
            cells = [line[place] for line in self.lines[1:] if line[place]]
            numbers = sum(_NUMBER.fullmatch(cell) is not None for cell in cells)
            sides.append("right" if 2 * numbers >= len(cells) else "left")
        return sides

    @staticmethod
    def _cells(tag: str, line: tuple[str, ...], sides: Sequence[str]) -> str:
        shown = []
        for side, text in zip(sides, line, strict=True):
            kind = tag if text else "td"  # a header without words is none
            words = html.escape(text)
            words = _IN_NAME.sub("<wbr>", words) if len(words) > 20 and " " not in words else words
            whole = "; white-space: nowrap" if kind == "td" and len(text) <= _SHORT else ""
            shown.append(f'<{kind} style="text-align: {side}{whole}">{words}</{kind}>')
        return "".join(shown)

    def __repr__(self) -> str:
        """What a terminal shows."""
        text = ["| " + " | ".join(line) + " |" for line in self.lines]
        marks = {"left": ":--|", "right": "--:|"}
        text.insert(1, "|" + "".join(marks[side] for side in self._sides()))
        return "\n".join(text)


def table(rows: Mapping[str, Sequence[str]], columns: Sequence[str]) -> Table:
    """A table with names in its first column; columns of numbers are aligned on the right.

    Args:
        rows: Name to the cells of its row.
        columns: Titles, one more than a row has cells; the first is that of the names.

    Raises:
        ValueError: A row does not have one cell fewer than there are titles.

    Example:
        >>> table({"int8": ["80", "3.2"]}, ["format", "bytes", "times smaller"])
        | format | bytes | times smaller |
        |:--|--:|--:|
        | int8 | 80 | 3.2 |
    """
    wrong = {name: len(cells) for name, cells in rows.items() if len(cells) + 1 != len(columns)}
    if wrong:
        raise ValueError(f"each row needs {len(columns) - 1} cells, got {wrong}")
    return Table((tuple(columns), *((name, *cells) for name, cells in rows.items())))

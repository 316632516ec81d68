"""Tables with measured numbers, shown in the page's own font."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tutorec._text import TextTable
from tutorec.teach.units import number

_DIGITS = 4
# With its unit, and a remark.
_NUMBER = re.compile(r"[<>~+-]?\d[\d.,:e+-]*( ?[%A-Za-z/]+)?( \(.*\))?")


def table(rows: Mapping[Any, Any] | Sequence[Sequence[Any]], heads: Sequence[str]) -> TextTable:
    """A table; columns of numbers are aligned on the right.

    A whole number has commas, another number four significant digits. None is an empty cell, a
    bool is yes or no, and a list, a tuple or a mapping is its members, separated by commas. Text
    is shown as it is.

    Args:
        rows: Name -> the cells of its row, or its only cell; or a list of rows.
        heads: Titles of the columns. With names, the first is that of the names.

    Raises:
        ValueError: A row does not have as many cells as the titles ask for.

    Example:
        >>> table(
        ...     {"int8": (80, 3.2, [0, 1]), "fp32": (1256, 1 / 3, None)},
        ...     ["", "bytes", "x", "on"],
        ... )
              bytes       x  on
        ----  -----  ------  ----
        int8     80     3.2  0, 1
        fp32  1,256  0.3333
        >>> table({"whole": 1.3782, "by rows": 2.0}, ["plan", "ms"])
        plan        ms
        -------  -----
        whole    1.378
        by rows      2
    """
    named = isinstance(rows, Mapping)
    lines = [[name, *_cells(row)] for name, row in rows.items()] if named else [*map(_cells, rows)]

    wrong = {
        _text(line[0] if named else index): len(line) - named
        for index, line in enumerate(lines)
        if len(line) != len(heads)
    }
    if wrong:
        raise ValueError(f"each row needs {len(heads) - named} cells, got {wrong}")

    texts = [[_text(cell) for cell in line] for line in lines]
    right = [column for column in range(named, len(heads)) if _is_of_numbers(texts, column)]
    return TextTable(list(heads), texts, right)


def _cells(row: Any) -> list[Any]:
    """The cells of a row; a value that is not a sequence is one cell."""
    row = _plain(row)
    return list(row) if isinstance(row, Sequence) and not isinstance(row, str) else [row]


def _text(value: Any) -> str:
    """What a cell shows."""
    value = _plain(value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value, _DIGITS)

    if isinstance(value, Mapping):
        return ", ".join(f"{_text(key)} {_text(member)}" for key, member in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return str(value)


def _plain(value: Any) -> Any:
    """Numbers of a tensor or an array as Python's own."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_of_numbers(lines: Sequence[Sequence[str]], place: int) -> bool:
    """Whether at least half of the cells of a column that are not empty are numbers."""
    cells = [line[place] for line in lines if line[place]]
    numbers = sum(_NUMBER.fullmatch(cell) is not None for cell in cells)
    return 2 * numbers >= len(cells)

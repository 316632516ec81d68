"""Tables and explanations as text for a terminal and as HTML, and formatted numbers."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_GAP = 2
_NARROWEST = 8
WIDTH = 100  # columns of an explanation
# Letters of a cell that stays in one line, and of a name that may be broken.
_UNBROKEN = 16
_LONG = 20
_IN_NAME = re.compile(r"(?<=[A-Za-z])(?=[._][A-Za-z])")


def visible(text: str) -> str:
    r"""A text with what a terminal obeys, or cannot print, as escape sequences.

    Example:
        >>> visible("a\x1b[31m.py\n")
        'a\\x1b[31m.py\\n'
    """
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


@dataclass(frozen=True, repr=False)
class TextTable:
    """Rows of cells under a header; as the last expression of a cell, an HTML table.

    Args:
        head: A word for each column.
        rows: As many words in each row.
        right: Indices of the right-aligned columns, such as those of numbers.
        width: Of a line at most: cells of the widest columns of text are cut, and say so by
            ``..``; 0: none is.

    Example:
        >>> print(TextTable(["table", "ms"], [["item", "0.2"], ["user", "12.0"]], right=[1]))
        table    ms
        -----  ----
        item    0.2
        user   12.0
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()
    width: int = 0

    def __repr__(self) -> str:
        widths = self._widths()
        rule = ["-" * width for width in widths]
        return "\n".join(self._line(row, widths) for row in (self.head, rule, *self.rows))

    def _widths(self) -> list[int]:
        widths = [
            max(len(row[column]) for row in (self.head, *self.rows))
            for column in range(len(self.head))
        ]

        text_columns = [column for column in range(len(widths)) if column not in self.right]
        while self.width and text_columns and sum(widths) + _GAP * (len(widths) - 1) > self.width:
            widest = max(text_columns, key=widths.__getitem__)
            if widths[widest] <= _NARROWEST:
                break
            widths[widest] -= 1
        return widths

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        placed = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            text = cell if len(cell) <= width else cell[: width - 2] + ".."
            placed.append(text.rjust(width) if column in self.right else text.ljust(width))
        return (" " * _GAP).join(placed).rstrip()

    def _repr_html_(self) -> str:
        return self.html()

    def html(self, caption: str = "") -> str:
        """The table as HTML without scripts or styles, legible on light and dark pages."""
        title = f"<caption style='text-align:left'>{escape(caption)}</caption>" if caption else ""
        body = "".join(self._html_row(row, "td") for row in self.rows)
        head = self._html_row(self.head, "th")
        table = f"<table>{title}<thead>{head}</thead><tbody>{body}</tbody></table>"
        return f"<div style='overflow-x:auto'>{table}</div>"

    def _html_row(self, row: Sequence[str], tag: str) -> str:
        cells = []
        for column, cell in enumerate(row):
            style = f"text-align:{'right' if column in self.right else 'left'}"
            if tag == "td" and len(cell) <= _UNBROKEN:
                style += ";white-space:nowrap"
            element = tag if cell else "td"
            cells.append(f"<{element} style='{style}'>{_html_cell(cell)}</{element}>")

        return f"<tr>{''.join(cells)}</tr>"


def _html_cell(cell: str) -> str:
    """Its words, a long name with places to break it; a bar of ``#`` is drawn."""
    if cell and not cell.strip("#"):
        look = f"width:{0.5 * len(cell)}em;height:0.6em;background:#6b7686"
        return f"<span style='display:inline-block;{look}'></span>"
    text = escape(cell)
    return _IN_NAME.sub("<wbr>", text) if len(cell) > _LONG and " " not in cell else text


@dataclass(frozen=True)
class Facts:
    """Lines of key and text.

    Args:
        lines: ``(key, text)``.
        title: The line above them.

    Example:
        >>> print(Facts([("step", "0.8 ms"), ("memory", "1.0 GiB")]))
        step    0.8 ms
        memory  1.0 GiB
    """

    lines: Sequence[tuple[str, str]]
    title: str = ""

    def __str__(self) -> str:
        width = max((len(key) for key, _ in self.lines), default=0)
        texts = [self.title] if self.title else []
        for key, sentence in self.lines:
            head = ("  " if self.title else "") + (key.ljust(width) + "  " if width else "")
            texts.append(_wrapped(sentence, initial_indent=head, subsequent_indent=" " * len(head)))
        return "\n".join(texts)

    def html(self) -> str:
        """The lines as an HTML table without a header."""
        cell = "<td style='text-align:left;vertical-align:top'>{}</td>"
        rows = "".join(
            f"<tr>{''.join(cell.format(escape(text)) for text in line)}</tr>" for line in self.lines
        )
        title = f"<p><b>{escape(self.title)}</b></p>" if self.title else ""
        return f"{title}<table><tbody>{rows}</tbody></table>"


@dataclass(frozen=True, repr=False)
class Explanation:
    """Text and tables, printed with at most 100 columns and shown by a notebook as HTML.

    Args:
        blocks: The blocks, from top to bottom.

    Example:
        >>> Explanation(["one table", Facts([("step", "0.8 ms")])])
        one table
        <BLANKLINE>
        step  0.8 ms
    """

    blocks: Sequence[str | Facts | TextTable]

    def __str__(self) -> str:
        return "\n\n".join(
            _wrapped(block) if isinstance(block, str) else str(block) for block in self.blocks
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(
            f"<p>{escape(block)}</p>" if isinstance(block, str) else block.html()
            for block in self.blocks
        )


def _wrapped(text: str, **indents: Any) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, **indents)


def byte_unit(count: float) -> tuple[float, str]:
    """The largest binary unit (1 KiB = 1024 B) below a number of bytes: its size and its name.

    Example:
        >>> byte_unit(512), byte_unit(3 * 2**20)
        ((1.0, 'B'), (1048576.0, 'MiB'))
    """
    power = 0
    while abs(count) >= 1024 ** (power + 1) and power < len(_BYTE_UNITS) - 1:
        power += 1
    return 1024.0**power, _BYTE_UNITS[power]


def bytes_text(count: float) -> str:
    """A number of bytes in binary units, three digits or more.

    Example:
        >>> bytes_text(512), bytes_text(4096 * 64 * 4), bytes_text(24.2 * 2**30)
        ('512 B', '1.00 MiB', '24.2 GiB')
    """
    scale, unit = byte_unit(count)
    return f"{int(count):,} B" if scale == 1 else f"{number_text(count / scale)} {unit}"


def ms_text(ms: float) -> str:
    """A number of milliseconds, three digits or more, without the unit.

    Example:
        >>> ms_text(0.01234), ms_text(1.5), ms_text(2345.6), ms_text(0.0)
        ('0.0123', '1.50', '2,346', '0')
    """
    return number_text(ms)


def spaced_percents(text: str) -> str:
    """The text with a space between a number and its ``%``, as the book writes percentages.

    Example:
        >>> spaced_percents("{share:.0%} of them".format(share=0.25))
        '25 % of them'
    """
    return re.sub(r"(?<=[0-9])%", " %", text)


def ranks_text(ranks: Iterable[int]) -> str:
    """Numbers of ranks, in order and each once, runs of three or more as ``first-last``.

    Example:
        >>> ranks_text([3, 0, 1, 2, 7]), ranks_text([1, 0]), ranks_text([])
        ('0-3, 7', '0, 1', 'none')
    """
    runs: list[list[int]] = []
    for rank in sorted({int(rank) for rank in ranks}):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])

    texts = [f"{run[0]}-{run[-1]}" if len(run) >= 3 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(texts) or "none"


def named_ranks(ranks: Iterable[int]) -> str:
    """Numbers of ranks with their noun.

    Example:
        >>> named_ranks([1]), named_ranks([0, 2])
        ('rank 1', 'ranks 0, 2')
    """
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def several(count: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> several(1, "rank"), several(1200, "rank")
        ('1 rank', '1,200 ranks')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def number_text(value: float, digits: int = 3) -> str:
    """A number with at least so many digits, no exponent; a value below 1 keeps them, too.

    Example:
        >>> (
        ...     number_text(1.37842),
        ...     number_text(1.37842, 4),
        ...     number_text(0.0012),
        ...     number_text(2345.6),
        ... )
        ('1.38', '1.378', '0.00120', '2,346')
    """
    if value == 0:
        return "0"

    size = abs(value)
    decimals = 0
    while size < 10 ** (digits - 1) - 0.05 and decimals < 9:
        size = size * 10
        decimals = decimals + 1
    return f"{value:,.{decimals}f}"

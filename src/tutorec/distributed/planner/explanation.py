"""What a planner says to people: paragraphs, facts and tables, as text for a terminal and as HTML for a notebook."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tutorec.distributed.text_table import TextTable

WIDTH = 100


@dataclass(frozen=True)
class Facts:
    """Lines that begin with a word.

    Args:
        lines: ``(word, sentence)``; a line without a word goes on with the one above.
        title: Stands above them.

    Example:
        >>> print(Facts([("step", "0.8 ms"), ("memory", "1.0 GiB")]))
        step    0.8 ms
        memory  1.0 GiB
    """

    lines: Sequence[tuple[str, str]]
    title: str = ""

    def __str__(self) -> str:
        wide = max((len(word) for word, _ in self.lines), default=0)
        indent = "  " if self.title else ""
        found = [self.title] if self.title else []
        for word, sentence in self.lines:
            head = f"{indent}{word.ljust(wide)}{'  ' if wide else ''}"
            found += textwrap.wrap(
                sentence, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
            ) or [head.rstrip()]
        return "\n".join(found)

    def html(self) -> str:
        """The lines as a table without a head."""
        style = "text-align:left;vertical-align:top"
        rows = "".join(
            f"<tr><td style='{style}'>{escape(word)}</td><td style='{style}'>{escape(sentence)}</td></tr>"
            for word, sentence in self.lines
        )
        title = f"<p><b>{escape(self.title)}</b></p>" if self.title else ""
        return f"{title}<table><tbody>{rows}</tbody></table>"


@dataclass(frozen=True, repr=False)
class Explanation:
    """Blocks below each other; printed as text of at most 100 columns, shown by a notebook as HTML.

    Args:
        blocks: Sentences, facts, tables.

    Example:
        >>> Explanation(["one table", Facts([("step", "0.8 ms")])])
        one table
        <BLANKLINE>
        step  0.8 ms
    """

    blocks: Sequence[str | Facts | TextTable]

    def __str__(self) -> str:
        return "\n\n".join(
            textwrap.fill(block, WIDTH, break_on_hyphens=False) if isinstance(block, str) else str(block)
            for block in self.blocks
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For a notebook."""
        return "".join(f"<p>{escape(block)}</p>" if isinstance(block, str) else block.html() for block in self.blocks)

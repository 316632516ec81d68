"""Figures of chapter 03: tables that share one lookup, and rows that backward updates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.teach.canvas import ACCENT, Chart
from tutorec.teach.diagram import Diagram, Node

__all__ = ["table_batching", "updates"]

_COLUMN = 26  # characters for a table
_LABELS = 30  # characters for the name of a strip


def table_batching(batch: KeyedJaggedTensor, table_rows: Sequence[int]) -> Chart:
    """The ids of a batch, looked up table by table, and in one stack of all tables.

    Args:
        batch: One sample of up to three features with up to two ids. Feature f reads table f.
        table_rows: Rows of each table.

    Example:
        >>> from tutorec.sparse.lists import kjt_from_lists
        >>> batch = kjt_from_lists({"a": [[7]], "b": [[3]]})
        >>> table_batching(batch, [10, 20]).claim
        '2 calls for 2 tables, or 1 call for a stack of 30 rows'
    """
    *first_rows, total = accumulate(table_rows, initial=0)
    tables = len(table_rows)
    diagram = Diagram(lines=17.6)
    diagram.text(0, 0.6, f"one call for each table: {tables} calls", bold=True)
    diagram.text(0, 9.4, "table batching: 1 call", bold=True)
    text = f"one stack of {total:,} rows"
    stack = diagram.box(0.3, 14.8, text, width=_COLUMN * tables - 4, lines=2.4)

    for table, (name, bag) in enumerate(batch.to_dict().items()):
        left = 0.3 + _COLUMN * table
        ids = bag.values().tolist()
        strip = diagram.strip(left, 2.6, ids, rank=ACCENT, title=name, cell=5)
        text = f"table {table}\n{table_rows[table]:,} rows"
        diagram.box(left, 5.4, text, width=_COLUMN - 4, lines=2.4)
        diagram.arrow(strip.bottom, (strip.bottom[0], 5.4))

        shifted = [f"{first_rows[table] + row:,}" for row in ids]
        title = f"{name} + {first_rows[table]:,}"
        strip = diagram.strip(left, 12, shifted, rank=ACCENT, title=title, cell=9)
        diagram.arrow(strip.bottom, (strip.bottom[0], stack.y))
    claim = "{tables} calls for {tables} tables, or 1 call for a stack of {rows:,} rows"
    return diagram.chart(claim, tables=tables, rows=total)


def updates(ids: Sequence[int], gradient: Tensor, change: Tensor) -> Chart:
    """What a step writes with a dense gradient, and what an update in backward writes.

    Args:
        ids: The bag of the only sample.
        gradient: Of each row of the table, [R] with R of at most 10.
        change: What backward subtracted from each row [R], where an optimizer runs inside it.

    Example:
        >>> import torch
        >>> gradient = torch.tensor([0.0, 2.0, 1.0])
        >>> updates([1, 2, 1], gradient, gradient).claim
        'a dense step writes 3 rows, an update in backward 2'
    """
    rows = range(len(gradient))
    changed = [ACCENT if number else None for number in change.tolist()]
    diagram = Diagram(lines=14.2)

    def strip(y: float, name: str, cells: Sequence[object], rank: Sequence[str | None]) -> Node:
        diagram.text(0, y + 0.6, name)
        return diagram.strip(_LABELS, y, cells, rank=rank, cell=4.4)

    strip(0.4, "ids of the bag", ids, [ACCENT] * len(ids))
    diagram.text(0, 3.2, "dense gradient", bold=True)
    numbers = [f"{number:.0f}" for number in gradient.tolist()]
    written = strip(4, "backward writes, step reads", numbers, [ACCENT] * len(rows))
    read = strip(6.4, "rows that step writes", rows, [ACCENT] * len(rows))
    diagram.arrow(written.bottom, read.top)

    diagram.text(0, 9.4, "update inside backward", bold=True)
    sums = [f"{number:.0f}" if number else "" for number in change.tolist()]
    added = strip(10.2, "sums of gradients", sums, changed)
    named = [row if changed[row] else "" for row in rows]
    updated = strip(12.6, "rows that backward writes", named, changed)
    diagram.arrow(added.bottom, updated.top)
    claim = "a dense step writes {rows} rows, an update in backward {updated}"
    return diagram.chart(claim, rows=len(rows), updated=len(changed) - changed.count(None))

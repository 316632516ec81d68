"""Rows of features divided among ranks: what each rank owns, and what it counts."""

from __future__ import annotations

from collections.abc import Mapping

from tutorec.balance import LoadBalanceManager
from tutorec.teach.canvas import Chart
from tutorec.teach.diagram import WIDTH, Diagram

__all__ = ["divisions"]

_STRIPS = 8.0  # left edge of the rows, in characters
_WIDEST = 5.0  # a cell
_LINE = 1.6


def divisions(cases: Mapping[str, LoadBalanceManager], *, claim: str) -> Chart:
    """Small divisions below each other, a line of rows for each rank.

    A cell is a row: feature and id in the first row of a feature, the id in the others. A row that
    the rank does not count has a thick frame, a row that is nobody's is empty.

    Args:
        cases: Name -> division, of a few dozen rows at most.
        claim: The title; ``{fewest}`` and ``{most}`` are the rows of all features in the smallest
            and the largest case.
    """
    heights = [2.4 + _LINE * len(case.groups) for case in cases.values()]
    diagram = Diagram(lines=sum(heights))
    top = 0.6
    for (name, case), height in zip(cases.items(), heights, strict=True):
        diagram.text(0, top, f"{name}: rows {case.embeddings_per_feat}", bold=True)
        _case(diagram, case, top + 1)
        top += height

    totals = [sum(case.embeddings_per_feat) for case in cases.values()]
    return diagram.chart(claim, fewest=min(totals), most=max(totals))


def _case(diagram: Diagram, case: LoadBalanceManager, top: float) -> None:
    """The rows of each rank, and how many it counts."""
    rows: list[list[str]] = []
    notes = []
    for rank in range(len(case.groups)):
        counted = case.get_num_embeddings_on_rank(rank)
        blocks = case.get_owned_rows(rank)
        cells = [""] * max(counted, *(block.offset + block.rows for block in blocks))
        for block in blocks:
            for row in range(block.rows):
                feature = f"{block.feature}:" if row == 0 else ""
                cells[block.offset + row] = f"{feature}{block.first + row}"
        rows.append(cells)
        empty = [f", lists feature {block.feature}" for block in blocks if block.rows < 1]
        notes.append(f"counts {counted}{''.join(empty)}")

    # so that the longest line has room for its text
    room = WIDTH - _STRIPS - max(map(len, notes)) - 1
    width = min(_WIDEST, room / max(map(len, rows)))
    for rank, cells in enumerate(rows):
        y = top + _LINE * rank
        counted = case.get_num_embeddings_on_rank(rank)
        missed = [row for row in range(counted, len(cells)) if cells[row]]
        owners = [rank if text else None for text in cells]
        diagram.text(0, y + 0.6, f"rank {rank}")
        node = diagram.strip(_STRIPS, y, cells, rank=owners, cell=width, marked=missed)
        diagram.text(node.right[0] + 1, y + 0.6, notes[rank])

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


def divisions(cases: Mapping[str, LoadBalanceManager], *, claim: str | None = None) -> Chart:
    """Small divisions below each other, a line of rows for each rank.

    A cell is a row: feature and id in the first row of a feature, the id in the others. A row that
    the rank does not count has a thick frame, a row that is nobody's is empty.

    Args:
        cases: Name -> division, of a few dozen rows at most.
        claim: The title; ``{fewest}`` and ``{most}`` are the rows of all features in the smallest
            and the largest case.

    Raises:
        ValueError: There is no case.
    """
    if not cases:
        raise ValueError("divisions needs a case, as {'fair': LoadBalanceManager([3, 6, 3], 3)}")

    heights = [2.4 + _LINE * len(case.groups) for case in cases.values()]
    diagram = Diagram(lines=sum(heights))
    top = 0.6
    for (name, case), height in zip(cases.items(), heights, strict=True):
        diagram.text(0, top, f"{name}: rows {case.embeddings_per_feat}", bold=True)
        cell = _cell(case)
        for rank in range(len(case.groups)):
            _draw_rank(diagram, case, rank, top + 1 + _LINE * rank, cell)
        top += height

    totals = [sum(case.embeddings_per_feat) for case in cases.values()]
    title = claim or "divisions of {fewest} to {most} rows"
    return diagram.chart(title, fewest=min(totals), most=max(totals))


def _rows_drawn(case: LoadBalanceManager, rank: int) -> int:
    """Rows from the first one to the last that the rank owns or counts."""
    ends = [block.offset + block.rows for block in case.get_owned_rows(rank)]
    return max([*ends, case.get_num_embeddings_on_rank(rank)])


def _cell(case: LoadBalanceManager) -> float:
    """The width of a cell, so that the longest line has room for its text."""
    ranks = range(len(case.groups))
    longest = max(_rows_drawn(case, rank) for rank in ranks)
    text = max(len(_said(case, rank)) for rank in ranks)
    return min(_WIDEST, (WIDTH - _STRIPS - text - 1) / longest)


def _said(case: LoadBalanceManager, rank: int) -> str:
    """What a rank says of its rows."""
    empty = [block.feature for block in case.get_owned_rows(rank) if block.rows < 1]
    lists = "".join(f", lists feature {feature}" for feature in empty)
    return f"counts {case.get_num_embeddings_on_rank(rank)}{lists}"


def _draw_rank(
    diagram: Diagram, case: LoadBalanceManager, rank: int, y: float, cell: float
) -> None:
    """The rows of a rank, and what it says of them."""
    number = _rows_drawn(case, rank)
    cells = [""] * number
    colors: list[int | None] = [None] * number
    for block in case.get_owned_rows(rank):
        for row in range(block.rows):
            feature = f"{block.feature}:" if row == 0 else ""
            cells[block.offset + row] = f"{feature}{block.first + row}"
            colors[block.offset + row] = rank

    counted = case.get_num_embeddings_on_rank(rank)
    missed = [row for row in range(counted, number) if colors[row] is not None]
    diagram.text(0, y + 0.6, f"rank {rank}")
    diagram.strip(_STRIPS, y, cells, rank=colors, cell=cell, marked=missed)
    diagram.text(_STRIPS + cell * number + 1, y + 0.6, _said(case, rank))

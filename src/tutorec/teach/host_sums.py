"""Sums of bags that are added inside a host before they cross to another."""

from __future__ import annotations

from collections.abc import Sequence

from tutorec.teach.canvas import Chart
from tutorec.teach.diagram import Diagram

__all__ = ["host_sums"]

_LANE = 19.5
_CELL = 4.0


def host_sums(rows: Sequence[Sequence[int]], inside: int, across: int, *, claim: str) -> Chart:
    """Two hosts of two ranks; a table is on the first host, cut by rows: add inside it, then cross.

    Args:
        rows: For both ranks of the first host how many rows of one bag of each of the four ranks it
            holds.
        inside: Bytes that a rank of the first host sends to its neighbour in a step.
        across: Bytes that it sends to the rank with its number on the other host.
        claim: The title.
    """
    diagram = Diagram(lines=17)
    diagram.text(2 * _LANE, 3.2, "no rows of this table")
    diagram.text(2 * _LANE, 7.4, f"inside the host:\n{inside:,} B each way")
    diagram.text(2 * _LANE + 6, 11.2, f"across: {across:,} B each")

    sums = [f"{first} + {second}" for first, second in zip(*rows, strict=True)]
    middles = []
    for rank in (0, 1):
        title = f"for rank {rank}, for rank {rank + 2}"
        cells = [sums[rank], sums[rank + 2]]
        middles.append(
            diagram.strip(_LANE * rank, 9.4, cells, rank=rank, cell=2 * _CELL, title=title)
        )

    for rank in (0, 1):
        x = _LANE * rank
        diagram.strip(x, 2.6, rows[rank], rank=rank, cell=_CELL, title="rows added, for rank")
        for other in range(4):
            start = x + _CELL * (other + 0.5)
            diagram.text(start, 4.4, str(other), align="center")
            end = middles[other % 2].x + 2 * _CELL * (other // 2 + 0.3 + 0.4 * rank)
            diagram.arrow((start, 4.9), (end, 8.1), rank=rank)

    for rank in range(4):
        diagram.text(_LANE * rank, 0.5, f"rank {rank}, host {rank // 2}", bold=True)
        owner = rank % 2
        cells = [rows[0][rank] + rows[1][rank]]
        node = diagram.strip(
            _LANE * rank, 14.6, cells, rank=owner, cell=_CELL, title="its bag, all rows"
        )
        start = middles[owner].x + _CELL * (1 if rank < 2 else 3), 10.6
        diagram.arrow(start, (node.top[0], 13.2), rank=owner)
    return diagram.chart(claim)

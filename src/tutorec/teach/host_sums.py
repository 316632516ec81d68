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
        claim: The title; ``{parts}`` counts the partial sums that were made for the other host,
            ``{sums}`` those that cross.
    """
    diagram = Diagram(lines=17)
    bag_sums = [sum(counts) for counts in zip(*rows, strict=True)]

    for rank in range(4):
        diagram.text(_LANE * rank, 0.5, f"rank {rank}, host {rank // 2}", bold=True)
    diagram.text(2 * _LANE, 3.2, "no rows of this table")
    diagram.text(2 * _LANE, 7.4, f"inside the host:\n{inside:,} B each way")

    starts = []
    middles = []
    for rank in (0, 1):
        x = _LANE * rank
        starts.append(
            diagram.strip(x, 2.6, rows[rank], rank=rank, cell=_CELL, title="rows added, for rank")
        )
        for other in range(4):
            diagram.text(x + _CELL * (other + 0.5), 4.4, str(other), align="center")
        own = [f"{rows[0][other]} + {rows[1][other]}" for other in (rank, rank + 2)]
        middles.append(
            diagram.strip(
                x,
                9.4,
                own,
                rank=rank,
                cell=2 * _CELL,
                title=f"for rank {rank}, for rank {rank + 2}",
            )
        )

    for rank in (0, 1):
        for other in range(4):
            end = middles[other % 2].x + 2 * _CELL * (other // 2 + 0.3 + 0.4 * rank)
            diagram.arrow((starts[rank].x + _CELL * (other + 0.5), 4.9), (end, 8.1), rank=rank)

    for rank in range(4):
        x = _LANE * rank
        node = diagram.strip(
            x, 14.6, [bag_sums[rank]], rank=rank % 2, cell=_CELL, title="its bag, all rows"
        )
        start = middles[rank % 2]
        cell = start.x + _CELL * (1 if rank < 2 else 3), start.y + 1.2
        diagram.arrow(cell, (node.top[0], 13.2), rank=rank % 2)

    diagram.text(2 * _LANE + 6, 11.2, f"across: {across:,} B each")
    return diagram.chart(claim, parts=2 * 2, sums=2)

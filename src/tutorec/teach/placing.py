"""Tables on ranks, step by step: how an algorithm reaches its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tutorec.teach.canvas import Chart
from tutorec.teach.diagram import WIDTH, Diagram

__all__ = ["placing"]

_RANKS = 2
_BARS, _SUM = 27.0, 7.0  # left edge of the bars, room for the sum on their right


def placing(
    steps: Sequence[tuple[str, Mapping[str, int]]],
    ms: Mapping[str, float],
    *,
    claim: str,
) -> Chart:
    """Plans for two ranks below each other, a bar for each rank, as long as the rank is busy.

    Args:
        steps: What was done, and the plan after it: table -> rank. Tables that were on another
            rank, or on none, in the step before are framed.
        ms: Table -> its milliseconds.
        claim: The title; ``{first}`` and ``{last}`` are the milliseconds of the slowest rank in the
            first and the last step, ``{steps}`` counts the steps.
    """
    busy = [
        [sum(ms[table] for table, at in plan.items() if at == rank) for rank in range(_RANKS)]
        for _, plan in steps
    ]
    scale = (WIDTH - _BARS - _SUM) / max(map(max, busy))
    height = 1.3 * _RANKS + 0.8
    diagram = Diagram(lines=height * len(steps) + 0.2)
    before = steps[0][1]
    for number, (done, plan) in enumerate(steps):
        top = 0.4 + height * number
        diagram.text(0, top + 0.65 * _RANKS, done)
        for rank in range(_RANKS):
            y, x = top + 1.3 * rank, _BARS
            diagram.text(_BARS - 1, y + 0.6, f"rank {rank}", align="right")
            for table in (table for table, at in plan.items() if at == rank):
                new = before.get(table) != rank
                wide = scale * ms[table]
                diagram.strip(
                    x,
                    y,
                    [f"{table} {ms[table]:g}"],
                    rank=rank,
                    marked={0} if new else (),
                    cell=wide,
                )
                x += wide
            diagram.text(x + 0.8, y + 0.6, f"{busy[number][rank]:g} ms")
        before = plan
    return diagram.chart(claim, first=max(busy[0]), last=max(busy[-1]), steps=len(steps))

"""Tables on ranks, step by step: how an algorithm reaches its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tutorec.teach.canvas import Chart
from tutorec.teach.diagram import WIDTH, Diagram

__all__ = ["placing"]

_BARS = 27.0  # left edge of the bars
_SUM = 7.0  # room for the sum on their right
_HEIGHT = 3.4


def placing(plans: Sequence[Mapping[str, int]], ms: Mapping[str, float], *, claim: str) -> Chart:
    """Plans for two ranks below each other, a bar for each rank, as long as the rank is busy.

    Next to a plan is what was done since the plan before it: which tables were placed, moved or
    taken off. Those that were placed or moved are framed.

    Args:
        plans: Table -> rank, plan by plan; a first plan without tables is not drawn.
        ms: Table -> its milliseconds.
        claim: The title.
    """
    before, *drawn = plans if not plans[0] else [None, *plans]
    busy = [
        [sum(ms[table] for table, owner in plan.items() if owner == rank) for rank in (0, 1)]
        for plan in drawn
    ]
    scale = (WIDTH - _BARS - _SUM) / max(map(max, busy))
    diagram = Diagram(lines=_HEIGHT * len(drawn) + 0.2)

    for number, plan in enumerate(drawn):
        top = 0.4 + _HEIGHT * number
        diagram.text(0, top + 1.3, _changes(before, plan))
        for rank in (0, 1):
            y = top + 1.3 * rank
            x = _BARS
            diagram.text(_BARS - 1, y + 0.6, f"rank {rank}", align="right")
            for table in (table for table, owner in plan.items() if owner == rank):
                is_new = before is not None and before.get(table) != rank
                marked = {0} if is_new else ()
                cells = [f"{table} {ms[table]:g}"]
                node = diagram.strip(x, y, cells, rank=rank, marked=marked, cell=scale * ms[table])
                x = node.right[0]
            diagram.text(x + 0.8, y + 0.6, f"{busy[number][rank]:g} ms")
        before = plan
    return diagram.chart(claim)


def _changes(before: Mapping[str, int] | None, plan: Mapping[str, int]) -> str:
    """What leads from one plan to the next, on a line each."""
    if before is None:
        return "the plan before"

    placed = plan.keys() - before.keys()
    moved = [table for table in plan if before.get(table, plan[table]) != plan[table]]
    changes = {"put": placed, "move": moved, "take off": before.keys() - plan.keys()}
    lines = [f"{verb} {', '.join(sorted(tables))}" for verb, tables in changes.items() if tables]
    return "\n".join(lines) or "as it was"

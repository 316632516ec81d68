"""Tables on ranks, step by step: how an algorithm reaches its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tutorec.teach.canvas import Chart
from tutorec.teach.diagram import WIDTH, Diagram

__all__ = ["placing"]

_RANKS = 2
_BARS = 27.0  # left edge of the bars
_SUM = 7.0  # room for the sum on their right


def placing(
    plans: Sequence[Mapping[str, int]], ms: Mapping[str, float], *, claim: str | None = None
) -> Chart:
    """Plans for two ranks below each other, a bar for each rank, as long as the rank is busy.

    Next to a plan is what was done since the plan before it: which tables were placed, moved or
    taken off. Those that were placed or moved are framed.

    Args:
        plans: Table -> rank, plan by plan; a first plan without tables is not drawn.
        ms: Table -> its milliseconds.
        claim: The title; ``{first}`` and ``{last}`` are the milliseconds of the slowest rank in the
            first and the last plan that is drawn, ``{steps}`` counts these plans.

    Raises:
        ValueError: No plan has a table.
    """
    before, *drawn = plans if plans and not plans[0] else [None, *plans]
    if not any(drawn):
        raise ValueError("placing needs a plan with a table, as [{'a': 0}, {'a': 0, 'b': 1}]")

    busy = [
        [sum(ms[table] for table, owner in plan.items() if owner == rank) for rank in range(_RANKS)]
        for plan in drawn
    ]
    scale = (WIDTH - _BARS - _SUM) / max(map(max, busy))
    height = 1.3 * _RANKS + 0.8
    diagram = Diagram(lines=height * len(drawn) + 0.2)

    for number, plan in enumerate(drawn):
        top = 0.4 + height * number
        diagram.text(0, top + 0.65 * _RANKS, _done(before, plan))
        for rank in range(_RANKS):
            y = top + 1.3 * rank
            x = _BARS
            diagram.text(_BARS - 1, y + 0.6, f"rank {rank}", align="right")
            for table in (table for table, owner in plan.items() if owner == rank):
                is_new = before is not None and before.get(table) != rank
                wide = scale * ms[table]
                diagram.strip(
                    x,
                    y,
                    [f"{table} {ms[table]:g}"],
                    rank=rank,
                    marked={0} if is_new else (),
                    cell=wide,
                )
                x += wide
            diagram.text(x + 0.8, y + 0.6, f"{busy[number][rank]:g} ms")
        before = plan
    title = claim or "the slowest rank takes {first:g} ms first and {last:g} ms last"
    return diagram.chart(title, first=max(busy[0]), last=max(busy[-1]), steps=len(drawn))


def _done(before: Mapping[str, int] | None, plan: Mapping[str, int]) -> str:
    """What leads from one plan to the next, on a line each."""
    if before is None:
        return "the plan before"

    placed = [table for table in plan if table not in before]
    moved = [table for table in plan if before.get(table, plan[table]) != plan[table]]
    taken_off = [table for table in before if table not in plan]
    changes = {"put": placed, "move": moved, "take off": taken_off}
    lines = [f"{verb} {', '.join(sorted(tables))}" for verb, tables in changes.items() if tables]
    return "\n".join(lines) or "as it was"

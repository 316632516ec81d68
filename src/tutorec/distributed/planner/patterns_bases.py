"""What lies on all ranks alike: the bases of plans, counted out.

A table that is cut over all ranks, or copied to all of them, takes the same everywhere. So a plan is a base, which is
the choice of those tables that lie on all ranks, and patterns beside it (see `patterns`). There are few bases that a
fast plan can have: a choice that costs a table more than its cheapest one, priced with the multipliers of `bounds`,
lifts the mean of all ranks by the difference, and together the tables may lift it no further than to the limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tutorec.distributed.planner.bounds import Totals
from tutorec.distributed.planner.milp_model import binding_memories, content
from tutorec.distributed.planner.problem import Choice, Floats, PlanningProblem, Spread

MOST_BASES, MOST_CHOICES = 1_500_000, 60_000_000
"""Where more are possible, or they have more choices together, they are not looked at."""

_MOST_NUMBERS = int(np.iinfo(np.int8).max)

REST = -1
"""In the place of a choice: the table is not in the base."""


@dataclass(frozen=True, eq=False)
class Bases:
    """Bases of plans, S of them.

    Args:
        sizes: ``[S, 1 + D]`` ms, and parts of the roomiest rank's memory, that a base takes of every rank at least.
        chosen: ``[S, T]`` number of each table's choice, or `REST`.
    """

    sizes: Floats
    chosen: NDArray[np.int8]


def bases(problem: PlanningProblem, ms: float) -> Bases | None:
    """All bases that a plan of at most so many ms can have; of those that differ in equal tables only, one.

    Args:
        problem: What is to be planned; groups' latencies are not looked at.
        ms: The limit.

    Returns:
        The bases; None where there are too many, or a table has too many choices.

    Example:
        One of two equal tables can lie in rows on both ranks, with more work than whole:

        >>> from tutorec.distributed.planner.problem import Choice
        >>> whole = Choice(np.array([3.0]), np.zeros((1, 2), np.int64), Spread.ANY)
        >>> rows = Choice(np.array([2.0, 2.0]), np.zeros((2, 2), np.int64), Spread.ALL)
        >>> problem = PlanningProblem(2, 2, np.zeros((2, 2), np.int64), ((whole, rows),) * 2)
        >>> bases(problem, 3.5).chosen.tolist()
        [[-1, -1], [-1, 1]]
    """
    if max(map(len, problem.choices)) > _MOST_NUMBERS:
        return None
    totals = Totals(problem)
    relaxed = totals.relax(ms)
    kinds = binding_memories(problem)
    tables = len(problem.choices)
    sizes = np.zeros((1, 1 + len(kinds)))
    chosen = np.full((1, tables), REST, np.int8)
    if not relaxed.ms <= ms * (1 + 1e-9):
        return Bases(sizes[:0], chosen[:0])
    keep = totals.usable & (totals.longest <= ms)
    value = np.where(keep, totals.time + totals.memory @ relaxed.prices, np.inf)
    least = np.minimum.reduceat(value, totals.starts)
    slack = ms - totals.mean(least, relaxed.prices) + 1e-9 * ms
    room = np.maximum(problem.capacity.max(axis=0)[kinds], 1)
    options = [
        _options(choices, value[start : start + len(choices)] - least[table], kinds, room)
        for table, (start, choices) in enumerate(zip(totals.starts.tolist(), problem.choices, strict=True))
    ]
    above = np.zeros(1)
    before: dict[object, int] = {}
    for table in sorted(range(tables), key=lambda table: -np.sort(options[table][0])[:2][-1]):
        regret, taken, numbers = options[table]
        sums = above[:, None] + regret
        possible = sums <= slack
        alike = before.get(content(problem.choices[table]))
        if alike is not None:
            possible &= numbers >= chosen[:, alike, None]
        before[content(problem.choices[table])] = table
        parents, option = np.nonzero(possible)
        if len(parents) > min(MOST_BASES, MOST_CHOICES // tables):
            return None
        above, sizes, chosen = sums[possible], sizes[parents] + taken[option], chosen[parents]
        chosen[:, table] = numbers[option]
    fits = (sizes <= np.append(ms, np.full(len(kinds), 1 + 1e-9))).all(axis=1)
    return Bases(sizes[fits], chosen[fits])


def _options(
    choices: tuple[Choice, ...], regret: Floats, kinds: list[int], room: Floats
) -> tuple[Floats, Floats, NDArray[np.int8]]:
    """What it costs more to leave a table to the rest, or to put it into the base; sizes there; choices."""
    rest = [float(each) for each, choice in zip(regret, choices, strict=True) if choice.spread is not Spread.ALL]
    found = [(min(rest, default=np.inf), np.zeros(1 + len(kinds)), REST)]
    for number, choice in enumerate(choices):
        if choice.spread is Spread.ALL:
            sizes = np.append(choice.time.min(), choice.memory.min(axis=0)[kinds] / room)
            found.append((float(regret[number]), sizes, number))
    found = [each for each in found if np.isfinite(each[0])]
    return (
        np.array([each[0] for each in found]),
        np.array([each[1] for each in found]),
        np.array([each[2] for each in found], np.int8),
    )


def without_groups(problem: PlanningProblem, used: frozenset[int]) -> tuple[PlanningProblem, list[list[int]]] | None:
    """The problem of plans that use only some of the groups that have a latency.

    Args:
        problem: The problem.
        used: Numbers of the groups.

    Returns:
        The problem without latencies, and for each table the numbers of the choices that are left to it; None where a
        table has none left.
    """
    fixed = np.zeros(0) if problem.fixed is None else problem.fixed
    paid = {group for group in range(len(fixed)) if fixed[group] > 0}
    left = [
        [number for number, choice in enumerate(choices) if used.issuperset(paid.intersection(choice.groups))]
        for choices in problem.choices
    ]
    if not all(left):
        return None
    return replace(problem, choices=chosen_of(problem, left), fixed=None), left


def chosen_of(problem: PlanningProblem, left: list[list[int]]) -> tuple[tuple[Choice, ...], ...]:
    """For each table the choices of these numbers."""
    return tuple(
        tuple(choices[number] for number in numbers) for choices, numbers in zip(problem.choices, left, strict=True)
    )

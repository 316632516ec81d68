"""Choices that need not be tried: another of the same table can lie wherever they can, and takes no more of anything.

TorchRec lists a table that no column is cut from three times: whole, as one slice, and as one slice on a host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tutorec.distributed.planner.problem import Choice, PlanningProblem, Spread

# Spreads that are one where there is but one host: a piece on each of its ranks.
_ROWS = frozenset({Spread.HOST_ROWS, Spread.HOSTS_ROWS, Spread.ALL})


def undominated(problem: PlanningProblem) -> list[list[int]]:
    """For each table the numbers of the choices that no other makes needless, in their order.

    Of choices that are alike in everything the preferred one stays, of equally preferred ones the first.

    Args:
        problem: Whose choices.

    Example:
        >>> whole = Choice(np.array([2.0]), np.array([[0, 8]]), Spread.ANY)
        >>> slower = Choice(np.array([3.0]), np.array([[0, 8]]), Spread.HOST)
        >>> smaller = Choice(np.array([3.0]), np.array([[0, 4]]), Spread.HOST)
        >>> undominated(PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((whole, slower, smaller),)))
        [[0, 2]]
    """
    fixed = np.zeros(0) if problem.fixed is None else problem.fixed
    paid = frozenset(np.flatnonzero(fixed).tolist())
    several = problem.world_size > problem.local_size
    return [_undominated(choices, paid, several) for choices in problem.choices]


def _undominated(choices: Sequence[Choice], paid: frozenset[int], several: bool) -> list[int]:
    """Of one table; ``paid`` are groups that cost something, ``several`` whether there is more than one host."""
    kept: list[int] = []
    # what dominates comes before what it dominates, so that one look back is enough
    for number in sorted(range(len(choices)), key=lambda number: _key(choices[number], number)):
        choice = choices[number]
        if not any(_dominates(choices[other], choice, paid, several) for other in kept):
            kept.append(number)
    return sorted(kept)


def _key(choice: Choice, number: int) -> tuple[float, int, int, int, int]:
    freedom = {Spread.ANY: 0, Spread.HOST: 1}.get(choice.spread, 2)
    return float(choice.time.sum()), int(choice.memory.sum()), freedom, choice.preference, number


def _reaches(one: Spread, other: Spread, several: bool) -> bool:
    """Whether as many pieces may lie, spread like the first, wherever they may lie spread like the second."""
    if one is other or one is Spread.ANY:
        return True
    if one is Spread.HOST:
        return not several or other is Spread.HOST_ROWS
    return not several and {one, other} <= _ROWS


def _dominates(one: Choice, other: Choice, paid: frozenset[int], several: bool) -> bool:
    """Whether the first may lie wherever the second may, and neither takes more nor is less liked."""
    if len(one.time) != len(other.time) or one.preference > other.preference:
        return False
    return (
        _reaches(one.spread, other.spread, several)
        and (one.allowed is None or (other.allowed is not None and bool((one.allowed | ~other.allowed).all())))
        and bool((one.time <= other.time).all() and (one.memory <= other.memory).all())
        and paid.intersection(one.groups) <= paid.intersection(other.groups)
    )

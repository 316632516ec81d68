"""Where the shards of one more table can go, the other tables staying where they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tutorec.distributed.planner.placements import Packing
from tutorec.distributed.planner.problem import (
    Choice,
    Placement,
    PlanningProblem,
    Spread,
    rank_memory,
    rank_time,
)

# Sharpness of the potential: a table goes where the slowest of its ranks is the least slow.
_SHARP = 100.0


def with_choice(problem: PlanningProblem, placement: Placement, table: int, choice: int) -> Placement | None:
    """The placement with another choice for one table, the others staying where they are; None where it does not fit.

    Shards go, longest first, where the slowest rank stays the fastest.

    Args:
        problem: All choices.
        placement: An answer that fits.
        table: Its number.
        choice: The number among its choices.

    Example:
        >>> whole = Choice(np.array([2.0]), np.array([[0, 8]]), Spread.ANY)
        >>> halves = Choice(np.array([1.0, 1.0]), np.array([[0, 4], [0, 4]]), Spread.ALL)
        >>> problem = PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((whole, halves),))
        >>> with_choice(problem, Placement(np.array([0]), [np.array([0])]), 0, 1).ranks[0].tolist()
        [0, 1]
    """
    wanted = problem.choices[table][choice]
    load, held = rank_time(problem, placement), rank_memory(problem, placement)
    taken = problem.choices[table][int(placement.chosen[table])]
    np.subtract.at(load, placement.ranks[table], taken.time)
    np.subtract.at(held, placement.ranks[table], taken.memory)
    packing = Packing(replace(problem, capacity=problem.capacity - held, choices=((wanted,),)))
    packing.filled[:, 0] = load
    packing.sharpen(_SHARP, float(load.max()))
    position = packing.best(0)
    if position is None:
        return None
    chosen, everyone = placement.chosen.copy(), list(placement.ranks)
    chosen[table], everyone[table] = choice, position.ranks
    return Placement(chosen, everyone)


def fits_alone(problem: PlanningProblem, choice: Choice) -> bool:
    """Whether a choice could be placed if no other table were there; true where that is hard to tell.

    Example:
        >>> empty = PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ())
        >>> fits_alone(empty, Choice(np.array([2.0]), np.array([[0, 9]]), Spread.ANY))
        False
    """
    alone = replace(problem, choices=((choice,),))
    if Packing(alone).best(0) is not None:
        return True
    if choice.spread not in (Spread.ANY, Spread.HOST) or (choice.memory == choice.memory[:1]).all():
        return False
    # The greedy order may fail with shards of different sizes; a shard that fits nowhere rules the choice out.
    allowed = problem.capacity if choice.allowed is None else problem.capacity[choice.allowed]
    return all(bool((piece <= allowed).all(axis=1).any()) for piece in choice.memory)

"""Exercises of chapter 09b: what a bound proves, one rank that plans for all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tutorec.errors import PlannerError, RankError, RankTimeoutError
from tutorec.spmd.pool import Ranks
from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

Make = Callable[[], Any]

_SHORT = "table 'visitors' needs 7.3 GiB, and a rank has 6.2 GiB"
_WAITS = "a rank waits for what the other one does not send"


def _one_plans(rank: int, make_plan: Make) -> Any:
    """Rank 0 sends its plan, or its error."""
    result = [None]
    if rank == 0:
        try:
            result = [make_plan()]
        except PlannerError as error:
            result = [error]
    dist.broadcast_object_list(result, src=0)
    if isinstance(result[0], PlannerError):
        raise result[0]
    return result[0]


def _all_plan(rank: int, make_plan: Make) -> Any:
    """Each rank makes a plan of its own."""
    return make_plan()


def _raises_alone(rank: int, make_plan: Make) -> Any:
    """Rank 0 sends its plan, and keeps its error."""
    result = [make_plan() if rank == 0 else None]
    dist.broadcast_object_list(result, src=0)
    return result[0]


@functools.cache
def _on_two_ranks(function: Callable[[int, Make], Any]) -> Any:
    """What two ranks return where a plan is found, and where none is.

    Raises:
        ValueError: The function fails on a rank.
    """

    def attempt(rank: int, fits: bool) -> Any:
        calls = 0

        def make_plan() -> Any:
            nonlocal calls
            calls += 1
            if not fits:
                raise PlannerError(_SHORT)
            return {"visitors": ["row_wise", rank]}

        try:
            plan = function(rank, make_plan)
        except PlannerError as error:
            plan = f"PlannerError: {error}"
        return ... if plan is ... else [calls, plan]

    try:
        with Ranks(2, timeout=15) as world:
            outcomes = world.run(attempt, True)
            if outcomes == [..., ...]:
                return ...
            return [outcomes, world.run(attempt, False)]
    except RankTimeoutError:
        return _WAITS
    except RankError as error:
        raise ValueError(f"On two ranks it ends with: {error}") from error


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="09b.1",
        compared="the most that can be saved is 0.1 of 2.1 ms",
        solution=100 * 0.1 / 2.1,
        tolerance=1e-2,  # 4.8 is right, 5 is not
        mistakes=(
            Mistake(
                "takes the bound for a plan that exists and divides by it",
                100 * 0.1 / 2.0,
                "The saving is a part of the time that the plan takes now.",
            ),
            Mistake(
                "believes that a gap is a plan waiting to be found",
                100.0,
                "A bound limits what can be saved: no plan takes less than 2.0 ms.",
            ),
            Mistake(
                "believes that a plan above the bound proves nothing",
                0.0,
                "Perhaps nothing can be saved, but that is not proven. What is the most that the "
                "bound leaves?",
            ),
        ),
        shape="a percentage of the plan's time",
    ),
    Exercise(
        id="09b.2",
        compared="rank 0 plans once, and both ranks get its plan or its error",
        solution=_one_plans,
        measure=_on_two_ranks,
        mistakes=(
            Mistake(
                "believes that equal inputs give equal plans",
                _all_plan,
                "Both ranks make a plan, and the two plans differ. Who may call make_plan?",
            ),
            Mistake(
                "believes that an error ends all ranks",
                _raises_alone,
                "Where make_plan raises, one rank waits for a plan that never comes. What does "
                "rank 0 send then?",
            ),
        ),
        shape="a function that returns the plan of rank 0",
    ),
)

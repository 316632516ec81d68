"""Exercises of chapter 09b: what a bound proves, one rank that plans for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tutorec.errors import PlannerError, RankError, RankTimeoutError
from tutorec.spmd.pool import Ranks
from tutorec.teach.grading import Exercise

_SHORT = "table 'visitors' needs 7.3 GiB, and a rank has 6.2 GiB"
_WAITS = "a rank waits for what the other one does not send"


def _on_two_ranks(function: Callable[..., Any]) -> Any:
    """Calls of `make_plan` and what both ranks return where a plan is found, and where none is.

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
            return f"a plan of rank {rank}"

        try:
            plan = function(rank, make_plan)
        except PlannerError as error:
            plan = str(error)
        return plan if plan is ... else (calls, plan)

    try:
        with Ranks(2, timeout=15) as world:
            outcomes = world.run(attempt, True)
            if outcomes == [..., ...]:
                return ...
            return [*outcomes, *world.run(attempt, False)]
    except RankTimeoutError:
        return _WAITS
    except RankError as error:
        raise ValueError(f"On two ranks it ends with: {error}") from error


EXERCISES = (
    Exercise(
        "09b.1",
        compared="the most that can be saved is 0.1 of 2.1 ms",
        right=100 * 0.1 / 2.1,
        mistakes={
            "The saving is a part of the time that the plan takes now.": 100 * 0.1 / 2.0,
            "A bound limits what can be saved: no plan takes less than 2.0 ms.": 100.0,
            "Perhaps nothing can be saved, but that is not proven. What is the most that the "
            "bound leaves?": 0.0,
        },
        tolerance=0.01,
        shape="a percentage of the plan's time",
    ),
    Exercise(
        "09b.2",
        compared="rank 0 plans once, and both ranks get its plan or its error",
        right=[(1, "a plan of rank 0"), (0, "a plan of rank 0"), (1, _SHORT), (0, _SHORT)],
        measure=_on_two_ranks,
        mistakes={
            "Both ranks make a plan, and the two plans differ. Who may call make_plan?": [
                (1, "a plan of rank 0"),
                (1, "a plan of rank 1"),
                (1, _SHORT),
                (1, _SHORT),
            ],
            "Where make_plan raises, one rank waits for a plan that never comes. What does "
            "rank 0 send then?": _WAITS,
        },
        shape="a function that returns the plan of rank 0",
    ),
)

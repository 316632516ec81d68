"""Choices that are left out: no plan gets slower without them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from distributed.planner.instances import brute_force, problems
from hypothesis import given

from tutorec.distributed.planner.dominance import undominated
from tutorec.distributed.planner.problem import Choice, PlanningProblem, Spread

ROOM = np.array([[9, 9]] * 4)
WHOLE = Choice(np.array([2.0]), np.array([[4, 0]]), Spread.ANY, (0,), 1)
ROWS = Choice(np.array([1.0, 1.0]), np.array([[2, 0]] * 2), Spread.HOST_ROWS, (0,), 1)


@given(problem=problems())
def test_the_best_plan_needs_none_of_them(problem: PlanningProblem) -> None:
    kept = undominated(problem)
    assert all(kept)
    choices = tuple(
        tuple(of_table[number] for number in numbers) for of_table, numbers in zip(problem.choices, kept, strict=True)
    )
    assert brute_force(replace(problem, choices=choices)) == pytest.approx(brute_force(problem))


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (WHOLE, WHOLE, [0]),
        (WHOLE, replace(WHOLE, preference=0), [1]),
        (WHOLE, replace(WHOLE, spread=Spread.HOST, preference=4), [0]),
        (WHOLE, replace(WHOLE, time=np.array([3.0]), preference=0), [0, 1]),
        (WHOLE, replace(WHOLE, time=np.array([3.0]), memory=np.array([[3, 0]])), [0, 1]),
        (WHOLE, replace(WHOLE, allowed=np.array([True, False, True, True])), [0]),
        (WHOLE, replace(WHOLE, groups=(1,)), [0, 1]),
        (WHOLE, replace(WHOLE, groups=(0, 1)), [0]),
        (ROWS, replace(ROWS, spread=Spread.HOST), [1]),
        (ROWS, replace(ROWS, spread=Spread.ANY), [1]),
        (WHOLE, ROWS, [0, 1]),
    ],
)
def test_which_of_two_choices_are_kept(first: Choice, second: Choice, kept: list[int]) -> None:
    assert undominated(PlanningProblem(4, 2, ROOM, ((first, second),), np.array([0.5, 0.5]))) == [kept]


def test_on_one_host_rows_of_a_host_are_rows_of_all_ranks() -> None:
    rows = replace(ROWS, spread=Spread.ALL, preference=0)
    assert undominated(PlanningProblem(2, 2, ROOM[:2], ((ROWS, rows),))) == [[1]]
    assert undominated(PlanningProblem(4, 2, ROOM, ((ROWS, rows),))) == [[0, 1]]


def test_groups_without_latency_do_not_matter() -> None:
    other = replace(WHOLE, groups=(1,), preference=4)
    assert undominated(PlanningProblem(4, 2, ROOM, ((WHOLE, other),), np.array([0.0, 0.5]))) == [[0]]
    assert undominated(PlanningProblem(4, 2, ROOM, ((WHOLE, other),), np.array([0.5, 0.0]))) == [[0, 1]]

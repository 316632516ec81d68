"""The solver against every placement there is, on problems small enough to try them all."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from distributed.planner.instances import brute_force, model, problems, ways
from hypothesis import assume, given
from hypothesis import strategies as st

from tutorec.distributed.planner import milp
from tutorec.distributed.planner.milp import CLOSED, solve
from tutorec.distributed.planner.problem import (
    Choice,
    Placement,
    PlacementRule,
    PlanningProblem,
    broken_rules,
    cost,
    lower_bound,
)
from tutorec.distributed.planner.search import search


def choice(
    times: list[float],
    memory: list[int],
    spread: PlacementRule = PlacementRule.ANY_RANK,
    group: int | None = None,
    **words,
):
    held = np.array([[each, 0] for each in memory], np.int64)
    return Choice(
        np.array(times, np.float64), held, spread, () if group is None else (group,), **words
    )


def problem_of(
    choices, hosts: int = 1, local_size: int = 2, room: int = 100, fixed=(0.0, 0.0, 0.0)
) -> PlanningProblem:
    world_size = hosts * local_size
    capacity = np.full((world_size, 2), room, np.int64)
    return PlanningProblem(
        world_size, local_size, capacity, tuple(tuple(each) for each in choices), np.array(fixed)
    )


@st.composite
def problems_with_equals(draw: st.DrawFn) -> PlanningProblem:
    """Problems in which some tables are equal."""
    problem = draw(problems())
    first, *others = problem.choices
    equal = tuple(first if draw(st.booleans()) else choices for choices in others)
    return dataclasses.replace(problem, choices=(first, *equal))


@given(problems_with_equals())
def test_solution_is_the_best_of_all_placements(problem: PlanningProblem) -> None:
    best = brute_force(problem)
    result = solve(problem, seconds=20)
    if math.isinf(best):
        assert (result.placement, result.status, result.bound) == (None, "infeasible", math.inf)
        return
    assert result.status == "optimal"
    assert result.placement is not None
    assert broken_rules(problem, result.placement) == []
    assert result.cost == cost(problem, result.placement)
    assert result.bound <= best * (1 + 1e-9)
    assert best <= result.cost * (1 + 1e-9)
    assert result.cost <= best * (1 + 2 * CLOSED)


@given(problems_with_equals(), st.randoms(use_true_random=False))
def test_start_never_becomes_worse(problem: PlanningProblem, random: Any) -> None:
    all_ways = [
        [(number, ranks) for number, each in enumerate(choices) for ranks in ways(problem, each)]
        for choices in problem.choices
    ]
    assume(all(all_ways))
    drawn = [random.choice(of_table) for of_table in all_ways]
    start = Placement(np.array([number for number, _ in drawn]), [ranks for _, ranks in drawn])
    assume(not broken_rules(problem, start))
    result = solve(problem, seconds=20, start=start)
    assert result.status == "optimal"
    assert result.cost <= cost(problem, start)
    assert result.cost <= brute_force(problem) * (1 + 2 * CLOSED)


def test_equal_tables_are_spread_over_hosts() -> None:
    pair = [choice([2.0, 1.0], [1, 1], PlacementRule.ONE_HOST)]
    problem = problem_of([pair] * 4, hosts=2, local_size=2)
    result = solve(problem)
    assert result.placement is not None
    assert broken_rules(problem, result.placement) == []
    # Two tables on each host, 3 ms on each rank.
    assert result.cost == 3.0
    assert sorted(int(ranks[0]) // 2 for ranks in result.placement.ranks) == [0, 0, 1, 1]


def test_groups_are_paid_once() -> None:
    # Alone table 0 is best whole, and table 1 split; but each way costs 2 ms once it is used.
    whole_0, split_0 = (
        choice([3.0], [1], group=0),
        choice([3.5, 0.5], [1, 1], PlacementRule.EVERY_RANK, group=1),
    )
    whole_1, split_1 = (
        choice([9.0], [1], group=0),
        choice([2.0, 2.0], [1, 1], PlacementRule.EVERY_RANK, group=1),
    )
    problem = problem_of([[whole_0, split_0], [whole_1, split_1]], fixed=np.array([2.0, 2.0]))
    result = solve(problem)
    assert result.placement is not None
    assert result.placement.chosen.tolist() == [1, 1]
    assert result.cost == 7.5


def test_memory_that_only_just_suffices_is_used() -> None:
    # Gibibytes: a solver's tolerance of a millionth would be kilobytes.
    gib = 2**30
    sizes = [5 * gib + 1, 4 * gib, 3 * gib, 2 * gib - 1]
    tables = [[choice([1.0], [size])] for size in sizes]
    result = solve(problem_of(tables, room=7 * gib))
    assert result.placement is not None
    assert broken_rules(problem_of(tables, room=7 * gib), result.placement) == []
    # With a byte less on each rank there is no way.
    none = solve(problem_of(tables, room=7 * gib - 1))
    assert (none.placement, none.status) == (None, "infeasible")


def test_start_is_kept_where_nothing_is_better() -> None:
    problem = problem_of([[choice([2.0], [1])], [choice([2.0], [1])]])
    start = Placement(np.array([0, 0]), [np.array([1]), np.array([0])])
    assert solve(problem, start=start).placement is start


def test_no_tables_are_planned_at_once() -> None:
    result = solve(problem_of([]))
    assert (result.cost, result.bound, result.status) == (0.0, 0.0, "optimal")


def test_problem_that_is_too_large_keeps_its_start_and_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(milp, "_MOST_VARIABLES", 3)
    problem = problem_of([[choice([float(ms)], [1])] for ms in (5, 4, 3, 2)])
    start = Placement(np.zeros(4, np.int64), [np.array([0])] * 4)
    result = solve(problem, start=start)
    assert (result.placement, result.cost, result.status) == (start, 14.0, "too large")
    assert result.bound == pytest.approx(7.0)
    assert result.gap == pytest.approx(0.5)
    without = solve(problem)
    assert (without.placement, without.cost, without.gap, without.status) == (
        None,
        math.inf,
        1.0,
        "too large",
    )


def test_time_limit_leaves_the_best_so_far_with_its_gap() -> None:
    rng = np.random.default_rng(0)
    problem = problem_of(
        [[choice([float(ms)], [1])] for ms in rng.uniform(5.0, 10.0, 9)], local_size=4
    )
    ranks = [np.array([number % 4]) for number in range(9)]
    start = Placement(np.zeros(9, np.int64), ranks)
    result = solve(problem, seconds=0.0, start=start)
    assert (result.placement, result.status) == (start, "time limit")
    assert result.bound == lower_bound(problem).ms
    assert result.gap == pytest.approx(1 - result.bound / result.cost)
    assert solve(problem, seconds=0.0).status == "time limit"


def test_plan_that_no_move_of_one_table_improves_is_improved() -> None:
    # 3 + 3 | 2 + 2 + 2 is even; 3 + 2 + 2 | 3 + 2 takes three tables to exchange.
    problem = problem_of([[choice([float(ms)], [1])] for ms in (3, 3, 2, 2, 2)])
    start = Placement(np.zeros(5, np.int64), [np.array([rank]) for rank in (0, 1, 0, 0, 1)])
    assert cost(problem, start) == 7.0
    assert solve(problem, start=start).cost == 6.0


def test_one_rank_has_no_others_to_plan_anew() -> None:
    problem = problem_of([[choice([2.0], [1]), choice([1.0], [2])]], local_size=1)
    start = Placement(np.array([0]), [np.array([0])])
    assert solve(problem, start=start).cost == 1.0


@pytest.mark.parametrize("local_size", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_ten_tables_on_four_ranks_are_proven(seed: int, local_size: int) -> None:
    problem = model(seed, 10, 4, local_size, 0.6)
    start = search(problem)
    assert start is not None
    result = solve(problem, 60.0, start)
    assert result.gap < 0.02
    assert result.bound <= result.cost <= cost(problem, start) <= 1.05 * result.bound

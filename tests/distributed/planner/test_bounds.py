"""The lower bound: no placement is below it, and its reason says what keeps plans from being
faster.
"""

from __future__ import annotations

import numpy as np
import pytest
from distributed.planner.instances import brute_force, problems
from hypothesis import given

from tutorec.distributed.planner.problem import (
    Choice,
    PlacementRule,
    PlanningProblem,
    lower_bound,
)


def _whole(ms: float, size: int, *groups: int) -> Choice:
    return Choice(np.array([ms]), np.array([[size, 0]]), PlacementRule.ANY_RANK, groups)


def _rooms(*rooms: int) -> np.ndarray:
    return np.array([[room, 0] for room in rooms])


@given(problem=problems())
def test_no_placement_is_below_the_bound(problem: PlanningProblem) -> None:
    assert lower_bound(problem).ms <= brute_force(problem)


@given(problem=problems(latencies=False))
def test_no_placement_is_below_the_bound_without_latencies(problem: PlanningProblem) -> None:
    assert lower_bound(problem).ms <= brute_force(problem)


def test_the_bound_of_even_work_is_the_mean() -> None:
    bound = lower_bound(
        PlanningProblem(2, 2, _rooms(9, 9), tuple((_whole(ms, 1),) for ms in (3.0, 3.0, 2.0)))
    )
    assert bound.ms == pytest.approx(4.0)
    assert (
        str(bound)
        == "no plan is faster than 4 ms: it is the work of all tables, spread evenly over 2 ranks"
    )


def test_the_bound_of_one_long_piece_is_that_piece_and_names_the_table() -> None:
    bound = lower_bound(PlanningProblem(2, 2, _rooms(9, 9), ((_whole(1.0, 1),), (_whole(6.0, 1),))))
    assert bound.ms == pytest.approx(6.0)
    assert "table 1" in bound.reason


def test_the_bound_counts_memory_that_forces_slow_choices() -> None:
    """Four tables of 1 ms and 10 bytes, or 9 ms and 1 byte, in 22 bytes: two must be slow, 20 ms on
    one rank.
    """
    tables = tuple((_whole(1.0, 10), _whole(9.0, 1)) for _ in range(4))
    bound = lower_bound(PlanningProblem(1, 1, _rooms(22), tables))
    assert bound.ms == pytest.approx(20.0)
    assert bound.reason.endswith("in the memory that they have")


def test_the_bound_counts_latencies_of_groups_that_cannot_be_avoided() -> None:
    """Either both groups, 1 + 1 ms and their latencies, or the first alone: 1 + 4 + 0.5 ms."""
    tables = ((_whole(1.0, 1, 0),), (_whole(1.0, 1, 1), _whole(4.0, 1, 0)))
    for latency, ms in ((1.0, 3.5), (9.0, 5.5)):
        bound = lower_bound(PlanningProblem(1, 1, _rooms(9), tables, np.array([0.5, latency])))
        assert bound.ms == pytest.approx(ms)


def test_the_bound_is_infinite_where_memory_is_short() -> None:
    bound = lower_bound(
        PlanningProblem(2, 2, _rooms(10, 10), tuple((_whole(1.0, 7),) for _ in range(3)))
    )
    assert bound.ms == np.inf
    assert bound.reason == "the tables need more memory than the ranks have"


def test_the_bound_is_infinite_where_a_piece_fits_on_no_rank() -> None:
    bound = lower_bound(
        PlanningProblem(2, 2, _rooms(10, 10), ((_whole(1.0, 1),), (_whole(1.0, 11),)))
    )
    assert bound.ms == np.inf
    assert bound.reason == "the tables need more memory than the ranks have"


@pytest.mark.parametrize("seed", range(20))
def test_no_placement_is_below_the_bound_where_the_last_byte_decides(seed: int) -> None:
    """A byte may cost tens of milliseconds here, and what gigabytes cost is so much that a sum's
    rounding counts.
    """
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 40, 3) * 10**9
    tables = tuple(
        tuple(
            _whole(float(draw.uniform(1, 100)), int(size + draw.integers(0, 3))) for _ in range(3)
        )
        for size in sizes
    )
    room = sum(int(choices[draw.integers(3)].memory[0, 0]) for choices in tables)
    problem = PlanningProblem(1, 1, _rooms(room), tables)
    assert lower_bound(problem).ms <= brute_force(problem)


def test_no_tables_take_no_time() -> None:
    assert lower_bound(PlanningProblem(2, 2, _rooms(1, 1), ())).ms == 0.0

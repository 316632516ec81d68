"""The search: what it returns fits and is legal, is near to the best, and does not depend on the
order of anything.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from distributed.planner.instances import FIXED, brute_force, model, problems
from hypothesis import given
from hypothesis import strategies as st

from tutorec.distributed.planner.problem import (
    Choice,
    Placement,
    PlacementRule,
    PlanningProblem,
    broken_rules,
    cost,
    lower_bound,
    rank_memory,
    rank_time,
)
from tutorec.distributed.planner.search import search, with_preferred_groups


def _whole(ms: float, size: int, allowed: list[bool] | None = None) -> Choice:
    return Choice(
        np.array([ms]),
        np.array([[0, size]]),
        PlacementRule.ANY_RANK,
        allowed=None if allowed is None else np.array(allowed),
    )


def _rooms(*rooms: int) -> np.ndarray:
    return np.array([[0, room] for room in rooms])


def _found(problem: PlanningProblem) -> Placement:
    found = search(problem)
    assert found is not None, "nothing found where there is room"
    return found


@given(problem=problems())
def test_a_placement_is_legal_fits_and_is_near_the_best(problem: PlanningProblem) -> None:
    best = brute_force(problem)
    found = search(problem)
    if found is None:
        assert best == np.inf
        return
    assert broken_rules(problem, found) == []
    assert cost(problem, found) <= 1.5 * best + 1e-9


@given(problem=problems())
def test_what_cannot_fit_is_not_found_and_what_fits_is(problem: PlanningProblem) -> None:
    found = search(problem)
    assert (found is None) == (brute_force(problem) == np.inf)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_tables_does_not_matter(seed: int) -> None:
    problem = model(seed, 10, 8, 4, 0.6)
    order = np.random.default_rng(seed).permutation(len(problem.choices)).tolist()
    shuffled = replace(problem, choices=tuple(problem.choices[table] for table in order))
    first, second = _found(problem), _found(shuffled)
    assert cost(problem, first) == pytest.approx(cost(shuffled, second), rel=1e-12)
    assert [first.chosen[table] for table in order] == second.chosen.tolist()


@given(problem=problems(), data=st.data())
def test_the_order_of_hosts_does_not_matter(problem: PlanningProblem, data: st.DataObject) -> None:
    hosts = np.arange(problem.world_size).reshape(-1, problem.local_size)
    ranks = hosts[data.draw(st.permutations(range(len(hosts))))].ravel()

    def moved(choice: Choice) -> Choice:
        allowed = None if choice.allowed is None else choice.allowed[ranks]
        if choice.rule is PlacementRule.EVERY_RANK:
            return replace(
                choice, time=choice.time[ranks], memory=choice.memory[ranks], allowed=allowed
            )
        return replace(choice, allowed=allowed)

    choices = tuple(tuple(moved(choice) for choice in of_table) for of_table in problem.choices)
    other = replace(problem, capacity=problem.capacity[ranks], choices=choices)
    first, second = search(problem), search(other)
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert cost(problem, first) == pytest.approx(cost(other, second), rel=1e-9)


def test_a_table_whose_only_usable_choice_is_in_a_free_group_is_placed() -> None:
    free = np.zeros((1, 2), dtype=np.int64)
    choices = (
        Choice(np.zeros(2), np.array([[3, 0], [3, 0]]), PlacementRule.ANY_RANK, (0,)),
        Choice(np.zeros(1), free, PlacementRule.ANY_RANK, (0,), allowed=np.array([False])),
        Choice(np.zeros(1), free, PlacementRule.ANY_RANK, (1,), allowed=np.array([True])),
    )
    problem = PlanningProblem(1, 1, np.array([[4, 0]]), (choices,), np.array([0.0, 0.0, 0.5]))
    assert _found(problem).chosen.tolist() == [2]


@pytest.mark.parametrize("instance", FIXED)
def test_fixed_instances_are_within_a_fifth_of_the_bound(
    instance: tuple[int, int, int, int, float],
) -> None:
    problem = model(*instance)
    found = _found(problem)
    assert broken_rules(problem, found) == []
    assert cost(problem, found) <= 1.2 * lower_bound(problem).ms


@pytest.mark.slow
@pytest.mark.parametrize(("tables", "world_size"), [(60, 8), (120, 64)])
def test_where_memory_is_loose_the_bound_is_near(tables: int, world_size: int) -> None:
    problem = model(0, tables, world_size, 8, 0.1)
    assert cost(problem, _found(problem)) <= 1.1 * lower_bound(problem).ms


def test_equal_tables_go_to_ranks_in_their_order() -> None:
    tables = tuple((_whole(2.0, size),) for size in (9, 9, 1, 1))
    found = _found(PlanningProblem(2, 2, _rooms(10, 10), tables))
    assert [ranks.tolist() for ranks in found.ranks] == [[0], [1], [0], [1]]


def test_equal_tables_in_rows_of_a_host_go_to_hosts_in_their_order() -> None:
    def rows(size: int) -> tuple[Choice, ...]:
        return (
            Choice(np.array([1.0, 1.0]), np.array([[0, size]] * 2), PlacementRule.ROWS_ON_HOST),
        )

    found = _found(PlanningProblem(4, 2, _rooms(9, 9, 9, 9), tuple(map(rows, (7, 7, 2, 2)))))
    assert [ranks.tolist() for ranks in found.ranks] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_of_equal_ranks_the_one_of_the_next_host_comes_first() -> None:
    found = _found(
        PlanningProblem(4, 2, _rooms(9, 9, 9, 9), tuple((_whole(1.0, 1),) for _ in range(4)))
    )
    assert [ranks.tolist() for ranks in found.ranks] == [[0], [2], [1], [3]]


def test_of_choices_that_cost_the_same_the_preferred_one_is_taken() -> None:
    tables = (tuple(replace(_whole(2.0, 1), preference=preference) for preference in (2, 0, 1)),)
    assert _found(PlanningProblem(2, 2, _rooms(9, 9), tables)).chosen.tolist() == [1]


def test_a_choice_with_less_work_is_taken_where_the_slowest_rank_stays_as_it_is() -> None:
    large = (_whole(10.0, 1),)
    small = (_whole(4.0, 1), _whole(1.0, 1))
    found = _found(PlanningProblem(2, 2, _rooms(9, 9), (large, small)))
    assert found.chosen.tolist() == [0, 1]


def test_a_swap_is_found_that_no_single_move_gives() -> None:
    """3 3 2 2 2 on two ranks: the longest first gives 7 and 5, two threes together 6 and 6."""
    tables = tuple((_whole(ms, 1),) for ms in (3.0, 3.0, 2.0, 2.0, 2.0))
    problem = PlanningProblem(2, 2, _rooms(9, 9), tables)
    assert rank_time(problem, _found(problem)).tolist() == [6.0, 6.0]


def test_tables_that_fit_in_one_way_only_are_found() -> None:
    """Ten tables that fill two ranks to the last byte: 7+6+5+4+3 = 25 on both."""
    sizes = (7, 7, 6, 6, 5, 5, 4, 4, 3, 3)
    problem = PlanningProblem(
        2, 2, _rooms(25, 25), tuple((_whole(float(i), s),) for i, s in enumerate(sizes))
    )
    assert rank_memory(problem, _found(problem))[:, 1].tolist() == [25, 25]


def test_a_slow_choice_is_taken_where_memory_is_short() -> None:
    tables = tuple((_whole(1.0, 8), _whole(5.0, 2)) for _ in range(3))
    problem = PlanningProblem(1, 1, _rooms(12), tables)
    found = _found(problem)
    assert sorted(found.chosen.tolist()) == [0, 1, 1]
    assert cost(problem, found) == 11.0


def test_pinned_tables_stay_where_they_may_lie() -> None:
    tables = ((_whole(5.0, 1, [False, True]),), (_whole(4.0, 1, [False, True]),), (_whole(1.0, 1),))
    found = _found(PlanningProblem(2, 2, _rooms(9, 9), tables))
    assert [ranks.tolist() for ranks in found.ranks] == [[1], [1], [0]]


def test_a_second_group_is_opened_only_where_it_is_worth_its_latency() -> None:
    """Rows take 1 ms off the slowest rank; a second group of exchanges costs more than that, or
    less.
    """
    rows = Choice(
        np.array([1.0, 1.0]), np.array([[0, 1]] * 2), PlacementRule.EVERY_RANK, (1,), preference=1
    )
    whole = replace(_whole(2.0, 1), groups=(0,))
    only_whole = replace(_whole(3.0, 1), groups=(0,))
    tables = ((only_whole,), (only_whole,), (whole, rows))
    for latency, used in ((2.0, 0), (0.5, 1)):
        problem = PlanningProblem(2, 2, _rooms(9, 9), tables, np.array([0.5, latency]))
        assert _found(problem).chosen.tolist()[2] == used


def test_what_fits_nowhere_is_none_and_no_tables_are_an_empty_answer() -> None:
    assert search(PlanningProblem(2, 2, _rooms(5, 5), ((_whole(1.0, 6),),))) is None
    assert (
        search(PlanningProblem(2, 2, _rooms(5, 5), tuple((_whole(1.0, 4),) for _ in range(3))))
        is None
    )
    assert _found(PlanningProblem(2, 2, _rooms(5, 5), ())).ranks == []


def test_a_limit_of_time_still_gives_a_plan() -> None:
    problem = model(0, 30, 8, 4, 0.5)
    found = search(problem, seconds=0.0)
    assert found is not None and broken_rules(problem, found) == []


def test_the_answer_is_the_same_every_time() -> None:
    problem = model(3, 12, 8, 4, 0.7)
    first, second = _found(problem), _found(problem)
    assert first.chosen.tolist() == second.chosen.tolist()
    assert [ranks.tolist() for ranks in first.ranks] == [ranks.tolist() for ranks in second.ranks]


def test_a_piece_as_long_as_the_slowest_rank_is_cut_where_others_have_to_make_room() -> None:
    """One table takes 10 ms, or 6 ms on both ranks, which two of 3 ms hold already: 10 and 6, or 9
    and 9.
    """
    rows = Choice(
        np.array([6.0, 6.0]), np.array([[0, 1]] * 2), PlacementRule.EVERY_RANK, preference=1
    )
    tables = (_whole(10.0, 1), rows), (_whole(3.0, 1),), (_whole(3.0, 1),)
    found = _found(PlanningProblem(2, 2, _rooms(9, 9), tables))
    assert found.chosen.tolist() == [1, 0, 0]


def test_no_overfull_rank_is_left_of_a_search_that_lets_ranks_be_overfull() -> None:
    """Only one of the ranks has room for the table in both kinds of memory, and no plan takes
    longer than another.
    """
    table = (Choice(np.zeros(1), np.array([[9, 3]]), PlacementRule.ANY_RANK),)
    rows = Choice(
        np.zeros(4), np.array([[0, 0], [5, 0], [5, 0], [3, 0]]), PlacementRule.ROW_BLOCKS_ON_HOSTS
    )
    halves = (Choice(np.zeros(2), np.array([[6, 0], [6, 0]]), PlacementRule.ANY_RANK),)
    capacity = np.array([[4, 0], [16, 0], [9, 100], [4, 0]])
    problem = PlanningProblem(4, 2, capacity, ((*table, rows), halves))
    assert broken_rules(problem, _found(problem)) == []


def test_equal_shards_take_the_preferred_group_and_dearer_ones_do_not():
    def table(*preferences: int) -> tuple[Choice, ...]:
        time, memory = np.array([1.0, 1.0]), np.zeros((2, 2), int)
        spreads = (PlacementRule.EVERY_RANK, PlacementRule.ROWS_ON_HOST)
        return tuple(
            Choice(time, memory, spread, groups=(group,), preference=preference)
            for group, (spread, preference) in enumerate(zip(spreads, preferences, strict=True))
        )

    taken = Placement(np.array([1, 1]), [np.arange(2), np.arange(2)])
    for fixed, expected in (([0.5, 0.5], [0, 0]), ([0.6, 0.5], [1, 1])):
        problem = PlanningProblem(
            2, 2, np.zeros((2, 2), int), (table(1, 3), table(1, 3)), np.array(fixed)
        )
        assert with_preferred_groups(problem, taken).chosen.tolist() == expected

"""Patterns and bases: each is held to counting out all that there is, and together they prove what trying all finds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from distributed.planner.instances import FIXED, brute_force, model, problems, ways
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import linprog

from tutorec.distributed.planner import patterns_prices, patterns_search
from tutorec.distributed.planner.optimal import CLOSED
from tutorec.distributed.planner.patterns import Holdings, kinds_of_pieces, worthiest
from tutorec.distributed.planner.patterns_bases import REST, bases
from tutorec.distributed.planner.patterns_prices import Basis, Columns
from tutorec.distributed.planner.patterns_proof import Proof
from tutorec.distributed.planner.patterns_search import Caller, PatternSearch
from tutorec.distributed.planner.problem import (
    Choice,
    Placement,
    PlanningProblem,
    Spread,
    broken_rules,
    cost,
)
from tutorec.distributed.planner.search import search

FOREVER = 1e9


@pytest.fixture(autouse=True, scope="module")
def unlimited_seconds() -> Iterator[None]:
    """Solvers stop at a number of nodes, never at a time: answers do not depend on how fast the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FIRST", "LATER"):
            patch.setattr(patterns_search, name, (FOREVER, getattr(patterns_search, name)[1]))
        yield


@st.composite
def placements(draw: st.DrawFn) -> tuple[PlanningProblem, Placement]:
    """A problem and one of the placements that fit."""
    problem = draw(problems(latencies=False))
    chosen, ranks = [], []
    for choices in problem.choices:
        every = [(number, laid) for number, each in enumerate(choices) for laid in ways(problem, each)]
        assume(every)
        number, laid = every[draw(st.integers(0, len(every) - 1))]
        chosen.append(number)
        ranks.append(laid)
    placement = Placement(np.array(chosen), ranks)
    assume(not broken_rules(problem, placement))
    return problem, placement


def held(choice: Choice, ranks: np.ndarray, rank: int) -> tuple[int, ...]:
    """How many pieces of each kind a rank holds."""
    return tuple(int((ranks[pieces] == rank).sum()) for pieces in kinds_of_pieces(choice))


@given(placements())
def test_every_placement_is_a_base_and_patterns_that_fit_beside_it(drawn: tuple[PlanningProblem, Placement]) -> None:
    problem, placement = drawn
    ms = cost(problem, placement)
    holdings, found = Holdings.of(problem, ms), bases(problem, ms)
    assert holdings is not None and found is not None
    taken = placement.taken(problem)
    everywhere = np.array([choice.spread is Spread.ALL for choice in taken])
    own = np.where(everywhere, placement.chosen, REST)
    # of bases that differ in equal tables only there is one
    same = [tuple(sorted(row.tolist())) for row in found.chosen]
    assert tuple(sorted(own.tolist())) in same
    base = found.sizes[same.index(tuple(sorted(own.tolist())))]
    shares = np.zeros(len(taken))
    for rank in range(problem.world_size):
        sizes = base.copy()
        for table in np.flatnonzero(~everywhere).tolist():
            counts = held(taken[table], placement.ranks[table], rank)
            if any(counts):
                numbers = holdings.choice[table].tolist()
                way = next(
                    way
                    for way, (number, each) in enumerate(zip(numbers, holdings.counts[table], strict=False))
                    if number == placement.chosen[table] and each == counts
                )
                sizes += holdings.sizes[table, way]
                shares[table] += holdings.share[table, way]
        assert (sizes <= np.append(ms, np.ones(len(base) - 1)) * (1 + 1e-9)).all()
    assert shares[~everywhere] == pytest.approx(1.0)


@given(problems(latencies=False), st.integers(1, 20), st.data())
def test_worthiest_pattern_is_the_best_of_all(problem: PlanningProblem, ms: int, data: st.DataObject) -> None:
    holdings = Holdings.of(problem, ms / 2)
    assert holdings is not None
    prices = np.array([data.draw(st.integers(0, 4)) for _ in problem.choices]) / 2
    room = np.append(ms / 2, np.full(holdings.sizes.shape[2] - 1, data.draw(st.sampled_from([0.3, 1.0]))))
    tables = range(len(prices))
    worth = [
        sum(float(prices[table] * holdings.share[table, way]) for table, way in zip(tables, some, strict=True))
        for some in product(*(np.flatnonzero(real).tolist() for real in holdings.real))
        if (sum(holdings.sizes[table, way] for table, way in zip(tables, some, strict=True)) <= room + 1e-9).all()
    ]
    above = data.draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0]))
    for some in (holdings, holdings.undominated()):
        found = worthiest(some, room, prices, above)
        assert found.all_seen
        assert found.worth == pytest.approx(max(above, *worth))
        assert (len(found.ways) > 0) == (max(worth) > above)
    few = worthiest(holdings, room, prices, above, states=1)
    assert few.worth >= max(worth) - 1e-9


@given(st.integers(0, 10**6))
def test_prices_are_the_best(seed: int) -> None:
    draw = np.random.default_rng(seed)
    shares = np.vstack([np.eye(5), draw.choice([0.0, 0.25, 0.5, 1.0], (20, 5))])
    sets = np.vstack([np.ones(5), draw.integers(0, 2, (3, 5))])
    columns = Columns(shares, np.ones((25, 1)), sets, np.arange(4))
    basis = Basis(np.ones(5), np.ones((5, 1)), sets[0], 0)
    fewest = basis.improve(columns, enough=-1.0)
    prices, value = basis.prices()
    assert value == pytest.approx(fewest)
    assert (shares @ prices).max() <= 1 + 1e-6
    assert (sets @ prices).min() >= fewest - 1e-6
    # f is the last variable
    matrix = np.vstack([np.column_stack([shares, np.zeros(25)]), np.column_stack([-sets, np.ones(4)])])
    best = linprog(np.append(np.zeros(5), -1.0), matrix, np.append(np.ones(25), np.zeros(4)))
    assert fewest == pytest.approx(-best.fun, abs=1e-6)


def test_prices_go_on_from_a_basis_whose_columns_are_gone() -> None:
    shares = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    columns = Columns(shares, np.array([[1.0], [1.0], [2.0]]), np.ones((1, 2)), np.array([7]))
    basis = Basis(np.ones(2), np.ones((2, 1)), np.ones(2), 7)
    assert basis.improve(columns, enough=0.0) == pytest.approx(1.0)
    moved = basis.moved(np.array([1.5]), np.array([7]))
    assert moved is not None
    smaller = Columns(shares[:2], columns.sizes[:2], columns.sets, columns.names)
    assert moved.improve(smaller, enough=0.0) == pytest.approx(2.0)
    assert basis.prices()[1] == pytest.approx(1.0)


class Recorder:
    """Keeps the best plan; what is left to a program it finds by trying all."""

    def __init__(self, problem: PlanningProblem, start: float, placement: Placement | None = None) -> None:
        self.problem, self.cost, self.placement, self.asked = problem, start, placement, 0

    def caller(self, seconds: float = FOREVER) -> Caller:
        return Caller(lambda: self.cost * (1 - 0.99 * CLOSED), self.take, self.exact, lambda: seconds)

    def take(self, placement: Placement) -> bool:
        if broken_rules(self.problem, placement) or cost(self.problem, placement) >= self.cost:
            return False
        self.cost, self.placement = cost(self.problem, placement), placement
        return True

    def exact(self, numbers: list[list[int]]) -> float:
        self.asked += 1
        assert len(self.problem.choices) < 8, "too many plans to try them all"
        some = tuple(
            tuple(choices[number] for number in left)
            for choices, left in zip(self.problem.choices, numbers, strict=True)
        )
        problem = self.problem
        best = brute_force(
            PlanningProblem(problem.world_size, problem.local_size, problem.capacity, some, problem.fixed)
        )
        self.cost = min(self.cost, best)
        return best


@given(problems())
def test_search_of_all_patterns_finds_the_best_plan_and_proves_it(problem: PlanningProblem) -> None:
    best = brute_force(problem)
    recorder = Recorder(problem, 100.0)
    bound = PatternSearch(problem, recorder.caller()).run()
    if np.isinf(best):
        assert recorder.placement is None
        return
    assert 0 < bound <= best * (1 + 1e-9) or best == 0
    assert best <= recorder.cost * (1 + 1e-9)
    assert recorder.cost <= best * (1 + CLOSED) + 1e-12


@given(problems(), st.floats(0.9, 1.1))
def test_bound_of_any_limit_is_below_the_best_plan(problem: PlanningProblem, part: float) -> None:
    best = brute_force(problem)
    assume(0 < best < np.inf)
    recorder = Recorder(problem, best * part)
    assert PatternSearch(problem, recorder.caller()).run() <= best * (1 + 1e-9)


@pytest.mark.parametrize("instance", FIXED[:5])
def test_fixed_instances_are_closed(instance: tuple[int, int, int, int, float]) -> None:
    problem = model(*instance)
    start = search(problem)
    assert start is not None
    recorder = Recorder(problem, cost(problem, start), start)
    bound = PatternSearch(problem, recorder.caller()).run()
    assert bound >= recorder.cost * (1 - CLOSED)
    assert bound <= recorder.cost <= cost(problem, start) <= 1.05 * bound


def test_search_goes_on_where_time_was_over() -> None:
    problem = model(*FIXED[3])
    start = search(problem)
    assert start is not None
    recorder = Recorder(problem, cost(problem, start), start)
    left = [5.0, 5.0, 0.0]
    caller = Caller(recorder.caller().limit, recorder.take, recorder.exact, lambda: left.pop(0) if left else FOREVER)
    searching = PatternSearch(problem, caller)
    assert searching.run() == 0.0
    assert searching.run() >= recorder.cost * (1 - CLOSED)


def test_what_is_too_large_for_patterns_has_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = model(*FIXED[0])
    monkeypatch.setattr(patterns_search, "MOST_TABLES", 7)
    assert PatternSearch(problem, Recorder(problem, 100.0).caller()).run() == 0.0
    monkeypatch.undo()
    for limit in ("patterns_bases.MOST_BASES", "patterns.MOST_WAYS"):
        monkeypatch.setattr(f"tutorec.distributed.planner.{limit}", 0)
        assert PatternSearch(problem, Recorder(problem, 100.0).caller()).run() == 0.0
        monkeypatch.undo()


def pieces(times: list[float], memory: list[int], spread: Spread = Spread.ANY) -> Choice:
    return Choice(np.array(times), np.array([[each, 0] for each in memory], np.int64), spread)


def whole_search(choices: list[list[Choice]], room: int, local_size: int) -> tuple[float, Recorder]:
    """The bound from patterns alone, for two ranks."""
    capacity = np.array([[room, 0]] * 2)
    recorder = Recorder(PlanningProblem(2, local_size, capacity, tuple(tuple(each) for each in choices)), 100.0)
    return PatternSearch(recorder.problem, recorder.caller()).run(), recorder


def test_blocks_that_differ_may_lie_on_different_hosts() -> None:
    bound, recorder = whole_search([[pieces([3.0, 2.0], [1, 1], Spread.HOSTS_ROWS)]], room=9, local_size=1)
    assert recorder.cost == 3.0
    assert 3.0 * (1 - CLOSED) <= bound <= 3.0


def test_tables_that_can_only_lie_everywhere_have_no_patterns() -> None:
    rows = [pieces([time, time], [1, 1], Spread.ALL) for time in (0.25, 0.5)]
    bound, recorder = whole_search([rows, rows], room=4, local_size=2)
    assert recorder.cost == 0.5
    assert 0.5 * (1 - CLOSED) <= bound <= 0.5


def test_last_byte_beside_a_base_is_room() -> None:
    # 80 GiB less 7 bytes lie everywhere, and 7 bytes of each rank are left for a table each
    room = 80 * 2**30
    rows = pieces([1.0, 1.0], [room - 7] * 2, Spread.ALL)
    bound, recorder = whole_search([[rows], *([pieces([1.0], [7])] for _ in range(2))], room, local_size=2)
    assert recorder.cost == 2.0
    assert 2.0 * (1 - CLOSED) <= bound <= 2.0


def test_prices_of_a_spoilt_basis_refute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    basis = Basis(np.ones(2), np.ones((2, 1)), np.ones(2), 7)
    basis.cost = np.array([1.0, np.nan, 0.0])
    prices, ranks = basis.prices()
    assert (prices.tolist(), ranks) == ([0.0, 0.0], 0.0)

    def singular(_: np.ndarray) -> np.ndarray:
        raise np.linalg.LinAlgError

    shares = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    columns = Columns(shares, np.ones((3, 1)), np.ones((1, 2)), np.array([7]))
    going_on = Basis(np.ones(2), np.ones((2, 1)), np.ones(2), 7)
    monkeypatch.setattr(patterns_prices, "_FRESH_AFTER", 1)
    monkeypatch.setattr(np.linalg, "inv", singular)
    assert going_on.improve(columns, enough=0.0) == pytest.approx(1.0)
    assert going_on.moved(np.ones(1), np.array([7])) is None


def test_table_with_very_many_choices_is_left_to_others() -> None:
    ways_ = tuple(pieces([2.0 + number, 2.0 + number], [1, 1], Spread.ALL) for number in range(128))
    problem = PlanningProblem(2, 2, np.ones((2, 2), np.int64), (ways_,))
    assert bases(problem, 50.0) is None
    assert PatternSearch(problem, Recorder(problem, 50.0).caller()).run() == 0.0


def test_choice_without_pieces_is_left_to_others() -> None:
    nothing = Choice(np.zeros(0), np.zeros((0, 2), np.int64), Spread.ANY)
    problem = PlanningProblem(1, 1, np.array([[1, 1]]), ((nothing,),))
    assert Holdings.of(problem, 1.0) is None


def test_bases_that_take_too_long_under_a_lower_limit_are_dropped() -> None:
    rows = Choice(np.array([2.0, 2.0]), np.zeros((2, 2), np.int64), Spread.ALL)
    problem = PlanningProblem(2, 2, np.ones((2, 2), np.int64), ((rows,),))
    found, holdings = bases(problem, 3.0), Holdings.of(problem, 3.0)
    assert found is not None and holdings is not None
    proof = Proof(2, found, holdings, 3.0, lambda: False)
    assert proof.again(0) is not None
    proof.ms = 1.5
    assert proof.again(0) is None
    assert list(proof.cases()) == []
    assert proof.complete

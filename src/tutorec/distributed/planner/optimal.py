"""The best plan and the proof: HiGHS, given the planning problem in three forms.

1. **Parts.** A few ranks are planned anew while all others keep what they have: small programs that find faster plans,
   and prove nothing.
2. **Patterns** (`patterns_search`). What lies on all ranks alike is counted out, and what single ranks hold beside it
   is priced. Prices refute nearly all of it, and the solver is asked about the rest. It ends with the best plan and the
   proof, unless tables or ways to cut them are too many.
3. **The whole program** (`milp_model`), which knows of everything: ranks that differ, tables that are pinned, hosts.
   Plans of many tables differ by so little that the solver gets lost among them, but it has a bound at any time.

They take turns until the plan is as good as the bound, or time is over.

Corresponds to nothing in TorchRec, whose planner does not know how far its plans are from the best.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tutorec.distributed.planner.bounds import lower_bound
from tutorec.distributed.planner.milp_model import MilpModel
from tutorec.distributed.planner.patterns_bases import chosen_of
from tutorec.distributed.planner.patterns_search import Caller, PatternSearch
from tutorec.distributed.planner.problem import (
    Ints,
    Placement,
    PlanningProblem,
    broken_rules,
    cost,
    rank_memory,
    rank_time,
)

CLOSED = 1e-3
"""A plan that is slower than the bound by at most this part counts as the best: no estimate is that exact."""

MOST_VARIABLES = 60_000
"""A program with more is not given to the solver: it would not come back from reading it in the time it has."""

PART_SECONDS = 1.0
"""The longest that the solver may think about a few ranks."""

BASE_SECONDS = 10.0
"""The longest that the solver may think about what lies on single ranks beside one base."""

TICK_SECONDS = 0.25
"""How often a caller hears of the time that is over."""

Progress = Callable[[float], None]


@dataclass(frozen=True, eq=False)
class MilpResult:
    """What the solver found.

    Args:
        placement: The best placement; None where none was found.
        cost: Its ms; infinite where there is none.
        bound: No placement that fits takes fewer ms; infinite where it is known that none fits.
        gap: ``(cost - bound) / cost``; 0 where it is known that none fits.
        status: ``"optimal"``: the gap is at most `CLOSED`; ``"time limit"``; ``"infeasible"``; ``"too large"``.
    """

    placement: Placement | None
    cost: float
    bound: float
    gap: float
    status: str


def solve(
    problem: PlanningProblem, seconds: float = 60.0, start: Placement | None = None, progress: Progress | None = None
) -> MilpResult:
    """Look for the best placement, and for a bound that proves it.

    Args:
        problem: What is to be planned.
        seconds: Stop after about this long.
        start: A placement that fits, to be improved.
        progress: Called now and then, from a thread of its own, with the share of the time that is over.

    Returns:
        The best placement that was found, `start` where nothing was better, and how far it can be from the best.

    Raises:
        ValueError: `start` breaks a rule.

    Example:
        Tables of 3, 3 and 2 ms on two ranks: two must share one. The first may be split instead, in 2 ms on each:

        >>> from tutorec.distributed.planner.problem import Choice, Spread
        >>> def whole(ms):
        ...     return Choice(np.array([ms]), np.array([[0, 0]]), Spread.ANY)
        >>> rows = Choice(np.array([2.0, 2.0]), np.zeros((2, 2), int), Spread.ALL)
        >>> tables = (whole(3.0), rows), (whole(3.0),), (whole(2.0),)
        >>> problem = PlanningProblem(2, 2, np.zeros((2, 2), int), tables)
        >>> result = solve(problem)
        >>> result.cost, result.status
        (5.0, 'optimal')
    """
    if start is not None and (broken := broken_rules(problem, start)):
        raise ValueError(f"the placement to start from breaks {len(broken)} rules, the first: {broken[0]}")
    if not problem.choices:
        return MilpResult(Placement(np.zeros(0, np.int64), []), 0.0, 0.0, 0.0, "optimal")
    with _Clock(seconds, progress) as clock:
        return _Solver(problem, start, clock).run()


class _Clock:
    """The time that is left; as a context, it tells of it while the solver does not come back.

    Args:
        seconds: All of it.
        progress: Called with the share that is over, from a thread of its own.
    """

    def __init__(self, seconds: float, progress: Progress | None) -> None:
        self._begin, self._seconds, self._progress = time.perf_counter(), seconds, progress
        self._over = threading.Event()

    def __enter__(self) -> _Clock:
        if self._progress is not None:
            threading.Thread(target=self._tell, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _tell(self) -> None:
        assert self._progress is not None, "there is somebody to tell"
        while not self._over.wait(TICK_SECONDS) and self.left() > 0:
            self._progress(1.0 - self.left() / self._seconds)

    def left(self) -> float:
        """Seconds."""
        return self._seconds - (time.perf_counter() - self._begin)


class _Solver:
    """The best placement and the best bound so far."""

    def __init__(self, problem: PlanningProblem, start: Placement | None, clock: _Clock) -> None:
        self.problem, self.clock = problem, clock
        self.placement = start
        self.cost = cost(problem, start) if start is not None else float("inf")
        self.bound = lower_bound(problem).ms
        self.rng = np.random.default_rng(0)  # the same parts in every run
        self.part_tables = 8.0
        self.patterns: PatternSearch | None = None
        self.patterns_until = 0.0

    def run(self) -> MilpResult:
        """Look for plans and bounds in turn; where the program is too large, for plans alone."""
        if np.isinf(self.bound):
            return MilpResult(None, float("inf"), float("inf"), 0.0, "infeasible")
        if too_large := self._is_too_large():
            self._parts(self.clock.left(), 48)
        else:
            self._search()
        if self.placement is None:
            infeasible = np.isinf(self.bound)
            status = "infeasible" if infeasible else "too large" if too_large else "time limit"
            return MilpResult(None, float("inf"), self.bound, 0.0 if infeasible else 1.0, status)
        gap = max(0.0, self.cost - self.bound) / self.cost if self.cost > 0 else 0.0
        status = "optimal" if self.closed() else "too large" if too_large else "time limit"
        return MilpResult(self.placement, self.cost, min(self.bound, self.cost), gap, status)

    def _search(self) -> None:
        """Parts first, as they are quick; base by base; all of it for what these cannot see; and again."""
        steps: tuple[tuple[float, Callable[[float], None]], ...] = (
            (0.15, lambda seconds: self._parts(seconds, 12)),
            (0.5, self._patterns),
            (0.3, self._whole),
            (0.8, self._patterns),
            (0.5, lambda seconds: self._parts(seconds, 36)),
            (1.0, self._whole),
        )
        for share, step in steps:
            if not self.closed() and self.clock.left() > 0:
                step(self.clock.left() * share)

    def _below(self) -> float | None:
        """Milliseconds from which on plans are of no interest to the program."""
        return self.cost * (1.0 - CLOSED / 2) if self.placement is not None else None

    def _is_too_large(self) -> bool:
        model = MilpModel(self.problem, self._below())
        return model.possible and model.size > MOST_VARIABLES

    def closed(self) -> bool:
        """Whether there is nothing left to look for."""
        return self.bound >= self.cost * (1.0 - CLOSED) or np.isinf(self.bound)

    def _whole(self, seconds: float) -> None:
        """Solve the whole program for some time."""
        self.bound = max(self.bound, self._program([list(range(len(each))) for each in self.problem.choices], seconds))

    def _program(self, numbers: list[list[int]], seconds: float) -> float:
        """Solve the program of plans with choices of these numbers, for some time; a bound for such plans."""
        problem = replace(self.problem, choices=chosen_of(self.problem, numbers))
        below = self._below()
        bound, squeeze = 0.0, 0.0
        for _ in range(2):
            model = MilpModel(problem, below, squeeze)
            outcome = _ask(model, seconds, 0.49 * CLOSED) if model.possible else _NOTHING
            proven = below if outcome.impossible else outcome.bound
            if squeeze == 0.0:  # with less memory than there is, a bound would be none
                bound = float("inf") if proven is None else proven
            found = outcome.placement
            if found is None:
                break
            chosen = [numbers[table][number] for table, number in enumerate(found.chosen.tolist())]
            if self._take(Placement(np.array(chosen, np.int64), found.ranks)):
                break
            squeeze = 1e-5
        return bound

    def _patterns(self, seconds: float) -> None:
        """Look for plans below the limit base by base, for some time."""
        if self.placement is None:
            return
        self.patterns_until = self.clock.left() - seconds
        if self.patterns is None:
            caller = Caller(
                limit=lambda: self.cost * (1.0 - 0.99 * CLOSED),
                take=self._take_better,
                exact=lambda numbers: self._program(numbers, min(BASE_SECONDS, self._patterns_left())),
                left=self._patterns_left,
            )
            self.patterns = PatternSearch(self.problem, caller)
        self.bound = max(self.bound, self.patterns.run())

    def _patterns_left(self) -> float:
        return self.clock.left() - self.patterns_until

    def _take_better(self, placement: Placement) -> bool:
        """Keep a placement that is better; False where it is not, or does not fit."""
        before = self.cost
        return self._take(placement) and self.cost < before

    def _take(self, placement: Placement) -> bool:
        """Keep a placement that is better; False where it does not fit, by a rounding error of the solver."""
        if broken_rules(self.problem, placement):
            return False
        found = cost(self.problem, placement)
        if found < self.cost:
            self.placement, self.cost = placement, found
        return True

    # Parts of the ranks

    def _parts(self, seconds: float, patience: int) -> None:
        """Plan the slowest rank and others anew: more tables where that does not help, fewer where it is slow."""
        failures, until = 0, self.clock.left() - seconds
        while self.placement is not None and not self.closed() and self.clock.left() > until and failures < patience:
            begin = self.clock.left()
            better = self._part(self._some_tables(int(self.part_tables)))
            failures = 0 if better else failures + 1
            if begin - self.clock.left() > PART_SECONDS / 2:
                self.part_tables = max(self.part_tables * 0.9, 4.0)
            elif not better:
                self.part_tables = min(self.part_tables * 1.05, float(len(self.problem.choices)))

    def _some_tables(self, count: int) -> tuple[Ints, Ints]:
        """Tables to plan anew: of the slowest rank and of others, the faster the likelier, and a few that reach beyond.

        Args:
            count: About how many.

        Returns:
            The tables, and the ranks.
        """
        assert self.placement is not None, "there is a placement to improve"
        load = rank_time(self.problem, self.placement)
        slow = int(load.argmax())
        weights = 1.0 + load.max() - load
        others = np.delete(np.arange(len(load)), slow)
        some = others
        if len(others):
            some = self.rng.choice(others, len(others), replace=False, p=weights[others] / weights[others].sum())
        order = np.empty(len(load), np.int64)  # of the ranks, when they join
        order[np.append(slow, some)] = np.arange(len(load))
        joins = np.array([order[ranks].max(initial=0) for ranks in self.placement.ranks])
        begins = np.array([order[ranks].min(initial=0) for ranks in self.placement.ranks])
        last = int(np.sort(joins)[min(max(count * 3 // 4, 1), len(joins)) - 1])
        across = self.rng.permutation(np.flatnonzero((joins > last) & (begins <= last)))[: max(count // 4, 1)]
        inside = self.rng.permutation(np.flatnonzero(joins <= last))[:count]
        return np.union1d(inside, across), np.flatnonzero(order <= last)

    def _part(self, part: tuple[Ints, Ints]) -> bool:
        """Solve for some tables, the others where they are; whether that made the plan better."""
        free, focus = part
        now = self.placement
        assert now is not None, "there is a placement to improve"
        held = np.setdiff1d(np.arange(len(now.chosen)), free)
        problem = self.problem
        choices = tuple(problem.choices[table] for table in held.tolist())
        rest = PlanningProblem(problem.world_size, problem.local_size, problem.capacity, choices, problem.fixed)
        stays = Placement(now.chosen[held], [now.ranks[table] for table in held.tolist()])
        fixed = np.zeros(0) if problem.fixed is None else problem.fixed.copy()
        used = sorted({group for choice in stays.taken(rest) for group in choice.groups})
        paid = float(fixed[used].sum()) if len(fixed) else 0.0
        if len(fixed):
            fixed[used] = 0.0
        room = problem.capacity - rank_memory(rest, stays)
        sub = PlanningProblem(
            problem.world_size,
            problem.local_size,
            room,
            tuple(problem.choices[table] for table in free.tolist()),
            fixed,
        )
        model = MilpModel(sub, (self.cost - paid) * (1 + 1e-9), 0.0, rank_time(rest, stays), focus)
        if not model.possible or model.size > MOST_VARIABLES:
            return False
        outcome = _ask(model, min(PART_SECONDS, self.clock.left()), CLOSED / 10)
        if outcome.placement is None:
            return False
        chosen, ranks = now.chosen.copy(), list(now.ranks)
        for number, table in enumerate(free.tolist()):
            chosen[table], ranks[table] = outcome.placement.chosen[number], outcome.placement.ranks[number]
        found = Placement(chosen, ranks)
        if broken_rules(problem, found) or not self._better(found, now):
            return False
        self.placement, self.cost = found, cost(problem, found)
        return True

    def _better(self, found: Placement, than: Placement) -> bool:
        """Whether a placement costs less, or as much with less to do on the ranks that come next."""
        new, old = cost(self.problem, found), cost(self.problem, than)
        if abs(new - old) > 1e-9 * old:
            return new < old
        loads = [np.sort(rank_time(self.problem, each))[::-1] for each in (found, than)]
        differ = np.flatnonzero(np.abs(loads[0] - loads[1]) > 1e-9 * old)
        return len(differ) > 0 and bool(loads[0][differ[0]] < loads[1][differ[0]])


@dataclass(frozen=True)
class _Outcome:
    """What the solver said of a program: a placement, a bound, or that there is no solution."""

    placement: Placement | None
    bound: float
    impossible: bool


_NOTHING = _Outcome(None, 0.0, True)


def _ask(model: MilpModel, seconds: float, gap: float) -> _Outcome:
    """Let HiGHS solve a program."""
    from scipy.optimize import milp

    begin = time.perf_counter()
    program = model.program()
    seconds = max(seconds - (time.perf_counter() - begin), 0.1)
    answer = milp(**program, options={"time_limit": seconds, "mip_rel_gap": gap})
    placement = model.read(answer.x) if answer.x is not None else None
    bound = 0.0 if answer.mip_dual_bound is None else float(answer.mip_dual_bound) * model.scale
    # Status 2: infeasible. The solver's numbers are exact to a millionth.
    return _Outcome(placement, bound * (1 - 1e-6), answer.status == 2)

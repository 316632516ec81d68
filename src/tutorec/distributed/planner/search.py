"""The default search: place all tables, then take some off and put them back, again and again.

1. **Place** the tables one by one, the one with the most work first, each where the potential of ``packing`` grows
   least, and sweep: take each table off once and put it back where it is best among all others.
2. **Ruin and repair**: take off some tables of the slowest rank and some drawn at random, put them back in a drawn
   order, and keep the result when the potential did not grow, or now and then when it did, at first more, at the end
   less. The potential sharpens meanwhile: at first it counts the work of all ranks, at the end little but the slowest.
   Some repairs begin with a table that is cut in another way, for which tables of its new ranks have to make room.
   Choices that no faster plan can have are closed, those of the plan, too.
3. **Polish**: of equally fast plans the one with less work, with preferred choices, and with less memory on the fullest
   rank.

Latencies of groups are paid once, which no table sees by itself. So sets of open groups are tried, in the order of
their bounds, as long as a bound lies below the best plan.

The order of tables and of hosts does not matter: they are sorted by what they need and have before the search starts,
and the drawn numbers are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tutorec.distributed.planner.bounds import Totals, lower_bound
from tutorec.distributed.planner.dominance import undominated
from tutorec.distributed.planner.local_search import EQUAL, Budget, LocalSearch, Progress
from tutorec.distributed.planner.problem import Placement, PlanningProblem, cost
from tutorec.distributed.planner.search_order import SortedProblem

# A plan this near to the bound ends the search.
_CLOSE = 1.0005
# Places looked for: of a table, of two tables (few tables have few plans), in total at most, and beyond that for each
# table of a large model.
_PLACES_OF_A_TABLE, _PLACES_OF_TWO, _PLACES, _MORE_PLACES_OF_A_TABLE = 150, 15, 12000, 10
# Of what all ranks have, the part that tables take at least, where memory counts as short.
_SHORT = 0.5
# Times the bound, the longest pieces that are used as long as all tables find a place.
_STRETCHES = (1.25, 2.0, 5.0, math.inf)
# A program of so many choices times ranks is solved where nothing else finds a plan, in so many seconds at most.
_SMALL_PROGRAM, _PROGRAM_SECONDS = 2000, 10.0
# Sets of open groups that are tried at most, and those of them that are searched to the end.
_SETS_BOUNDED, _SETS_TRIED, _SETS_SEARCHED = 64, 32, 4


def search(
    problem: PlanningProblem, seconds: float | None = None, progress: Progress | None = None
) -> Placement | None:
    """A placement that fits and is fast; the same one in every run.

    Args:
        problem: What is to be planned.
        seconds: Stop after this long with the best found so far; None: after a number of steps that depends on the
            problem alone, so that the answer does, too.
        progress: Called now and then with the share of the work that is done.

    Returns:
        The placement; None where none was found.

    Example:
        Two large tables and two small ones on two ranks:

        >>> from tutorec.distributed.planner.problem import Choice, Spread
        >>> def whole(ms, size):
        ...     return (Choice(np.array([ms]), np.array([[0, size]]), Spread.ANY),)
        >>> tables = (whole(2.0, 9), whole(2.0, 9), whole(1.0, 1), whole(1.0, 1))
        >>> found = search(PlanningProblem(2, 2, np.array([[0, 10], [0, 10]]), tables))
        >>> [ranks.tolist() for ranks in found.ranks]
        [[0], [1], [0], [1]]
    """
    if not problem.choices:
        return Placement(np.zeros(0, dtype=np.int64), [])
    ordered = SortedProblem(problem)
    bound = lower_bound(ordered.problem).ms
    if math.isinf(bound):
        return None
    tables = len(problem.choices)
    places = min((_PLACES_OF_A_TABLE + _PLACES_OF_TWO * tables) * tables, _PLACES) + _MORE_PLACES_OF_A_TABLE * tables
    found = _Search(ordered.problem, bound, Budget(places, seconds, progress)).run()
    return None if found is None else ordered.restore(found)


class _Search:
    """The best placement so far, and what is still to be tried."""

    def __init__(self, problem: PlanningProblem, bound: float, budget: Budget) -> None:
        self.problem, self.bound, self.budget = problem, bound, budget
        self.totals = Totals(problem)
        worth_a_try = [set(numbers) for numbers in undominated(problem)]
        self.usable = self.totals.usable & [
            number in numbers
            for choices, numbers in zip(problem.choices, worth_a_try, strict=True)
            for number in range(len(choices))
        ]
        self.cost = math.inf
        self.placement: Placement | None = None

    def run(self) -> Placement | None:
        """Try sets of groups, search the best of them to the end, and polish."""
        tried: list[tuple[float, int, LocalSearch, frozenset[int] | None]] = []
        for bound, opened in self._sets_of_groups():
            if tried and (bound >= self.cost * (1 - EQUAL) or self.budget.spent > self.budget.places / 2):
                break
            local = self._first_plans(max(bound, self.bound), opened)
            if local is not None:
                tried.append((self._keep(local), len(tried), local, opened))
        if not tried:
            return self._squeezed()
        finalists = sorted(tried, key=lambda entry: entry[:2])[:_SETS_SEARCHED]
        for following, (_, _, local, opened) in enumerate(finalists, start=1):
            places = self.budget.left if following == len(finalists) else self.budget.left // 2
            self._improve(local, places, opened)
        return self._polished()

    def _first_plans(self, bound: float, opened: frozenset[int] | None) -> LocalSearch | None:
        """Place all tables, without long pieces if they can be spared: later they are in the way.

        A slow choice with little memory is tempting as long as ranks have work to spare for it, and afterwards no table
        can make room for a faster one.
        """
        for stretch in _STRETCHES:
            longest = math.inf if math.isinf(stretch) else stretch * bound  # a bound of 0 times infinity is no number
            local = LocalSearch(self.problem, self._brief_choices(opened, longest), self.budget, self.bound)
            placed = local.place_all()
            if (not placed or self.totals.fill > _SHORT) and not self.budget.out_of_time:
                placed = local.place_in_short_memory() or placed
            if placed:
                return local
        return None

    def _keep(self, local: LocalSearch) -> float:
        """Remember a search's best plan if it is the best of all; its milliseconds."""
        placement = local.placement()
        found = cost(self.problem, placement)
        if found < self.cost * (1 - EQUAL):
            self.cost, self.placement = found, placement
        return found

    def _improve(self, local: LocalSearch, places: int, opened: frozenset[int] | None) -> None:
        """Ruin and repair the best plan of a set of groups; None: all groups."""
        latency = self._latency(local)

        def fruitful(slowest: float) -> list[list[int]]:
            return self._open_choices(opened, self.totals.fruitful(slowest + latency))

        local.ruin_and_repair(places, self.bound * _CLOSE - latency, fruitful)
        self._keep(local)

    def _latency(self, local: LocalSearch) -> float:
        return cost(self.problem, local.placement()) - local.slowest

    def _open_choices(self, opened: frozenset[int] | None, fruitful: np.ndarray | None = None) -> list[list[int]]:
        """For each table the choices that could be used and whose groups are all open; None: any groups."""
        flat = iter((self.usable if fruitful is None else self.usable & fruitful).tolist())
        return [
            [
                number
                for number, choice in enumerate(choices)
                if next(flat) and (opened is None or opened.issuperset(choice.groups))
            ]
            for choices in self.problem.choices
        ]

    def _brief_choices(self, opened: frozenset[int] | None, longest: float) -> list[list[int]]:
        """Of the open choices those without longer pieces; of a table that has none such, those with the shortest."""
        found = []
        for start, numbers in zip(self.totals.starts.tolist(), self._open_choices(opened), strict=True):
            pieces = [float(self.totals.pieces[start + number]) for number in numbers]
            limit = max(longest, min(pieces))
            found.append([number for number, piece in zip(numbers, pieces, strict=True) if piece <= limit])
        return found

    def _sets_of_groups(self) -> Sequence[tuple[float, frozenset[int] | None]]:
        """Sets of groups to open, with the bound of each, the smallest first."""
        if self.problem.fixed is None or not self.problem.fixed.any():
            return [(self.bound, None)]
        sets, _ = self.totals.sets_of_groups(_SETS_BOUNDED)
        every = frozenset(group for of_table in self.problem.choices for each in of_table for group in each.groups)
        # a set whose bound is finite may still leave a table without a choice that fits on a rank
        tried = [
            (bound, opened)
            for bound, opened in sets[:_SETS_TRIED]
            if math.isfinite(bound) and all(self._open_choices(opened))
        ]
        # what has a small bound may be hard to place: all groups together are always tried, the last
        return tried if every in (opened for _, opened in tried) else [*tried, (self.bound, every)]

    def _polished(self) -> Placement:
        """A plan that is as fast as the best, with less work and less memory, in the order of tables and ranks."""
        placement = self.placement
        assert placement is not None, "a plan is polished after it was found"
        used = frozenset(group for choice in placement.taken(self.problem) for group in choice.groups)
        local = LocalSearch(self.problem, self._open_choices(used), self.budget, self.cost)
        placement = self._no_dearer(local.trimmed(placement), placement)
        alone = [[number] for number in placement.chosen.tolist()]
        local = LocalSearch(self.problem, alone, self.budget, self.cost)
        return self._no_dearer(local.placed_anew(placement), placement)

    def _no_dearer(self, other: Placement | None, placement: Placement) -> Placement:
        """The other placement if it costs no more."""
        return placement if other is None or cost(self.problem, other) > self.cost * (1 + 1e-12) else other

    def _squeezed(self) -> Placement | None:
        """What finds a plan where memory is so short that placing one table after the other does not."""
        local = LocalSearch(self.problem, self._open_choices(None), self.budget, self.bound)
        if local.squeeze():
            self._improve(local, self.budget.left, None)
            return self._polished()
        return self._solved()

    def _solved(self) -> Placement | None:
        """The mixed-integer program's answer, where it is small: it misses nothing that fits."""
        from tutorec.distributed.planner.milp import solve  # which loads scipy

        choices = sum(len(of_table) for of_table in self.problem.choices)
        if choices * self.problem.world_size > _SMALL_PROGRAM:
            return None
        return solve(self.problem, seconds=_PROGRAM_SECONDS).placement

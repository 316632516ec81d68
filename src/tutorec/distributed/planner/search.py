"""The default search: longest processing time first, local search, then ruin and recreate.

1. **Place** the tables one by one, the one with the largest share of all work or memory first (LPT,
   longest processing time first; Graham 1969), each where the potential of `placements` grows
   least. Choices with a shard much longer than the bound are excluded as long as all tables can be
   placed without them, as in dual approximation (Hochbaum and Shmoys 1987): otherwise a slow choice
   that needs little memory is taken while ranks are empty, and later no table can make room for a
   faster one.
2. **Local search**: remove each table once, and place it where the potential grows least. This
   moves its shards and may change its sharding type.
3. **Ruin and recreate** (Schrimpf et al. 2000): remove some tables of the slowest rank and some
   random ones, place them again in a random order, and keep the result if the potential has not
   grown, or only a little. Sometimes an alternative is skipped at random ("blinks", Christiaens and
   Vanden Berghe 2020), so that other sharding types are tried. The sharpness of the potential
   increases in stages: at first it measures the work of all ranks, at the end mostly that of the
   slowest.

The latency of a group is paid once, which placing table by table does not see. First plans are
therefore made with all groups, with those of the bound's relaxed plan, and with each group alone.
The first two and the best of the others go through step 3, and the fastest result is the plan.

The order of tables and hosts does not matter: they are sorted before the search starts, and the
random numbers are the same in every run.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tutorec.distributed.planner.milp import solve
from tutorec.distributed.planner.placements import Packing, Position
from tutorec.distributed.planner.problem import (
    Bound,
    Choice,
    Ints,
    Placement,
    PlanningProblem,
    Spread,
    broken_rules,
    cost,
    fixed_time,
    lower_bound,
)

# Sharpness b of the potential: for placing, and at the start and end of ruin and recreate. With b =
# 30 throughout, plans of the 12 models of `bench planner` are 5 % slower.
_PLACING, _DULL, _SHARP, _STAGES = 10.0, 3.0, 300.0, 9
# Fraction by which the potential may grow, on average; 0 makes those plans 0.5 % slower.
_HEAT = 0.03
# Probability of skipping an alternative; 0 makes them 0.5 % slower, 0.2 makes them 0.9 % slower.
_BLINK = 0.1
# Tables that are removed, and how many of them are the slowest rank's; 8 are 0.6 % slower.
_RUINED, _OF_THE_SLOWEST = 12, 4
# Number of position searches: 120 per table find the best plan of ten tables, more gain little.
_PLACINGS_OF_A_TABLE, _PLACINGS = 120, 10000
# Maximum shard lengths, as multiples of the bound.
_STRETCHES = (1.25, 2.5, 5.0, math.inf)
# Times that differ by less are equal.
_EQUAL = 1e-9
# A plan this close to the bound ends the search.
_CLOSE = 1.0005
# If nothing fits and the problem is small, the integer program decides: choices x ranks, and
# seconds.
_SMALL_PROGRAM, _PROGRAM_SECONDS = 2000, 10.0


def search(problem: PlanningProblem, seconds: float | None = None) -> Placement | None:
    """Search for a fast placement that fits; the result is the same in every run.

    Args:
        problem: The problem.
        seconds: Time limit, after which the best placement so far is returned; None for a number of
            steps that depends on the problem only.

    Returns:
        The placement; None if none was found.

    Example:
        Two large tables and two small ones on two ranks:

        >>> def whole(ms, size):
        ...     return (Choice(np.array([ms]), np.array([[0, size]]), Spread.ANY),)
        >>> tables = (whole(2.0, 9), whole(2.0, 9), whole(1.0, 1), whole(1.0, 1))
        >>> placement = search(PlanningProblem(2, 2, np.array([[0, 10], [0, 10]]), tables))
        >>> [ranks.tolist() for ranks in placement.ranks]
        [[0], [1], [0], [1]]
    """
    if not problem.choices:
        return Placement(np.zeros(0, dtype=np.int64), [])
    ordered, tables, ranks = _sorted(problem)
    bound = lower_bound(ordered)
    if math.isinf(bound.ms):
        return None
    placement = _Search(ordered, bound, seconds).run()
    if placement is None:
        # the integer program finds a placement of a small problem if one fits
        small = sum(map(len, problem.choices)) * problem.world_size <= _SMALL_PROGRAM
        return solve(problem, _PROGRAM_SECONDS).placement if small else None
    chosen, places = np.empty_like(placement.chosen), list(placement.ranks)
    chosen[tables] = placement.chosen
    for table, (choice, held_by) in zip(tables, placement.placed(ordered), strict=True):
        places[table] = held_by if choice.spread is Spread.ALL else ranks[held_by]
    return Placement(chosen, places)


class _Search:
    """The best plan so far, and the state of the search."""

    def __init__(self, problem: PlanningProblem, bound: Bound, seconds: float | None) -> None:
        self.problem, self.bound = problem, bound
        self.target = max(bound.ms, 1e-12)
        tables = len(problem.choices)
        self.placings = min(_PLACINGS_OF_A_TABLE * tables, _PLACINGS) + 10 * tables
        self.spent = 0
        self.deadline = math.inf if seconds is None else time.perf_counter() + seconds
        self.random = random.Random(0)
        self.best: list[Position | None] = []
        self.slowest = math.inf
        # a table's size: the larger of its fractions of the ranks' time and memory
        room = np.maximum(problem.capacity.sum(axis=0), 1)
        self.sizes = [
            max(
                min(float(c.time.sum()) for c in of_table) / self.target / problem.world_size,
                min(float((c.memory.sum(axis=0) / room).max()) for c in of_table),
                1e-12,
            )
            for of_table in problem.choices
        ]
        self.order = sorted(range(tables), key=lambda table: -self.sizes[table])

    def run(self) -> Placement | None:
        """Make a first plan for several sets of groups, and improve three of them."""
        every = frozenset(
            g for of_table in self.problem.choices for c in of_table for g in c.groups
        )
        paid = [group for group in sorted(every) if self.problem.fixed[group]]
        alone = (every.difference(paid) | {group} for group in paid)
        sets = dict.fromkeys([every, every.difference(paid) | self.bound.groups, *alone])
        first: list[Packing] = []
        for opened in sets:
            packing = self._first_plan(opened)
            if packing is not None:
                first.append(packing)
            if self.spent > self.placings / 2 or self._late():
                break
        others = sorted(first[2:], key=lambda packing: (self._missing(packing), self._ms(packing)))
        finalists = [*first[:2], *others[:1]]
        best: Packing | None = None
        for packing in finalists:
            self._improve(packing, self.placings / len(finalists))
            if self.best:
                packing.lay(self.best)
                if best is None or self._ms(packing) < self._ms(best) * (1 - _EQUAL):
                    best = packing
        if best is None:
            return None
        best.lay(list(best.positions))
        best.ceiling[0] = best.slowest  # prefer less work with an equally slow slowest rank
        best.sharpen(_DULL, best.slowest)
        self._sweep(best)
        return with_preferred_groups(self.problem, best.placement())

    def _first_plan(self, opened: frozenset[int]) -> Packing | None:
        """LPT and local search with choices of these groups; None if a table has none."""
        usable = [
            [number for number, choice in enumerate(of_table) if opened.issuperset(choice.groups)]
            for of_table in self.problem.choices
        ]
        if not all(usable):
            return None
        packing = self._longest_first(usable, _STRETCHES[0])
        for stretch in _STRETCHES[1:]:
            if None in packing.positions:
                packing = self._longest_first(usable, stretch)
        for _ in range(2):
            packing.sharpen(_PLACING, packing.slowest)
            self._sweep(packing)
        self.spent += packing.placings
        return packing

    def _longest_first(self, usable: Sequence[Sequence[int]], stretch: float) -> Packing:
        """LPT with the usable choices that are not too long; at least a table's shortest."""
        brief = []
        for of_table, numbers in zip(self.problem.choices, usable, strict=True):
            longest = {number: of_table[number].longest for number in numbers}
            most = max(stretch * self.target, min(longest.values()))
            brief.append([number for number in numbers if longest[number] <= most])
        packing = Packing(self.problem, brief)
        packing.sharpen(_PLACING, self.target)
        for table in self.order:
            position = packing.best(table)
            if position is not None:
                packing.put(table, position)
        return packing

    def _sweep(self, packing: Packing) -> None:
        """Local search: remove each placed table once, and place it again at its best position."""
        for table, position in enumerate(packing.positions):
            if position is not None:
                packing.take(table)
                packing.put(table, packing.best(table) or position)

    def _improve(self, packing: Packing, placings: float) -> None:
        """Ruin and recreate, in stages of increasing sharpness; sets `best` to the best plan."""
        self.best, self.slowest = [], math.inf
        self._keep(packing)
        enough = _CLOSE * self.bound.ms - self._latency(packing)
        for stage in range(_STAGES):
            packing.lay(list(packing.positions))  # many additions accumulate rounding errors
            packing.sharpen(_DULL * (_SHARP / _DULL) ** (stage / (_STAGES - 1)), packing.slowest)
            start = packing.placings
            while packing.placings - start < placings / _STAGES:
                if self.slowest <= enough or self._late():
                    return
                self._ruin_and_recreate(packing)

    def _ruin_and_recreate(self, packing: Packing) -> None:
        """Remove some tables and place them again; undo it unless the result is accepted."""
        draw, positions = self.random, packing.positions
        absent = [table for table, position in enumerate(positions) if position is None]
        ranks = len(packing.filled)
        rank = draw.randrange(ranks) if absent else int(packing.filled[:, 0].argmax())
        there = np.flatnonzero(packing.holds[rank]).tolist()
        off = dict.fromkeys(draw.sample(there, min(len(there), draw.randint(1, _OF_THE_SLOWEST))))
        count = min(draw.randint(2, _RUINED), len(positions) - len(absent))
        while len(off) < count:
            table = draw.randrange(len(positions))
            if positions[table] is not None:
                off[table] = None
        was_missing, saved = self._missing(packing), packing.save()
        limit = packing.potential * math.exp(draw.expovariate(1.0) * _HEAT)
        for table in off:
            packing.take(table)
        missing = 0.0
        for table in sorted(
            [*off, *absent], key=lambda table: -self.sizes[table] * draw.uniform(0.5, 1.5)
        ):
            skipped = [draw.random() < _BLINK for _ in packing.alternatives[table]]
            position = packing.best(table, skipped)
            if position is not None:
                packing.put(table, position)
            else:
                missing += self.sizes[table]
            if missing > was_missing or (
                missing == was_missing and packing.potential > limit * (1 + _EQUAL)
            ):
                packing.restore(saved)
                return
        self._keep(packing)

    def _ms(self, packing: Packing) -> float:
        """Milliseconds of a step."""
        return packing.slowest + self._latency(packing)

    def _latency(self, packing: Packing) -> float:
        """Milliseconds of the groups that the placed tables use."""
        placed = zip(self.problem.choices, packing.positions, strict=True)
        used = (of_table[position.number] for of_table, position in placed if position)
        return fixed_time(self.problem, used)

    def _missing(self, packing: Packing) -> float:
        """Size of the tables that are not placed."""
        return sum(
            size
            for size, position in zip(self.sizes, packing.positions, strict=True)
            if position is None
        )

    def _keep(self, packing: Packing) -> None:
        """Store a plan if it is the fastest so far."""
        if packing.slowest < self.slowest * (1 - _EQUAL) and None not in packing.positions:
            self.slowest, self.best = packing.slowest, list(packing.positions)

    def _late(self) -> bool:
        return time.perf_counter() >= self.deadline


def with_preferred_groups(problem: PlanningProblem, placement: Placement) -> Placement:
    """The same shards in preferred groups: row-wise, not table-row-wise, if all ranks are one host.

    A plan is made with one set of groups, so its tables could not use an equal choice of another
    group.
    """
    for group in sorted({group for choice in placement.taken(problem) for group in choice.groups}):
        for other in range(len(problem.fixed)):
            chosen, taken = placement.chosen.copy(), placement.taken(problem)
            for table, choice in enumerate(taken):
                groups = tuple(other if each == group else each for each in choice.groups)
                if group in choice.groups:
                    equal = (
                        number
                        for number, each in enumerate(problem.choices[table])
                        if each.groups == groups
                        and np.array_equal(each.time, choice.time)
                        and np.array_equal(each.memory, choice.memory)
                    )
                    chosen[table] = next(equal, chosen[table])
            swapped = Placement(chosen, placement.ranks)
            rank = sum(choice.preference for choice in swapped.taken(problem))
            better = rank < sum(choice.preference for choice in taken)
            if (
                better
                and not broken_rules(problem, swapped)
                and cost(problem, swapped) <= cost(problem, placement)
            ):
                placement = swapped
    return placement


def _sorted(problem: PlanningProblem) -> tuple[PlanningProblem, list[int], Ints]:
    """The problem with tables and ranks in canonical order, and the permutations of both."""
    tables = sorted(range(len(problem.choices)), key=lambda table: _key(problem.choices[table]))
    choices = [choice for table in tables for choice in problem.choices[table]]
    columns = [-problem.capacity]
    columns += [~choice.allowed[:, None] for choice in choices if choice.allowed is not None]
    if len(columns) > 1 or (problem.capacity != problem.capacity[0]).any():
        columns += [choice.time[:, None] for choice in choices if choice.spread is Spread.ALL]
    of_hosts = np.concatenate(columns, axis=1).reshape(problem.world_size // problem.local_size, -1)
    hosts = np.lexsort(of_hosts.T[::-1])  # by the first column, then by the second, ...
    ranks = np.arange(problem.world_size).reshape(-1, problem.local_size)[hosts].ravel()

    def moved(choice: Choice) -> Choice:
        allowed = None if choice.allowed is None else choice.allowed[ranks]
        held = ranks if choice.spread is Spread.ALL else slice(None)
        return replace(choice, time=choice.time[held], memory=choice.memory[held], allowed=allowed)

    ordered = tuple(tuple(moved(choice) for choice in problem.choices[table]) for table in tables)
    return replace(problem, capacity=problem.capacity[ranks], choices=ordered), tables, ranks


def _key(choices: Sequence[Choice]) -> tuple[object, ...]:
    """Sort key: much work first, then large memory, then everything in which tables differ."""
    each = sorted(
        (
            float(choice.time.sum()),
            -int(choice.memory.sum()),
            choice.longest,
            choice.spread.value,
            choice.preference,
            choice.groups,
            len(choice.time),
            () if choice.allowed is None else tuple(choice.allowed.tolist()),
        )
        for choice in choices
    )
    return (-each[0][0], each[0][1], each)

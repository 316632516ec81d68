"""The default search: longest processing time first, local search, then ruin and recreate.

The cost of a placement is that of its slowest rank, but a search that looks at the slowest rank
only makes no progress on the others. `Packing` therefore places shards where a potential over all
ranks grows least::

    sum over ranks r of (exp(b * load_r / target) + sum over k of exp(b * used_rk / room_k))

where k runs over the kinds of memory. This is the exponential cost function of load balancing and
of vector scheduling (Aspnes et al. 1997, Chekuri and Khanna 2004). For small b it measures the work
of all ranks, for large b mostly that of the fullest. The growth from a shard is a product of a
factor of the shard with the exponentials of the ranks, so all ranks are compared in one operation.

1. **Place** the tables one by one, the one with the largest share of all work or memory first (LPT,
   longest processing time first; Graham 1969), each where the potential grows least. Choices with a
   shard much longer than the bound are excluded as long as all tables can be placed without them,
   as in dual approximation (Hochbaum and Shmoys 1987): otherwise a slow choice that needs little
   memory is taken while ranks are empty, and later no table can make room for a faster one.
2. **Local search**: remove each table once, and place it where the potential grows least. This
   moves its shards and may change its sharding type.
3. **Ruin and recreate** (Schrimpf et al. 2000): remove some tables of the slowest rank and some
   random ones, place them again in a random order, and keep the result if the potential has not
   grown, or only a little. Sometimes an alternative is skipped at random ("blinks", Christiaens and
   Vanden Berghe 2020), so that other sharding types are tried. The sharpness b of the potential
   increases in stages.

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
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from tutorec.distributed.planner.milp import solve
from tutorec.distributed.planner.problem import (
    Bound,
    Choice,
    Floats,
    Ints,
    Placement,
    PlacementRule,
    PlanningProblem,
    broken_rules,
    candidate_rank_blocks,
    canonical_order,
    cost,
    fixed_time,
    lower_bound,
    rank_memory,
    rank_time,
)

# Sharpness b of the potential: for placing, and at the start and end of ruin and recreate. With b =
# 30 throughout, plans of the 12 models of `bench planner` are 5 % slower.
_PLACING = 10.0
_DULL = 3.0
_SHARP = 300.0
_STAGES = 9
# Memory is a hard limit for any b: its term is small until memory is nearly full.
_MEMORY_SHARPNESS = 10.0
# exp of this, squared and summed over many ranks, is a finite float.
_LARGEST_EXPONENT = 300.0
# Fraction by which the potential may grow, on average; 0 makes those plans 0.5 % slower.
_HEAT = 0.03
# Probability of skipping an alternative; 0 makes them 0.5 % slower, 0.2 makes them 0.9 % slower.
_BLINK = 0.1
# Tables that are removed, and how many of them are the slowest rank's; 8 are 0.6 % slower.
_RUINED = 12
_RUINED_OF_SLOWEST = 4
# Number of position searches: 120 per table find the best plan of ten tables, more gain little.
_PLACINGS_PER_TABLE = 120
_PLACINGS = 10000
# Maximum shard lengths, as multiples of the bound.
_STRETCHES = (1.25, 2.5, 5.0, math.inf)
# Growths, and times, that differ by less are equal; preference breaks ties of growths.
_EQUAL = 1e-9
# A plan this close to the bound ends the search.
_CLOSE = 1.0005
# Sharpness of the potential with which a single table is placed again.
_SHARPEST = 100.0
# If nothing fits and the problem is small, the integer program decides: choices x ranks, and
# seconds.
_SMALL_PROGRAM = 2000
_PROGRAM_SECONDS = 10.0


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
        ...     return (Choice(np.array([ms]), np.array([[0, size]]), PlacementRule.ANY_RANK),)
        >>> tables = (whole(2.0, 9), whole(2.0, 9), whole(1.0, 1), whole(1.0, 1))
        >>> placement = search(PlanningProblem(2, 2, np.array([[0, 10], [0, 10]]), tables))
        >>> [ranks.tolist() for ranks in placement.ranks]
        [[0], [1], [0], [1]]
    """
    if not problem.choices:
        return Placement(np.zeros(0, dtype=np.int64), [])

    ordered, table_order, rank_order = canonical_order(problem)
    bound = lower_bound(ordered)
    if math.isinf(bound.ms):
        return None

    placement = _Search(ordered, bound, seconds).run()
    if placement is None:
        # the integer program finds a placement of a small problem if one fits
        small = sum(map(len, problem.choices)) * problem.world_size <= _SMALL_PROGRAM
        return solve(problem, _PROGRAM_SECONDS).placement if small else None

    chosen = np.empty_like(placement.chosen)
    chosen[table_order] = placement.chosen
    table_ranks = list(placement.ranks)
    placed_tables = zip(table_order, placement.choices_and_ranks(ordered), strict=True)
    for table, (choice, ranks) in placed_tables:
        everywhere = choice.rule is PlacementRule.EVERY_RANK
        table_ranks[table] = ranks if everywhere else rank_order[ranks]

    return Placement(chosen, table_ranks)


class _Search:
    """The best plan so far, and the state of the search."""

    def __init__(self, problem: PlanningProblem, bound: Bound, seconds: float | None) -> None:
        self.problem = problem
        self.bound = bound
        self.target = max(bound.ms, 1e-12)
        self.best: list[Position | None] = []
        self.slowest = math.inf

        tables = len(problem.choices)
        self.placings = min(_PLACINGS_PER_TABLE * tables, _PLACINGS) + 10 * tables
        self.spent = 0
        self.deadline = math.inf if seconds is None else time.perf_counter() + seconds
        self.random = random.Random(0)

        room = np.maximum(problem.capacity.sum(axis=0), 1)
        self.sizes = [self._size(choices, room) for choices in problem.choices]
        self.order = sorted(range(tables), key=lambda table: -self.sizes[table])

    def _size(self, choices: Sequence[Choice], room: Ints) -> float:
        """A table's size: the larger of its fractions of the ranks' time and memory."""
        least_ms = min(float(choice.time.sum()) for choice in choices)
        least_memory = min(float((choice.memory.sum(axis=0) / room).max()) for choice in choices)
        return max(least_ms / self.target / self.problem.world_size, least_memory, 1e-12)

    def run(self) -> Placement | None:
        """Make a first plan for several sets of groups, and improve three of them."""
        first_plans: list[Packing] = []
        for groups in self._group_sets():
            packing = self._first_plan(groups)
            if packing is not None:
                first_plans.append(packing)
            if self.spent > self.placings / 2 or self._late():
                break

        others = sorted(
            first_plans[2:], key=lambda packing: (self._missing(packing), self._ms(packing))
        )
        finalists = [*first_plans[:2], *others[:1]]
        best: Packing | None = None
        for packing in finalists:
            self._improve(packing, self.placings / len(finalists))
            if not self.best:
                continue
            packing.place_all(self.best)
            if best is None or self._ms(packing) < self._ms(best) * (1 - _EQUAL):
                best = packing

        if best is None:
            return None

        # prefer less work with an equally slow slowest rank
        best.place_all(list(best.positions))
        best.ceiling[0] = best.slowest
        best.sharpen(_DULL, best.slowest)
        self._sweep(best)
        return with_preferred_groups(self.problem, best.placement())

    def _group_sets(self) -> list[frozenset[int]]:
        """The sets of groups for first plans: all, those of the bound, and each group alone."""
        choices = chain.from_iterable(self.problem.choices)
        every = frozenset(group for choice in choices for group in choice.groups)
        paid = [group for group in sorted(every) if self.problem.fixed[group]]
        free = every.difference(paid)
        alone = [free | {group} for group in paid]
        return list(dict.fromkeys([every, free | self.bound.groups, *alone]))

    def _first_plan(self, groups: frozenset[int]) -> Packing | None:
        """LPT and local search with choices of these groups; None if a table has none."""
        usable = [
            [number for number, choice in enumerate(choices) if groups.issuperset(choice.groups)]
            for choices in self.problem.choices
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
        allowed = []
        for choices, numbers in zip(self.problem.choices, usable, strict=True):
            longest = {number: choices[number].longest for number in numbers}
            limit = max(stretch * self.target, min(longest.values()))
            allowed.append([number for number in numbers if longest[number] <= limit])

        packing = Packing(self.problem, allowed)
        packing.sharpen(_PLACING, self.target)
        for table in self.order:
            position = packing.best_position(table)
            if position is not None:
                packing.place(table, position)

        return packing

    def _sweep(self, packing: Packing) -> None:
        """Local search: remove each placed table once, and place it again at its best position."""
        for table, position in enumerate(packing.positions):
            if position is not None:
                packing.remove(table)
                packing.place(table, packing.best_position(table) or position)

    def _improve(self, packing: Packing, placings: float) -> None:
        """Ruin and recreate, in stages of increasing sharpness; sets `best` to the best plan."""
        self.best = []
        self.slowest = math.inf
        self._keep(packing)

        enough = _CLOSE * self.bound.ms - self._latency(packing)
        for stage in range(_STAGES):
            packing.place_all(list(packing.positions))  # additions accumulate rounding errors
            packing.sharpen(_DULL * (_SHARP / _DULL) ** (stage / (_STAGES - 1)), packing.slowest)
            start = packing.placings
            while packing.placings - start < placings / _STAGES:
                if self.slowest <= enough or self._late():
                    return
                self._ruin_and_recreate(packing)

    def _ruin_and_recreate(self, packing: Packing) -> None:
        """Remove some tables and place them again; undo it unless the result is accepted."""
        absent = [table for table, position in enumerate(packing.positions) if position is None]
        removed = self._draw_tables(packing, absent)
        missing_before = self._missing(packing)
        limit = packing.potential * math.exp(self.random.expovariate(1.0) * _HEAT)
        saved = packing.save()

        for table in removed:
            packing.remove(table)

        missing = 0.0
        for table in self._shuffled([*removed, *absent]):
            skipped = [self.random.random() < _BLINK for _ in packing.alternatives[table]]
            position = packing.best_position(table, skipped)
            if position is not None:
                packing.place(table, position)
            else:
                missing += self.sizes[table]

            grown = missing == missing_before and packing.potential > limit * (1 + _EQUAL)
            if missing > missing_before or grown:
                packing.restore(saved)
                return

        self._keep(packing)

    def _draw_tables(self, packing: Packing, absent: Sequence[int]) -> list[int]:
        """Placed tables to remove: some of the slowest rank (a random one if tables are absent)."""
        draw = self.random
        tables = len(packing.positions)
        slowest = int(packing.filled[:, 0].argmax())
        rank = draw.randrange(len(packing.filled)) if absent else slowest
        on_rank = np.flatnonzero(packing.holds[rank]).tolist()
        count = min(len(on_rank), draw.randint(1, _RUINED_OF_SLOWEST))
        drawn = dict.fromkeys(draw.sample(on_rank, count))

        count = min(draw.randint(2, _RUINED), tables - len(absent))
        while len(drawn) < count:
            table = draw.randrange(tables)
            if packing.positions[table] is not None:
                drawn[table] = None

        return list(drawn)

    def _shuffled(self, tables: Sequence[int]) -> list[int]:
        """The tables in a random order in which large tables tend to be first."""
        return sorted(tables, key=lambda table: -self.sizes[table] * self.random.uniform(0.5, 1.5))

    def _ms(self, packing: Packing) -> float:
        """Milliseconds of a step."""
        return packing.slowest + self._latency(packing)

    def _latency(self, packing: Packing) -> float:
        """Milliseconds of the groups that the placed tables use."""
        placed = zip(self.problem.choices, packing.positions, strict=True)
        used = (choices[position.number] for choices, position in placed if position)
        return fixed_time(self.problem, used)

    def _missing(self, packing: Packing) -> float:
        """Size of the tables that are not placed."""
        placed = zip(self.sizes, packing.positions, strict=True)
        return sum(size for size, position in placed if position is None)

    def _keep(self, packing: Packing) -> None:
        """Store a plan if it is the fastest so far."""
        if packing.slowest < self.slowest * (1 - _EQUAL) and None not in packing.positions:
            self.slowest = packing.slowest
            self.best = list(packing.positions)

    def _late(self) -> bool:
        return time.perf_counter() >= self.deadline


def with_preferred_groups(problem: PlanningProblem, placement: Placement) -> Placement:
    """The same shards in preferred groups: row-wise, not table-row-wise, if all ranks are one host.

    A plan is made with one set of groups, so its tables could not use an equal choice of another
    group.
    """
    used = {group for choice in placement.choices(problem) for group in choice.groups}
    for group in sorted(used):
        for other in range(len(problem.fixed)):
            swapped = _with_group(problem, placement, group, other)
            preference = sum(choice.preference for choice in swapped.choices(problem))
            preferred = preference < sum(choice.preference for choice in placement.choices(problem))
            if (
                preferred
                and not broken_rules(problem, swapped)
                and cost(problem, swapped) <= cost(problem, placement)
            ):
                placement = swapped

    return placement


def _with_group(
    problem: PlanningProblem, placement: Placement, group: int, other: int
) -> Placement:
    """The placement with choices of another group in place of equal ones of a group."""
    chosen = placement.chosen.copy()
    for table, choice in enumerate(placement.choices(problem)):
        if group not in choice.groups:
            continue
        groups = tuple(other if number == group else number for number in choice.groups)
        for number, candidate in enumerate(problem.choices[table]):
            if (
                candidate.groups == groups
                and np.array_equal(candidate.time, choice.time)
                and np.array_equal(candidate.memory, choice.memory)
            ):
                chosen[table] = number
                break

    return Placement(chosen, placement.ranks)


def with_choice(
    problem: PlanningProblem, placement: Placement, table: int, choice: int
) -> Placement | None:
    """The placement with another choice for one table; None if it does not fit.

    The other tables are not moved. Shards are placed longest first, where the slowest rank remains
    fastest.

    Args:
        problem: The problem.
        placement: A placement that fits.
        table: Index of the table.
        choice: Index of the new choice.

    Example:
        >>> whole = Choice(np.array([2.0]), np.array([[0, 8]]), PlacementRule.ANY_RANK)
        >>> halves = Choice(
        ...     np.array([1.0, 1.0]), np.array([[0, 4], [0, 4]]), PlacementRule.EVERY_RANK
        ... )
        >>> problem = PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((whole, halves),))
        >>> placed = Placement(np.array([0]), [np.array([0])])
        >>> with_choice(problem, placed, 0, 1).ranks[0].tolist()
        [0, 1]
    """
    replacement = problem.choices[table][choice]
    load = rank_time(problem, placement)
    used = rank_memory(problem, placement)
    current = problem.choices[table][int(placement.chosen[table])]
    np.subtract.at(load, placement.ranks[table], current.time)
    np.subtract.at(used, placement.ranks[table], current.memory)
    alone = replace(problem, capacity=problem.capacity - used, choices=((replacement,),))
    packing = Packing(alone)
    packing.filled[:, 0] = load
    packing.sharpen(_SHARPEST, float(load.max()))
    position = packing.best_position(0)
    if position is None:
        return None

    chosen = placement.chosen.copy()
    everyone = list(placement.ranks)
    chosen[table] = choice
    everyone[table] = position.ranks

    return Placement(chosen, everyone)


# --- packing


@dataclass(slots=True, eq=False)  # not frozen: thousands are created per second
class Position:
    """A choice of a table, and the ranks of its P shards.

    Args:
        growth: Growth of the potential.
        number: Index of the choice.
        ranks: ``[P]``.
        needs: ``[P, 1 + K]``: ms and bytes of each shard.
        everywhere: Whether there is a shard on every rank.
    """

    growth: float
    number: int
    ranks: Ints
    needs: Floats
    everywhere: bool


class Alternatives:
    """C choices of one table with the same placement rule and P shards, in B blocks of S.

    All rules are followed in the same way: blocks of S shards are placed one after the other, the
    longest first, each on one of U blocks of S ranks. If blocks must share a host, there are G
    groups of rank blocks, which are all tried (see `candidate_rank_blocks`).

    Args:
        choices: All choices of the table.
        numbers: Indices of these choices, the preferred one first.
        problem: The problem, for its ranks.
        memories: ``[K]``: indices of the kinds of memory that are limited.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        numbers: Sequence[int],
        problem: PlanningProblem,
        memories: Ints,
    ) -> None:
        first = choices[numbers[0]]
        self.numbers = numbers
        self.everywhere = first.rule is PlacementRule.EVERY_RANK
        self.rank_blocks = candidate_rank_blocks(first.rule, problem.world_size, problem.local_size)
        self.closed = None
        if first.allowed is not None:
            self.closed = ~first.allowed[self.rank_blocks].all(axis=2)

        block_shape = (-1, self.rank_blocks.shape[2], 1 + len(memories))
        rows = []
        for number in numbers:
            row = np.column_stack([choices[number].time, choices[number].memory[:, memories]])
            rows.append(row.reshape(block_shape))
        needs = np.stack(rows).astype(np.float64)  # [C, B, S, 1 + K]

        order = np.argsort(-needs[..., 0].sum(axis=2), axis=1, kind="stable")  # [C, B]
        self.restore = np.argsort(order, axis=1, kind="stable")
        self.needs = np.take_along_axis(needs, order[:, :, None, None], axis=1)
        self.largest_needs = self.needs.sum(axis=1).max(axis=(0, 1))
        self.growth_factors = self.needs

    def best_position(self, weights: Floats, free: Floats | None) -> Position | None:
        """Position with the least growth of the potential, over these choices; None if none fits.

        Args:
            weights: ``[W, 1 + K]``: the terms of the potential.
            free: ``[W, 1 + K]``: free ms and bytes of the ranks; None if all choices fit
                everywhere.
        """
        choices, blocks, shards, resources = self.needs.shape
        groups, candidates, _ = self.rank_blocks.shape
        factors = self.growth_factors.reshape(choices, blocks, 1, shards * resources, 1)
        block_weights = weights[self.rank_blocks]
        block_weights = block_weights.reshape(1, groups, candidates, shards * resources)
        room = None if free is None else free[self.rank_blocks][None]
        if blocks > 1:  # every choice and every group fills its own copy of the ranks
            block_weights = np.repeat(block_weights, choices, axis=0)
            room = None if room is None else np.repeat(room, choices, axis=0)

        choice_and_group = np.arange(choices)[:, None], np.arange(groups)
        total = np.zeros((choices, groups))
        selected = np.empty((blocks, choices, groups), np.int64)
        for block in range(blocks):
            growth = (block_weights @ factors[:, block])[..., 0]  # [C, G, U]
            if room is not None:
                full = (self.needs[:, block, None, None] > room).any(axis=(3, 4))
                growth[full] = math.inf
            if self.closed is not None:
                growth[:, self.closed] = math.inf

            candidate = growth.argmin(axis=2)
            selected[block] = candidate
            index = (*choice_and_group, candidate)
            total += growth[index]
            if block + 1 < blocks:
                grown = block_weights[index] * (1.0 + factors[:, block, :, :, 0])
                block_weights[index] = np.minimum(grown, math.exp(_LARGEST_EXPONENT))
                if room is not None:
                    room[index] -= self.needs[:, block, None]

        choice, group = divmod(int(total.argmin()), groups)
        least_growth = float(total[choice, group])
        if not math.isfinite(least_growth):
            return None

        order = self.restore[choice]
        ranks = self.rank_blocks[group, selected[:, choice, group][order]].ravel()
        needs = self.needs[choice, order].reshape(-1, resources)
        return Position(least_growth, self.numbers[choice], ranks, needs, self.everywhere)


class Packing:
    """A partial placement, in which tables can be placed and removed.

    Args:
        problem: The problem.
        allowed: For each table, the indices of the choices that may be used; None for all.

    Attributes:
        filled: ``[W, 1 + K]``: ms and bytes on each rank; missing capacity relative to the largest
            rank counts as filled.
        ceiling: ``[1 + K]``: ms and bytes that no rank may exceed.
        positions: For each table its position; None if it is not placed.
        holds: ``[W, T]``: whether a rank has shards of a table that is not on all ranks.
        placings: Number of searches for a position.

    Example:
        >>> whole = Choice(np.array([2.0]), np.array([[1, 0]]), PlacementRule.ANY_RANK)
        >>> packing = Packing(
        ...     PlanningProblem(2, 2, np.array([[1, 0], [1, 0]]), ((whole,), (whole,)))
        ... )
        >>> for table in range(2):
        ...     packing.place(table, packing.best_position(table))
        >>> packing.slowest, [ranks.tolist() for ranks in packing.placement().ranks]
        (2.0, [[0], [1]])
    """

    def __init__(
        self, problem: PlanningProblem, allowed: Sequence[Sequence[int]] | None = None
    ) -> None:
        largest = [
            np.max([choice.memory.sum(axis=0) for choice in choices], axis=0)
            for choices in problem.choices
        ]
        limited = np.sum(largest, axis=0) > problem.capacity.min(axis=0)
        memories = np.flatnonzero(limited)
        capacity = problem.capacity[:, memories].astype(np.float64)
        self.room = capacity.max(axis=0)
        self.filled = np.column_stack([np.zeros(problem.world_size), self.room - capacity])
        self.ceiling = np.concatenate([[math.inf], self.room])

        self.alternatives: list[list[Alternatives]] = []
        for table, choices in enumerate(problem.choices):
            numbers = range(len(choices)) if allowed is None else allowed[table]
            self.alternatives.append(
                [
                    Alternatives(choices, similar, problem, memories)
                    for similar in _similar_choices(choices, numbers)
                ]
            )

        tables = len(problem.choices)
        self.positions: list[Position | None] = [None] * tables
        self.holds = np.zeros((problem.world_size, tables), np.bool_)
        self.placings = 0
        self.sharpen(_MEMORY_SHARPNESS, 1.0)

    def sharpen(self, sharpness: float, target: float) -> None:
        """Set b of the potential, and the target milliseconds of a rank."""
        memory_sharpness = max(sharpness, _MEMORY_SHARPNESS)
        memory_scale = memory_sharpness / np.maximum(self.room, 1.0)
        self._scale = np.concatenate([[sharpness / max(target, 1e-12)], memory_scale])
        # a rank with full memory has the same weight as one with full time
        memory_offset = np.full(len(self.room), sharpness - memory_sharpness)
        self._offset = np.concatenate([[0.0], memory_offset])
        self.weights = self._exp(self.filled)
        for alternatives in chain.from_iterable(self.alternatives):
            exponents = np.minimum(alternatives.needs * self._scale, _LARGEST_EXPONENT)
            alternatives.growth_factors = np.expm1(exponents)

    def _exp(self, filled: Floats) -> Floats:
        return np.exp(np.minimum(filled * self._scale + self._offset, _LARGEST_EXPONENT))

    @property
    def slowest(self) -> float:
        """Milliseconds of the slowest rank."""
        return float(self.filled[:, 0].max())

    @property
    def potential(self) -> float:
        """The potential, which placing minimizes."""
        return float(self.weights.sum())

    def best_position(self, table: int, skipped: Sequence[bool] = ()) -> Position | None:
        """Position of a table with the least growth of the potential; None if it fits nowhere.

        Args:
            table: Index of the table.
            skipped: For each of its `Alternatives`, whether they are skipped; empty for none.
        """
        self.placings += 1
        free = self.ceiling - self.filled
        least_free = free.min(axis=0)
        best = None
        for number, alternatives in enumerate(self.alternatives[table]):
            if skipped and skipped[number]:
                continue
            fits = (alternatives.largest_needs <= least_free).all()
            position = alternatives.best_position(self.weights, None if fits else free)
            if position and (best is None or position.growth < best.growth * (1 - _EQUAL)):
                best = position

        return best

    def place(self, table: int, position: Position) -> None:
        """Place a table."""
        self.positions[table] = position
        self._add(position, position.needs)
        if not position.everywhere:
            self.holds[position.ranks, table] = True

    def remove(self, table: int) -> None:
        """Remove a placed table."""
        position = self.positions[table]
        assert position is not None, f"table {table} is not placed"
        self.positions[table] = None
        self._add(position, -position.needs)
        self.holds[position.ranks, table] = False

    def _add(self, position: Position, needs: Floats) -> None:
        ranks = position.ranks
        if len(ranks) == 1:
            self.filled[ranks] += needs
        else:
            np.add.at(self.filled, ranks, needs)
        self.weights[ranks] = self._exp(self.filled[ranks])

    def place_all(self, positions: Sequence[Position | None]) -> None:
        """Remove all tables, and place them at these positions."""
        for table, position in enumerate(self.positions):
            if position is not None:
                self.remove(table)

        for table, position in enumerate(positions):
            if position is not None:
                self.place(table, position)

    def save(self) -> tuple[Any, ...]:
        """Save the state for `restore`."""
        return list(self.positions), self.filled.copy(), self.weights.copy(), self.holds.copy()

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Restore a saved state."""
        self.positions, self.filled, self.weights, self.holds = saved

    def placement(self) -> Placement:
        """The complete placement; all tables must be placed."""
        placed = [position for position in self.positions if position is not None]
        assert len(placed) == len(self.positions), "a table is not placed"
        chosen = np.array([position.number for position in placed], dtype=np.int64)
        return Placement(chosen, [position.ranks for position in placed])


def _similar_choices(choices: Sequence[Choice], numbers: Sequence[int]) -> list[list[int]]:
    """Numbers of choices with the same rule and number of shards together; a pinned one alone."""
    similar: dict[object, list[int]] = {}
    for number in sorted(numbers, key=lambda number: choices[number].preference):
        choice = choices[number]
        key = (choice.rule, len(choice.time)) if choice.allowed is None else number
        similar.setdefault(key, []).append(number)

    return list(similar.values())

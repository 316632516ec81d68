"""What no plan can be faster than: the search's yardstick, printed beside every plan.

Three things hold for every plan that fits. Its slowest rank is no faster than the mean of all ranks. It is no faster
than the longest of its pieces, so that choices with a longer piece are out of the question. And all tables together
have no more memory than all ranks together. With a price mu on each byte (the multiplier of Lagrange of that last
condition) the mean falls apart into tables,

    mean(mu) = sum over tables of min over choices ( time / W + mu . bytes ) - mu . capacity + latencies of used groups,

and for every mu >= 0 no plan has a smaller mean. The best mu is found by cutting planes, which is the linear program's
own bound, and the longest piece that has to be allowed by bisection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tutorec.distributed.planner.problem import Choice, Floats, Ints, PlanningProblem, Spread

# groups whose use is decided together, at most: all subsets are tried
_GROUPS_AT_ONCE = 8
_CUTS, _HALVINGS, _CLOSE = 40, 8, 1e-3
# sets of groups that are bounded one by one
_SETS = 64
# a bound that rounding errors of a sum could lift above a plan would be none
_SLACK = 1e-12
# where the last bytes decide, what memory costs is a difference of huge numbers: by this part of them it can be wrong
_ROUNDING = 1e-14

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Bound:
    """No plan that fits takes fewer milliseconds; infinite where none fits.

    Args:
        ms: The bound.
        reason: What keeps plans from being faster, in words.
    """

    ms: float
    reason: str

    def __str__(self) -> str:
        return f"no plan is faster than {self.ms:.6g} ms: {self.reason}"


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The choices that would be best if work could be spread evenly, and memory lay in one heap.

    Args:
        ms: Mean of a rank, and the groups' latencies: a bound for plans whose pieces take at most ``longest`` each.
        prices: ``[2]`` ms per byte of HBM and DDR.
        chosen: ``[T]`` number of each table's choice; where choices are tied, one of them.
    """

    ms: float
    prices: Floats
    chosen: Ints


def lower_bound(problem: PlanningProblem) -> Bound:
    """The fewest milliseconds that a plan can take, for all that is known without looking for one.

    Args:
        problem: What is to be planned.

    Returns:
        The bound; infinite where memory is short whatever is chosen.

    Example:
        >>> whole = Choice(np.array([6.0]), np.array([[0, 8]]), Spread.ANY)
        >>> rows = Choice(np.array([4.0, 4.0]), np.array([[0, 4], [0, 4]]), Spread.ALL)
        >>> print(lower_bound(PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((whole, rows), (whole,)))))
        no plan is faster than 6 ms: every way to cut table 1 leaves a rank with at least that
    """
    if not problem.choices:
        return Bound(0.0, "there are no tables")
    totals = Totals(problem)
    if not totals.possible.all():
        table = int(np.flatnonzero(~totals.possible)[0])
        return Bound(float("inf"), f"{_name(problem, table)} fits on the ranks in none of its ways")
    lengths = np.unique(totals.longest)
    lengths = lengths[lengths >= totals.unavoidable.max()]
    found, first, last = 0.0, 0, len(lengths) - 1
    relaxed: Relaxation | None = None
    while first <= last:
        middle = (first + last) // 2
        relaxed = totals.relax(lengths[middle])
        following = lengths[middle + 1] if middle + 1 < len(lengths) else np.inf
        found = max(found, min(relaxed.ms, following))
        if relaxed.ms >= following:
            first = middle + 1
        else:
            last = middle - 1
    if not np.isfinite(found):
        return Bound(found, _shortage(problem, totals))
    floor = float(totals.unavoidable.max())
    if problem.fixed is not None and problem.fixed.any():
        sets, others = totals.sets_of_groups(_SETS)
        found = max(found, min([others, *(bound for bound, _ in sets)]))
    if found <= floor:
        table = int(totals.unavoidable.argmax())
        return Bound(floor * (1 - _SLACK), f"every way to cut {_name(problem, table)} leaves a rank with at least that")
    short = relaxed is not None and bool((relaxed.prices > 0).any())
    reason = f"it is the work of all tables, spread evenly over {problem.world_size} ranks"
    return Bound(found * (1 - _SLACK), reason + (", in the memory that they have" if short else ""))


class Totals:
    """What choices take, all pieces together, as arrays over all choices of all tables (N).

    Args:
        problem: Whose choices.

    Attributes:
        time: ``[N]`` ms of a rank, were the choice spread evenly.
        memory: ``[N, 2]`` bytes.
        pieces: ``[N]`` ms of the longest piece.
        longest: ``[N]`` ms of the longest piece and of the choice's own groups.
        usable: ``[N]``: whether each of its pieces fits on some rank.
        table: ``[N]``; ``starts`` ``[T]`` is where each table's choices start.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        choices = [choice for of_table in problem.choices for choice in of_table]
        counts = np.array([len(of_table) for of_table in problem.choices])
        self.starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        self.table = np.repeat(np.arange(len(counts)), counts)
        fixed = np.zeros(1) if problem.fixed is None else problem.fixed
        latency = [sum(fixed[group] for group in choice.groups) if fixed.any() else 0.0 for choice in choices]
        self.time = np.array([choice.time.sum() for choice in choices]) / problem.world_size
        self.pieces = np.array([choice.time.max(initial=0.0) for choice in choices])
        self.longest = self.pieces + latency
        self.memory = np.array([choice.memory.sum(axis=0) for choice in choices], dtype=np.float64)
        self.usable = _usable(problem, choices)
        self.capacity = np.maximum(problem.capacity, 0).sum(axis=0).astype(np.float64)
        self.possible = np.logical_or.reduceat(self.usable, self.starts)
        longest = np.where(self.usable, self.longest, np.inf)
        self.unavoidable = np.minimum.reduceat(longest, self.starts)
        numbers: dict[tuple[int, ...], int] = {}
        self._group_set = np.array([numbers.setdefault(choice.groups, len(numbers)) for choice in choices])
        self._group_sets = list(numbers)
        self._groups = frozenset(group for choice in choices for group in choice.groups)
        self._components = _components(problem, choices, fixed) if fixed.any() else []

    @property
    def fill(self) -> float:
        """The part of all ranks' memory that the tables' fastest choices take, of the kind that is shortest."""
        chosen = self._argmin(np.where(self.usable, self.time, np.inf))
        return float((self.memory[chosen].sum(axis=0) / np.maximum(self.capacity, 1.0)).max())

    def relax(self, longest: float = float("inf")) -> Relaxation:
        """The relaxation over choices whose pieces take no longer.

        Args:
            longest: Milliseconds.

        Returns:
            The relaxation; its ``ms`` is infinite where memory is short, or a table is left without a choice.
        """
        keep = self.usable & (self.longest <= longest)
        if not np.logical_or.reduceat(keep, self.starts).all():
            return Relaxation(np.inf, np.zeros(2), np.zeros(len(self.starts), dtype=np.int64))
        time = np.where(keep, self.time, np.inf)
        prices = self._prices(time, np.zeros(2), (0, 1))
        if prices is None:
            least = np.where(keep[:, None], self.memory, np.inf)[:, 0]
            return Relaxation(np.inf, np.zeros(2), self._argmin(least) - self.starts)
        value = time + self.memory @ prices
        chosen = self._argmin(value)
        mean = self.mean(value[chosen], prices)
        latencies = sum(float(component.dearer(value).min()) for component in self._components)
        return Relaxation(mean + latencies, prices, chosen - self.starts)

    def mean(self, least: Floats, prices: Floats) -> float:
        """Milliseconds of the mean rank at least, where tables cost ``[T]`` with what their memory costs."""
        return float(least.sum() * (1 - _ROUNDING) - prices @ self.capacity * (1 + _ROUNDING))

    def sets_of_groups(self, most: int) -> tuple[list[tuple[float, frozenset[int]]], float]:
        """Sets of groups that a plan could use, and a bound for the plans that use just these.

        Args:
            most: How many sets at most: those whose mean is smallest.

        Returns:
            Bound and set, the smallest bound first, and a bound for plans that use any other set. Groups that are not
            decided on here are in all sets, and are not paid for.
        """
        relaxed = self.relax()
        value = np.where(self.usable, self.time, np.inf) + self.memory @ relaxed.prices
        mean = self.mean(np.minimum.reduceat(value, self.starts), relaxed.prices)
        decided = frozenset(group for component in self._components for group in component.groups)
        sets, others = [(mean, self._groups - decided)], float("inf")
        for component in self._components:
            dearer = component.dearer(value)
            subsets = [subset for subset in np.argsort(dearer, kind="stable").tolist() if np.isfinite(dearer[subset])]
            sets = [
                (bound + float(dearer[subset]), some | component.members_of(subset))
                for bound, some in sets
                for subset in subsets
            ]
            sets.sort(key=lambda entry: (entry[0], sorted(entry[1])))
            others = min([others, *(bound for bound, _ in sets[most : most + 1])])
            sets = sets[:most]
        found = [(self._bound_with(some, decided, value, relaxed.prices), some) for _, some in sets]
        return sorted(found, key=lambda entry: (entry[0], sorted(entry[1]))), others

    def _bound_with(self, used: frozenset[int], decided: frozenset[int], value: Floats, prices: Floats) -> float:
        """A bound for plans that use just these groups: from the mean, and from the longest piece."""
        fixed = np.zeros(0) if self.problem.fixed is None else self.problem.fixed
        latency = float(sum(fixed[group] for group in sorted(used & decided)))
        possible = np.array([used.issuperset(groups) for groups in self._group_sets])[self._group_set]
        value = np.where(possible, value, np.inf)

        def mean(longest: float) -> float:
            least = np.minimum.reduceat(np.where(self.pieces <= longest, value, np.inf), self.starts)
            return self.mean(least, prices)

        low = float(np.minimum.reduceat(np.where(np.isfinite(value), self.pieces, np.inf), self.starts).max())
        if not np.isfinite(low):
            return low
        # a plan either has a piece longer than z, or at least the mean of choices with none
        high = mean(low)
        for _ in range(_HALVINGS):
            if high <= low * (1 + _CLOSE):
                break
            middle = (low + high) / 2
            reached = mean(middle)
            low = max(low, min(reached, middle))
            high = high if reached > middle else middle
        return low + latency

    def fruitful(self, limit: float) -> np.ndarray:
        """``[N]``: the choices that a plan of at most so many milliseconds can have.

        A choice that costs a table more than its cheapest one, prices included, lifts the bound by the difference.
        """
        relaxed = self.relax(limit)
        keep = self.usable & (self.longest <= limit)
        if not np.isfinite(relaxed.ms):
            return keep
        value = np.where(keep, self.time + self.memory @ relaxed.prices, np.inf)
        least = np.minimum.reduceat(value, self.starts)
        mean = self.mean(least, relaxed.prices)
        return keep & (mean + value - least[self.table] <= limit * (1 + _SLACK))

    def _argmin(self, value: Floats) -> Ints:
        """``[T]``: which of the N is the least of each table; the first of equal ones."""
        least = np.minimum.reduceat(value, self.starts)
        ties = np.flatnonzero(value <= least[self.table])
        return ties[np.searchsorted(self.table[ties], np.arange(len(self.starts)))]

    def _prices(self, time: Floats, prices: Floats, kinds: tuple[int, ...]) -> Floats | None:
        """Prices of these kinds that make the mean largest, others as given; None where it grows without end."""

        def mean(price: float) -> tuple[float, float, Floats] | None:
            trial = prices.copy()
            trial[kind] = price
            found = self._prices(time, trial, kinds[1:])
            if found is None:
                return None
            value = time + self.memory @ found
            chosen = self._argmin(value)
            over = self.memory[chosen, kind].sum() - self.capacity[kind]
            return float(value[chosen].sum() - found @ self.capacity), float(over), found

        if not kinds:
            return prices
        kind = kinds[0]
        least = np.minimum.reduceat(np.where(np.isfinite(time), self.memory[:, kind], np.inf), self.starts)
        if least.sum() > self.capacity[kind]:
            return None
        return steepest(mean, start=float(time[np.isfinite(time)].max()) / max(self.capacity[kind], 1.0))


def steepest(mean: Callable[[float], tuple[float, float, _Found] | None], start: float) -> _Found | None:
    """What a concave function of one price returns beside its value and slope, at its top among prices >= 0.

    Args:
        mean: ``price -> (value, slope, what is returned)``; None where the function grows without end.
        start: A price that is tried first.
    """
    low = mean(0.0)
    if low is None:
        return None
    if low[1] <= 0:
        return low[2]
    price, high_price = 0.0, max(start, 1e-30)
    high = mean(high_price)
    while high is not None and high[1] > 0 and high_price < 1e30:
        price, low, high_price = high_price, high, high_price * 8.0
        high = mean(high_price)
    if high is None:
        return None
    best = max(low, high, key=lambda found: found[0])
    for _ in range(_CUTS):
        if low[1] - high[1] <= 0:
            break
        # where the two tangents meet
        middle = (high[0] - low[0] + low[1] * price - high[1] * high_price) / (low[1] - high[1])
        if not price < middle < high_price:
            break
        found = mean(middle)
        if found is None:
            break
        top = low[0] + low[1] * (middle - price)
        best = max(best, found, key=lambda point: point[0])
        if found[0] >= top - 1e-12 * abs(top):
            break
        if found[1] > 0:
            price, low = middle, found
        else:
            high_price, high = middle, found
    return best[2]


@dataclass(frozen=True, eq=False)
class _Component:
    """Groups that tables have to choose between, and those tables; G groups, at most a few.

    Args:
        groups: Their numbers.
        latency: ``[2 ** G]`` ms of every subset of them.
        members: For each subset of groups that a choice can need, the choices that need it: positions among the N.
        rows: For each of those, the table's row here.
        tables: How many tables.
    """

    groups: tuple[int, ...]
    latency: Floats
    members: tuple[tuple[int, Ints, Ints], ...]
    tables: int

    def dearer(self, value: Floats) -> Floats:
        """How much dearer its tables get when no groups but those of a subset are open, and are paid for.

        Args:
            value: ``[N]`` what choices cost.

        Returns:
            ``[2 ** G]`` milliseconds above the sum of the tables' cheapest choices.
        """
        costs = np.full((len(self.latency), self.tables), np.inf)
        for subset, positions, rows in self.members:
            np.minimum.at(costs[subset], rows, value[positions])
        for bit in range(len(self.groups)):
            with_bit = np.flatnonzero(np.arange(len(costs)) >> bit & 1)
            costs[with_bit] = np.minimum(costs[with_bit], costs[with_bit ^ (1 << bit)])
        return costs.sum(axis=1) + self.latency - costs[-1].sum()

    def members_of(self, subset: int) -> frozenset[int]:
        """The groups of a subset."""
        return frozenset(group for bit, group in enumerate(self.groups) if subset >> bit & 1)


def _components(problem: PlanningProblem, choices: list[Choice], fixed: Floats) -> list[_Component]:
    """Groups that share tables belong together; sets of too many are left out, which leaves the bound a bound."""
    home = list(range(len(fixed)))

    def root(group: int) -> int:
        while home[group] != group:
            home[group] = home[home[group]]
            group = home[group]
        return group

    for of_table in problem.choices:
        groups = [group for choice in of_table for group in choice.groups]
        for group in groups[1:]:
            home[root(group)] = root(groups[0])
    table_of = [table for table, of_table in enumerate(problem.choices) for _ in of_table]
    positions: dict[int, list[int]] = {}
    for position, choice in enumerate(choices):
        if choice.groups:
            positions.setdefault(root(choice.groups[0]), []).append(position)
    found = []
    for members in positions.values():
        groups = tuple(sorted({group for position in members for group in choices[position].groups}))
        if len(groups) > _GROUPS_AT_ONCE:
            continue
        bit = {group: 1 << place for place, group in enumerate(groups)}
        latency = np.array(
            [sum(fixed[group] for group in groups if subset & bit[group]) for subset in range(1 << len(groups))]
        )
        rows = {table: row for row, table in enumerate(sorted({table_of[position] for position in members}))}
        by_subset: dict[int, list[int]] = {}
        for table in rows:
            start = table_of.index(table)
            for position in range(start, start + len(problem.choices[table])):
                subset = sum(bit[group] for group in set(choices[position].groups))
                by_subset.setdefault(subset, []).append(position)
        parts = tuple(
            (subset, np.array(list_), np.array([rows[table_of[position]] for position in list_]))
            for subset, list_ in by_subset.items()
        )
        found.append(_Component(groups, latency, parts, len(rows)))
    return found


def _usable(problem: PlanningProblem, choices: list[Choice]) -> np.ndarray:
    """``[N]``: whether every piece of a choice fits on some rank that it may lie on."""
    roomiest = problem.capacity.max(axis=0)
    found = np.ones(len(choices), dtype=np.bool_)
    for position, choice in enumerate(choices):
        if choice.spread is Spread.ALL:
            pinned = choice.allowed is not None and not choice.allowed.all()
            found[position] = not pinned and bool((choice.memory <= problem.capacity).all())
        elif choice.allowed is None:
            found[position] = bool((choice.memory <= roomiest).all())
        else:
            room = problem.capacity[choice.allowed]
            found[position] = len(room) > 0 and bool((choice.memory <= room.max(axis=0)).all())
    return found


def _shortage(problem: PlanningProblem, totals: Totals) -> str:
    """Which memory is short, and by how much."""
    words = []
    for kind, name in enumerate(("HBM", "DDR")):
        least = np.where(totals.usable, totals.memory[:, kind], np.inf)
        needed = np.minimum.reduceat(least, totals.starts).sum()
        if needed > totals.capacity[kind]:
            words.append(f"{needed:,.0f} bytes of {name} at least, where all ranks have {totals.capacity[kind]:,.0f}")
    return "the tables need " + (" and ".join(words) or "more memory than all ranks have together")


def _name(problem: PlanningProblem, table: int) -> str:
    """A table as its options call it; its number where a problem has none."""
    names = [option.name for option in problem.choices[table][0].options if hasattr(option, "name")]
    if not names:
        return f"table {table}"
    return " and ".join(f"table {name!r}" for name in names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")

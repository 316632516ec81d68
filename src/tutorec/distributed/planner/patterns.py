"""What a rank can hold: the patterns out of which plans are made, and the worthiest of them.

A plan is a pattern for each rank: what the rank holds of which table, in no more than so many milliseconds and in the
memory that it has. Give each table k a price ``v[k]``; a pattern is worth ``v[k]`` times its share of table k, summed
over the tables. All ranks together hold each table once, so their patterns are worth ``sum(v)``. Hence, whatever the
prices are,

    worth of the worthiest pattern < sum(v) / W    =>    no plan is that fast.

The worthiest pattern is a knapsack's content: at most one way to hold each table, several sizes that are limited (time
and each kind of memory). It is found by putting table after table into all knapsacks at once and dropping those that
cannot become worthy enough any more. With a price on each size as well (multipliers of Lagrange) the tables fall apart:
a knapsack is worth no more than the multipliers times what it may take, plus each table's best surplus,

    sizes . multipliers + sum over tables of max over ways ( worth - sizes of the way . multipliers ),

and with what has been put in so far, this bound less what these ways lose against their tables' best.

Ranks that are not equal are taken for the roomiest of them, and which host a rank belongs to is not looked at; a
pattern may be more than a rank can hold, never less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from tutorec.distributed.planner.bounds import steepest
from tutorec.distributed.planner.milp_model import binding_memories, equal_lines
from tutorec.distributed.planner.problem import Choice, Floats, Ints, PlanningProblem, Spread

ROUNDING = 1e-9
"""Part by which a pattern may exceed its room: a sum's rounding error must not forbid what fits."""

MOST_WAYS = 400
"""A table that a rank can hold in more ways is left to others."""


@dataclass(frozen=True, eq=False)
class Holdings:
    """In which ways a rank can hold some of each table; T tables with up to J ways, the first of which is nothing.

    Args:
        sizes: ``[T, J, 1 + D]`` ms, and parts of the roomiest rank's memory of D kinds.
        share: ``[T, J]`` part of the table.
        real: ``[T, J]``; tables have fewer ways than J.
        choice: ``[T, J]`` number of the choice; -1: nothing.
        counts: For each table and way how many pieces of each kind, in the order of `kinds_of_pieces`.
    """

    sizes: Floats
    share: Floats
    real: np.ndarray
    choice: Ints
    counts: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def of(cls, problem: PlanningProblem, ms: float) -> Holdings | None:
        """Ways to hold tables in so many ms, whole ranks apart: what lies on all ranks is no pattern's business.

        Args:
            problem: Whose tables.
            ms: The most that a way may take.

        Returns:
            The ways; None where a table has too many, or can be cut into no pieces at all.
        """
        kinds = binding_memories(problem)
        room = np.maximum(problem.capacity.max(axis=0)[kinds], 0)
        ways: list[list[tuple[Floats, float, int, tuple[int, ...]]]] = []
        for choices in problem.choices:
            own: list[tuple[Floats, float, int, tuple[int, ...]]] = [(np.zeros(1 + len(kinds)), 0.0, -1, ())]
            for number, choice in enumerate(choices):
                if not len(choice.time):
                    return None
                for sizes, share, counts in _ways(choice, problem.local_size, MOST_WAYS):
                    scaled = np.concatenate([sizes[:1], sizes[1:][kinds] / np.maximum(room, 1)])
                    if sizes[0] <= ms * (1 + ROUNDING) and (sizes[1:][kinds] <= room).all():
                        own.append((scaled, share, number, counts))
                if len(own) > MOST_WAYS:
                    return None
            ways.append(own)
        most = max(len(own) for own in ways)
        shape = (len(ways), most)
        found = cls(
            np.zeros((*shape, 1 + len(kinds))),
            np.zeros(shape),
            np.zeros(shape, np.bool_),
            np.full(shape, -1),
            tuple(tuple(counts for *_, counts in own) for own in ways),
        )
        for table, own in enumerate(ways):
            for way, (sizes, share, number, _) in enumerate(own):
                found.sizes[table, way], found.share[table, way] = sizes, share
                found.real[table, way], found.choice[table, way] = True, number
        return found

    def undominated(self) -> Holdings:
        """Without ways that hold no more of a table, and take no less, than another one: for worth they are no use."""
        larger = (self.sizes[:, :, None] >= self.sizes[:, None, :]).all(axis=3)
        poorer = self.share[:, :, None] <= self.share[:, None, :]
        worse = larger & poorer & self.real[:, None, :]
        # of equal ways the first stays
        strictly = worse & ~(worse.transpose(0, 2, 1) & np.tri(worse.shape[1], dtype=np.bool_).T)
        real = self.real & ~strictly.any(axis=2)
        real[:, 0] = True
        return replace(self, real=real)

    def of_tables(self, some: np.ndarray) -> Holdings:
        """Of these tables only, ``[T]``: there are no ways to hold the others."""
        real = self.real & some[:, None]
        real[:, 0] = True
        return replace(self, real=real)

    def fitting(self, room: Floats) -> np.ndarray:
        """``[T, J]``: which ways leave no size over, ``[1 + D]``."""
        return self.real & (self.sizes <= room * (1 + ROUNDING)).all(axis=2)


def kinds_of_pieces(choice: Choice) -> list[Ints]:
    """Numbers of equal pieces together."""
    return equal_lines(np.column_stack([choice.time, choice.memory]))


def _ways(choice: Choice, local_size: int, most: int) -> Iterator[tuple[Floats, float, tuple[int, ...]]]:
    """Sizes, share and pieces of each kind, of all that a rank can hold of a choice; not much more than `most`."""
    if choice.spread is Spread.ALL:
        return
    kinds = kinds_of_pieces(choice)
    pieces = len(choice.time)
    at_once = pieces if choice.spread in (Spread.ANY, Spread.HOST) else pieces // local_size
    total = float(choice.time.sum())
    shares = choice.time / total if total > 0 else np.full(pieces, 1 / max(pieces, 1))
    found = 0
    for counts in product(*(range(min(len(kind), at_once) + 1) for kind in kinds)):
        if 0 < sum(counts) <= at_once:
            some = [(kind[0], count) for kind, count in zip(kinds, counts, strict=True)]
            time = sum(count * float(choice.time[piece]) for piece, count in some)
            memory = sum(count * choice.memory[piece].astype(np.float64) for piece, count in some)
            yield np.append(time, memory), sum(count * float(shares[piece]) for piece, count in some), counts
            found += 1
        if found > most:
            return


@dataclass(frozen=True, eq=False)
class Worthiest:
    """The worthiest patterns.

    Args:
        ways: ``[n, T]`` which way each of them holds each table, the worthiest pattern first.
        worth: No pattern is worth more; or, where none is worth more than was asked for, what was asked for.
        all_seen: Whether no pattern was dropped because there were too many.
    """

    ways: Ints
    worth: float
    all_seen: bool


def worthiest(
    holdings: Holdings, room: Floats, prices: Floats, above: float, states: int = 3000, most: int = 15
) -> Worthiest:
    """Patterns that are worth more than so much.

    Args:
        holdings: What a rank can hold of each table.
        room: ``[1 + D]`` how large a pattern may be.
        prices: ``[T]``, none below 0.
        above: Patterns that are worth less do not matter.
        states: How many patterns are followed at a time.
        most: How many are returned.

    Returns:
        The patterns.

    Example:
        Two tables of 2 ms and one of 1 ms, the latter in great demand, in 3 ms:

        >>> def whole(ms):
        ...     return (Choice(np.array([ms]), np.zeros((1, 2), np.int64), Spread.ANY),)
        >>> problem = PlanningProblem(2, 2, np.zeros((2, 2), np.int64), (whole(2.0), whole(2.0), whole(1.0)))
        >>> found = worthiest(Holdings.of(problem, 3.0), np.array([3.0]), np.array([1.0, 2.0, 3.0]), above=4.5)
        >>> found.ways.tolist(), found.worth
        ([[0, 1, 1]], 5.0)
    """
    none = np.zeros((0, len(prices)), np.int64)
    worth = np.where(holdings.fitting(room), prices[:, None] * holdings.share, -np.inf)
    bound, multipliers = _multipliers(worth, holdings.sizes, room)
    if bound <= above:
        return Worthiest(none, above, True)
    surplus = worth - holdings.sizes @ multipliers
    loss = surplus.max(axis=1)[:, None] - surplus
    useful = loss < bound - above
    size = np.zeros((1, len(room)))
    value, lost = np.zeros(1), np.full(1, loss[~useful[:, 1:].any(axis=1), 0].sum())
    steps: list[tuple[int, Ints, Ints, Ints]] = []
    left_out = -np.inf
    for table in _largest_first(holdings, useful, room):
        ways = np.flatnonzero(useful[table])
        sizes = size[:, None] + holdings.sizes[table, ways]
        losses = lost[:, None] + loss[table, ways]
        parents, taken = np.nonzero((sizes <= room * (1 + ROUNDING)).all(axis=2) & (losses < bound - above))
        size, lost = sizes[parents, taken], losses[parents, taken]
        value = value[parents] + worth[table, ways[taken]]
        if len(lost) > states:
            order = np.argpartition(lost, states)
            left_out = max(left_out, bound - float(lost[order[states]]))
            order = order[:states]
            size, lost, value, parents, taken = size[order], lost[order], value[order], parents[order], taken[order]
        steps.append((table, parents, taken, ways))
        if not len(lost):
            return Worthiest(none, max(above, left_out), left_out == -np.inf)
    best = np.argsort(-value, kind="stable")[:most]
    best = best[value[best] > above]
    found = np.zeros((len(best), len(prices)), np.int64)
    at = best
    for table, parents, taken, ways in reversed(steps):
        found[:, table] = ways[taken[at]]
        at = parents[at]
    return Worthiest(found, max(above, left_out, float(value.max())), left_out == -np.inf)


def _largest_first(holdings: Holdings, useful: np.ndarray, room: Floats) -> list[int]:
    """Tables that can be held at all, in the order in which few knapsacks arise."""
    parts = (holdings.sizes / np.maximum(room, 1e-300)).clip(max=1.0).sum(axis=2)
    largest = np.where(useful, parts, 0.0).max(axis=1)
    tables = np.flatnonzero(useful[:, 1:].any(axis=1))
    return tables[np.argsort(-largest[tables], kind="stable")].tolist()


# A knapsack's bound, how much of each size it takes, and the multipliers.
_Knapsack = tuple[float, Floats, Floats]


def _multipliers(worth: Floats, sizes: Floats, room: Floats) -> tuple[float, Floats]:
    """The lowest bound of a knapsack's worth, and the multipliers of the sizes that give it."""
    rows = np.arange(len(worth))

    def lowest(multipliers: Floats, kinds: tuple[int, ...]) -> _Knapsack:
        if not kinds:
            surplus = worth - sizes @ multipliers
            best = surplus.argmax(axis=1)
            return float(surplus[rows, best].sum() + multipliers @ room), sizes[rows, best].sum(axis=0), multipliers
        kind = kinds[0]

        def falling(price: float) -> tuple[float, float, _Knapsack]:
            trial = multipliers.copy()
            trial[kind] = price
            bound, used, all_ = lowest(trial, kinds[1:])
            return -bound, float(used[kind] - room[kind]), (bound, used, all_)

        best = steepest(falling, start=float(worth.max()) / max(float(room[kind]), 1e-12))
        assert best is not None, "a knapsack's bound is finite at every price"
        return best

    bound, _, multipliers = lowest(np.zeros(len(room)), (*range(1, len(room)), 0))
    return bound, multipliers

"""The placing engine of the search and of what-if analyses.

The cost of a placement is that of its slowest rank, but a search that looks at the slowest rank
only makes no progress on the others. Shards are therefore placed where a potential over all ranks
grows least::

    sum over ranks r of (exp(b * load_r / target) + sum over k of exp(b * held_rk / room_k))

where k runs over the kinds of memory. This is the exponential cost function of load balancing and
of vector scheduling (Aspnes et al. 1997, Chekuri and Khanna 2004). For small b it measures the work
of all ranks, for large b mostly that of the fullest. The growth from a shard is a product of a
factor of the shard with the exponentials of the ranks, so all ranks are compared in one operation.

All spreads are placed in the same way: blocks of S shards, one after the other, the longest first,
each on one of U units of S ranks. If blocks must share a host, there are G groups of units, which
are all tried (see `units`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.planner.problem import (
    Choice,
    Floats,
    Ints,
    Placement,
    PlanningProblem,
    Spread,
    units,
)
from tutorec.errors import bad_input

# Memory is a hard limit for any b: its term is small until memory is nearly full.
_MEMORY_SHARPNESS = 10.0
# exp of this, squared and summed over many ranks, is a finite float.
_LARGEST_EXPONENT = 300.0
# Growths that differ by less are ties, which preference breaks.
_TIE = 1e-9


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
    """C choices of one table with the same spread and P shards, in B blocks of S.

    Args:
        choices: All choices of the table.
        numbers: Indices of these choices, the preferred one first.
        problem: The problem, for its ranks.
        kinds: ``[K]``: the kinds of memory that are limited.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        numbers: Sequence[int],
        problem: PlanningProblem,
        kinds: Ints,
    ) -> None:
        first = choices[numbers[0]]
        self.numbers, self.everywhere = numbers, first.spread is Spread.ALL
        self.units = units(first.spread, problem.world_size, problem.local_size)
        self.closed = None if first.allowed is None else ~first.allowed[self.units].all(axis=2)
        shape = (-1, self.units.shape[2], 1 + len(kinds))
        needs = np.stack(
            [
                np.column_stack([choices[number].time, choices[number].memory[:, kinds]]).reshape(
                    shape
                )
                for number in numbers
            ]
        ).astype(np.float64)
        order = np.argsort(-needs[..., 0].sum(axis=2), axis=1, kind="stable")  # [C, B]
        self.restore = np.argsort(order, axis=1, kind="stable")
        self.needs = np.take_along_axis(needs, order[:, :, None, None], axis=1)  # [C, B, S, 1 + K]
        self.most = self.needs.sum(axis=1).max(axis=(0, 1))
        self.steps = self.needs

    def place(self, weights: Floats, free: Floats | None) -> Position | None:
        """Position with the least growth of the potential, over these choices; None if none fits.

        Args:
            weights: ``[W, 1 + K]``: the terms of the potential.
            free: ``[W, 1 + K]``: free ms and bytes of the ranks; None if all choices fit
                everywhere.
        """
        choices, blocks, shards, kinds = self.needs.shape
        groups, count, _ = self.units.shape
        steps = self.steps.reshape(choices, blocks, 1, shards * kinds, 1)
        at = weights[self.units].reshape(1, groups, count, shards * kinds)
        room = None if free is None else free[self.units][None]
        if blocks > 1:  # every choice and every group fills its own copy of the ranks
            at = np.repeat(at, choices, axis=0)
            room = None if room is None else np.repeat(room, choices, axis=0)
        pick = np.arange(choices)[:, None], np.arange(groups)
        total, taken = np.zeros((choices, groups)), np.empty((blocks, choices, groups), np.int64)
        for block in range(blocks):
            growth = (at @ steps[:, block])[..., 0]  # [C, G, U]
            if room is not None:
                full = (self.needs[:, block, None, None] > room).any(axis=(3, 4))
                growth[full] = math.inf
            if self.closed is not None:
                growth[:, self.closed] = math.inf
            taken[block] = unit = growth.argmin(axis=2)
            total += growth[(*pick, unit)]
            if block + 1 < blocks:
                grown = at[(*pick, unit)] * (1.0 + steps[:, block, :, :, 0])
                at[(*pick, unit)] = np.minimum(grown, math.exp(_LARGEST_EXPONENT))
                if room is not None:
                    room[(*pick, unit)] -= self.needs[:, block, None]
        which, group = divmod(int(total.argmin()), groups)
        if not math.isfinite(total[which, group]):
            return None
        order = self.restore[which]
        ranks = self.units[group, taken[:, which, group][order]].ravel()
        needs = self.needs[which, order].reshape(-1, kinds)
        return Position(
            float(total[which, group]), self.numbers[which], ranks, needs, self.everywhere
        )


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
        >>> whole = Choice(np.array([2.0]), np.array([[1, 0]]), Spread.ANY)
        >>> packing = Packing(
        ...     PlanningProblem(2, 2, np.array([[1, 0], [1, 0]]), ((whole,), (whole,)))
        ... )
        >>> for table in range(2):
        ...     packing.put(table, packing.best(table))
        >>> packing.slowest, [ranks.tolist() for ranks in packing.placement().ranks]
        (2.0, [[0], [1]])
    """

    def __init__(
        self, problem: PlanningProblem, allowed: Sequence[Sequence[int]] | None = None
    ) -> None:
        most = np.sum(
            [np.max([c.memory.sum(axis=0) for c in of], axis=0) for of in problem.choices], axis=0
        )
        self.kinds = np.flatnonzero(most > problem.capacity.min(axis=0))
        capacity = problem.capacity[:, self.kinds].astype(np.float64)
        self.room = capacity.max(axis=0)
        self.filled = np.column_stack([np.zeros(problem.world_size), self.room - capacity])
        self.ceiling = np.concatenate([[math.inf], self.room])
        self.alternatives: list[list[Alternatives]] = []
        for table, choices in enumerate(problem.choices):
            alike: dict[object, list[int]] = {}
            numbers = range(len(choices)) if allowed is None else allowed[table]
            for number in sorted(numbers, key=lambda number: choices[number].preference):
                choice = choices[number]
                key = (choice.spread, len(choice.time)) if choice.allowed is None else number
                alike.setdefault(key, []).append(number)
            self.alternatives.append(
                [Alternatives(choices, same, problem, self.kinds) for same in alike.values()]
            )
        self.positions: list[Position | None] = [None] * len(problem.choices)
        self.holds = np.zeros((problem.world_size, len(problem.choices)), np.bool_)
        self.placings = 0
        self.sharpen(_MEMORY_SHARPNESS, 1.0)

    def sharpen(self, sharpness: float, target: float) -> None:
        """Set b of the potential, and the target milliseconds of a rank."""
        of_memory = max(sharpness, _MEMORY_SHARPNESS)
        memory = of_memory / np.maximum(self.room, 1.0)
        self._scale = np.concatenate([[sharpness / max(target, 1e-12)], memory])
        # a rank with full memory has the same weight as one with full time
        self._offset = np.concatenate([[0.0], np.full(len(self.room), sharpness - of_memory)])
        self.weights = self._exp(self.filled)
        for each in chain.from_iterable(self.alternatives):
            each.steps = np.expm1(np.minimum(each.needs * self._scale, _LARGEST_EXPONENT))

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

    def best(self, table: int, skipped: Sequence[bool] = ()) -> Position | None:
        """Position of a table with the least growth of the potential; None if it fits nowhere.

        Args:
            table: Index of the table.
            skipped: For each of its `Alternatives`, whether they are skipped; empty for none.
        """
        self.placings += 1
        free = self.ceiling - self.filled
        least, best = free.min(axis=0), None
        for number, each in enumerate(self.alternatives[table]):
            if skipped and skipped[number]:
                continue
            position = each.place(self.weights, None if (each.most <= least).all() else free)
            if position and (best is None or position.growth < best.growth * (1 - _TIE)):
                best = position
        return best

    def put(self, table: int, position: Position) -> None:
        """Place a table."""
        self.positions[table] = position
        self._add(position, position.needs)
        if not position.everywhere:
            self.holds[position.ranks, table] = True

    def take(self, table: int) -> Position:
        """Remove a table and return its position."""
        position = self.positions[table]
        assert position is not None, f"table {table} is not placed"
        self.positions[table] = None
        self._add(position, -position.needs)
        self.holds[position.ranks, table] = False
        return position

    def _add(self, position: Position, needs: Floats) -> None:
        ranks = position.ranks
        if len(ranks) == 1:
            self.filled[ranks] += needs
        else:
            np.add.at(self.filled, ranks, needs)
        self.weights[ranks] = self._exp(self.filled[ranks])

    def lay(self, positions: Sequence[Position | None]) -> None:
        """Remove all tables, and place them at these positions."""
        for table, position in enumerate(self.positions):
            if position is not None:
                self.take(table)
        for table, position in enumerate(positions):
            if position is not None:
                self.put(table, position)

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


def place_options(problem: PlanningProblem, placement: Placement) -> list[ShardingOption]:
    """The chosen option of each table, as a copy with placed shards, in the problem's order."""
    placed = []
    for choice, ranks in placement.placed(problem):
        for option in choice.options:
            placed.append(option.with_pieces(replace(option.pieces(), ranks=ranks)))
    return placed


def in_rank_order(problem: PlanningProblem, placement: Placement) -> Placement:
    """The same placement with equal shards of a table on ascending ranks, a canonical form.

    Args:
        problem: The problem.
        placement: The placement.
    """
    sorted_ranks = []
    for choice, ranks in placement.placed(problem):
        # Shards of a grid keep their local rank: whole blocks are exchanged.
        block = units(choice.spread, problem.world_size, problem.local_size).shape[2]
        blocks = ranks.reshape(-1, block)
        kind = choice.alike(block)
        in_order = np.empty_like(blocks)
        in_order[kind.argsort(kind="stable")] = blocks[np.lexsort((blocks[:, 0], kind))]
        sorted_ranks.append(in_order.ravel())
    return Placement(placement.chosen, sorted_ranks)


def check_one_each(what: str, options: Sequence[ShardingOption]) -> None:
    """Check that there is at most one option per table.

    Args:
        what: Source of the options, for the message.
        options: The options.

    Raises:
        PlannerError: A table has two.
    """
    seen: dict[str, ShardingOption] = {}
    for option in options:
        if option.fqn in seen:
            raise bad_input(
                f"{what} has table {option.name!r} twice, as {seen[option.fqn].sharding_type} and "
                f"as {option.sharding_type}: take one option for each table"
            )
        seen[option.fqn] = option

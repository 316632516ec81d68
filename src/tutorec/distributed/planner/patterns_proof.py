"""The proof that no plan is faster than a limit, base by base.

A plan in so many milliseconds is a base and a pattern for each of W ranks (see `patterns_bases` and `patterns`). Each
base takes time and memory of every rank; what it leaves is the room of the patterns, which together hold all other
tables. With prices v of the tables, for any of the bases,

    sum of v over the tables beside the base > W * worth of the worthiest pattern    =>    no plan has this base.

The right side falls as a base grows. So one knapsack refutes many bases at once, all that are no smaller than the
smallest: its time and memory are the least of theirs. For a set of bases the best prices are sought
(`patterns_prices`), bases and patterns being added as they come up, and whatever these prices refute is done with.
Where a mixture of the bases that remain fits on W ranks, no prices refute them all: the set is cut in two, by time or
by memory, and each half, having less room or fewer bases, is looked at by itself. A single base that is left over is a
`Case`: it may have a plan below the limit, and something exact has to find out (`patterns_plans`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tutorec.distributed.planner.patterns import ROUNDING, Holdings, Worthiest, worthiest
from tutorec.distributed.planner.patterns_bases import REST, Bases
from tutorec.distributed.planner.patterns_prices import Basis, Columns
from tutorec.distributed.planner.problem import Floats, Ints

# Worth is summed in single precision where many bases are compared; a base is refuted by this part at least.
_MARGIN = 1e-5
# Patterns followed at a time: at first, for what they can find; then so that next to none is dropped.
_FEW, _SOME, _MANY = 300, 3000, 100_000
_ROUNDS, _PATTERNS_KEPT = 80, 2000
_TINY = 1e-9


@dataclass(frozen=True, eq=False)
class Case:
    """A base that could not be refuted.

    Args:
        number: Of the base.
        room: ``[1 + D]`` what it leaves of each rank.
        rest: ``[T]`` whether a table lies beside the base.
        bound: At least so many ranks are needed.
        prices: ``[T]`` that say so; no pattern is worth more than 1.
    """

    number: int
    room: Floats
    rest: np.ndarray
    bound: float
    prices: Floats


@dataclass(frozen=True, eq=False)
class _Set:
    """Bases that are looked at together, with what is known from a larger set that they were part of."""

    bases: Ints
    prices: Floats | None = None
    basis: Basis | None = None


class Proof:
    """Bases that are not refuted yet.

    Args:
        ranks: W.
        bases: All bases.
        holdings: What a rank can hold beside them.
        ms: The limit, which may be lowered.
        out_of_time: Whether to stop.
    """

    def __init__(
        self, ranks: int, bases: Bases, holdings: Holdings, ms: float, out_of_time: Callable[[], bool]
    ) -> None:
        self.ranks, self.bases, self.ms = ranks, bases, ms
        self.all_ways, self.holdings = holdings, holdings.undominated()
        self.rest = bases.chosen == REST
        self._out_of_time = out_of_time
        self._waiting = [_Set(np.arange(len(bases.sizes)))] if len(bases.sizes) else []
        tables, ways = np.nonzero(self.holdings.real & (self.holdings.share > 0))
        # the first pattern is empty
        self._singles = 1 + len(tables)
        self._known = np.zeros((self._singles, len(self.holdings.share)), np.int64)
        self._known[1 + np.arange(len(tables)), tables] = ways
        self._shares, self._sizes = self._measured(self._known)

    @property
    def complete(self) -> bool:
        """Whether all bases were looked at."""
        return not self._waiting

    def cases(self) -> Iterator[Case]:
        """Refute what can be refuted, and give what cannot; goes on where it stopped.

        Between two cases the limit may be lowered.
        """
        while self._waiting and not self._out_of_time():
            some = self._within_limit(self._waiting.pop())
            if not len(some.bases):
                continue
            room = self._room(some.bases)
            left = _Question(self, room).ask(some)
            if len(left.bases) == 1 and (room == self._room(left.bases)).all():
                case = self._case(int(left.bases[0]), room)
                if case.bound <= self.ranks:
                    yield case
            elif len(left.bases):
                self._waiting += self._halves(left)

    def again(self, number: int, part: float = 1.0) -> Case | None:
        """A base once more, when the limit is lower, or for a part of the limit; None: it is refuted now."""
        room = self._room(np.array([number]))
        room[0] -= (1.0 - part) * self.ms
        case = self._case(number, room) if room[0] >= 0 else None
        return case if case is not None and case.bound <= self.ranks else None

    def _room(self, bases: Ints) -> Floats:
        """``[1 + D]`` what the bases leave at most; of memory a little more, as the last byte counts."""
        least = self.bases.sizes[bases].min(axis=0)
        return np.append(self.ms - least[0], np.maximum(1.0 - least[1:], 0.0) + ROUNDING)

    def _within_limit(self, some: _Set) -> _Set:
        """Without the bases that take longer than the limit by themselves."""
        fast = self.bases.sizes[some.bases, 0] <= self.ms
        return some if fast.all() else _Set(some.bases[fast], some.prices, some.basis)

    def _halves(self, some: _Set) -> list[_Set]:
        """The smaller and the larger bases, by the size in which they differ most."""
        if len(some.bases) == 1:
            return [some]
        sizes = self.bases.sizes[some.bases] / np.append(self.ms, np.ones(self.bases.sizes.shape[1] - 1))
        kind = int(np.ptp(sizes, axis=0).argmax())
        values = sizes[:, kind]
        small = values < (values.min() + values.max()) / 2
        if not small.any() or small.all():
            small = np.arange(len(values)) < len(values) // 2
        return [_Set(some.bases[small], some.prices, some.basis), _Set(some.bases[~small], some.prices, some.basis)]

    def _case(self, number: int, room: Floats) -> Case:
        """The best prices for one base alone: how many ranks it needs at least."""
        rest = self.rest[number]
        best, prices = 0.0, np.zeros(len(rest))
        if not (self.holdings.fitting(room)[:, 1:].any(axis=1) | ~rest).all():
            return Case(number, room, rest, np.inf, prices)
        question = _Question(self, room)
        basis = question.first_basis(number)
        for _ in range(_ROUNDS):
            basis.improve(question.columns(np.array([number])), 0.0)
            trial, _ = basis.prices()
            found = self.worthiest(room, trial, 1.0 + 1e-6)
            bound = float(trial @ rest) / max(found.worth, 1.0 + 1e-6) * (1 - _TINY)
            if bound > best:
                best, prices = bound, trial / max(found.worth, 1.0 + 1e-6)
            if not len(found.ways) or best > self.ranks:
                break
            question.learn(found.ways)
        return Case(number, room, rest, best, prices)

    def worthiest(self, room: Floats, prices: Floats, above: float) -> Worthiest:
        """Patterns that are worth more: any, or it is certain that there are none."""
        found = worthiest(self.holdings, room, prices, above, _FEW)
        return found if len(found.ways) or found.all_seen else worthiest(self.holdings, room, prices, above, _MANY)

    def learn(self, ways: Ints) -> tuple[Floats, Floats]:
        """Remember patterns; their shares and sizes."""
        if len(self._known) > self._singles + 2 * _PATTERNS_KEPT:
            keep = np.r_[: self._singles, len(self._known) - _PATTERNS_KEPT : len(self._known)]
            self._known, self._shares, self._sizes = self._known[keep], self._shares[keep], self._sizes[keep]
        shares, sizes = self._measured(ways)
        self._known = np.vstack([self._known, ways])
        self._shares, self._sizes = np.vstack([self._shares, shares]), np.vstack([self._sizes, sizes])
        return shares, sizes

    def fitting(self, room: Floats) -> tuple[Floats, Floats]:
        """Shares and sizes of the patterns that are known and leave no room exceeded."""
        fits = (self._sizes <= room * (1 + _TINY)).all(axis=1)
        return self._shares[fits], self._sizes[fits]

    def _measured(self, ways: Ints) -> tuple[Floats, Floats]:
        tables = np.arange(ways.shape[1])
        return self.holdings.share[tables, ways], self.holdings.sizes[tables, ways].sum(axis=1)


class _Question:
    """Whether a set of bases can be refuted with patterns of one room."""

    def __init__(self, proof: Proof, room: Floats) -> None:
        self.proof, self.room = proof, room
        self.shares, self.sizes = proof.fitting(room)

    def learn(self, ways: Ints) -> None:
        """Take in new patterns."""
        shares, sizes = self.proof.learn(ways)
        self.shares, self.sizes = np.vstack([self.shares, shares]), np.vstack([self.sizes, sizes])

    def columns(self, names: Ints) -> Columns:
        """What may enter the basis: all patterns, and these bases' tables."""
        return Columns(self.shares, self.sizes, self.proof.rest[names].astype(np.float64), names)

    def first_basis(self, number: int) -> Basis:
        """Each table by itself, in its largest share."""
        holdings = self.proof.holdings
        share = np.where(holdings.fitting(self.room), holdings.share, 0.0)
        best = share.argmax(axis=1)
        tables = np.arange(len(share))
        some = self.proof.rest[number].astype(np.float64)
        return Basis(share[tables, best], holdings.sizes[tables, best], some, number)

    def ask(self, some: _Set) -> _Set:
        """What is left of a set, with the prices and the basis that were found last."""
        proof, ranks = self.proof, self.proof.ranks
        fits = proof.holdings.fitting(self.room)[:, 1:].any(axis=1)
        left = some.bases[~proof.rest[some.bases][:, ~fits].any(axis=1)]
        worth = _Worth(proof.rest, left)
        prices = some.prices
        if prices is not None and len(left):
            worth.price(prices)
            self._retry(worth, prices)
        if not len(worth.bases):
            return _Set(worth.bases)
        focus = [int(worth.bases[worth.values.argmin() if prices is not None else 0])]
        basis = some.basis.moved(self.room, worth.bases) if some.basis is not None else None
        basis = basis or self.first_basis(focus[0])
        for _ in range(_ROUNDS):
            fewest = basis.improve(self.columns(np.array(focus)), ranks * (1 + _TINY))
            if fewest <= ranks * (1 + _TINY):
                break
            trial, _ = basis.prices()
            worth.price(trial)
            cheapest = int(worth.bases[worth.values.argmin()])
            grew = worth.values.min() < fewest * (1 - _MARGIN) and cheapest not in focus
            if grew:
                focus.append(cheapest)
                if worth.values.min() <= ranks:
                    continue
            above = max(1.0 + 1e-8, float(worth.values.min()) / ranks * (1 - 2 * _MARGIN))
            found = proof.worthiest(self.room, trial, above)
            if len(found.ways):
                self.learn(found.ways)
            if worth.refute(ranks * found.worth):
                prices = trial
            if not len(worth.bases) or not (len(found.ways) or grew):
                break
        return _Set(worth.bases, prices, basis)

    def _retry(self, worth: _Worth, prices: Floats) -> None:
        """Try the prices that refuted bases with more room, unless a pattern is known that they cannot beat."""
        ranks = self.proof.ranks
        known = float((self.shares @ prices).max(initial=0.0))
        if known <= float(np.median(worth.values)) / ranks:
            above = max(known, float(worth.values.min()) / ranks * (1 - 2 * _MARGIN), 1e-6)
            worth.refute(ranks * worthiest(self.proof.holdings, self.room, prices, above, _SOME).worth)


class _Worth:
    """What the tables beside each of many bases are worth."""

    def __init__(self, rest: np.ndarray, bases: Ints) -> None:
        self.bases, self.values = bases, np.zeros(len(bases), np.float32)
        self._rest = rest[bases].astype(np.float32)

    def price(self, prices: Floats) -> None:
        """Sum up."""
        self.values = self._rest @ prices.astype(np.float32)

    def refute(self, most: float) -> bool:
        """Drop the bases whose rest is worth more than all ranks can hold; whether there were any."""
        keep = ~(self.values > most * (1 + _MARGIN))
        if keep.all():
            return False
        self.bases, self.values, self._rest = self.bases[keep], self.values[keep], self._rest[keep]
        return True

"""Taking tables off and putting them back: what the search does for one set of open choices."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from tutorec.distributed.planner.packing import Packing, Place
from tutorec.distributed.planner.problem import Placement, PlanningProblem

Progress = Callable[[float], None]
# For each table the numbers of choices.
OpenChoices = Sequence[Sequence[int]]

# Sharpness of the potential while tables are placed, and at the start and the end of ruin and repair.
_PLACING, _DULL, _SHARP, _STAGES = 10.0, 3.0, 300.0, 9
# By which part ranks may get slower for once, on average, at the start and the end of ruin and repair.
_HOT, _COLD = 0.002, 0.0002
# Sharpness where the placing of tables is to be right at the first try.
_PRECISE = 100.0
# Of a potential that counts little but work and memory of all ranks.
_TRIMMING = 2.0
# Tables that ruin and repair takes off: at most, and of the slowest rank.
_RUINED, _OF_THE_SLOWEST = 12, 4
# How often it cuts a table in another way, one of the slowest rank or any; tables that make room, and more of them.
_SWITCHING, _OF_THE_SLOWEST_FIRST, _MAKING_ROOM, _MORE = 0.3, 0.5, 16, 3
# The least part by which a cycle is to make the plan faster: choices that do not allow it are closed.
_BETTER = 1e-3
# Places looked for in a cycle from dull to sharp, for each table; cycles without a better plan that end the search.
_CYCLE_OF_A_TABLE, _PATIENCE = 120, 2
# The part of such a cycle that is enough for ranks to get slower meanwhile.
_ENOUGH_OF_A_CYCLE = 0.25
# Two costs that differ by less are equal.
EQUAL = 1e-9
# A potential that may grow by the exponential of this may grow at will.
_MUCH = 50.0
# Times this, no time matters beside memory.
_NO_HURRY = 1e6


class Budget:
    """How much may still be tried: places looked for, and seconds where a limit is given.

    Args:
        places: How many places may be looked for.
        seconds: None: no limit.
        progress: Called with the share of the work that is done.
    """

    def __init__(self, places: int, seconds: float | None = None, progress: Progress | None = None) -> None:
        self.places, self.spent, self.progress = places, 0, progress
        self.deadline = math.inf if seconds is None else time.perf_counter() + seconds

    def spend(self, places: int) -> None:
        """Count places that were looked for."""
        self.spent += places
        if self.progress is not None:
            self.progress(min(1.0, self.spent / self.places))

    @property
    def left(self) -> int:
        """Places that may still be looked for."""
        return max(0, self.places - self.spent)

    @property
    def out_of_time(self) -> bool:
        """Whether the seconds are over."""
        return time.perf_counter() >= self.deadline


class LocalSearch:
    """One packing and the best that was found for it.

    Args:
        problem: What is planned, its tables in the order in which they are placed.
        open_choices: For each table the choices that may be used.
        budget: What is left to be tried, shared by all searches.
        target: Milliseconds that a rank should take: a bound.

    Attributes:
        best: Where the tables lie in the best plan; None before one was found.
        slowest: Milliseconds of its slowest rank.
    """

    def __init__(self, problem: PlanningProblem, open_choices: OpenChoices, budget: Budget, target: float) -> None:
        self.packing, self.open_choices = Packing(problem, open_choices), open_choices
        self.budget, self.target = budget, max(target, 1e-12)
        self.sizes = [
            min(float(choices[number].time.sum()) for number in numbers)
            for choices, numbers in zip(problem.choices, open_choices, strict=True)
        ]
        self.random = random.Random(0)
        self.best: list[Place] | None = None
        self.slowest = math.inf
        self.starts: list[tuple[float, int, list[Place]]] = []

    def place_all(self, sharpness: float = _PLACING) -> bool:
        """Find a first plan, the table with the most work first, and improve it by sweeps.

        Args:
            sharpness: Of the potential while tables are placed.

        Returns:
            Whether all tables found a place.
        """
        self.packing.lay([None] * len(self.sizes))
        self.packing.sharpen(sharpness, self.target)
        return self._put(range(len(self.sizes))) and self._improve()

    def place_in_short_memory(self) -> bool:
        """Find first plans in other ways, for ranks that have hardly room: see `place_by_memory`.

        Returns:
            Whether any way led to a plan.
        """
        sharply, by_memory = self.place_all(_PRECISE), self.place_by_memory()
        return sharply or by_memory

    def place_by_memory(self) -> bool:
        """As ``place_all``, the largest tables first, each where memory is least in want, however long it takes."""
        packing = self.packing
        packing.lay([None] * len(self.sizes))
        least = [
            min(float(stack.needs[which, 1:].sum()) for stack in stacks for which in range(len(stack.numbers)))
            for stacks in packing.stacks
        ]
        packing.sharpen(_PRECISE, _NO_HURRY * self.target)
        by_memory = sorted(range(len(least)), key=lambda table: -least[table])
        if not self._put(by_memory):
            return False
        for hurry in (1e3, 1e2, 1e1, 1.0):
            packing.sharpen(_PLACING, hurry * max(self.target, packing.slowest / 10))
            self._sweep()
        return self._improve()

    def ruin_and_repair(self, places: int, enough: float, fruitful: Callable[[float], OpenChoices]) -> None:
        """Take off some tables and put them back, as long as it helps.

        Args:
            places: How many places may be looked for.
            enough: Milliseconds of a slowest rank that need no improvement.
            fruitful: The choices that a plan can have whose slowest rank takes at most so many milliseconds.
        """
        assert self.best is not None, "tables are placed before the placement is improved"
        starts = [places_ for _, _, places_ in sorted(self.starts, key=lambda entry: entry[:2])]
        length = min(_CYCLE_OF_A_TABLE * len(self.best), places // len(starts))
        start, cycle, idle = self.packing.work, 0, 0
        while self.slowest > enough and (left := places - (self.packing.work - start)) > 0:
            if (cycle >= len(starts) and idle >= _PATIENCE) or self.budget.out_of_time:
                break
            open_choices = fruitful(self.slowest * (1 - _BETTER))
            if not all(open_choices):
                break  # no plan is faster
            before = self.slowest
            self._start_from(starts[cycle] if cycle < len(starts) else self.best, open_choices)
            self._cycle(min(left, length), enough)
            cycle, idle = cycle + 1, 0 if self.slowest < before else idle + 1

    def _start_from(self, places: list[Place], open_choices: OpenChoices) -> None:
        """Lay a plan, its tables whose choices no faster plan has in another way, and keep to choices that one has.

        A table whose piece alone takes as long as the slowest rank keeps any plan from being faster, but no small
        change gets rid of that piece: pieces on all other ranks have to make room first.
        """
        if open_choices != self.open_choices:
            work = self.packing.work
            self.packing, self.open_choices = Packing(self.packing.problem, open_choices), open_choices
            self.packing.work = work
        packing = self.packing
        packing.lay(places)
        packing.sharpen(_PLACING, packing.slowest)
        for table, (place, numbers) in enumerate(zip(places, open_choices, strict=True)):
            if place.number not in numbers:
                packing.take(table)
                packing.put(table, packing.best(table) or place)

    def _cycle(self, places: int, enough: float) -> None:
        """Ruin and repair while the potential sharpens and slower plans are taken ever less often."""
        packing = self.packing
        # what gets slower takes long to get faster again: longer than the cycles of large models last
        patient = places >= _ENOUGH_OF_A_CYCLE * _CYCLE_OF_A_TABLE * len(self.sizes)
        for stage in range(_STAGES):
            packing.settle()
            part = stage / (_STAGES - 1)
            sharpness = _DULL * (_SHARP / _DULL) ** part
            packing.sharpen(sharpness, packing.slowest)
            # ranks that take a part p longer multiply a potential of this sharpness by exp(sharpness * p)
            heat = sharpness * _HOT * (_COLD / _HOT) ** part if patient else 0.0
            start = packing.work
            while packing.work - start < places / _STAGES and self.slowest > enough:
                self._ruin(int(packing.filled[0].argmax()), heat)
                if self.budget.out_of_time:
                    return
            self.budget.spend(packing.work - start)

    def squeeze(self) -> bool:
        """Let ranks be overfull, and take tables off and put them back until none is.

        Returns:
            Whether that came to pass; the plan is ``best``.
        """
        packing = self.packing
        packing.lay([None] * len(self.sizes))
        ceiling, packing.ceiling = packing.ceiling, np.full_like(packing.ceiling, np.inf)
        packing.sharpen(_PLACING, _NO_HURRY * self.target)
        if not self._put(range(len(self.sizes))):
            return False  # a table is pinned to ranks that none of its choices can lie on
        for sharpness in (_PLACING, 3 * _PLACING, _PRECISE):
            packing.sharpen(sharpness, _NO_HURRY * self.target)
            self._sweep()
            start = packing.work
            while packing.work - start < self.budget.places / 6 and not (packing.filled <= ceiling).all():
                self._ruin(int((packing.filled[1:] / np.maximum(ceiling[1:], 1.0)).max(axis=0).argmax()))
            self.budget.spend(packing.work - start)
            packing.settle()
            if (packing.filled <= ceiling).all():
                break
        packing.ceiling = ceiling
        self.best, self.slowest = None, math.inf  # what was kept meanwhile may be overfull
        return packing.fits() and self._improve()

    def trimmed(self, placement: Placement) -> Placement | None:
        """A plan with less work and memory, and no rank slower than the slowest.

        Args:
            placement: The plan.

        Returns:
            The other plan.
        """
        packing = self.packing
        packing.adopt(placement)
        packing.ceiling[0] = packing.slowest * (1 + 1e-12)
        packing.sharpen(_TRIMMING, packing.slowest or 1.0)
        for _ in range(2):
            self._sweep()
        packing.settle()
        return packing.placement()

    def placed_anew(self, placement: Placement) -> Placement | None:
        """The open choices placed one by one, if that loads no rank more than the fullest is loaded.

        Args:
            placement: The plan whose time and memory are not to be exceeded.

        Returns:
            The plan, whose tables lie in the order of tables and ranks; None where it would load a rank more.
        """
        packing = self.packing
        packing.adopt(placement)
        fullest = packing.filled.max(axis=1, keepdims=True) * (1 + 1e-12)
        packing.lay([None] * len(self.sizes))
        packing.ceiling = np.minimum(packing.ceiling, fullest)
        packing.sharpen(_PLACING, self.target)
        return packing.placement() if self._put(range(len(self.sizes))) else None

    def placement(self) -> Placement:
        """The best plan, as an answer."""
        assert self.best is not None, "no plan was found"
        self.packing.lay(self.best)
        return self.packing.placement()

    def _improve(self) -> bool:
        """Sweeps over a full packing; the best of what they leave is kept, as a start for ruin and repair, too."""
        best, slowest = self.best, self.slowest
        self.best, self.slowest = None, math.inf
        self._keep()
        for _ in range(3):
            self.packing.sharpen(_PLACING, self.packing.slowest)
            self._sweep()
            self.packing.settle()
            self._keep()
            if self.budget.out_of_time:
                break
        assert self.best is not None, "tables that fit where they are placed still fit after sweeps"
        self.starts.append((self.slowest, len(self.starts), self.best))
        if best is not None and slowest <= self.slowest * (1 + EQUAL):
            self.best, self.slowest = best, slowest
        return True

    def _put(self, tables: Iterable[int]) -> bool:
        before = self.packing.work
        done = _put_all(self.packing, tables)
        self.budget.spend(self.packing.work - before)
        return done

    def _sweep(self) -> None:
        """Take each table off and put it where it is best among all others."""
        for table in range(len(self.sizes)):
            was = self.packing.take(table)
            self.packing.put(table, self.packing.best(table) or was)
        self.budget.spend(len(self.sizes))

    def _ruin(self, rank: int, heat: float = 0.0) -> bool:
        """Take off some tables, and put them back; keep what comes of it unless the potential grows too much.

        Args:
            rank: Which loses some for certain.
            heat: The logarithm by which the potential may grow, on average.

        Returns:
            Whether this gave the best plan so far.
        """
        packing, draw = self.packing, self.random
        before, loads = packing.potential, packing.loads()
        switched = self._switched(rank) if draw.random() < _SWITCHING else None
        if switched is None:
            was = {}
            off = self._drawn([rank], draw.randint(1, _OF_THE_SLOWEST), was)
            off = self._and_any(off, draw.randint(2, _RUINED), was)
        else:
            was, ranks = switched
            off = self._drawn(ranks, draw.randint(2, _MAKING_ROOM), was)
            off = self._and_any(off, len(off) + draw.randint(0, _MORE), was)
        was |= packing.lift(off)
        order = sorted(off, key=lambda table: -self.sizes[table] * draw.uniform(0.5, 1.5))
        growth = math.exp(min(-heat * math.log(1 - draw.random()), _MUCH)) + EQUAL
        if self._put_within(order, before * growth):
            return self._keep()
        packing.put_back(was, loads)
        return False

    def _switched(self, rank: int) -> tuple[dict[int, Place], list[int]] | None:
        """Cut a table of a rank, or any, in another way, and lay it where it is best.

        Once tables of its new ranks are taken off, too, it may prove the better way, though it was the worse one.

        Returns:
            The table with the place where it lay, and its new ranks; None where there is no other way.
        """
        packing, draw = self.packing, self.random
        there = list(packing.on_rank[rank])
        first = bool(there) and draw.random() < _OF_THE_SLOWEST_FIRST
        table = draw.choice(there) if first else draw.randrange(len(self.sizes))
        was = packing.places[table]
        assert was is not None, "all tables lie somewhere before one is ruined"
        others = [stack for stack in packing.stacks[table] if was.number not in stack.numbers]
        if not others:
            return None
        lifted = packing.lift([table])
        place = packing.best(table, [draw.choice(others)])
        packing.put(table, place or was)
        return None if place is None else (lifted, place.ranks.tolist())

    def _drawn(self, ranks: Sequence[int], most: int, but: Mapping[int, Place]) -> list[int]:
        """Tables that lie on some ranks; those of ``but`` are not drawn."""
        there = list({table: None for rank in ranks for table in self.packing.on_rank[rank] if table not in but})
        return self.random.sample(there, min(len(there), most))

    def _and_any(self, tables: Sequence[int], wanted: int, but: Mapping[int, Place]) -> list[int]:
        """These tables and others, so many in all; those of ``but`` are not drawn."""
        found = dict.fromkeys(tables)
        while len(found) < min(wanted, len(self.sizes) - len(but)):
            table = self.random.randrange(len(self.sizes))
            if table not in but:
                found[table] = None
        return list(found)

    def _put_within(self, tables: Iterable[int], limit: float) -> bool:
        """Put tables where they are best, in this order; False where one fits nowhere or the potential exceeds that."""
        packing = self.packing
        potential = packing.potential
        for table in tables:
            place = packing.best(table)
            if place is None:
                return False
            potential += place.growth
            if potential > limit * (1 + EQUAL):
                return False  # it can but grow
            packing.put(table, place)
        return packing.potential <= limit

    def _keep(self) -> bool:
        """Remember the packing if it is the best so far."""
        slowest = self.packing.slowest
        if slowest >= self.slowest * (1 - EQUAL) or not self.packing.fits():
            return False
        self.slowest = slowest
        self.best = [place for place in self.packing.places if place is not None]
        assert len(self.best) == len(self.sizes), "a table lies nowhere"
        return True


def _put_all(packing: Packing, tables: Iterable[int]) -> bool:
    """Put tables that lie nowhere where they are best, in this order; False where one fits nowhere."""
    for table in tables:
        place = packing.best(table)
        if place is None:
            return False
        packing.put(table, place)
    return True

"""Tables on ranks, one at a time: what the search takes off and puts back.

A plan is judged by its slowest rank, but a search that looks at the slowest rank alone sees no progress on the others.
So tables are placed by a potential that all ranks add to:

    sum over ranks r of exp(b * load_r / target) + sum over kinds of memory k of exp(b - c + c * held_rk / capacity_k)

With a small b it counts the work of all ranks, with a large one little but the fullest; memory, of which c is never
small, costs nothing until it runs short. What a piece adds on every rank is a product of two or three factors of its
own with the exponentials of the ranks, so that all choices of a table, on all ranks, are compared in a few operations
of numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutorec.distributed.planner.problem import Choice, Floats, Ints, Placement, PlanningProblem, Spread

Mask = NDArray[np.bool_]

# Memory is a limit however dull the potential is: it weighs little until it runs short.
_MEMORY_SHARPNESS = 10.0
# Hosts that are looked at one by one for pieces that do not fit evenly.
_FEW_HOSTS = 8
# Two potentials that differ by less are a tie, which preference decides.
_TIE = 1e-9
# The product of two exponentials of this, summed over many ranks, is a float still.
_LARGEST_EXPONENT, _LARGEST_WEIGHT = 300.0, 1e130


@dataclass(slots=True, eq=False)  # not frozen: thousands are made in a second
class Place:
    """A choice of a table and where its P pieces lie; K kinds of memory.

    Args:
        growth: What the potential grows by.
        preference: Of the choice.
        number: Which of the table's choices.
        ranks: ``[P]``, as the packing counts them.
        needs: ``[1 + K, P]``: ms and bytes of each piece.
        spread: Of the choice.
    """

    growth: float
    preference: int
    number: int
    ranks: Ints
    needs: Floats
    spread: Spread

    def better_than(self, other: Place) -> bool:
        """Whether the potential grows less; of equal ones the preferred choice is better."""
        if abs(self.growth - other.growth) <= _TIE * abs(other.growth):
            return (self.preference, self.number) < (other.preference, other.number)
        return self.growth < other.growth


@dataclass(eq=False)
class Stack:
    """Choices of a table that are placed in one operation: C choices of P pieces.

    Args:
        spread: Of all of them.
        numbers: Which of the table's choices they are.
        preference: Of all of them.
        needs: ``[C, 1 + K, P]``: ms and bytes of each piece.
        closed: ``[W]``, ranks that may hold no piece; None: all may.
        most: ``[1 + K]``: the most that a choice adds to a rank.
        steps: ``[C, 1 + K, P]``: what a piece multiplies its rank's exponentials by, less one.
        sharpened: The packing's sharpening that ``steps`` are of.
    """

    spread: Spread
    numbers: tuple[int, ...]
    preference: int
    needs: Floats
    closed: Mask | None
    most: list[float]
    steps: Floats
    sharpened: int = -1

    def place(self, growth: float, which: int, ranks: Ints) -> Place:
        """One of the choices, on these ranks."""
        return Place(float(growth), self.preference, self.numbers[which], ranks, self.needs[which], self.spread)


class Packing:
    """Tables on ranks: W ranks on H hosts of L.

    Ranks are counted local rank first (local rank l of host h is l * H + h): equal ranks are then taken in the order of
    TorchRec's partitioners, and the ranks of a host are a column of ``[L, H]``.

    Args:
        problem: What is to be placed.
        open_choices: For each table, the numbers of those choices that may be used; None: all.

    Attributes:
        filled: ``[1 + K, W]``: ms and bytes on each rank; what a rank has less than the roomiest counts as held.
        ceiling: ``[1 + K, 1]``: ms and bytes that no rank may exceed.
        places: For each table where it lies; None: nowhere.
        on_rank: For each rank the tables that have pieces there and not on all ranks.
        work: How many times a place was looked for.

    Example:
        >>> halves = [Choice(np.array([2.0]), np.array([[1, 0]]), Spread.ANY)]
        >>> packing = Packing(PlanningProblem(2, 2, np.array([[1, 0], [1, 0]]), (tuple(halves), tuple(halves))))
        >>> for table in range(2):
        ...     packing.put(table, packing.best(table))
        >>> packing.slowest, [ranks.tolist() for ranks in packing.placement().ranks]
        (2.0, [[0], [1]])
    """

    def __init__(self, problem: PlanningProblem, open_choices: Sequence[Sequence[int]] | None = None) -> None:
        self.problem = problem
        self.locals, self.hosts = problem.local_size, problem.world_size // problem.local_size
        self.order = np.arange(problem.world_size).reshape(self.hosts, self.locals).T.ravel()
        self.kinds = _kinds_that_matter(problem)
        capacity = problem.capacity[self.order][:, self.kinds].T.astype(np.float64)
        self.room = capacity.max(axis=1)
        self.empty = np.concatenate([np.zeros((1, problem.world_size)), self.room[:, None] - capacity])
        self.filled = self.empty.copy()
        self.ceiling = np.concatenate([[np.inf], self.room])[:, None]
        self.stacks = [
            self._stacked(choices, range(len(choices)) if open_choices is None else open_choices[table])
            for table, choices in enumerate(problem.choices)
        ]
        self.places: list[Place | None] = [None] * len(self.stacks)
        self.on_rank: list[dict[int, None]] = [{} for _ in range(problem.world_size)]
        self.work = 0
        self._sharpened = 0
        self.sharpen(8.0, 1.0)

    def sharpen(self, sharpness: float, target: float) -> None:
        """Weigh full ranks more, or less.

        Args:
            sharpness: b of the potential.
            target: Milliseconds that a rank should take.
        """
        self._sharpened += 1
        of_memory = max(sharpness, _MEMORY_SHARPNESS)
        self.factors = np.concatenate([[sharpness / max(target, 1e-12)], of_memory / np.maximum(self.room, 1.0)])[
            :, None
        ]
        # a rank full of memory weighs as much as one full of work
        self.offsets = np.concatenate([[0.0], np.full(len(self.room), sharpness - of_memory)])[:, None]
        self._scales = self.factors[:, 0].tolist(), self.offsets[:, 0].tolist()
        self.weights = self._exponentials(self.filled)

    @property
    def slowest(self) -> float:
        """Milliseconds of the slowest rank."""
        return float(self.filled[0].max())

    @property
    def potential(self) -> float:
        """What placing keeps small."""
        return float(self.weights.sum())

    def best(self, table: int, stacks: Sequence[Stack] | None = None) -> Place | None:
        """Where a table that lies nowhere costs least; None where it fits nowhere.

        Args:
            table: Which.
            stacks: Those of its choices that may be used; None: all that are open.
        """
        self.work += 1
        free = self.ceiling - self.filled
        least = free.min(axis=1).tolist()
        found: Place | None = None
        for stack in self.stacks[table] if stacks is None else stacks:
            if stack.sharpened != self._sharpened:
                stack.steps = np.expm1(np.minimum(stack.needs * self.factors, _LARGEST_EXPONENT))
                stack.sharpened = self._sharpened
            own = free if stack.closed is None else np.where(stack.closed, -1.0, free)
            loose = stack.closed is None and all(most <= room for most, room in zip(stack.most, least, strict=True))
            place = _FINDERS[stack.spread, stack.needs.shape[2] == 1](self, stack, None if loose else own)
            if place is not None and (found is None or place.better_than(found)):
                found = place
        return found

    def put(self, table: int, place: Place) -> None:
        """Lay a table somewhere."""
        self._enter(table, place)
        self._add(place, place.needs)

    def take(self, table: int) -> Place:
        """Take a table off, and say where it lay."""
        place = self._leave(table)
        self._add(place, -place.needs)
        return place

    def lift(self, tables: Iterable[int]) -> dict[int, Place]:
        """Take several tables off at once, and say where they lay."""
        was = {table: self._leave(table) for table in tables}
        for place in was.values():
            if len(place.ranks) == 1:
                self.filled[:, place.ranks[0]] -= place.needs[:, 0]
            else:
                np.subtract.at(self.filled.T, place.ranks, place.needs.T)
        self.weights = self._exponentials(self.filled)
        return was

    def loads(self) -> tuple[Floats, Floats]:
        """What the ranks hold, for `put_back`."""
        return self.filled.copy(), self.weights.copy()

    def put_back(self, was: Mapping[int, Place], loads: tuple[Floats, Floats]) -> None:
        """Lay tables that were lifted where they lay, whether they lie elsewhere by now or nowhere.

        Args:
            was: Where they lay.
            loads: Of the ranks before they were lifted: nothing has to be added up anew, nor is a rounding error left.
        """
        for table in was:
            if self.places[table] is not None:
                self._leave(table)
        for table, place in was.items():
            self._enter(table, place)
        self.filled, self.weights = loads

    def settle(self) -> None:
        """Add all loads up anew: what is put and taken many times leaves rounding errors."""
        self.filled = self.empty.copy()
        for place in self.places:
            if place is not None:
                np.add.at(self.filled.T, place.ranks, place.needs.T)
        self.weights = self._exponentials(self.filled)

    def placement(self) -> Placement:
        """The answer, in the problem's order of ranks."""
        chosen, ranks = [], []
        for table, place in enumerate(self.places):
            assert place is not None, f"table {table} lies nowhere"
            chosen.append(place.number)
            lies = self.order[place.ranks]
            ranks.append(np.sort(lies) if place.spread is Spread.ALL else lies)
        return Placement(np.array(chosen, dtype=np.int64), ranks)

    def adopt(self, placement: Placement) -> None:
        """Lay all tables as an answer says; the inverse of ``placement``."""
        inner = np.argsort(self.order)
        places: list[Place | None] = []
        for choices, number, ranks in zip(
            self.problem.choices, placement.chosen.tolist(), placement.ranks, strict=True
        ):
            choice = choices[number]
            lies = np.arange(len(ranks)) if choice.spread is Spread.ALL else inner[ranks]
            places.append(Place(0.0, choice.preference, number, lies, self._needs(choice), choice.spread))
        self.lay(places)

    def fits(self) -> bool:
        """Whether no rank exceeds its ceiling."""
        return bool((self.filled <= self.ceiling).all())

    def lay(self, places: Sequence[Place | None]) -> None:
        """Take everything off, and lay all tables as ``places`` once was."""
        self.places = [None] * len(places)
        self.on_rank = [{} for _ in self.on_rank]
        for table, place in enumerate(places):
            if place is not None:
                self.put(table, place)
        self.settle()

    def _enter(self, table: int, place: Place) -> None:
        self.places[table] = place
        if place.spread is not Spread.ALL:
            for rank in place.ranks.tolist():
                self.on_rank[rank][table] = None

    def _leave(self, table: int) -> Place:
        place = self.places[table]
        assert place is not None, f"table {table} lies nowhere"
        self.places[table] = None
        if place.spread is not Spread.ALL:
            for rank in place.ranks.tolist():
                self.on_rank[rank].pop(table, None)
        return place

    def _needs(self, choice: Choice) -> Floats:
        """``[1 + K, P]`` of a choice, its pieces in the packing's order."""
        needs = np.concatenate([choice.time[None], choice.memory.T[self.kinds]]).astype(np.float64)
        return needs[:, self.order] if choice.spread is Spread.ALL else needs

    def _stacked(self, choices: Sequence[Choice], numbers: Sequence[int]) -> list[Stack]:
        """The open choices of a table; those of one spread together where one operation places them."""
        together: dict[object, list[int]] = {}
        for number in numbers:
            choice = choices[number]
            simple = choice.spread in (Spread.ALL, Spread.HOST_ROWS) or len(choice.time) == 1
            key = (choice.spread, choice.preference, len(choice.time)) if simple else number
            together.setdefault(key if choice.allowed is None else number, []).append(number)
        found = []
        for members in together.values():
            first = choices[members[0]]
            closed = None if first.allowed is None else ~first.allowed[self.order]
            needs = np.stack([self._needs(choices[number]) for number in members])
            # pieces that may share a rank have to be small together to fit wherever they are put
            share = first.spread in (Spread.ANY, Spread.HOST, Spread.HOSTS_ROWS)
            most = needs.sum(axis=2).max(axis=0) if share else needs.max(axis=(0, 2))
            found.append(Stack(first.spread, tuple(members), first.preference, needs, closed, most.tolist(), needs))
        return found

    def _exponentials(self, filled: Floats) -> Floats:
        return np.exp(np.minimum(filled * self.factors + self.offsets, _LARGEST_EXPONENT))

    def _add(self, place: Place, needs: Floats) -> None:
        ranks = place.ranks
        if place.spread is Spread.ALL:
            self.filled += needs
            self.weights = self._exponentials(self.filled)
            return
        if len(ranks) == 1:
            # two or three numbers: one by one they take less time than an operation of numpy
            rank = ranks.item()
            for kind, (need, factor, offset) in enumerate(zip(needs[:, 0].tolist(), *self._scales, strict=True)):
                held = self.filled.item(kind, rank) + need
                self.filled[kind, rank] = held
                self.weights[kind, rank] = math.exp(min(held * factor + offset, _LARGEST_EXPONENT))
            return
        if place.spread is Spread.HOST_ROWS:
            self.filled[:, ranks] += needs
        else:
            np.add.at(self.filled.T, ranks, needs.T)
        self.weights[:, ranks] = self._exponentials(self.filled[:, ranks])


def _whole_piece(packing: Packing, stack: Stack, free: Floats | None) -> Place | None:
    """One piece, on any rank."""
    growth = stack.steps[:, :, 0] @ packing.weights
    if free is not None:
        growth[(stack.needs > free).any(axis=1)] = np.inf
    return _least(stack, growth, lambda rank: np.array([rank]))


def _piece_each(packing: Packing, stack: Stack, free: Floats | None) -> Place | None:
    """A piece on every rank."""
    growth = stack.steps.reshape(len(stack.steps), -1) @ packing.weights.ravel()
    if free is not None:
        growth[(stack.needs > free).any(axis=(1, 2))] = np.inf
    return _least(stack, growth[:, None], lambda _: np.arange(packing.problem.world_size))


def _rows_of_a_host(packing: Packing, stack: Stack, free: Floats | None) -> Place | None:
    """A piece on every rank of one host."""
    size, hosts = packing.locals, packing.hosts
    growth = stack.steps.reshape(len(stack.steps), -1) @ packing.weights.reshape(-1, hosts)
    if free is not None:
        full = stack.needs[..., None] > free.reshape(-1, size, hosts)
        growth[full.any(axis=(1, 2))] = np.inf
    return _least(stack, growth, lambda host: np.arange(size) * hosts + host)


def _pieces_anywhere(packing: Packing, stack: Stack, free: Floats | None) -> Place | None:
    """Several pieces, each on any rank."""
    found = _one_by_one(packing.weights, stack.steps[0].T, stack.needs[0].T, free)
    return None if found is None else stack.place(found[0], 0, found[1])


def _blocks_of_hosts(packing: Packing, stack: Stack, free: Floats | None) -> Place | None:
    """Several blocks of a piece for each rank of a host, each block on any host."""
    size, hosts = packing.locals, packing.hosts
    steps, needs = (_blocks(array, size) for array in (stack.steps[0], stack.needs[0]))
    found = _one_by_one(
        packing.weights.reshape(-1, hosts), steps, needs, None if free is None else free.reshape(-1, hosts)
    )
    if found is None:
        return None
    return stack.place(found[0], 0, (np.arange(size) * hosts + found[1][:, None]).ravel())


def _pieces_in_a_host(packing: Packing, stack: Stack, free: Floats | None) -> Place | None:
    """Several pieces, each on any rank of one host: as evenly as may be, one more on those that cost least."""
    size, hosts = packing.locals, packing.hosts
    needs = stack.needs[0]
    pieces = needs.shape[1]
    if (needs != needs[:, :1]).any():
        return _uneven_in_a_host(packing, stack, free)
    each, more = divmod(pieces, size)
    exponents = needs[:, 0] * packing.factors[:, 0]
    base, next_ = (np.expm1(np.minimum(count * exponents, _LARGEST_EXPONENT)) for count in (each, each + 1))
    growth = (base @ packing.weights).reshape(size, hosts)
    extra = ((next_ - base) @ packing.weights).reshape(size, hosts)
    if free is not None:
        for kind, need in enumerate(needs[:, 0]):
            room = free[kind].reshape(size, hosts)
            growth[each * need > room] = np.inf
            extra[(each + 1) * need > room] = np.inf
    ranking = np.argsort(extra, axis=0, kind="stable")
    total = growth.sum(axis=0) + np.take_along_axis(extra, ranking[:more], axis=0).sum(axis=0)
    host = int(total.argmin())
    if not math.isfinite(total[host]):
        few = stack.closed is not None or hosts <= _FEW_HOSTS
        return _uneven_in_a_host(packing, stack, free) if few else None
    numbers = np.concatenate([np.tile(np.arange(size), each), ranking[:more, host]])
    return stack.place(total[host], 0, numbers * hosts + host)


def _uneven_in_a_host(packing: Packing, stack: Stack, free: Floats | None) -> Place | None:
    """As ``_pieces_in_a_host`` for pieces or ranks that differ: host by host, the largest piece first."""
    hosts, found = packing.hosts, None
    for host in range(hosts):
        own = slice(host, None, hosts)
        room = None if free is None else free[:, own]
        placed = _one_by_one(packing.weights[:, own], stack.steps[0].T, stack.needs[0].T, room)
        if placed is not None and (found is None or placed[0] < found[0]):
            found = (placed[0], placed[1] * hosts + host)
    return None if found is None else stack.place(found[0], 0, found[1])


def _one_by_one(weights: Floats, steps: Floats, needs: Floats, free: Floats | None) -> tuple[float, Ints] | None:
    """Pieces one after the other, the largest first, each where it costs least.

    Args:
        weights: ``[S, W]``: exponentials of the ranks (or hosts).
        steps: ``[P, S]``: of the pieces.
        needs: ``[P, S]`` ms and bytes of the pieces.
        free: ``[S, W]`` of the ranks; None: all pieces fit everywhere.

    Returns:
        The growth and ``[P]`` ranks; None where a piece fits nowhere.
    """
    weights = weights.copy()
    free = None if free is None else free.copy()
    ranks = np.empty(len(steps), dtype=np.int64)
    total, before = 0.0, -1
    growth = np.empty(0)
    # equal pieces stand side by side, so that only the rank that took one is looked at again
    for piece in np.lexsort((needs[:, 0], steps[:, 0]))[::-1].tolist():
        step, need = steps[piece], needs[piece]
        if before < 0 or (step != steps[before]).any() or (need != needs[before]).any():
            growth = step @ weights
            if free is not None:
                growth[(need[:, None] > free).any(axis=0)] = np.inf
        before = piece
        rank = int(growth.argmin())
        if not math.isfinite(growth[rank]):
            return None
        total += float(growth[rank])
        ranks[piece] = rank
        weights[:, rank] = np.minimum(weights[:, rank] * (1.0 + step), _LARGEST_WEIGHT)
        growth[rank] = step @ weights[:, rank]
        if free is not None:
            free[:, rank] -= need
            if (need > free[:, rank]).any():
                growth[rank] = np.inf
    return total, ranks


def _blocks(pieces: Floats, size: int) -> Floats:
    """``[S, B * L]`` as ``[B, S * L]``."""
    return pieces.reshape(len(pieces), -1, size).transpose(1, 0, 2).reshape(pieces.shape[1] // size, -1)


def _least(stack: Stack, growth: Floats, ranks: Callable[[int], Ints]) -> Place | None:
    """The least of ``[C, places]``."""
    which, where = divmod(int(growth.argmin()), growth.shape[1])
    least = growth[which, where]
    return stack.place(least, which, ranks(where)) if math.isfinite(least) else None


def _kinds_that_matter(problem: PlanningProblem) -> Ints:
    """The kinds of memory that could run short; one at least."""
    largest = sum(np.max([choice.memory.sum(axis=0) for choice in choices], axis=0) for choices in problem.choices)
    short = np.flatnonzero(largest > problem.capacity.min(axis=0))
    return short if len(short) else np.array([0])


_Finder = Callable[[Packing, Stack, Floats | None], Place | None]
# by spread, and whether there is but one piece
_FINDERS: dict[tuple[Spread, bool], _Finder] = {
    (Spread.ANY, True): _whole_piece,
    (Spread.ANY, False): _pieces_anywhere,
    (Spread.HOST, True): _whole_piece,
    (Spread.HOST, False): _pieces_in_a_host,
} | {
    (spread, single): finder
    for spread, finder in (
        (Spread.HOST_ROWS, _rows_of_a_host),
        (Spread.HOSTS_ROWS, _blocks_of_hosts),
        (Spread.ALL, _piece_each),
    )
    for single in (True, False)
}

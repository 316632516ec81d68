"""The planning problem as a mixed-integer linear program.

    minimise    z + sum of fixed[g] * y[g]
    such that   sum over choices of u[k, c]           = tables of kind k         each table takes one choice
                sum over ranks of x[k, c, q, r]       = pieces of kind q * u     each piece has a place
                sum over pieces on r of time          <= z                       z is the slowest rank
                sum over pieces on r of memory        <= capacity[r]
                u[k, c]                               <= tables of kind k * y[g] a used group is paid for

Where only plans below a limit are of interest there is one more variable, that there is none: it costs the limit, in
the place of all tables. The solver then always has a solution, and without one it would keep its bound to itself.

All but z are whole numbers, and they are counts: equal tables are one kind k, and equal pieces of a choice one kind q,
as which of several equals lies where makes no difference. A piece that goes to a whole host has a variable for each
host instead of each rank; what lies everywhere has none. Equal ranks, and equal hosts, remain: a plan and the one with
ranks 0 and 1 exchanged are both solutions, and a solver that does not see it refutes every plan W! times. So they are
numbered in the order in which tables come to them: the first table lies on rank 0, the second on rank 0 or 1 ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutorec.distributed.planner.problem import Choice, Floats, Ints, Placement, PlanningProblem, Spread


@dataclass(eq=False)
class Kind:
    """Equal pieces of a choice, or equal blocks of pieces that go to one host.

    Args:
        pieces: ``[m, b]`` numbers of the pieces: m equal ones of b pieces each (b is 1, or L for blocks).
        places: ``[p]`` ranks, or hosts, where they may lie.
        first: Number of the variable of the first place; the others follow.
    """

    pieces: Ints
    places: Ints
    first: int = -1


@dataclass(eq=False)
class Way:
    """A choice of a kind of tables, with its variables.

    Args:
        number: Which of the tables' choices.
        choice: The choice.
        used: Number of the variable that counts the tables that take it.
        kinds: Its kinds of pieces; empty where each piece has its rank.
        hosts: For table-column-wise: hosts that may be taken, and the number of the first of their variables.
    """

    number: int
    choice: Choice
    used: int = -1
    kinds: list[Kind] = field(default_factory=list)
    hosts: Ints | None = None
    first_host: int = -1


@dataclass(eq=False)
class Bundle:
    """Equal tables and the ways that are left to them."""

    tables: list[int]
    ways: list[Way]


class Lines:
    """A sparse matrix while it is being written, with bounds of its lines."""

    def __init__(self) -> None:
        self.rows: list[Ints] = []
        self.columns: list[Ints] = []
        self.values: list[Floats] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, low: float, high: float) -> int:
        """A new line, empty as yet: ``low <= ... <= high``."""
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1

    def put(self, rows: Any, columns: Any, values: Any) -> None:
        """Entries, broadcast against each other."""
        rows, columns, values = np.broadcast_arrays(rows, columns, values)
        self.rows.append(rows.ravel().astype(np.int64))
        self.columns.append(columns.ravel().astype(np.int64))
        self.values.append(values.ravel().astype(np.float64))


class MilpModel:
    """The program of a problem, and how its solutions are read.

    Args:
        problem: What is to be planned.
        below: Plans of this cost, in ms, or more are of no interest; None: all are.
        squeeze: Part of the capacity that is left free, so that what a solver takes for whole numbers fits once
            rounded.
        load: ``[W]`` ms that ranks have to do already; None: nothing. What they hold already is no capacity.
        focus: Ranks whose slowest one is to be as fast as possible, too, where it is not the slowest of all.

    Attributes:
        possible: Whether each table has a choice left that fits somewhere and is not too slow alone.
        size: Number of variables.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        below: float | None = None,
        squeeze: float = 0.0,
        load: Floats | None = None,
        focus: Ints | None = None,
    ) -> None:
        self.problem = problem
        self.load = load
        self.focus = focus
        self.fixed: Floats = np.zeros(0) if problem.fixed is None else np.asarray(problem.fixed, np.float64)
        self.below = below
        self.squeeze = squeeze
        self.ranks = np.arange(problem.world_size)
        self.hosts = self.ranks.reshape(-1, problem.local_size)
        self.memories = binding_memories(problem)
        self.bundles = self._bundles()
        self.possible = all(bundle.ways for bundle in self.bundles)
        self.scale = self._time_scale()
        self.size = 0
        if self.possible:
            self._number()

    # What is left to choose

    def _bundles(self) -> list[Bundle]:
        """Equal tables together, those with the longest pieces first: they leave the least to choose."""
        of_content: dict[tuple[Any, ...], Bundle] = {}
        for table, choices in enumerate(self.problem.choices):
            bundle = of_content.setdefault(content(choices), Bundle([], []))
            if not bundle.tables:
                ways = [self._way(number, choice) for number, choice in enumerate(choices)]
                bundle.ways = [way for way in ways if way is not None]
            bundle.tables.append(table)

        def weight(bundle: Bundle) -> float:
            free = [way.choice.time for way in bundle.ways if way.choice.spread is not Spread.ALL]
            return max((float(time.max(initial=0.0)) for time in free), default=0.0)

        return sorted(of_content.values(), key=weight, reverse=True)

    def _way(self, number: int, choice: Choice) -> Way | None:
        """A choice and the places of its pieces; None where it does not fit or is too slow, alone on the ranks."""
        if self.below is not None:
            latency = float(self.fixed[list(set(choice.groups))].sum()) if len(self.fixed) else 0.0
            if float(choice.time.max(initial=0.0)) + latency >= self.below:
                return None
        way = Way(number, choice)
        if choice.spread is Spread.ALL:
            allowed = choice.allowed is None or bool(choice.allowed.all())
            return way if allowed and bool((choice.memory <= self.problem.capacity).all()) else None
        self._open(way)
        somewhere = all(len(kind.places) for kind in way.kinds) and (way.hosts is None or len(way.hosts) > 0)
        return way if somewhere else None

    def _open(self, way: Way) -> None:
        """Find the kinds of pieces of a way and their places."""
        choice, capacity = way.choice, self.problem.capacity
        allowed = np.ones(len(self.ranks), np.bool_) if choice.allowed is None else choice.allowed
        lines = np.column_stack([choice.time, choice.memory])
        if choice.spread in (Spread.ANY, Spread.HOST):
            for pieces in equal_lines(lines):
                fits = allowed & (choice.memory[pieces[0]] <= capacity).all(axis=1)
                way.kinds.append(Kind(pieces[:, None], self.ranks[fits]))
            if choice.spread is Spread.HOST:
                roomy = [np.isin(self.hosts, kind.places).any(axis=1) for kind in way.kinds]
                way.hosts = np.flatnonzero(np.logical_and.reduce(roomy)) if roomy else np.arange(len(self.hosts))
                for kind in way.kinds:
                    kind.places = kind.places[np.isin(kind.places // self.problem.local_size, way.hosts)]
        else:
            blocks = np.arange(len(choice.time)).reshape(-1, self.problem.local_size)
            for group in equal_lines(lines[blocks].reshape(len(blocks), -1)):
                needs = choice.memory[blocks[group[0]]]
                fits = allowed[self.hosts].all(axis=1) & (needs <= capacity[self.hosts]).all(axis=(1, 2))
                way.kinds.append(Kind(blocks[group], np.flatnonzero(fits)))

    def _time_scale(self) -> float:
        """Milliseconds that become 1 in the program: solvers compare numbers with absolute tolerances."""
        if self.below is not None and self.below > 0:
            return self.below
        ways = [[float(way.choice.time.sum()) for way in bundle.ways] for bundle in self.bundles]
        total = sum(min(times) * len(bundle.tables) for times, bundle in zip(ways, self.bundles, strict=True) if times)
        return total / self.problem.world_size or 1.0

    # The variables

    def _number(self) -> None:
        """Give every count a variable: z, then the groups, then way after way; last what only some programs have."""
        self.high: list[float] = [np.inf, *[1.0] * len(self.fixed)]
        fresh = _Numbering() if self.load is None and _ranks_are_equal(self) else None
        for bundle in self.bundles:
            tables = len(bundle.tables)
            for way in bundle.ways:
                way.used = self._variables(1, tables)
                if way.hosts is not None:
                    way.first_host = self._variables(len(way.hosts), tables)
                for kind in way.kinds:
                    if fresh is not None:
                        kind.places = kind.places[kind.places < fresh.seen(bundle)]
                    kind.first = self._variables(len(kind.places), tables * len(kind.pieces))
            if fresh is not None:
                fresh.count(bundle)
        self.slowest_of_focus = self._variables(1, np.inf) if self.focus is not None else -1
        self.none = self._variables(1, 1.0) if self.below is not None and self.focus is None else -1
        self.size = len(self.high)

    def _variables(self, count: int, high: float) -> int:
        """Numbers of new variables."""
        first = len(self.high)
        self.high.extend([float(high)] * count)
        return first

    # The program

    def program(self) -> dict[str, Any]:
        """Arguments of `scipy.optimize.milp`, options excepted."""
        from scipy.optimize import Bounds, LinearConstraint
        from scipy.sparse import csc_array

        lines = Lines()
        load_of = np.zeros(len(self.ranks)) if self.load is None else self.load / self.scale
        time_of = [lines.add(-np.inf, -done) for done in load_of.tolist()]
        room = self.problem.capacity * (1.0 - self.squeeze)
        memory_of = {kind: [lines.add(-np.inf, 1.0) for _ in self.ranks] for kind in self.memories}
        largest = {kind: np.maximum(room[:, kind].astype(np.float64), 1.0) for kind in self.memories}
        slowest = np.zeros(len(self.ranks), np.int64)
        if self.focus is not None:
            slowest[self.focus] = self.slowest_of_focus
            lines.put(lines.add(-np.inf, 0.0), [self.slowest_of_focus, 0], [1.0, -1.0])
        lines.put(time_of, slowest, -1.0)
        for kind in self.memories:
            for rank in np.flatnonzero(self.problem.capacity[:, kind] <= 0):
                lines.high[memory_of[kind][rank]] = 0.0

        def load(ranks: Ints, column: Any, time: Any, memory: Ints) -> None:
            lines.put(np.asarray(time_of)[ranks], column, np.asarray(time) / self.scale)
            for kind in self.memories:
                lines.put(np.asarray(memory_of[kind])[ranks], column, memory[..., kind] / largest[kind][ranks])

        for bundle in self.bundles:
            one_each = lines.add(len(bundle.tables), len(bundle.tables))
            if self.none >= 0:
                lines.put(one_each, self.none, float(len(bundle.tables)))
            for way in bundle.ways:
                lines.put(one_each, way.used, 1.0)
                self._write_way(way, lines, load)
            self._write_groups(bundle, lines)
            self._write_longest(bundle, lines)
        objective = np.zeros(self.size)
        objective[0] = 1.0
        objective[1 : 1 + len(self.fixed)] = self.fixed / self.scale
        if self.below is not None:
            costly = np.flatnonzero(objective)
            lines.put(lines.add(-np.inf, self.below / self.scale), costly, objective[costly])
        if self.none >= 0:
            objective[self.none] = self.below / self.scale if self.below is not None else 0.0
        if self.focus is not None:
            objective[self.slowest_of_focus] = 1.0
        matrix = csc_array(
            (np.concatenate(lines.values), (np.concatenate(lines.rows), np.concatenate(lines.columns))),
            shape=(len(lines.low), self.size),
        )
        whole = np.ones(self.size)
        whole[[0, self.slowest_of_focus] if self.focus is not None else 0] = 0
        high: Any = np.array(self.high)
        low: Any = np.array(lines.low)
        top: Any = np.array(lines.high)
        return {
            "c": objective,
            "integrality": whole,
            "bounds": Bounds(0.0, high),
            "constraints": LinearConstraint(matrix, low, top),
        }

    def _write_way(self, way: Way, lines: Lines, load: Any) -> None:
        """The lines of one choice: its pieces have places, which they load."""
        choice, size = way.choice, self.problem.local_size
        if choice.spread is Spread.ALL:
            load(self.ranks, way.used, choice.time, choice.memory)
            return
        if way.hosts is not None:
            line = lines.add(0.0, 0.0)
            lines.put(line, way.first_host + np.arange(len(way.hosts)), 1.0)
            lines.put(line, way.used, -1.0)
        for kind in way.kinds:
            columns = kind.first + np.arange(len(kind.places))
            piece = kind.pieces[0]
            if choice.spread is Spread.HOST:
                assert way.hosts is not None, "pieces of one host have a variable for each host"
                for number, host in enumerate(way.hosts.tolist()):
                    line = lines.add(0.0, 0.0)
                    lines.put(line, columns[kind.places // size == host], 1.0)
                    lines.put(line, way.first_host + number, -float(len(kind.pieces)))
            else:
                line = lines.add(0.0, 0.0)
                lines.put(line, columns, 1.0)
                lines.put(line, way.used, -float(len(kind.pieces)))
            if choice.spread in (Spread.ANY, Spread.HOST):
                load(
                    kind.places,
                    columns,
                    choice.time[piece[0]],
                    np.broadcast_to(choice.memory[piece[0]], (len(columns), 2)),
                )
            else:
                for local, number in enumerate(piece.tolist()):
                    memory = np.broadcast_to(choice.memory[number], (len(columns), 2))
                    load(kind.places * size + local, columns, choice.time[number], memory)

    def _write_groups(self, bundle: Bundle, lines: Lines) -> None:
        """A choice pays for its groups: all choices of a table that use the group together, which is tighter."""
        users: dict[int, list[int]] = {}
        for way in bundle.ways:
            for group in set(way.choice.groups):
                if len(self.fixed) and self.fixed[group] > 0:
                    users.setdefault(group, []).append(way.used)
        for group, used in users.items():
            line = lines.add(-np.inf, 0.0)
            lines.put(line, used, 1.0)
            lines.put(line, 1 + group, -float(len(bundle.tables)))

    def _write_longest(self, bundle: Bundle, lines: Lines) -> None:
        """Wherever a table's longest piece lies, it lies on top of what lies everywhere.

        The program implies it for whole numbers only; said outright, it lifts the bound of the relaxation.
        """
        tables = len(bundle.tables)
        done = 0.0 if self.load is None else float(self.load.min()) / self.scale
        line = lines.add(-np.inf, -tables * done)
        lines.put(line, 0, -float(tables))  # of several equal tables, their mean
        for way in bundle.ways:
            lines.put(line, way.used, float(way.choice.time.max(initial=0.0)) / self.scale)
        for other in self.bundles:
            if other is not bundle:
                for way in other.ways:
                    if way.choice.spread is Spread.ALL and (least := float(way.choice.time.min())) > 0:
                        lines.put(line, way.used, tables * least / self.scale)

    # The answer

    def read(self, solution: Floats) -> Placement | None:
        """The placement that a solution counts out; None where it says that there is none below the limit."""
        counts = np.rint(solution).astype(np.int64)
        if self.none >= 0 and counts[self.none]:
            return None
        chosen = np.zeros(len(self.problem.choices), np.int64)
        ranks: list[Ints] = [np.zeros(0, np.int64)] * len(chosen)
        for bundle in self.bundles:
            tables = iter(bundle.tables)
            for way in bundle.ways:
                for where in self._places(way, counts):
                    table = next(tables)
                    chosen[table], ranks[table] = way.number, where
        return Placement(chosen, ranks)

    def _places(self, way: Way, counts: NDArray[np.int64]) -> Iterator[Ints]:
        """The ranks of each table that takes this choice."""
        choice, used, size = way.choice, int(counts[way.used]), self.problem.local_size
        dealt = [
            np.repeat(kind.places, counts[kind.first : kind.first + len(kind.places)]).reshape(used, len(kind.pieces))
            for kind in way.kinds
        ]  # equal pieces lie host by host, so that tables of one host stay on it
        for table in range(used):
            where = np.empty(len(choice.time), np.int64)
            if choice.spread is Spread.ALL:
                where[:] = self.ranks
            for kind, places in zip(way.kinds, dealt, strict=True):
                at = places[table][:, None]
                blocks = choice.spread in (Spread.HOST_ROWS, Spread.HOSTS_ROWS)
                where[kind.pieces] = at * size + np.arange(size) if blocks else at
            yield where


class _Numbering:
    """How many ranks or hosts the tables so far can have come to, numbered in the order of their first piece."""

    def __init__(self) -> None:
        self._before = 0

    def seen(self, bundle: Bundle) -> int:
        """How many a bundle's pieces may use: one more for each of its own."""
        pieces = [sum(len(kind.pieces) for kind in way.kinds) for way in bundle.ways]
        return self._before + len(bundle.tables) * max(pieces, default=0)

    def count(self, bundle: Bundle) -> None:
        """Go on to the next tables."""
        self._before = self.seen(bundle)


def _ways(model: MilpModel) -> Iterator[Way]:
    for bundle in model.bundles:
        yield from bundle.ways


def _ranks_are_equal(model: MilpModel) -> bool:
    """Whether nothing tells one place from another: ranks if all pieces lie anywhere, hosts if all lie on hosts."""
    capacity = model.problem.capacity
    spreads = {way.choice.spread for way in _ways(model)} - {Spread.ALL}
    flat, by_host = spreads <= {Spread.ANY}, spreads <= {Spread.HOST_ROWS, Spread.HOSTS_ROWS}
    if not flat and not by_host:
        return False
    size = 1 if flat else model.problem.local_size

    def same(array: NDArray[Any]) -> bool:
        hosts = array.reshape(-1, size, *array.shape[1:])
        return bool((hosts == hosts[:1]).all())

    if not same(capacity):
        return False
    for way in _ways(model):
        choice = way.choice
        if choice.allowed is not None and not choice.allowed.all():
            return False
        if choice.spread is Spread.ALL and not (same(choice.time) and same(choice.memory)):
            return False
    return True


def equal_lines(lines: NDArray[Any]) -> list[Ints]:
    """Numbers of equal lines together, in the order of the first of them."""
    found: dict[bytes, list[int]] = {}
    for number, line in enumerate(np.ascontiguousarray(lines)):
        found.setdefault(line.tobytes(), []).append(number)
    return [np.array(numbers) for numbers in found.values()]


def content(choices: tuple[Choice, ...]) -> tuple[Any, ...]:
    """What tells a table from others, for the solver."""
    return tuple(
        (
            choice.spread,
            tuple(sorted(set(choice.groups))),
            np.asarray(choice.time, np.float64).tobytes(),
            np.asarray(choice.memory, np.int64).tobytes(),
            None if choice.allowed is None else choice.allowed.tobytes(),
        )
        for choice in choices
    )


def binding_memories(problem: PlanningProblem) -> list[int]:
    """Kinds of memory that could run out: a rank that held the most of every table would be over its capacity."""
    found = []
    for kind in range(2):
        most = sum(max(int(choice.memory[:, kind].sum()) for choice in choices) for choices in problem.choices)
        if most > problem.capacity[:, kind].min(initial=0):
            found.append(kind)
    return found

"""A plan below a limit beside a given base, or the proof that there is none.

The prices that leave a base standing (`patterns_proof.Case`) say that at least so many ranks are needed, nearly W. A
plan of W ranks can lose no more than the difference: its patterns' worths, of which none exceeds 1, are together at
most ``W - bound`` below W. So no single pattern is further below 1 than that, and those that are left are few. They are
all counted out, and HiGHS puts W of them together:

    sum over h, p of lambda[h, p] * pieces[p, k, c, q] = pieces of kind q * u[k, c]    every piece has a place
    sum over c of u[k, c]                              = 1                             each table takes one choice
    sum over p of lambda[h, p]                        <= L                             host h has L ranks
    sum over p of lambda[h, p] * pieces[p, k, c, q]    = sum over b of pieces of kind q in b * y[k, c, b, h]
    sum over h of y[k, c, b, h]                        = blocks of kind b * u[k, c]    what must be on one host is

Without choices that go to hosts all ranks are one host here. What the patterns do not tell apart, as unequal ranks or
tables that are pinned, may make an answer no plan; then the base is left to the program of `milp_model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tutorec.distributed.planner.milp_model import Lines, equal_lines
from tutorec.distributed.planner.patterns import Holdings, kinds_of_pieces, worthiest
from tutorec.distributed.planner.patterns_proof import Case
from tutorec.distributed.planner.problem import Choice, Ints, Placement, PlanningProblem, Spread

_STATES_OF_A_PATTERN = 10
_TINY = 1e-6


@dataclass(frozen=True)
class Answer:
    """What is known of a base: a placement to be checked, that there is none, or neither."""

    placement: Placement | None = None
    refuted: bool = False


@dataclass(frozen=True, eq=False)
class _Way:
    """A choice of a table, with the numbers of its variables.

    Args:
        table: Which.
        number: Of the choice.
        choice: The choice.
        used: Variable: whether it is taken.
        blocks: What goes to one host together: for each kind of equal blocks, ``[n, b]`` numbers of their pieces, and
            the first of the variables that count them on each host. None where pieces may lie on any host.
    """

    table: int
    number: int
    choice: Choice
    used: int
    blocks: list[tuple[Ints, int]]


class PatternProgram:
    """The program of one base.

    Args:
        problem: Without latencies.
        holdings: In which ways a rank can hold a table, all of them.
        case: The base.
        chosen: ``[T]`` its choices.
    """

    def __init__(self, problem: PlanningProblem, holdings: Holdings, case: Case, chosen: Ints) -> None:
        self.problem, self.holdings, self.case, self.chosen = problem, holdings, case, chosen
        self.rest = np.flatnonzero(case.rest).tolist()
        spreads = {choice.spread for table in self.rest for choice in problem.choices[table]}
        self.by_host = bool(spreads & {Spread.HOST, Spread.HOST_ROWS, Spread.HOSTS_ROWS})
        self.hosts = problem.world_size // problem.local_size if self.by_host else 1

    def solve(self, seconds: float, most: int) -> Answer:
        """Put patterns together, for so long at most; with more patterns than `most` it is left alone."""
        from scipy.optimize import milp

        if not self.rest:
            return Answer(Placement(self.chosen, [np.arange(self.problem.world_size)] * len(self.chosen)))
        least = 1.0 - (self.problem.world_size - self.case.bound) - _TINY
        holdings = self.holdings.of_tables(self.case.rest)
        found = worthiest(holdings, self.case.room, self.case.prices, least, _STATES_OF_A_PATTERN * most, most + 1)
        if not found.all_seen or len(found.ways) > most:
            return Answer()
        if not len(found.ways):
            return Answer(refuted=True)
        ways = found.ways
        answer = milp(**self._program(ways), options={"time_limit": max(seconds, 0.1)})
        if answer.x is None:
            return Answer(refuted=answer.status == 2)
        return Answer(self._read(ways, np.rint(answer.x).astype(np.int64)))

    def _program(self, ways: Ints) -> dict[str, Any]:
        """Arguments of `scipy.optimize.milp`: first the patterns of each host, then the choices, then their hosts."""
        from scipy.optimize import Bounds, LinearConstraint
        from scipy.sparse import csc_array

        count, size = len(ways), self.hosts * len(ways)
        per_host = self.problem.world_size // self.hosts
        high = [float(per_host)] * size
        lines = Lines()
        for host in range(self.hosts):
            lines.put(lines.add(-np.inf, per_host), host * count + np.arange(count), 1.0)
        self.ways = self._ways(lines, high)
        for way in self.ways:
            for kind, pieces in enumerate(kinds_of_pieces(way.choice)):
                counts = self._counts(way, kind, ways)
                held = np.flatnonzero(counts)
                every = lines.add(0.0, 0.0)
                lines.put(every, way.used, -float(len(pieces)))
                for host in range(self.hosts):
                    lines.put(every, host * count + held, counts[held])
                    if way.blocks:
                        here = lines.add(0.0, 0.0)
                        lines.put(here, host * count + held, counts[held])
                        for blocks, first in way.blocks:
                            lines.put(here, first + host, -float(np.isin(blocks[0], pieces).sum()))
        matrix = csc_array(
            (np.concatenate(lines.values), (np.concatenate(lines.rows), np.concatenate(lines.columns))),
            shape=(len(lines.low), len(high)),
        )
        low: Any = np.array(lines.low)
        top: Any = np.array(lines.high)
        most: Any = np.array(high)
        return {
            "c": np.zeros(len(high)),
            "integrality": np.ones(len(high)),
            "bounds": Bounds(0.0, most),
            "constraints": LinearConstraint(matrix, low, top),
        }

    def _ways(self, lines: Lines, high: list[float]) -> list[_Way]:
        """Number the variables of choices, let each table take one, and each of its blocks a host."""
        found = []
        for table in self.rest:
            one = lines.add(1.0, 1.0)
            for number, choice in enumerate(self.problem.choices[table]):
                if choice.spread is Spread.ALL:
                    continue
                way = _Way(table, number, choice, len(high), [])
                found.append(way)
                high.append(1.0)
                lines.put(one, way.used, 1.0)
                for blocks in _equal_blocks(choice, self.problem.local_size):
                    way.blocks.append((blocks, len(high)))
                    everywhere = lines.add(0.0, 0.0)
                    lines.put(everywhere, way.used, -float(len(blocks)))
                    lines.put(everywhere, len(high) + np.arange(self.hosts), 1.0)
                    high += [float(len(blocks))] * self.hosts
        return found

    def _counts(self, way: _Way, kind: int, ways: Ints) -> Ints:
        """``[n]`` how many pieces of a kind each pattern has."""
        own = self.holdings.counts[way.table]
        numbers = self.holdings.choice[way.table, : len(own)].tolist()
        of_way = np.array(
            [counts[kind] if number == way.number else 0 for number, counts in zip(numbers, own, strict=True)]
        )
        return of_way[ways[:, way.table]]

    def _read(self, ways: Ints, solution: Ints) -> Placement | None:
        """The placement that a solution stands for; None where the solver's rounding errors lost a piece."""
        count, per_host = len(ways), self.problem.world_size // self.hosts
        ranks_of: list[int] = []
        pattern_of: list[int] = []
        for host in range(self.hosts):
            some = np.repeat(np.arange(count), solution[host * count : (host + 1) * count])
            pattern_of += some.tolist()
            ranks_of += range(host * per_host, host * per_host + len(some))
        on_ranks, ranks = ways[pattern_of], np.array(ranks_of, np.int64)
        chosen = np.array(self.chosen, np.int64)
        placed = [np.arange(self.problem.world_size)] * len(chosen)
        for way in self.ways:
            if not solution[way.used]:
                continue
            laid = np.full(len(way.choice.time), -1)
            for kind, pieces in enumerate(kinds_of_pieces(way.choice)):
                held = np.repeat(ranks, self._counts(way, kind, on_ranks))
                if len(held) != len(pieces):
                    return None
                laid[pieces] = held
            if way.choice.spread in (Spread.HOST_ROWS, Spread.HOSTS_ROWS):
                # each piece has its rank within the host, whichever of the host's patterns it was found in
                for blocks, first in way.blocks:
                    hosts = np.repeat(np.arange(self.hosts), solution[first : first + self.hosts])
                    laid[blocks] = hosts[:, None] * self.problem.local_size + np.arange(self.problem.local_size)
            chosen[way.table], placed[way.table] = way.number, laid
        return Placement(chosen, placed)


def _equal_blocks(choice: Choice, local_size: int) -> list[Ints]:
    """Pieces that go to one host together, equal blocks of them together: ``[n, b]`` numbers of pieces."""
    if choice.spread is Spread.ANY:
        return []
    if choice.spread is Spread.HOST:
        return [np.arange(len(choice.time))[None]]
    blocks = np.arange(len(choice.time)).reshape(-1, local_size)
    lines = np.column_stack([choice.time, choice.memory])[blocks].reshape(len(blocks), -1)
    return [blocks[some] for some in equal_lines(lines)]

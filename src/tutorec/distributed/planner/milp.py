"""The planning problem as a mixed-integer linear program, solved by HiGHS.

::

    minimise    z + sum of fixed[g] * y[g]                  z: slowest rank, y: group is used
    such that   sum over c of u[t, c]           = 1         each table takes one choice
                sum over p of x[t, c, q, p]     = n[q] * u  each of n[q] equal shards has a place
                sum over shards on r of time    <= z        for every rank r
                sum over shards on r of memory  <= capacity[r]
                u[t, c]                         <= y[g]     a used group is paid for
                lower_bound <= objective <= cost of the plan to start from

The place p of a shard is a rank; for a block of L shards on one host it is the host. A choice with
a shard on every rank has no x. Equal shards of a choice are counted, not distinguished.

Source:
    HiGHS: Huangfu and Hall, `Parallelizing the dual revised simplex method
    <https://doi.org/10.1007/s12532-017-0130-5>`_, 2018. TorchRec's planner has no bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tutorec.distributed.planner.problem import (
    Choice,
    Floats,
    Ints,
    LinearProgram,
    Placement,
    PlanningProblem,
    Spread,
    broken_rules,
    cost,
    longest_ms,
    lower_bound,
    pay_for_groups,
    units,
)

CLOSED = 1e-3
"""A plan whose gap is at most this counts as optimal: estimates are less accurate."""

_MOST_VARIABLES = 60_000
"""HiGHS exceeds its time limit in the presolve of a larger program."""


@dataclass(frozen=True, eq=False)
class MilpResult:
    """What the solver returned.

    Args:
        placement: The best placement; None if none is known.
        cost: Its ms; infinite if there is none.
        bound: No placement that fits takes fewer ms; infinite if none fits.
        gap: ``(cost - bound) / cost``; 0 if none fits.
        status: ``"optimal"``: the gap is at most `CLOSED`; ``"time limit"``; ``"infeasible"``;
            ``"too large"``.
    """

    placement: Placement | None
    cost: float
    bound: float
    gap: float
    status: str


def solve(
    problem: PlanningProblem, seconds: float = 60.0, start: Placement | None = None
) -> MilpResult:
    """Search for the best placement, and prove how good it is.

    Args:
        problem: The problem.
        seconds: The time limit.
        start: A placement that fits; only better ones are searched for.

    Returns:
        The best placement, `start` if none is better, and the bound.

    Example:
        Tables of 3, 3 and 2 ms on two ranks: two must share one. The first may be split instead, in
        2 ms on each:

        >>> def whole(ms):
        ...     return Choice(np.array([ms]), np.array([[0, 0]]), Spread.ANY)
        >>> rows = Choice(np.array([2.0, 2.0]), np.zeros((2, 2), int), Spread.ALL)
        >>> tables = (whole(3.0), rows), (whole(3.0),), (whole(2.0),)
        >>> problem = PlanningProblem(2, 2, np.zeros((2, 2), int), tables)
        >>> result = solve(problem)
        >>> result.cost, result.status
        (5.0, 'optimal')
    """
    if not problem.choices:
        return MilpResult(Placement(np.zeros(0, np.int64), []), 0.0, 0.0, 0.0, "optimal")
    bound = lower_bound(problem).ms
    best, limit = start, np.inf if start is None else cost(problem, start)
    status = "time limit"
    deadline = time.perf_counter() + seconds
    # HiGHS satisfies constraints up to a millionth. A solution that exceeds memory is computed
    # again with less capacity.
    for spare in (0.0, 1e-5):
        if bound >= limit * (1 - CLOSED):
            break
        model = MilpModel(problem, bound, limit, spare)
        if model.program.size > _MOST_VARIABLES:
            status = "too large"
            break
        placement, proven = model.solve(deadline - time.perf_counter())
        if spare == 0.0:
            bound = max(bound, proven)
        if placement is None:
            break
        if not broken_rules(problem, placement):
            best, limit = min(
                (best, limit), (placement, cost(problem, placement)), key=lambda pair: pair[1]
            )
            break
    if best is None:
        infeasible = bool(np.isinf(bound))
        return MilpResult(
            None, limit, bound, 1.0 - infeasible, "infeasible" if infeasible else status
        )
    bound = min(bound, limit)
    gap = (limit - bound) / limit if limit > 0 else 0.0
    return MilpResult(best, limit, bound, gap, "optimal" if gap <= CLOSED else status)


@dataclass(eq=False)
class _Block:
    """Equal shards (or blocks of L shards) of a choice, and the variables that count them.

    Args:
        shards: ``[n, b]`` numbers of the shards: n equal blocks of b shards (b is 1 or L).
        ranks: ``[p, b]`` ranks of a block's shards at each place.
        counts: ``[p]`` numbers of the variables: how many blocks have this place.
    """

    shards: Ints
    ranks: Ints
    counts: Ints


@dataclass(eq=False)
class _Way:
    """A choice of a table that fits, with its variables."""

    table: int
    number: int
    choice: Choice
    used: int
    blocks: list[_Block] = field(default_factory=list)


class MilpModel:
    """The program of a problem.

    Args:
        problem: The problem.
        bound: No plan takes fewer ms.
        below: Only plans of fewer ms are feasible.
        spare: Share of the capacity that is left free.
    """

    def __init__(
        self, problem: PlanningProblem, bound: float, below: float, spare: float = 0.0
    ) -> None:
        self.problem, self.below = problem, below
        self.scale = bound or 1.0  # ms per unit of the program: HiGHS has absolute tolerances
        self.fixed = np.zeros(0) if problem.fixed is None else problem.fixed
        self.program = program = LinearProgram()
        objective = np.append(1.0, self.fixed / self.scale)
        slowest = program.variables(1, whole=False, cost=1.0)
        self._groups = program.variables(len(self.fixed), 1.0, cost=objective[1:])
        program.put(
            program.rows(1, bound / self.scale * (1 - 1e-9), below / self.scale),
            np.append(slowest, self._groups),
            objective,
        )
        self._time = program.rows(problem.world_size)
        program.put(self._time, slowest, -1.0)
        self._room = np.maximum(problem.capacity * (1.0 - spare), 1.0)
        self._memory = program.rows(problem.capacity.size, high=1.0).reshape(problem.capacity.shape)
        self.ways: list[_Way] = []
        for table, choices in enumerate(problem.choices):
            self._add_table(table, choices)

    # --- variables and constraints

    def _equal(self, total: int, counts: Any, times: int) -> None:
        """Constrain the sum of variables to a multiple of another."""
        row = self.program.rows(1, 0.0, 0.0)
        self.program.put(row, counts, 1.0)
        self.program.put(row, total, -float(times))

    def _add_table(self, table: int, choices: tuple[Choice, ...]) -> None:
        ways = [
            way
            for number, choice in enumerate(choices)
            if (way := self._way(table, number, choice))
        ]
        used = np.array([way.used for way in ways], np.int64)
        self.program.put(self.program.rows(1, 1.0, 1.0), used, 1.0)
        pay_for_groups(
            self.program,
            (used, self._groups),
            [way.choice for way in ways],
            np.zeros_like(used),
            np.arange(len(self.fixed)),
        )
        self.ways.extend(ways)

    def _way(self, table: int, number: int, choice: Choice) -> _Way | None:
        """Add a choice and its variables; None if it fits nowhere, or takes too long even alone."""
        problem, program = self.problem, self.program
        if longest_ms(problem, choice) >= self.below:
            return None
        block = units(choice.spread, problem.world_size, problem.local_size).shape[2]
        places = np.arange(problem.world_size).reshape(-1, block)
        allowed = (
            np.ones(problem.world_size, np.bool_) if choice.allowed is None else choice.allowed
        )
        content = np.column_stack([choice.time, choice.memory]).reshape(-1, block * 3)
        numbers = np.arange(len(choice.time)).reshape(-1, block)
        _, first, kind = np.unique(content, axis=0, return_index=True, return_inverse=True)
        fitting = []
        for index, shard in enumerate(first.tolist()):
            room = problem.capacity[places] - choice.memory[numbers[shard]]
            fits = allowed[places].all(axis=1) & (room >= 0).all(axis=(1, 2))
            if not fits.any():
                return None
            fitting.append((numbers[kind.ravel() == index], places[fits]))
        way = _Way(table, number, choice, int(program.variables(1, 1.0)[0]))
        for shards, ranks in fitting:
            counts = program.variables(len(ranks), len(shards))
            self._equal(way.used, counts, len(shards))
            way.blocks.append(_Block(shards, ranks, counts))
            program.put(self._time[ranks], counts[:, None], choice.time[shards[0]] / self.scale)
            memory = choice.memory[shards[0]] / self._room[ranks]
            program.put(self._memory[ranks], counts[:, None, None], memory)
        if choice.spread is Spread.HOST:
            self._keep_on_one_host(way)
        return way

    def _keep_on_one_host(self, way: _Way) -> None:
        hosts = self.program.variables(self.problem.world_size // self.problem.local_size, 1.0)
        self._equal(way.used, hosts, 1)
        for block in way.blocks:
            at = block.ranks[:, 0] // self.problem.local_size
            for host, used in enumerate(hosts.tolist()):
                self._equal(used, block.counts[at == host], len(block.shards))

    # --- solution

    def solve(self, seconds: float) -> tuple[Placement | None, float]:
        """A placement of fewer ms than `below`, if HiGHS finds one, and a lower bound."""
        answer = self.program.solve(time_limit=max(seconds, 0.0), mip_rel_gap=CLOSED / 2)
        if answer.status == 2:  # infeasible
            return None, self.below
        bound = (
            0.0
            if answer.mip_dual_bound is None
            else float(answer.mip_dual_bound) * self.scale * (1 - 1e-6)
        )
        return (None if answer.x is None else self._read(answer.x)), bound

    def _read(self, solution: Floats) -> Placement:
        counts = np.rint(solution).astype(np.int64)
        tables = len(self.problem.choices)
        chosen, ranks = np.zeros(tables, np.int64), [np.zeros(0, np.int64)] * tables
        for way in self.ways:
            if not counts[way.used]:
                continue
            where = np.empty(len(way.choice.time), np.int64)
            for block in way.blocks:
                where[block.shards] = np.repeat(block.ranks, counts[block.counts], axis=0)
            chosen[way.table], ranks[way.table] = way.number, where
        return Placement(chosen, ranks)

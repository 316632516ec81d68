"""The planning problem as a mixed-integer linear program, solved by HiGHS.

::

    minimise    z + sum of fixed[g] * y[g]                  z: slowest rank, y: group is used
    such that   sum over c of u[t, c]           = 1         each table takes one choice
                sum over p of x[t, c, q, p]     = n[q] * u  each of n[q] equal shards has a place
                sum over shards on r of time    <= z        for every rank r
                sum over shards on r of memory  <= capacity[r]
                u[t, c]                         <= y[g]     a used group is paid for
                lower_bound <= objective <= cost of the plan to start from

A place p of a block of shards is a block of ranks (see `problem.candidate_rank_blocks`). A choice
whose shards must share a host is one choice c for each host. Equal blocks of a choice are counted,
not distinguished. The lower bound is the relaxation of this program to all ranks together
(`problem.ChoiceProgram` has what they share).

Source:
    HiGHS: Huangfu and Hall, `Parallelizing the dual revised simplex method
    <https://doi.org/10.1007/s12532-017-0130-5>`_, 2018. TorchRec's planner has no bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tutorec.distributed.planner.problem import (
    Choice,
    ChoiceProgram,
    Floats,
    Ints,
    Placement,
    PlanningProblem,
    broken_rules,
    candidate_rank_blocks,
    cost,
    longest_ms,
    lower_bound,
)

CLOSED = 1e-3
"""A plan whose gap is at most this counts as optimal: estimates are less accurate."""

_MOST_VARIABLES = 60_000
"""HiGHS exceeds its time limit in the presolve of a larger program."""


@dataclass(frozen=True, eq=False)
class MilpResult:
    """The result of the solver.

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

        >>> from tutorec.distributed.plan.plan import PlacementRule
        >>> def whole(ms):
        ...     return Choice(np.array([ms]), np.array([[0, 0]]), PlacementRule.ANY_RANK)
        >>> rows = Choice(np.array([2.0, 2.0]), np.zeros((2, 2), int), PlacementRule.EVERY_RANK)
        >>> tables = (whole(3.0), rows), (whole(3.0),), (whole(2.0),)
        >>> problem = PlanningProblem(2, 2, np.zeros((2, 2), int), tables)
        >>> result = solve(problem)
        >>> result.cost, result.status
        (5.0, 'optimal')
    """
    if not problem.choices:
        return MilpResult(Placement(np.zeros(0, np.int64), []), 0.0, 0.0, 0.0, "optimal")

    bound = lower_bound(problem).ms
    best = start
    limit = np.inf if start is None else cost(problem, start)
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


class _Candidate(NamedTuple):
    """A choice of a table, and the blocks of ranks that its blocks of shards may take."""

    table: int
    number: int
    choice: Choice
    rank_blocks: Ints


class _Blocks(NamedTuple):
    """Equal blocks of a choice's shards, and the variables that count them.

    Args:
        candidate: The choice, and where its blocks may be.
        shards: ``[n, S]`` numbers of the shards of n equal blocks.
        ranks: ``[U, S]`` blocks of ranks on which such a block fits.
        counts: ``[U]`` numbers of the variables: how many of the blocks are there.
    """

    candidate: _Candidate
    shards: Ints
    ranks: Ints
    counts: Ints


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
        self.problem = problem
        self.below = below
        self.scale = bound or 1.0  # ms per unit of the program: HiGHS has absolute tolerances
        fixed = problem.fixed / self.scale
        self.blocks: list[_Blocks] = []
        candidates = [
            _Candidate(table, number, choice, group)
            for table, choices in enumerate(problem.choices)
            for number, choice in enumerate(choices)
            if longest_ms(problem, choice) < below
            for group in candidate_rank_blocks(choice.rule, problem.world_size, problem.local_size)
        ]
        table = np.array([candidate.table for candidate in candidates], np.int64)
        choices = [candidate.choice for candidate in candidates]
        self.program = program = ChoiceProgram(
            choices, table, len(problem.choices), fixed, (True, True)
        )
        program.put(
            program.rows(1, bound / self.scale * (1 - 1e-9), below / self.scale),
            np.append(program.slowest, program.used),
            np.append(1.0, fixed[program.paid]),
        )
        program.pay_for_groups()
        self._time = program.rows(problem.world_size)
        program.put(self._time, program.slowest, -1.0)
        self._room = np.maximum(problem.capacity * (1.0 - spare), 1.0)
        self._memory = program.rows(problem.capacity.size, high=1.0).reshape(problem.capacity.shape)
        for candidate, used in zip(candidates, program.share.tolist(), strict=True):
            self._place(candidate, used)

    def _place(self, candidate: _Candidate, used: int) -> None:
        """If a candidate is chosen, each of its blocks takes a unit; equal blocks are counted."""
        program = self.program
        choice = candidate.choice
        size = candidate.rank_blocks.shape[1]
        numbers = choice.block_numbers(size)
        blocks = np.arange(len(choice.time)).reshape(-1, size)
        for shards in (blocks[numbers == number] for number in range(int(numbers.max()) + 1)):
            time = choice.time[shards[0]]
            memory = choice.memory[shards[0]]
            free = self.problem.capacity[candidate.rank_blocks] >= memory  # [U, S, 2]
            if choice.allowed is not None:
                free &= choice.allowed[candidate.rank_blocks][..., None]

            ranks = candidate.rank_blocks[free.all(axis=(1, 2))]
            counts = program.variables(len(ranks), len(shards))
            row = program.rows(1, 0.0, 0.0)
            program.put(row, counts, 1.0)
            program.put(row, used, -float(len(shards)))
            program.put(self._time[ranks], counts[:, None], time / self.scale)
            program.put(self._memory[ranks], counts[:, None, None], memory / self._room[ranks])
            self.blocks.append(_Blocks(candidate, shards, ranks, counts))

    # --- solution

    def solve(self, seconds: float) -> tuple[Placement | None, float]:
        """A placement of fewer ms than `below`, if HiGHS finds one, and a lower bound."""
        result = self.program.solve(time_limit=max(seconds, 0.0), mip_rel_gap=CLOSED / 2)
        if result.status == 2:  # infeasible
            return None, self.below

        bound = (
            0.0
            if result.mip_dual_bound is None
            else float(result.mip_dual_bound) * self.scale * (1 - 1e-6)
        )
        return (None if result.x is None else self._read(result.x)), bound

    def _read(self, solution: Floats) -> Placement:
        counts = np.rint(solution).astype(np.int64)
        tables = len(self.problem.choices)
        chosen = np.zeros(tables, np.int64)
        ranks = [np.zeros(0, np.int64)] * tables
        for candidate, shards, rank_blocks, variables in self.blocks:
            if counts[variables].any():
                if not len(ranks[candidate.table]):
                    ranks[candidate.table] = np.empty(len(candidate.choice.time), np.int64)
                chosen[candidate.table] = candidate.number
                ranks[candidate.table][shards] = np.repeat(rank_blocks, counts[variables], axis=0)

        return Placement(chosen, ranks)

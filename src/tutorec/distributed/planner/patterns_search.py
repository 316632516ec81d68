"""The search for the best plan by patterns: what no base allows is proven, what one allows is found.

`patterns_proof` refutes bases until a few are left, `patterns_plans` finds plans for these, or refutes them; a plan
lowers the limit for all that follow. A base that is hard is put off, until the limit is lower, and comes to the general
program at last.

Latencies of groups are paid once, whatever lies where. So each set of groups is a question of its own: about plans that
use no others, within the limit less the set's latencies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tutorec.distributed.planner.patterns import Holdings
from tutorec.distributed.planner.patterns_bases import REST, Bases, bases, without_groups
from tutorec.distributed.planner.patterns_plans import Answer, PatternProgram
from tutorec.distributed.planner.patterns_proof import Case, Proof
from tutorec.distributed.planner.problem import Placement, PlanningProblem

MOST_GROUPS = 6
"""Of more groups with latencies there are too many sets."""

MOST_TABLES = 150
"""With more tables a single question takes too long."""

# Limits at which a plan is looked for where too much is possible below the limit itself.
_PARTS_OF_THE_LIMIT = (0.99, 0.995, 0.998)

FIRST, LATER = (1.0, 2000), (5.0, 10_000)
"""Seconds for a base, and patterns that it may have: at first, and when all others are done."""

# With less time nothing is begun.
_LEAST_SECONDS = 0.5


@dataclass(frozen=True)
class Caller:
    """What the search is told, and whom it tells.

    Args:
        limit: Milliseconds: only plans that take no more are of interest.
        take: Keep a placement that fits and is better; what it returns is whether that was so.
        exact: Find out about plans with these numbers of choices only; returns a bound for them.
        left: Seconds.
    """

    limit: Callable[[], float]
    take: Callable[[Placement], bool]
    exact: Callable[[list[list[int]]], float]
    left: Callable[[], float]


class PatternSearch:
    """Finds plans below the limit until there are none; goes on where it stopped.

    Args:
        problem: What is to be planned.
        caller: Has the limit, and gets the plans.
    """

    def __init__(self, problem: PlanningProblem, caller: Caller) -> None:
        fixed = np.zeros(0) if problem.fixed is None else problem.fixed
        paid = np.flatnonzero(fixed > 0).tolist()
        self._caller = caller
        self._parts: list[_Part] | None = None
        if len(paid) <= MOST_GROUPS and len(problem.choices) <= MOST_TABLES:
            sets = [used for count in range(len(paid) + 1) for used in combinations(paid, count)]
            found = [(without_groups(problem, frozenset(used)), float(fixed[list(used)].sum())) for used in sets]
            self._parts = [_Part(*part, latency, caller) for part, latency in found if part is not None]

    def run(self) -> float:
        """Search on.

        Returns:
            A bound for all plans: the limit itself if the search was completed; 0 where time was over, or where the
            problem is none for patterns.
        """
        if self._parts is None:
            return 0.0
        bound = float("inf")
        for part in self._parts:
            bound = min(bound, part.search())
            if bound == 0.0:
                return 0.0
        return min(bound, self._caller.limit() * (1 - 1e-9))


class _Part:
    """The search among plans that use some groups.

    Args:
        problem: Without the choices that need other groups, and without latencies.
        numbers: For each table which choices these are.
        latency: Milliseconds that the groups cost.
        caller: As above.
    """

    def __init__(self, problem: PlanningProblem, numbers: list[list[int]], latency: float, caller: Caller) -> None:
        self.problem, self.numbers, self.latency, self.caller = problem, numbers, latency, caller
        self._proof: Proof | None = None
        self._hard: list[Case] = []
        self._bound = float("inf")

    def search(self) -> float:
        """A bound for these plans; infinite where none is below the limit; 0 where nothing is known."""
        ms = self._ms()
        if ms <= 0:
            return float("inf")
        if self._proof is None:
            found = bases(self.problem, ms)
            holdings = Holdings.of(self.problem, ms)
            if found is None or holdings is None:
                return 0.0
            self._proof = Proof(self.problem.world_size, found, holdings, ms, lambda: self.caller.left() <= 0)
        proof = self._proof
        proof.ms = ms
        self._hard += [case for case in proof.cases() if self._is_hard(proof, case, FIRST)]
        self._hard.sort(key=lambda case: case.bound, reverse=True)
        while proof.complete and self._hard and self.caller.left() > _LEAST_SECONDS:
            self._settle(proof, self._hard.pop())
        return self._bound if proof.complete and not self._hard else 0.0

    def _settle(self, proof: Proof, case: Case) -> None:
        """Find out about a hard base, with the limit as it is by now."""
        proof.ms = self._ms()
        again = proof.again(case.number)
        if again is not None and self._is_hard(proof, again, LATER):
            self._bound = min(self._bound, self.caller.exact(self._choices(proof.bases, case)))

    def _ms(self) -> float:
        return self.caller.limit() - self.latency

    def _is_hard(self, proof: Proof, case: Case, effort: tuple[float, int]) -> bool:
        """Look for plans with a base, each below the one before; whether it is left open."""
        following: Case | None = case
        while following is not None:
            answer = self._ask(proof, following, effort)
            if answer.refuted:
                return False
            if answer.placement is None and not self._finds_much_faster(proof, case.number, effort):
                return True
            proof.ms = self._ms()
            following = proof.again(case.number)
        return False

    def _finds_much_faster(self, proof: Proof, number: int, effort: tuple[float, int]) -> bool:
        """Look for plans far below the limit: fewer patterns are left to choose from, as less is lost on them."""
        for part in _PARTS_OF_THE_LIMIT:
            case = proof.again(number, part)
            if case is not None and self._ask(proof, case, effort).placement is not None:
                return True
        return False

    def _ask(self, proof: Proof, case: Case, effort: tuple[float, int]) -> Answer:
        """Solve the program of a base; only placements that the caller took count."""
        chosen = proof.bases.chosen[case.number].astype(np.int64)
        answer = PatternProgram(self.problem, proof.all_ways, case, chosen).solve(
            min(effort[0], self.caller.left()), effort[1]
        )
        if answer.placement is None or self.caller.take(self._renumbered(answer.placement)):
            return answer
        return Answer()

    def _renumbered(self, placement: Placement) -> Placement:
        """With the numbers that choices have in the whole problem."""
        chosen = [self.numbers[table][number] for table, number in enumerate(placement.chosen.tolist())]
        return Placement(np.array(chosen, np.int64), placement.ranks)

    def _choices(self, found: Bases, case: Case) -> list[list[int]]:
        """Numbers of the choices that plans with a base can have, in the whole problem."""
        of_all = [choice.spread.value == "all" for choices in self.problem.choices for choice in choices]
        everywhere = iter(of_all)
        left = []
        for numbers, taken in zip(self.numbers, found.chosen[case.number].tolist(), strict=True):
            flags = [next(everywhere) for _ in numbers]
            free = [number for number, flag in zip(numbers, flags, strict=True) if not flag]
            left.append(free if taken == REST else [numbers[taken]])
        return left

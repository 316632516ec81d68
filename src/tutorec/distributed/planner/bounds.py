"""Lower bound on the time of every plan: the search's target, shown with every plan.

Every plan that fits satisfies a few linear conditions: its slowest rank takes at least the mean of
all ranks, and at least the longest shard of each table; all tables together need at most the memory
of all ranks; a choice is used only if its groups are paid for. The least time under these
conditions is a bound. It is the optimum of a linear program in which a table may be divided among
choices, while a group is paid for entirely or not at all (in large models, also in part).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutorec.distributed.planner.problem import (
    Choice,
    Floats,
    Ints,
    PlanningProblem,
    Spread,
    fixed_time,
    table_name,
)

# Relative tolerance by which the solver's optimum may exceed the true one.
_TOLERANCE = 5e-7
# With more choices, groups may be paid for in part: whole groups take HiGHS 1.8 s for 1,000 tables,
# parts 0.3 s, and raise the bound by less than 0.1 % there.
_SMALL = 2000
# How often longer shards are excluded in small models: three times raise chapter 09's bound by 2 %.
_ROUNDS = 4
# Nodes of branch and bound; a limit only lowers the bound.
_NODES = 100


@dataclass(frozen=True)
class Bound:
    """A time that no fitting plan is faster than; infinite if none fits.

    Args:
        ms: The bound.
        reason: What limits plans, as text.
        groups: The groups that the relaxed plan uses.
    """

    ms: float
    reason: str
    groups: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return f"no plan is faster than {self.ms:.6g} ms: {self.reason}"


def lower_bound(problem: PlanningProblem) -> Bound:
    """The least time of a plan according to the linear relaxation.

    Args:
        problem: The problem.

    Returns:
        The bound; infinite if memory does not suffice for any choices.

    Example:
        >>> whole = Choice(np.array([6.0]), np.array([[0, 8]]), Spread.ANY)
        >>> rows = Choice(np.array([4.0, 4.0]), np.array([[0, 4], [0, 4]]), Spread.ALL)
        >>> print(
        ...     lower_bound(
        ...         PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((whole, rows), (whole,)))
        ...     )
        ... )
        no plan is faster than 6 ms: every way to cut table 1 leaves a rank with at least that
    """
    if not problem.choices:
        return Bound(0.0, "there are no tables")
    fixed = np.zeros(0) if problem.fixed is None else problem.fixed
    usable = [[c for c in of_table if fits(problem, c)] for of_table in problem.choices]
    for table, choices in enumerate(usable):
        if not choices:
            return Bound(
                math.inf,
                (
                    f"{table_name(problem.choices[table][0], table)} fits on the ranks in none of "
                    "its ways"
                ),
            )
    if short := _shortage(problem, usable):
        return Bound(math.inf, f"the tables need {short}")
    longest = [[longest_ms(problem, c) for c in of_table] for of_table in usable]
    shortest = [min(of_table) for of_table in longest]
    floor = max(shortest)
    relaxed, groups, full = _relaxation(problem, usable, fixed)
    small = sum(map(len, usable)) <= _SMALL
    for _ in range(_ROUNDS if small else 0):
        # A plan faster than `following` contains none of the longer shards.
        reached = max(relaxed, floor)
        following = min(
            (ms for of_table in longest for ms in of_table if ms > reached), default=0.0
        )
        brief = [
            [choice for choice, ms in zip(*pair, strict=True) if ms <= reached]
            for pair in zip(usable, longest, strict=True)
        ]
        tightened, opened, filled = _relaxation(problem, brief, fixed)
        if min(tightened, following) <= reached * (1 + _TOLERANCE):
            break
        relaxed = min(tightened, following)
        if tightened <= following:
            groups, full = opened, filled
            break
    if relaxed <= floor:
        table = shortest.index(floor)
        reason = (
            f"every way to cut {table_name(problem.choices[table][0], table)} leaves a rank "
            "with at least that"
        )
        return Bound(floor * (1 - 1e-12), reason, groups)
    if math.isinf(relaxed):
        return Bound(
            relaxed, "the tables need more memory of both kinds than all ranks have together"
        )
    reason = f"it is the work of all tables, spread evenly over {problem.world_size} ranks"
    return Bound(relaxed, reason + (", in the memory that they have" if full else ""), groups)


def _relaxation(
    problem: PlanningProblem, usable: list[list[Choice]], fixed: Floats
) -> tuple[float, frozenset[int], bool]:
    """Optimum of the linear program, the groups that it uses, and whether memory is full."""
    choices = [choice for of_table in usable for choice in of_table]
    table = np.repeat(np.arange(len(usable)), [len(of_table) for of_table in usable])
    paid = np.flatnonzero(fixed)
    longest = np.array([choice.time.max(initial=0.0) for choice in choices])
    unit = float(longest.max()) or 1.0  # ms: the solver's tolerances are absolute
    mean = np.array([choice.time.sum() for choice in choices]) / problem.world_size
    room = np.maximum(problem.capacity, 0).sum(axis=0)
    memory = np.array([choice.memory.sum(axis=0) for choice in choices]) / np.maximum(room, 1)
    whole_groups = len(paid) > 0 and len(choices) <= _SMALL

    program = LinearProgram()
    share = program.variables(len(choices), whole=False)  # of a table that has this choice
    slowest = program.variables(1, whole=False, cost=1.0)  # milliseconds of the slowest rank
    used = program.variables(len(paid), whole=whole_groups, cost=fixed[paid] / unit)
    program.put(program.rows(len(usable), 1.0, 1.0)[table], share, 1.0)
    at_most_slowest = program.rows(1)
    program.put(at_most_slowest, share, mean / unit)
    program.put(at_most_slowest, slowest, -1.0)
    at_most_slowest = program.rows(len(usable))
    program.put(at_most_slowest[table], share, longest / unit)
    program.put(at_most_slowest, slowest, -1.0)
    _pay_for_groups(program, (share, used), choices, table, paid)
    program.put(program.rows(2, high=1.0)[:, None], share, memory.T)

    result = program.solve(node_limit=_NODES, mip_rel_gap=_TOLERANCE)
    if result.status == 2:
        return math.inf, frozenset(), True
    if result.x is None:
        return 0.0, frozenset(paid.tolist()), False
    bound = result.mip_dual_bound if whole_groups else result.fun
    full = bool((result.x[share] @ memory >= 1.0 - _TOLERANCE).any())
    opened = frozenset(paid[result.x[used] > 0.5].tolist())
    return float(bound) * unit * (1 - _TOLERANCE), opened, full


def _pay_for_groups(
    program: LinearProgram,
    variables: tuple[Ints, Ints],
    choices: list[Choice],
    table: Ints,
    paid: Ints,
) -> None:
    """Constrain the shares of each table that use a group to what the group is paid for."""
    share, used = variables
    uses = [[group in choice.groups for group in paid.tolist()] for choice in choices]
    using, which = np.nonzero(np.reshape(uses, (len(choices), len(paid))))
    pairs, row = np.unique(table[using] * len(paid) + which, return_inverse=True)
    at_most_used = program.rows(len(pairs))
    program.put(at_most_used[row], share[using], 1.0)
    program.put(at_most_used, used[pairs % max(len(paid), 1)], -1.0)


class LinearProgram:
    """A mixed-integer linear program in the making; minimizes the cost of its variables.

    Example:
        Two variables of at least 2 together, of which the second costs less:

        >>> program = LinearProgram()
        >>> columns = program.variables(2, cost=np.array([2.0, 1.0]))
        >>> program.put(program.rows(1, 2.0, np.inf), columns, 1.0)
        >>> program.solve().x.tolist()
        [0.0, 2.0]
    """

    def __init__(self) -> None:
        self._variables: list[tuple[float, bool, float]] = []  # largest value, integrality, cost
        self._rows: list[tuple[float, float]] = []
        self._entries: list[list[NDArray[Any]]] = []

    @property
    def size(self) -> int:
        """Number of variables."""
        return len(self._variables)

    def variables(
        self, count: int, high: float = math.inf, whole: bool = True, cost: Floats | float = 0.0
    ) -> Ints:
        """Add variables of 0 to ``high``; returns their numbers."""
        costs = np.broadcast_to(cost, count).tolist()
        self._variables += [(high, whole, each) for each in costs]
        return np.arange(self.size - count, self.size)

    def rows(self, count: int, low: float = -math.inf, high: float = 0.0) -> Ints:
        """Add constraints that sums are ``low`` to ``high``; returns their numbers."""
        self._rows += [(low, high)] * count
        return np.arange(len(self._rows) - count, len(self._rows))

    def put(self, rows: Any, columns: Any, values: Any) -> None:
        """Add ``values`` times variables to sums; the arguments are broadcast."""
        columns = np.asarray(columns, np.int64)
        self._entries.append([each.ravel() for each in np.broadcast_arrays(rows, columns, values)])

    def solve(self, **options: float) -> Any:
        """The result of ``scipy.optimize.milp``, which runs HiGHS."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csc_array

        high, whole, costs = np.array(self._variables, np.float64).T
        rows, columns, values = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        matrix = csc_array((values, (rows, columns)), shape=(len(self._rows), self.size))
        return milp(
            costs,
            integrality=whole,
            bounds=Bounds(0.0, high),  # pyright: ignore[reportArgumentType]
            constraints=LinearConstraint(matrix, *np.array(self._rows).T),
            options=options,
        )


def longest_ms(problem: PlanningProblem, choice: Choice) -> float:
    """Milliseconds of a choice's longest shard, and of its groups."""
    return float(choice.time.max(initial=0.0)) + fixed_time(problem, [choice])


def fits(problem: PlanningProblem, choice: Choice) -> bool:
    """Whether each shard of a choice fits on some allowed rank."""
    if choice.spread is Spread.ALL:
        pinned = choice.allowed is not None and not choice.allowed.all()
        return not pinned and bool((choice.memory <= problem.capacity).all())
    room = problem.capacity if choice.allowed is None else problem.capacity[choice.allowed]
    return len(room) > 0 and bool((choice.memory <= room.max(axis=0)).all())


def _shortage(problem: PlanningProblem, usable: list[list[Choice]]) -> str:
    """Which memory is short, and by how much; empty if each kind alone suffices."""
    rooms = np.maximum(problem.capacity, 0).sum(axis=0).tolist()
    words = []
    for kind, name in enumerate(("HBM", "DDR")):
        needed = sum(min(int(c.memory[:, kind].sum()) for c in of_table) for of_table in usable)
        if needed > rooms[kind]:
            words.append(
                f"{needed:,} bytes of {name} at least, where all ranks have {rooms[kind]:,}"
            )
    return " and ".join(words)

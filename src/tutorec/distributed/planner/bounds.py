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
from typing import TYPE_CHECKING

import numpy as np

from tutorec.distributed.planner.problem import (
    Choice,
    Floats,
    Ints,
    PlanningProblem,
    Spread,
    table_name,
)

if TYPE_CHECKING:
    from scipy.sparse import csr_array

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
    longest = [[_longest(c, fixed) for c in of_table] for of_table in usable]
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
    """Optimum of the linear program, the groups that it uses, and whether memory is full.

    Variables are the fraction of a table with each choice ``[N]``, the milliseconds of the slowest
    rank, and whether each group with a cost is used.
    """
    from scipy.optimize import milp

    choices = [choice for of_table in usable for choice in of_table]
    table = np.repeat(np.arange(len(usable)), [len(of_table) for of_table in usable])
    paid = np.flatnonzero(fixed)
    count = len(choices)
    room = np.maximum(problem.capacity, 0).sum(axis=0).astype(np.float64)
    memory = np.array([choice.memory.sum(axis=0) for choice in choices]) / np.maximum(room, 1.0)
    unit, shard, work = _times(choices, problem.world_size)
    whole_groups = len(paid) > 0 and count <= _SMALL
    result = milp(
        np.concatenate([np.zeros(count), [1.0], fixed[paid] / unit]),
        integrality=np.concatenate([np.zeros(count + 1), np.full(len(paid), whole_groups)]),
        constraints=_constraints(choices, table, shard, work, memory, paid),
        options={"node_limit": _NODES, "mip_rel_gap": _TOLERANCE},
    )
    if result.status == 2:
        return math.inf, frozenset(), True
    if result.x is None:
        return 0.0, frozenset(paid.tolist()), False
    bound = result.mip_dual_bound if whole_groups else result.fun
    full = bool((result.x[:count] @ memory >= 1.0 - _TOLERANCE).any())
    opened = frozenset(paid[result.x[count + 1 :] > 0.5].tolist())
    return float(bound) * unit * (1 - _TOLERANCE), opened, full


def _constraints(
    choices: list[Choice], table: Ints, shard: Floats, work: Floats, memory: Floats, paid: Ints
) -> list[tuple[csr_array, float, float]]:
    """Each table has one choice; ranks' time, memory, and groups bound what is chosen."""
    from scipy.sparse import csr_array

    count, tables = len(choices), int(table[-1]) + 1
    numbers = np.arange(count)

    def of(values: Floats, rows: Ints, columns: Ints, height: int) -> csr_array:
        return csr_array((values, (rows, columns)), shape=(height, count + 1 + len(paid)))

    whole = of(np.ones(count), table, numbers, tables)
    mean = of(np.append(work, -1.0), np.zeros(count + 1, np.int64), np.append(numbers, count), 1)
    shards = of(
        np.append(shard, -np.ones(tables)),
        np.append(table, np.arange(tables)),
        np.append(numbers, np.full(tables, count)),
        tables,
    )
    held = of(memory.T.ravel(), np.repeat([0, 1], count), np.tile(numbers, 2), 2)
    payments = of(*_payments(choices, table, paid))
    at_most_zero = [(matrix, -math.inf, 0.0) for matrix in (mean, shards, payments)]
    return [(whole, 1.0, 1.0), *at_most_zero, (held, -math.inf, 1.0)]


def _times(choices: list[Choice], world_size: int) -> tuple[float, Floats, Floats]:
    """Milliseconds of the longest shard, in whose unit choices' shards and shares are given."""
    shard = np.array([choice.time.max(initial=0.0) for choice in choices])
    unit = float(shard.max()) or 1.0  # the solver's tolerances are absolute
    work = np.array([choice.time.sum() for choice in choices]) / world_size / unit
    return unit, shard / unit, work


def _payments(choices: list[Choice], table: Ints, paid: Ints) -> tuple[Floats, Ints, Ints, int]:
    """The numbers, rows, columns and bounds of: a table's use of a group is at most its share."""
    uses = np.array([[group in choice.groups for group in paid] for choice in choices], np.bool_)
    using, which = np.nonzero(uses.reshape(len(choices), len(paid)))
    pairs, pair = np.unique(table[using] * (len(paid) + 1) + which, return_inverse=True)
    return (
        np.append(np.ones(len(using)), -np.ones(len(pairs))),
        np.append(pair, np.arange(len(pairs))),
        np.append(using, len(choices) + 1 + pairs % (len(paid) + 1)),
        max(len(pairs), 1),
    )


def _longest(choice: Choice, fixed: Floats) -> float:
    """Milliseconds of a choice's longest shard, and of its groups."""
    latency = float(fixed[list(choice.groups)].sum()) if len(fixed) else 0.0
    return float(choice.time.max(initial=0.0)) + latency


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

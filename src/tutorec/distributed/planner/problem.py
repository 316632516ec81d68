"""The planning problem in numbers, its solutions, and a lower bound on their cost.

For each table choose one of its options, and a rank for each of the option's shards, such that no
rank exceeds its memory and the slowest rank is as fast as possible::

    cost = max over ranks r of (sum of the times of r's shards) + sum of fixed[g] over used groups g

A group is a collection together with a sharding type: its tables share exchanges, whose latency is
paid once for any number of tables.

Every plan that fits satisfies a few linear conditions: its slowest rank takes at least the mean of
all ranks, and at least the longest shard of each table; all tables together need at most the memory
of all ranks; a choice is used only if its groups are paid for. The least time under these
conditions is a bound: the search's target, shown with every plan. It is the optimum of a linear
program in which a table may be divided among choices, while a group is paid for entirely or not at
all (in large models, also in part).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutorec.distributed.plan.plan import SHARDING_TRAITS, PlacementRule, ShardingType
from tutorec.distributed.planner.options import Constraints, ShardingOption
from tutorec.distributed.planner.topology import Floats, Ints, Topology, device_memory
from tutorec.errors import PlannerError, PlannerErrorType, bad_input

MEMORIES = ("HBM", "DDR")  # the kinds of memory that plans are limited by

# The relaxation: relative tolerance by which the solver's optimum may exceed the true one.
_TOLERANCE = 5e-7
# With more choices, groups may be paid for in part: whole groups take HiGHS 1.8 s for 1,000 tables,
# parts 0.3 s, and raise the bound by less than 0.1 % there.
_SMALL = 2000
# How often longer shards are excluded in small models: three times raise chapter 09's bound by 2 %.
_ROUNDS = 4
# Nodes of branch and bound; a limit only lowers the bound.
_NODES = 100
_SHORT = "the tables need more memory than the ranks have"


def candidate_rank_blocks(rule: PlacementRule, world_size: int, local_size: int) -> Ints:
    """The blocks of ranks that may hold a block of shards: ``[G, U, S]``.

    Shards come in blocks of S, each of which goes to one of U blocks of S ranks. All blocks of a
    table go to one of G groups of rank blocks.

    Example:
        >>> candidate_rank_blocks(
        ...     PlacementRule.ANY_RANK, 4, 2
        ... ).tolist()  # one host after the other
        [[[0], [2], [1], [3]]]
        >>> candidate_rank_blocks(PlacementRule.ONE_HOST, 4, 2).tolist()
        [[[0], [1]], [[2], [3]]]
        >>> candidate_rank_blocks(PlacementRule.ROWS_ON_HOST, 4, 2).tolist()
        [[[0, 1], [2, 3]]]
    """
    ranks = np.arange(world_size).reshape(-1, local_size)
    if rule is PlacementRule.ANY_RANK:
        return ranks.T.reshape(1, -1, 1)
    if rule is PlacementRule.ONE_HOST:
        return ranks[:, :, None]
    if rule is PlacementRule.EVERY_RANK:
        return ranks.reshape(1, 1, -1)

    return ranks[None]


@dataclass(frozen=True, eq=False)
class Choice:
    """One way to shard a table, or several colocated tables; P shards.

    Args:
        time: ``[P]`` ms of each shard in a step.
        memory: ``[P, 2]`` bytes of each shard: HBM, DDR.
        rule: Where shards may be placed.
        groups: Indices of the groups whose exchanges it uses.
        preference: Ties in cost go to the smallest preference.
        allowed: ``[W]``, the ranks that may hold a shard; None for all.
        options: The sharding options, one per table.
    """

    time: Floats
    memory: Ints
    rule: PlacementRule
    groups: tuple[int, ...] = ()
    preference: int = 0
    allowed: NDArray[np.bool_] | None = None
    options: tuple[ShardingOption, ...] = ()

    def block_numbers(self, block: int) -> Ints:
        """``[B]``: equal numbers for equal blocks of shards, in the order of their costs."""
        costs = np.column_stack([self.time, self.memory]).reshape(-1, 3 * block)
        if len(costs) == 1:  # a shard on every rank: thousands of columns, of which unique is slow
            return np.zeros(1, np.int64)
        return np.unique(costs, axis=0, return_inverse=True)[1].ravel()

    @property
    def longest(self) -> float:
        """Milliseconds of its longest shard."""
        return float(self.time.max(initial=0.0))


@dataclass(frozen=True, eq=False)
class PlanningProblem:
    """Tables, their choices, and the ranks.

    Args:
        world_size: W.
        local_size: L, ranks per host.
        capacity: ``[W, 2]`` bytes for tables on each rank: HBM, DDR.
        choices: For each table (or group of colocated tables), its choices; never empty.
        fixed: ``[G]`` ms of each used group.

    Example:
        >>> half = Choice(np.array([2.0]), np.array([[0, 8]]), PlacementRule.ANY_RANK)
        >>> problem = PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((half,), (half,)))
        >>> cost(problem, Placement(np.array([0, 0]), [np.array([0]), np.array([1])]))
        2.0
    """

    world_size: int
    local_size: int
    capacity: Ints
    choices: tuple[tuple[Choice, ...], ...]
    fixed: Floats = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(
        cls,
        options: Sequence[ShardingOption],
        topology: Topology,
        constraints: Constraints | None = None,
        fixed: Callable[[ShardingOption], float] | None = None,
    ) -> PlanningProblem:
        """The problem of a list of estimated options.

        Args:
            options: Options of all tables.
            topology: The ranks, with the storage available to tables.
            constraints: Constraints of the tables: pinned ranks and colocation.
            fixed: Option -> ms of its group.

        Raises:
            PlannerError: Colocated tables have no sharding or no rank in common; an option has no
                estimate, or was made for another topology.
        """
        constraints = constraints or {}
        world_size = topology.world_size
        local_size = topology.intra_group_size
        groups: dict[tuple[str, str], int] = {}
        latencies = []
        colocated_tables: dict[str, dict[str, list[Choice]]] = {}
        for option in options:
            key = option.path, option.sharding_type
            if key not in groups:
                groups[key] = len(groups)
                latencies.append(fixed(option) if fixed else 0.0)

            sharding_type = ShardingType(option.sharding_type)
            constraint = constraints.get(option.name)
            pin = constraint and constraint.pin
            choice = Choice(
                time=option.times(),
                memory=option.memory()[:, :2],
                rule=SHARDING_TRAITS[sharding_type].placement,
                groups=(groups[key],),
                preference=list(SHARDING_TRAITS).index(sharding_type),
                allowed=None if pin is None else np.isin(np.arange(world_size), list(pin)),
                options=(option,),
            )
            _check_shard_count(choice, world_size, local_size)

            label = constraint and constraint.colocate
            together = option.fqn if label is None else f"colocate {label}"
            tables = colocated_tables.setdefault(together, {})
            tables.setdefault(option.fqn, []).append(choice)

        choices = []
        for tables in colocated_tables.values():
            first, *others = tables.values()
            choices.append(_colocated([first, *others]) if others else tuple(first))

        capacity = device_memory(topology)[:, :2]
        return cls(world_size, local_size, capacity, tuple(choices), np.array(latencies))


@dataclass(eq=False)
class Placement:
    """A solution: for each table its choice, and the rank of each shard.

    Args:
        chosen: ``[T]``: index of each table's choice.
        ranks: For each table ``[P]``: the rank of each shard.
    """

    chosen: Ints
    ranks: list[Ints]

    def choices(self, problem: PlanningProblem) -> list[Choice]:
        """The choice of each table."""
        return [
            choices[index]
            for choices, index in zip(problem.choices, self.chosen.tolist(), strict=True)
        ]

    def choices_and_ranks(self, problem: PlanningProblem) -> Iterator[tuple[Choice, Ints]]:
        """The choice of each table, with the ranks of its shards."""
        return zip(self.choices(problem), self.ranks, strict=True)


def rank_sums(
    problem: PlanningProblem, placement: Placement, amounts: Callable[[Choice], NDArray[Any]]
) -> NDArray[Any]:
    """``[W, ...]``: sums over the shards on each rank.

    Args:
        problem: The problem.
        placement: The placement.
        amounts: ``[P, ...]`` numbers of the shards of a choice.
    """
    table_amounts = [amounts(choice) for choice in placement.choices(problem)]
    if not table_amounts:
        return np.zeros(problem.world_size)

    first = table_amounts[0]
    sums = np.zeros((problem.world_size, *first.shape[1:]), first.dtype)
    np.add.at(sums, np.concatenate(placement.ranks), np.concatenate(table_amounts))
    return sums


def rank_time(problem: PlanningProblem, placement: Placement) -> Floats:
    """Milliseconds of each rank, ``[W]``, without the cost of groups."""
    return rank_sums(problem, placement, lambda choice: choice.time)


def rank_memory(problem: PlanningProblem, placement: Placement) -> Ints:
    """Bytes on each rank, ``[W, 2]``: HBM, DDR."""
    return rank_sums(problem, placement, lambda choice: choice.memory)


def fixed_time(problem: PlanningProblem, choices: Iterable[Choice]) -> float:
    """Milliseconds of the groups that choices use."""
    used = {group for choice in choices for group in choice.groups}
    return float(problem.fixed[sorted(used)].sum())


def cost(problem: PlanningProblem, placement: Placement) -> float:
    """Milliseconds of a step: those of the slowest rank and of the used groups."""
    fixed = fixed_time(problem, placement.choices(problem))
    return float(rank_time(problem, placement).max()) + fixed


def broken_rules(problem: PlanningProblem, placement: Placement) -> list[str]:
    """Descriptions of the rules that a placement breaks; empty if it is legal and fits.

    Args:
        problem: The problem.
        placement: The placement.
    """
    broken = []
    for table, (choice, ranks) in enumerate(placement.choices_and_ranks(problem)):
        name = table_name(choice, table)
        rank_blocks = candidate_rank_blocks(choice.rule, problem.world_size, problem.local_size)
        size = rank_blocks.shape[2]
        if len(ranks) != len(choice.time) or len(ranks) % size:
            broken.append(f"{name}: {len(ranks)} ranks for {len(choice.time)} shards")
            continue

        used = (rank_blocks[:, :, None] == ranks.reshape(-1, size)).all(axis=3)  # [G, U, B]
        if not used.any(axis=1).all(axis=1).any():
            broken.append(
                f"{name}: ranks {ranks.tolist()} of a world of {problem.world_size} are not a "
                f"placement {choice.rule.value!r}"
            )
        elif choice.allowed is not None and not choice.allowed[ranks].all():
            broken.append(f"{name}: ranks {ranks.tolist()} are not all allowed")

    if broken:
        return broken

    used_bytes = rank_memory(problem, placement)
    for rank, memory in np.argwhere(used_bytes > problem.capacity).tolist():
        broken.append(
            f"rank {rank}: {used_bytes[rank, memory]} bytes of {MEMORIES[memory]} where "
            f"{problem.capacity[rank, memory]} are"
        )
    return broken


def table_name(choice: Choice, number: int) -> str:
    """Name of a choice's table, or of its colocated tables; the number if it has no options."""
    names = [f"table {option.name!r}" for option in choice.options] or [f"table {number}"]
    return " and ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def _check_shard_count(choice: Choice, world_size: int, local_size: int) -> None:
    """Check that an option has as many shards as its rule requires in this topology.

    Raises:
        PlannerError: It was made for another topology.
    """
    option = choice.options[0]
    count = len(choice.time)
    block = candidate_rank_blocks(choice.rule, world_size, local_size).shape[2]
    one_block = choice.rule in (PlacementRule.EVERY_RANK, PlacementRule.ROWS_ON_HOST)
    if count % block or (one_block and count != block):
        raise bad_input(
            f"table {option.name!r} as {option.sharding_type} is cut into {count} shards, and "
            f"there are {world_size} ranks, {local_size} of them on a host: give planner, "
            "enumerator and storage reservation one topology"
        )


def _colocated(tables: Sequence[Sequence[Choice]]) -> tuple[Choice, ...]:
    """The choices that all colocated tables have, summed per shard.

    Raises:
        PlannerError: They have no sharding and allowed rank in common.
    """
    by_sharding = [{_sharding(choice): choice for choice in choices} for choices in tables]
    summed = []
    for key in by_sharding[0]:
        members = [choices[key] for choices in by_sharding if key in choices]
        masks = [choice.allowed for choice in members if choice.allowed is not None]
        allowed = np.logical_and.reduce(masks) if masks else None
        if len(members) < len(tables) or (allowed is not None and not allowed.any()):
            continue

        groups = {group for choice in members for group in choice.groups}
        summed.append(
            replace(
                members[0],
                time=np.sum([choice.time for choice in members], axis=0),
                memory=np.sum([choice.memory for choice in members], axis=0),
                groups=tuple(sorted(groups)),
                allowed=allowed,
                options=tuple(option for choice in members for option in choice.options),
            )
        )

    if not summed:
        fqns = [repr(choices[0].options[0].fqn.strip(".")) for choices in tables]
        raise PlannerError(
            f"tables {', '.join(fqns)} are colocated, and have no sharding type with one number of "
            "shards, or no rank in common: give them the same sharding_types, min_partition and "
            "pin, or different values of colocate",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )

    return tuple(summed)


def _sharding(choice: Choice) -> tuple[str, str, int]:
    return choice.options[0].sharding_type, choice.options[0].compute_kernel, len(choice.time)


# --- from and to options


def place_options(problem: PlanningProblem, placement: Placement) -> list[ShardingOption]:
    """The chosen option of each table, as a copy with placed shards, in the problem's order."""
    placed = []
    for choice, ranks in placement.choices_and_ranks(problem):
        for option in choice.options:
            placed.append(option.with_shards(replace(option.shard_arrays(), ranks=ranks)))

    return placed


# --- canonical order


def in_rank_order(problem: PlanningProblem, placement: Placement) -> Placement:
    """The same placement with equal shards of a table on ascending ranks, a canonical form.

    Args:
        problem: The problem.
        placement: The placement.
    """
    sorted_ranks = []
    for choice, ranks in placement.choices_and_ranks(problem):
        # Shards of a grid keep their local rank: whole blocks are exchanged.
        block = candidate_rank_blocks(choice.rule, problem.world_size, problem.local_size).shape[2]
        rank_blocks = ranks.reshape(-1, block)
        number = choice.block_numbers(block)
        in_order = np.empty_like(rank_blocks)
        in_order[number.argsort(kind="stable")] = rank_blocks[
            np.lexsort((rank_blocks[:, 0], number))
        ]
        sorted_ranks.append(in_order.ravel())

    return Placement(placement.chosen, sorted_ranks)


def canonical_order(problem: PlanningProblem) -> tuple[PlanningProblem, list[int], Ints]:
    """The problem with tables and ranks in canonical order, and the permutations of both."""
    tables = sorted(range(len(problem.choices)), key=lambda table: _key(problem.choices[table]))
    choices = tuple(problem.choices[table] for table in tables)
    ranks = np.arange(problem.world_size)
    pinned = any(choice.allowed is not None for choice in chain.from_iterable(choices))
    if not pinned and (problem.capacity == problem.capacity[0]).all():
        return replace(problem, choices=choices), tables, ranks

    ranks = _rank_order(problem, list(chain.from_iterable(choices)))
    choices = tuple(tuple(_reordered(choice, ranks) for choice in table) for table in choices)
    return replace(problem, capacity=problem.capacity[ranks], choices=choices), tables, ranks


def _rank_order(problem: PlanningProblem, choices: Sequence[Choice]) -> Ints:
    """The ranks, hosts sorted by capacity, then by what the choices allow and put on each rank."""
    columns = [-problem.capacity]
    columns += [~choice.allowed[:, None] for choice in choices if choice.allowed is not None]
    columns += [
        choice.time[:, None] for choice in choices if choice.rule is PlacementRule.EVERY_RANK
    ]
    hosts = problem.world_size // problem.local_size
    host_rows = np.concatenate(columns, axis=1).reshape(hosts, -1)
    order = np.lexsort(host_rows.T[::-1])  # by the first column, then by the second, ...
    return np.arange(problem.world_size).reshape(hosts, -1)[order].ravel()


def _reordered(choice: Choice, ranks: Ints) -> Choice:
    """A choice after the ranks have been put into another order."""
    allowed = None if choice.allowed is None else choice.allowed[ranks]
    if choice.rule is not PlacementRule.EVERY_RANK:
        return replace(choice, allowed=allowed)

    return replace(choice, time=choice.time[ranks], memory=choice.memory[ranks], allowed=allowed)


def _key(choices: Sequence[Choice]) -> tuple[object, ...]:
    """Sort key: much work first, then large memory, then everything in which tables differ."""
    keys = sorted(
        (
            float(choice.time.sum()),
            -int(choice.memory.sum()),
            choice.longest,
            choice.rule.value,
            choice.preference,
            choice.groups,
            len(choice.time),
            () if choice.allowed is None else tuple(choice.allowed.tolist()),
        )
        for choice in choices
    )
    return (-keys[0][0], keys[0][1], keys)


# --- lower bound


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
        >>> whole = Choice(np.array([6.0]), np.array([[0, 8]]), PlacementRule.ANY_RANK)
        >>> rows = Choice(
        ...     np.array([4.0, 4.0]), np.array([[0, 4], [0, 4]]), PlacementRule.EVERY_RANK
        ... )
        >>> print(
        ...     lower_bound(
        ...         PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((whole, rows), (whole,)))
        ...     )
        ... )
        no plan is faster than 6 ms: every way to cut table 1 leaves a rank with at least that
    """
    if not problem.choices:
        return Bound(0.0, "there are no tables")

    usable = [
        [choice for choice in choices if fits(problem, choice)] for choices in problem.choices
    ]
    room = np.maximum(problem.capacity, 0).sum(axis=0)
    if not all(usable) or (_least_memory(usable) > room).any():
        return Bound(math.inf, _SHORT)

    longest = [[longest_ms(problem, choice) for choice in choices] for choices in usable]
    shortest = [min(table_longest) for table_longest in longest]
    floor = max(shortest)
    relaxed, groups, full = _relaxation(problem, usable)
    small = sum(map(len, usable)) <= _SMALL
    for _ in range(_ROUNDS if small else 0):
        # A plan faster than `following` contains none of the longer shards.
        reached = max(relaxed, floor)
        longer = [ms for table_longest in longest for ms in table_longest if ms > reached]
        following = min(longer, default=0.0)
        brief = []
        for choices, table_longest in zip(usable, longest, strict=True):
            lengths = zip(choices, table_longest, strict=True)
            brief.append([choice for choice, ms in lengths if ms <= reached])

        tightened, opened, filled = _relaxation(problem, brief)
        if min(tightened, following) <= reached * (1 + _TOLERANCE):
            break
        relaxed = min(tightened, following)
        if tightened <= following:
            groups = opened
            full = filled
            break

    if relaxed <= floor:
        table = shortest.index(floor)
        reason = (
            f"every way to cut {table_name(problem.choices[table][0], table)} leaves a rank "
            "with at least that"
        )
        return Bound(floor * (1 - 1e-12), reason, groups)
    if math.isinf(relaxed):
        return Bound(relaxed, _SHORT)

    reason = f"it is the work of all tables, spread evenly over {problem.world_size} ranks"
    return Bound(relaxed, reason + (", in the memory that they have" if full else ""), groups)


def _relaxation(
    problem: PlanningProblem, usable: list[list[Choice]]
) -> tuple[float, frozenset[int], bool]:
    """Optimum of the linear program, the groups that it uses, and whether memory is full."""
    choices = list(chain.from_iterable(usable))
    table = np.repeat(np.arange(len(usable)), [len(table_choices) for table_choices in usable])
    longest = np.array([choice.longest for choice in choices])
    unit = float(longest.max()) or 1.0  # ms: the solver's tolerances are absolute
    mean = np.array([choice.time.sum() for choice in choices]) / problem.world_size
    room = np.maximum(problem.capacity, 0).sum(axis=0)
    memory = np.array([choice.memory.sum(axis=0) for choice in choices]) / np.maximum(room, 1)
    whole_groups = bool(problem.fixed.any()) and len(choices) <= _SMALL

    program = ChoiceProgram(
        choices, table, len(usable), problem.fixed / unit, (False, whole_groups)
    )
    share = program.share
    paid = program.paid

    # the slowest rank takes the mean of all ranks, and a table's longest shard
    at_most_slowest = program.rows(1)
    program.put(at_most_slowest, share, mean / unit)
    program.put(at_most_slowest, program.slowest, -1.0)
    at_most_slowest = program.rows(len(usable))
    program.put(at_most_slowest[table], share, longest / unit)
    program.put(at_most_slowest, program.slowest, -1.0)

    program.pay_for_groups()
    program.put(program.rows(2, high=1.0)[:, None], share, memory.T)

    result = program.solve(node_limit=_NODES, mip_rel_gap=_TOLERANCE)
    if result.status == 2:
        return math.inf, frozenset(), True
    if result.x is None:
        return 0.0, frozenset(paid.tolist()), False

    bound = result.mip_dual_bound if whole_groups else result.fun
    full = bool((result.x[share] @ memory >= 1.0 - _TOLERANCE).any())
    opened = frozenset(paid[result.x[program.used] > 0.5].tolist())

    return float(bound) * unit * (1 - _TOLERANCE), opened, full


class ChoiceProgram:
    """A mixed-integer linear program about choices in the making; minimizes the cost of variables.

    It has what the relaxation and the integer program have in common: each table takes choices of 1
    in all, and the slowest rank and the groups that are paid for cost something.

    Args:
        choices: The choices of all tables.
        table: For each choice the number of its table.
        tables: Number of tables.
        fixed: ``[G]`` cost of each group.
        integer: Whether a table takes one choice, and groups are paid for entirely or not at all.

    Attributes:
        share: Variables: the share of its table that each choice has.
        slowest: Variable: the slowest rank.
        paid: The groups that cost something.
        used: Variables: whether each of these groups is paid for.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        table: Ints,
        tables: int,
        fixed: Floats,
        integer: tuple[bool, bool],
    ) -> None:
        self._variables: list[tuple[float, bool, float]] = []  # largest value, integrality, cost
        self._rows: list[tuple[float, float]] = []
        self._entries: list[list[NDArray[Any]]] = []
        self._choices = choices
        self._table = table
        self.paid = np.flatnonzero(fixed)
        self.share = self.variables(len(choices), integer=integer[0])
        self.slowest = self.variables(1, integer=False, cost=1.0)
        self.used = self.variables(len(self.paid), integer=integer[1], cost=fixed[self.paid])
        self.put(self.rows(tables, 1.0, 1.0)[table], self.share, 1.0)

    @property
    def size(self) -> int:
        """Number of variables."""
        return len(self._variables)

    def variables(
        self, count: int, high: float = math.inf, integer: bool = True, cost: Floats | float = 0.0
    ) -> Ints:
        """Add variables of 0 to ``high``; returns their numbers."""
        costs = np.broadcast_to(cost, count).tolist()
        self._variables += [(high, integer, variable_cost) for variable_cost in costs]
        return np.arange(self.size - count, self.size)

    def rows(self, count: int, low: float = -math.inf, high: float = 0.0) -> Ints:
        """Add constraints that sums are ``low`` to ``high``; returns their numbers."""
        self._rows += [(low, high)] * count
        return np.arange(len(self._rows) - count, len(self._rows))

    def put(self, rows: Any, columns: Any, values: Any) -> None:
        """Add ``values`` times variables to sums; the arguments are broadcast."""
        columns = np.asarray(columns, np.int64)
        broadcast = np.broadcast_arrays(rows, columns, values)
        self._entries.append([array.ravel() for array in broadcast])

    def solve(self, **options: float) -> Any:
        """The result of ``scipy.optimize.milp``, which runs HiGHS."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csc_array

        high, integrality, costs = np.array(self._variables, np.float64).T
        rows, columns, values = (np.concatenate(axis) for axis in zip(*self._entries, strict=True))
        matrix = csc_array((values, (rows, columns)), shape=(len(self._rows), self.size))

        return milp(
            costs,
            integrality=integrality,
            bounds=Bounds(0.0, high),  # pyright: ignore[reportArgumentType]
            constraints=LinearConstraint(matrix, *np.array(self._rows).T),
            options=options,
        )

    def pay_for_groups(self) -> None:
        """Constrain the shares of each table that use a group to what the group is paid for."""
        paid = self.paid.tolist()
        uses = [[group in choice.groups for group in paid] for choice in self._choices]
        using, group = np.nonzero(np.reshape(uses, (len(uses), len(paid))))
        pairs, row = np.unique(self._table[using] * len(paid) + group, return_inverse=True)
        at_most_used = self.rows(len(pairs))
        self.put(at_most_used[row], self.share[using], 1.0)
        self.put(at_most_used, self.used[pairs % max(len(paid), 1)], -1.0)


def longest_ms(problem: PlanningProblem, choice: Choice) -> float:
    """Milliseconds of a choice's longest shard, and of its groups."""
    return choice.longest + fixed_time(problem, [choice])


def fits(problem: PlanningProblem, choice: Choice) -> bool:
    """Whether each shard of a choice fits on some allowed rank."""
    if choice.rule is PlacementRule.EVERY_RANK:
        pinned = choice.allowed is not None and not choice.allowed.all()
        return not pinned and bool((choice.memory <= problem.capacity).all())
    room = problem.capacity if choice.allowed is None else problem.capacity[choice.allowed]
    return len(room) > 0 and bool((choice.memory <= room.max(axis=0)).all())


def _least_memory(tables: Iterable[Sequence[Choice]]) -> Ints:
    """``[2]``: the least bytes of all tables, HBM and DDR each for itself."""
    least = [
        np.min([choice.memory.sum(axis=0) for choice in choices], axis=0) for choices in tables
    ]
    return np.sum(least, axis=0)

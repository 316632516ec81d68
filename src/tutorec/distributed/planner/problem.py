"""The planning problem in numbers, and its solutions.

For each table choose one of its options, and a rank for each of the option's shards, such that no
rank exceeds its memory and the slowest rank is as fast as possible::

    cost = max over ranks r of (sum of the times of r's shards) + sum of fixed[g] over used groups g

A group is a collection together with a sharding type: its tables share exchanges, whose latency is
paid once for any number of tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tutorec.distributed.planner.constraints import Constraints
from tutorec.distributed.planner.options import Floats, Ints, ShardingOption
from tutorec.distributed.planner.topology import Topology, memory_of
from tutorec.errors import PlannerError, PlannerErrorType, bad_input

# Ties between options go to the first type in this list.
PREFERENCE: Sequence[str] = (
    ("table_wise row_wise column_wise table_row_wise table_column_wise grid_shard "
     "data_parallel").split()
)  # fmt: skip


class Spread(Enum):
    """Where the shards of an option may be placed; L ranks are a host.

    - ``ANY``: each on any rank (table-wise, column-wise).
    - ``HOST``: each on any rank of one host (table-column-wise).
    - ``HOST_ROWS``: shard i on local rank i of one host (table-row-wise); P = L.
    - ``HOSTS_ROWS``: blocks of L shards, each as in ``HOST_ROWS`` (grid); hosts may repeat.
    - ``ALL``: shard r on rank r (row-wise, data-parallel); P = W.
    """

    ANY = "any"
    HOST = "host"
    HOST_ROWS = "host_rows"
    HOSTS_ROWS = "hosts_rows"
    ALL = "all"


def units(spread: Spread, world_size: int, local_size: int) -> Ints:
    """Where blocks of shards can go: ``[G, U, S]``, G groups of U units of S ranks.

    Shards come in blocks of S. Each block takes a unit, and all blocks take units of one group.

    Example:
        >>> units(Spread.ANY, 4, 2).tolist()  # one host after the other
        [[[0], [2], [1], [3]]]
        >>> units(Spread.HOST, 4, 2).tolist()
        [[[0], [1]], [[2], [3]]]
        >>> units(Spread.HOST_ROWS, 4, 2).tolist()
        [[[0, 1], [2, 3]]]
    """
    ranks = np.arange(world_size).reshape(-1, local_size)
    if spread is Spread.ANY:
        return ranks.T.reshape(1, -1, 1)
    if spread is Spread.HOST:
        return ranks[:, :, None]
    return ranks.reshape(1, 1, -1) if spread is Spread.ALL else ranks[None]


@dataclass(frozen=True, eq=False)
class Choice:
    """One way to shard a table, or several colocated tables; P shards.

    Args:
        time: ``[P]`` ms of each shard in a step.
        memory: ``[P, 2]`` bytes of each shard: HBM, DDR.
        spread: Where shards may be placed.
        groups: Indices of the groups whose exchanges it uses.
        preference: Ties in cost go to the smallest preference.
        allowed: ``[W]``, the ranks that may hold a shard; None for all.
        options: The sharding options, one per table.
    """

    time: Floats
    memory: Ints
    spread: Spread
    groups: tuple[int, ...] = ()
    preference: int = 0
    allowed: NDArray[np.bool_] | None = None
    options: tuple[ShardingOption, ...] = ()


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
        >>> half = Choice(np.array([2.0]), np.array([[0, 8]]), Spread.ANY)
        >>> problem = PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((half,), (half,)))
        >>> cost(problem, Placement(np.array([0, 0]), [np.array([0]), np.array([1])]))
        2.0
    """

    world_size: int
    local_size: int
    capacity: Ints
    choices: tuple[tuple[Choice, ...], ...]
    fixed: Floats | None = None

    @classmethod
    def of(
        cls,
        options: Sequence[ShardingOption],
        topology: Topology,
        constraints: Constraints | None = None,
        fixed: Callable[[str, bool], float] | None = None,
    ) -> PlanningProblem:
        """The problem of a list of estimated options.

        Args:
            options: Options of all tables.
            topology: The ranks, with the storage available to tables.
            constraints: Constraints of the tables: pinned ranks and colocation.
            fixed: ``(sharding type, whether pooled) -> ms`` of a group.

        Raises:
            PlannerError: Colocated tables have no sharding or no rank in common; an option has no
                estimate, or was made for another topology.
        """
        constraints = constraints or {}
        world_size, local_size = topology.world_size, topology.intra_group_size
        groups: dict[tuple[str, str], int] = {}
        latencies: list[float] = []
        placed_together: dict[str, dict[str, list[Choice]]] = {}
        for option in options:
            group = groups.setdefault((option.path, option.sharding_type), len(groups))
            if group == len(latencies):
                latencies.append(fixed(option.sharding_type, option.is_pooled) if fixed else 0.0)
            constraint = constraints.get(option.name)
            pin = constraint and constraint.pin
            choice = Choice(
                time=option.times(),
                memory=option.memory()[:, :2],
                spread=_spread(option),
                groups=(group,),
                preference=PREFERENCE.index(option.sharding_type),
                allowed=None if pin is None else np.isin(np.arange(world_size), list(pin)),
                options=(option,),
            )
            _check_cut(choice, world_size, local_size)
            label = constraint and constraint.colocate
            together = option.fqn if label is None else f"colocate {label}"
            tables = placed_together.setdefault(together, {})
            tables.setdefault(option.fqn, []).append(choice)
        choices = tuple(_colocated(list(tables.values())) for tables in placed_together.values())
        return cls(world_size, local_size, memory_of(topology)[:, :2], choices, np.array(latencies))


@dataclass(eq=False)
class Placement:
    """A solution: for each table its choice, and the rank of each shard.

    Args:
        chosen: ``[T]``: index of each table's choice.
        ranks: For each table ``[P]``: the rank of each shard.
    """

    chosen: Ints
    ranks: list[Ints]

    def taken(self, problem: PlanningProblem) -> list[Choice]:
        """The choice of each table."""
        return [
            choices[index]
            for choices, index in zip(problem.choices, self.chosen.tolist(), strict=True)
        ]


def rank_time(problem: PlanningProblem, placement: Placement) -> Floats:
    """Milliseconds of each rank, ``[W]``, without the cost of groups."""
    taken = placement.taken(problem)
    if not taken:
        return np.zeros(problem.world_size)
    ranks, times = (
        np.concatenate(placement.ranks),
        np.concatenate([choice.time for choice in taken]),
    )
    return np.bincount(ranks, weights=times, minlength=problem.world_size).astype(np.float64)


def rank_memory(problem: PlanningProblem, placement: Placement) -> Ints:
    """Bytes on each rank, ``[W, 2]``: HBM, DDR."""
    held = np.zeros((problem.world_size, 2), dtype=np.int64)
    for choice, ranks in zip(placement.taken(problem), placement.ranks, strict=True):
        np.add.at(held, ranks, choice.memory)
    return held


def fixed_time(problem: PlanningProblem, choices: Iterable[Choice]) -> float:
    """Milliseconds of the groups that choices use."""
    used = {group for choice in choices for group in choice.groups}
    return float(problem.fixed[sorted(used)].sum()) if problem.fixed is not None and used else 0.0


def cost(problem: PlanningProblem, placement: Placement) -> float:
    """Milliseconds of a step: those of the slowest rank and of the used groups."""
    fixed = fixed_time(problem, placement.taken(problem))
    return float(rank_time(problem, placement).max()) + fixed


def broken_rules(problem: PlanningProblem, placement: Placement) -> list[str]:
    """Descriptions of the rules that a placement breaks; empty if it is legal and fits.

    Args:
        problem: The problem.
        placement: The placement.
    """
    broken = []
    world_size, local_size = problem.world_size, problem.local_size
    for table, (choice, ranks) in enumerate(
        zip(placement.taken(problem), placement.ranks, strict=True)
    ):
        if len(ranks) != len(choice.time):
            broken.append(
                f"{table_name(choice, table)}: {len(ranks)} ranks for {len(choice.time)} shards"
            )
            continue
        if len(ranks) and (ranks.min() < 0 or ranks.max() >= world_size):
            broken.append(
                f"{table_name(choice, table)}: ranks {ranks.tolist()} outside of a world of "
                f"{world_size}"
            )
            continue
        if choice.allowed is not None and not choice.allowed[ranks].all():
            broken.append(
                f"{table_name(choice, table)}: ranks {ranks.tolist()} are not all allowed"
            )
        legal_units = units(choice.spread, world_size, local_size)
        blocks = ranks.reshape(-1, legal_units.shape[2])
        taken = (legal_units[:, :, None] == blocks).all(axis=3)  # [G, U, B]
        if not taken.any(axis=1).all(axis=1).any():
            broken.append(
                f"{table_name(choice, table)}: ranks {ranks.tolist()} are not a placement "
                f"{choice.spread.value!r}"
            )
    if broken:
        return broken
    held = rank_memory(problem, placement)
    for rank, kind in np.argwhere(held > problem.capacity).tolist():
        memory = ("HBM", "DDR")[kind]
        broken.append(
            f"rank {rank}: {held[rank, kind]} bytes of {memory} where "
            f"{problem.capacity[rank, kind]} are"
        )
    return broken


def table_name(choice: Choice, number: int) -> str:
    """Name of a choice's table, or of its colocated tables; the number if it has no options."""
    names = [f"table {option.name!r}" for option in choice.options] or [f"table {number}"]
    return " and ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


_SPREADS = {
    "device": Spread.ANY,
    "uniform": Spread.ALL,
    "multi_host": Spread.HOSTS_ROWS,
    "host": Spread.HOST_ROWS,
}


def _spread(option: ShardingOption) -> Spread:
    return (
        Spread.HOST
        if option.sharding_type == "table_column_wise"
        else _SPREADS[option.partition_by]
    )


def _check_cut(choice: Choice, world_size: int, local_size: int) -> None:
    """Check that an option has as many shards as its spread requires in this topology.

    Raises:
        PlannerError: It was made for another topology.
    """
    option, count = choice.options[0], len(choice.time)
    block = units(choice.spread, world_size, local_size).shape[2]
    one_block = choice.spread in (Spread.ALL, Spread.HOST_ROWS)
    if count % block or (one_block and count != block):
        raise bad_input(
            f"table {option.name!r} as {option.sharding_type} is cut into {count} shards, and "
            f"there are {world_size} ranks, {local_size} of them on a host: give planner, "
            "enumerator and storage reservation one topology"
        )


def _colocated(tables: Sequence[Sequence[Choice]]) -> tuple[Choice, ...]:
    """The choices of a table; of colocated tables those that all have, summed per shard.

    Raises:
        PlannerError: They have no sharding, or no allowed rank, in common.
    """
    if len(tables) == 1:
        return tuple(tables[0])
    fqns = [repr(choices[0].options[0].fqn.strip(".")) for choices in tables]
    by_sharding = [{_sharding(choice): choice for choice in choices} for choices in tables]
    common = [key for key in by_sharding[0] if all(key in of_table for of_table in by_sharding)]
    if not common:
        shardings = "; ".join(
            f"{fqn} as {sorted({f'{kind} in {count}' for kind, _, count in of_table})}"
            for fqn, of_table in zip(fqns, by_sharding, strict=True)
        )
        raise PlannerError(
            f"colocated tables have no sharding type and number of shards in common: {shardings} "
            "shards; give them the same sharding_types and min_partition, or different values of "
            "colocate",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )
    summed = []
    for key in common:
        members = [of_table[key] for of_table in by_sharding]
        masks = [choice.allowed for choice in members if choice.allowed is not None]
        allowed = np.logical_and.reduce(masks) if masks else None
        if allowed is not None and not allowed.any():
            raise PlannerError(
                f"tables {', '.join(fqns)} are colocated, and their pins have no rank in common: "
                "give them the same pin, or different values of colocate",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )
        summed.append(
            replace(
                members[0],
                time=np.sum([choice.time for choice in members], axis=0),
                memory=np.sum([choice.memory for choice in members], axis=0),
                groups=tuple(sorted({group for choice in members for group in choice.groups})),
                allowed=allowed,
                options=tuple(option for choice in members for option in choice.options),
            )
        )
    return tuple(summed)


def _sharding(choice: Choice) -> tuple[str, str, int]:
    return choice.options[0].sharding_type, choice.options[0].compute_kernel, len(choice.time)

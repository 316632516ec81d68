"""The planning problem in numbers, and its solutions.

For each table choose one of its options, and a rank for each of the option's shards, such that no
rank exceeds its memory and the slowest rank is as fast as possible::

    cost = max over ranks r of (sum of the times of r's shards) + sum of fixed[g] over used groups g

A group is a collection together with a sharding type: its tables share exchanges, whose latency is
paid once for any number of tables. This module does not depend on modules or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutorec.distributed.planner.constraints import ParameterConstraints
from tutorec.distributed.planner.topology import memory_of
from tutorec.errors import PlannerError, PlannerErrorType, bad_input

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Ties between options go to the first type in this list.
PREFERENCE = (
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
        >>> units(Spread.ANY, 4, 2).tolist()  # equal ranks are taken from one host after the other
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
    options: tuple[Any, ...] = ()


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
        options: Sequence[Any],
        topology: Any,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        fixed: Callable[[str, bool], float] | None = None,
    ) -> PlanningProblem:
        """The problem of a list of estimated options.

        Args:
            options: Options of all tables, tutorec's or TorchRec's.
            topology: The ranks, with the storage available to tables.
            constraints: Constraints of the tables: pinned ranks and colocation.
            fixed: ``(sharding type, whether pooled) -> ms`` of a group.

        Raises:
            PlannerError: Colocated tables have no sharding or no rank in common; an option has no
                estimate, or was made for another topology.
        """
        constraints = constraints or {}
        world_size = topology.world_size
        local_size = min(
            getattr(topology, "intra_group_size", None) or topology.local_world_size, world_size
        )
        groups: dict[tuple[str, str], int] = {}
        latencies: list[float] = []
        by_table: dict[str, list[tuple[tuple[str, str, int], Choice]]] = {}
        for option in options:
            group = (_path(option), option.sharding_type)
            if group not in groups:
                groups[group] = len(groups)
                latencies.append(
                    fixed(option.sharding_type, option.is_pooled) if fixed is not None else 0.0
                )
            constraint = constraints.get(option.name)
            choice = _choice(option, groups[group], _pinned(constraint, world_size))
            _check_cut(option, choice, world_size, local_size)
            alike = (option.sharding_type, option.compute_kernel, len(choice.time))
            by_table.setdefault(f"{_path(option)}.{option.name}", []).append((alike, choice))
        bundles: dict[str, list[str]] = {}
        for fqn, found in by_table.items():
            word = getattr(constraints.get(found[0][1].options[0].name), "colocate", None)
            bundles.setdefault(fqn if word is None else f"colocate {word}", []).append(fqn)
        choices = tuple(
            tuple(choice for _, choice in by_table[members[0]])
            if len(members) == 1
            else _together([by_table[fqn] for fqn in members], members)
            for members in bundles.values()
        )
        capacity = memory_of(topology)[:, :2]
        return cls(world_size, local_size, capacity, choices, np.array(latencies))


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


def fixed_time(problem: PlanningProblem, placement: Placement) -> float:
    """Milliseconds of the used groups."""
    used = {group for choice in placement.taken(problem) for group in choice.groups}
    return float(problem.fixed[sorted(used)].sum()) if problem.fixed is not None and used else 0.0


def cost(problem: PlanningProblem, placement: Placement) -> float:
    """Milliseconds of a step: those of the slowest rank and of the used groups."""
    return float(rank_time(problem, placement).max()) + fixed_time(problem, placement)


def broken_rules(problem: PlanningProblem, placement: Placement) -> list[str]:
    """Descriptions of the rules that a placement breaks; empty if it is legal and fits.

    Args:
        problem: The problem.
        placement: The placement.
    """
    found = []
    world_size, local_size = problem.world_size, problem.local_size
    for table, (choice, ranks) in enumerate(
        zip(placement.taken(problem), placement.ranks, strict=True)
    ):
        if len(ranks) != len(choice.time):
            found.append(
                f"{_named(choice, table)}: {len(ranks)} ranks for {len(choice.time)} pieces"
            )
            continue
        if len(ranks) and (ranks.min() < 0 or ranks.max() >= world_size):
            found.append(
                f"{_named(choice, table)}: ranks {ranks.tolist()} outside of a world of "
                f"{world_size}"
            )
            continue
        if choice.allowed is not None and not choice.allowed[ranks].all():
            found.append(f"{_named(choice, table)}: ranks {ranks.tolist()} are not all allowed")
        legal_units = units(choice.spread, world_size, local_size)
        blocks = ranks.reshape(-1, legal_units.shape[2])
        taken = (legal_units[:, :, None] == blocks).all(axis=3)  # [G, U, B]
        legal = bool(taken.any(axis=1).all(axis=1).any())
        if not legal:
            found.append(
                f"{_named(choice, table)}: ranks {ranks.tolist()} where pieces lie "
                f"{choice.spread.value}"
            )
    if found:
        return found
    held = rank_memory(problem, placement)
    for rank, kind in np.argwhere(held > problem.capacity).tolist():
        memory = ("HBM", "DDR")[kind]
        found.append(
            f"rank {rank}: {held[rank, kind]} bytes of {memory} where "
            f"{problem.capacity[rank, kind]} are"
        )
    return found


def _named(choice: Choice, table: int) -> str:
    names = [repr(option.name) for option in choice.options if hasattr(option, "name")]
    return f"table {' + '.join(names) or table}"


_SPREADS = {
    "device": Spread.ANY,
    "uniform": Spread.ALL,
    "multi_host": Spread.HOSTS_ROWS,
    "host": Spread.HOST_ROWS,
}


def _choice(option: Any, group: int, allowed: NDArray[np.bool_] | None) -> Choice:
    """The numbers of one option.

    Raises:
        PlannerError: They have not been estimated, or are negative or not finite.
    """
    if hasattr(option, "pieces"):
        time, memory = option.times(), option.memory()[:, :2]
    else:
        time = np.array([shard.perf.total for shard in option.shards])
        memory = np.array(
            [[shard.storage.hbm, shard.storage.ddr] for shard in option.shards], dtype=np.int64
        )
    spread = _SPREADS[option.partition_by]
    if option.sharding_type == "table_column_wise":
        spread = Spread.HOST
    return Choice(
        time, memory, spread, (group,), PREFERENCE.index(option.sharding_type), allowed, (option,)
    )


def _check_cut(option: Any, choice: Choice, world_size: int, local_size: int) -> None:
    """Check that an option has as many shards as its spread requires in this topology.

    Raises:
        PlannerError: It was made for another topology.
    """
    count = len(choice.time)
    block = units(choice.spread, world_size, local_size).shape[2]
    one_block = choice.spread in (Spread.ALL, Spread.HOST_ROWS)
    if count % block or (one_block and count != block):
        raise bad_input(
            f"table {option.name!r} as {option.sharding_type} is cut into {count} shards, and "
            f"there are {world_size} ranks, {local_size} of them on a host: give planner, "
            "enumerator and storage reservation one topology"
        )


def _pinned(constraint: Any, world_size: int) -> NDArray[np.bool_] | None:
    """The ranks on which a table may be placed; None for all."""
    pin = getattr(constraint, "pin", None)
    if pin is None:
        return None
    allowed = np.zeros(world_size, dtype=np.bool_)
    allowed[list(pin)] = True
    return allowed


def _together(
    tables: Sequence[Sequence[tuple[tuple[str, str, int], Choice]]], names: Sequence[str]
) -> tuple[Choice, ...]:
    """The choices of colocated tables: the shardings that all have in common, summed per shard."""
    alike = [dict(found) for found in tables]
    common = [key for key in alike[0] if all(key in other for other in alike[1:])]
    if not common:
        ways = "; ".join(
            f"{name.strip('.')!r} as {sorted({f'{kind} in {count}' for kind, _, count in found})}"
            for name, found in zip(names, alike, strict=True)
        )
        raise PlannerError(
            f"tables that are to lie together can be cut alike in no way: {ways} pieces; give them "
            "the same sharding_types and min_partition, or another word for colocate",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )
    found = []
    for key in common:
        members = [other[key] for other in alike]
        masks = [choice.allowed for choice in members if choice.allowed is not None]
        if masks and not np.logical_and.reduce(masks).any():
            raise PlannerError(
                f"tables {', '.join(repr(name.strip('.')) for name in names)} are to lie together "
                "(colocate), and the ranks that they are pinned to have none in common: give them "
                "the same pin, or another word for colocate",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )
        found.append(
            Choice(
                time=np.sum([choice.time for choice in members], axis=0),
                memory=np.sum([choice.memory for choice in members], axis=0),
                spread=members[0].spread,
                groups=tuple(sorted({group for choice in members for group in choice.groups})),
                preference=members[0].preference,
                allowed=np.logical_and.reduce(masks) if masks else None,
                options=tuple(option for choice in members for option in choice.options),
            )
        )
    return tuple(found)


def _path(option: Any) -> str:
    return option.module[0]

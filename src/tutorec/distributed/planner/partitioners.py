"""Partitioners: they place the shards of a proposal on ranks.

Corresponds to TorchRec's ``torchrec.distributed.planner.partitioners``: the same rules, on arrays.
Tables with a shard on every rank are placed first. The others follow, the largest first, each shard
on the least loaded rank with enough memory: longest-processing-time-first (LPT) list scheduling
(Graham 1969). The default search uses `placements` instead.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.planner.options import (
    Floats,
    Ints,
    PartitionByType,
    ShardingOption,
    check_one_each,
)
from tutorec.distributed.planner.perf_models import NoopPerfModel
from tutorec.distributed.planner.topology import Topology, memory_of
from tutorec.distributed.planner.types import Partitioner
from tutorec.errors import PlannerError, PlannerErrorType

logger = logging.getLogger(__name__)

CLOSE_ENOUGH = 10 * 1024 * 1024
"""Bytes: the binary search for the least memory stops at this accuracy."""


class SortBy(Enum):
    """Order in which tables are placed: by storage or by time, the largest first."""

    STORAGE = "storage"
    PERF = "perf"


class GreedyPerfPartitioner(Partitioner):
    """Places each shard on the least loaded rank with enough memory.

    Row-wise and data-parallel tables are placed first, since their ranks are fixed. The others
    follow, the largest first. Ties go to the rank with the lowest local rank, so that hosts fill
    evenly. Table-row-wise and table-column-wise tables go to the least loaded host, grid-sharded
    tables to several hosts.

    Args:
        sort_by: Whether tables are sorted by storage or by time.
        balance_modules: Whether tables of collections with fewer tables are placed first.

    Example:
        The table of 3 ms is placed first, on rank 0; then rank 1 is the least loaded until it has 4
        ms:

        >>> from types import SimpleNamespace
        >>> from tutorec.distributed.planner.options import Perf, Shard, Storage
        >>> import torch
        >>> ranks = [
        ...     SimpleNamespace(rank=r, storage=Storage(9, 0), perf=Perf(0, 0, 0, 0))
        ...     for r in range(2)
        ... ]
        >>> two_ranks = SimpleNamespace(world_size=2, local_world_size=2, devices=ranks)
        >>> def option(name, ms):
        ...     shard = Shard([8, 4], [0, 0], Storage(2, 0), Perf(ms, 0, 0, 0))
        ...     table = name, torch.empty(8, 4), ("", torch.nn.Identity())
        ...     return ShardingOption(
        ...         *table, [1.0], 2, "table_wise", "device", "fused", [shard]
        ...     )
        >>> proposal = [option("a", 2.0), option("b", 3.0), option("c", 2.0)]
        >>> plan = GreedyPerfPartitioner(SortBy.PERF).partition(proposal, two_ranks)
        >>> [(each.name, each.shards[0].rank) for each in plan]
        [('a', 1), ('b', 0), ('c', 1)]

    Source:
        TorchRec's ``GreedyPerfPartitioner``. Unlike there, a proposal that does not fit is not
        changed.
    """

    def __init__(self, sort_by: SortBy = SortBy.STORAGE, balance_modules: bool = False) -> None:
        self._sort_by = sort_by
        self._balance_modules = balance_modules

    def partition(
        self,
        proposal: list[ShardingOption],
        storage_constraint: Topology,
        hbm_per_device: int | None = None,
    ) -> list[ShardingOption]:
        """Set the rank of every shard of an estimated proposal, if all of them fit.

        Args:
            proposal: An option for each table.
            storage_constraint: The ranks and their storage; not changed.
            hbm_per_device: Bytes of HBM per rank; replaces the topology's.

        Raises:
            PlannerError: A shard does not fit, the number of shards does not match the ranks, a
                table occurs twice, or an option has no estimate.
        """
        check_one_each("proposal", proposal)
        ranks = _Ranks.of(storage_constraint)
        if hbm_per_device:
            ranks.room[:, 0] = hbm_per_device
        return self._partition(proposal, ranks)

    def _partition(self, proposal: list[ShardingOption], ranks: _Ranks) -> list[ShardingOption]:
        """The same on given ranks. Ranks of shards are set once all shards fit."""
        placed: dict[str, Ints] = {}
        for group in self._groups(
            [_Table(option, option.times(), option.memory()) for option in proposal]
        ):
            ranks, places = _place(group, ranks)
            placed |= {table.option.fqn: place for table, place in zip(group, places, strict=True)}
        for option in proposal:
            option.place(placed[option.fqn])
        return proposal

    def _groups(self, tables: Sequence[_Table]) -> list[list[_Table]]:
        """Groups of dependent tables, and single tables, in placing order."""
        per_collection = Counter(table.option.path for table in tables)
        on_every_rank: list[list[_Table]] = []
        others: dict[str, list[_Table]] = {}
        for table in tables:
            if table.option.partition_by == PartitionByType.UNIFORM.value:
                on_every_rank.append([table])
            else:
                others.setdefault(table.option.dependency or table.option.fqn, []).append(table)

        def size(group: list[_Table]) -> tuple[float, ...]:
            first = -per_collection[group[0].option.path] if self._balance_modules else 0
            if self._sort_by is SortBy.PERF:
                return first, sum(float(table.time.sum()) for table in group)
            return first, *np.sum([table.memory.sum(axis=0) for table in group], axis=0).tolist()

        return on_every_rank + sorted(others.values(), key=size, reverse=True)


class MemoryBalancedPartitioner(Partitioner):
    """Minimizes the memory of the fullest rank, as long as the plan is hardly slower.

    It first places greedily with all memory. Then it finds, by binary search, the least memory per
    rank with which greedy placement succeeds and is at most `tolerance` slower.

    Args:
        max_search_count: Maximum steps of the binary search.
        tolerance: How much slower the plan may be: 0.02 is 2 %.
        balance_modules: Whether tables of collections with fewer tables are placed first.

    Source:
        TorchRec's ``MemoryBalancedPartitioner``. On a topology without HBM it balances DDR here.
    """

    def __init__(
        self, max_search_count: int = 10, tolerance: float = 0.02, balance_modules: bool = False
    ) -> None:
        self._max_search_count = max_search_count
        self._tolerance = tolerance
        self._greedy = GreedyPerfPartitioner(SortBy.PERF, balance_modules)

    def partition(
        self,
        proposal: list[ShardingOption],
        storage_constraint: Topology,
        hbm_per_device: int | None = None,
    ) -> list[ShardingOption]:
        """Set the rank of every shard; see `GreedyPerfPartitioner.partition`."""
        plan = self._greedy.partition(proposal, storage_constraint, hbm_per_device)
        model, ranks = NoopPerfModel(storage_constraint), _Ranks.of(storage_constraint)
        slowest = model.rate(plan) * (1 + self._tolerance)
        kind = 0 if ranks.room[:, 0].any() else 1
        best = [option.placed_ranks(len(ranks.room)) for option in plan]
        held = np.zeros(len(ranks.room), np.int64)
        for option, placed in zip(plan, best, strict=True):
            np.add.at(held, placed, option.memory()[:, kind])
        largest = max((int(option.memory()[:, kind].max()) for option in plan), default=0)
        low, high = max(int(held.sum() / len(held)), largest), int(held.max())
        for _ in range(self._max_search_count):
            if low + CLOSE_ENOUGH >= high:
                break
            middle = (low + high) // 2
            ranks.room[:, kind] = middle
            try:
                fast_enough = model.rate(self._greedy._partition(plan, ranks)) <= slowest
            except PlannerError:
                fast_enough = False
            logger.info(
                "at most %d bytes per rank: %s",
                middle,
                "taken" if fast_enough else "does not fit, or slower",
            )
            if fast_enough:
                high, best = middle, [option.placed_ranks(len(held)) for option in plan]
            else:
                low = middle
        for option, placed in zip(plan, best, strict=True):
            option.place(placed)
        return plan


class _Table(NamedTuple):
    """A table during placing; P shards."""

    option: ShardingOption
    time: Floats  # [P] ms
    memory: Ints  # [P, 3] bytes

    def refusal(self, problem: str) -> PlannerError:
        """The error for a table that cannot be placed."""
        return PlannerError(
            f"table {self.option.name!r} as {self.option.sharding_type}: {problem}; propose "
            "another of its options, or give it more memory or ranks",
            PlannerErrorType.PARTITION,
        )


@dataclass
class _Ranks:
    """The free resources of the ranks during placing; a host is L consecutive ranks."""

    room: Ints  # [W, 3] bytes: HBM, DDR, SSD
    load: Floats  # [W] ms
    local_size: int  # L, ranks per host
    order: Ints  # [W] the ranks in the order in which ties are broken

    @classmethod
    def of(cls, topology: Any) -> _Ranks:
        """The ranks of a topology, before anything is placed."""
        load = np.array([device.perf.total for device in topology.devices], np.float64)
        numbers = np.arange(len(load))
        # By local rank first: the ranks of a host share its memory, so hosts should fill evenly.
        order = np.lexsort((numbers, numbers % topology.local_world_size))
        local_size = getattr(topology, "intra_group_size", None) or topology.local_world_size
        return cls(memory_of(topology), load, local_size, order)

    def hosts(self) -> Ints:
        """``[H, L]``: the ranks of each host, the least loaded host first."""
        hosts = np.arange(len(self.room) // self.local_size * self.local_size).reshape(
            -1, self.local_size
        )
        return hosts[np.argsort(self.load[hosts].sum(axis=1), kind="stable")]

    def put(self, table: _Table, targets: Ints) -> Ints:
        """Place a table: shard i on target i, or each shard on the least loaded target that fits.

        Returns:
            The rank of each shard.

        Raises:
            PlannerError: A shard does not fit, or the number of shards is not that of the targets.
        """
        option, count = table.option, len(table.time)
        anywhere = option.partition_by == PartitionByType.DEVICE.value
        anywhere = anywhere or option.sharding_type == ShardingType.TABLE_COLUMN_WISE.value
        if not anywhere and count != len(targets):
            raise table.refusal(f"its {count} shards go one to each of {len(targets)} ranks")
        ranks = np.empty(count, np.int64)
        for shard, memory in enumerate(table.memory):
            candidates = targets if anywhere else targets[shard : shard + 1]
            fitting = candidates[(self.room[candidates] >= memory).all(axis=1)]
            if not len(fitting):
                where = f"one of {len(targets)} ranks" if anywhere else f"rank {candidates[0]}"
                left = _bytes(self.room[candidates].max(axis=0))
                raise table.refusal(
                    f"shard {shard} needs {_bytes(memory)}, and the most that {where} has left "
                    f"is {left}"
                )
            ranks[shard] = rank = fitting[self.load[fitting].argmin()]
            self.room[rank] -= memory
            self.load[rank] += table.time[shard]
        return ranks


def _bytes(memory: Ints) -> str:
    """Text of the kinds of memory that are not zero."""
    kinds = zip(memory.tolist(), ("HBM", "DDR", "SSD"), strict=True)
    return (
        " and ".join(f"{count:,} bytes of {kind}" for count, kind in kinds if count) or "no memory"
    )


def _place(group: list[_Table], ranks: _Ranks) -> tuple[_Ranks, list[Ints]]:
    """Place dependent tables, or one table, on the first targets on which all of them fit.

    Returns:
        The remaining resources, and the ranks of each table's shards.

    Raises:
        PlannerError: They fit on no targets (with the reason for the first ones), or this placing
            is not possible.
    """
    refusal: PlannerError | None = None
    for targets in _targets(group, ranks):
        trial = replace(ranks, room=ranks.room.copy(), load=ranks.load.copy())
        try:
            return trial, [trial.put(table, targets) for table in group]
        except PlannerError as error:
            refusal = refusal or error
    assert refusal is not None, "there are targets"
    raise refusal


def _targets(group: list[_Table], ranks: _Ranks) -> list[Ints]:
    """The sets of ranks that may hold a group, in the order in which they are tried.

    Raises:
        PlannerError: Tables depend on one another but not all are on one host, or shards do not
            fill whole hosts.
    """
    first, hosts = group[0], ranks.hosts()
    by = PartitionByType(first.option.partition_by)
    if by is PartitionByType.HOST:
        return list(hosts)
    if len(group) > 1:
        names = [table.option.name for table in group]
        raise first.refusal(
            f"tables {names} depend on one another, and only tables that lie on one host can"
        )
    if by is PartitionByType.UNIFORM:
        return [np.arange(len(ranks.room))]
    if by is PartitionByType.DEVICE:
        return [ranks.order]
    blocks, rest = divmod(len(first.time), ranks.local_size)
    if rest:
        raise first.refusal(
            f"its {len(first.time)} shards do not fill whole hosts of {ranks.local_size} ranks"
        )
    # Neighbors in the list of hosts by load; if there are more blocks than hosts, a host holds
    # several.
    starts = range(max(len(hosts) - blocks, 0) + 1)
    return [hosts[np.arange(start, start + blocks) % len(hosts)].ravel() for start in starts]

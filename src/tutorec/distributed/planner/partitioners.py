"""Partitioners: they place the shards of a proposal on ranks.

Corresponds to TorchRec's ``torchrec.distributed.planner.partitioners``: the same rules, on arrays.
Tables with a shard on every rank are placed first. The others follow, the largest first, each shard
on the least loaded rank with enough memory: longest-processing-time-first (LPT) list scheduling
(Graham 1969). The default search uses its `Packing` instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from tutorec.distributed.plan.plan import SHARDING_TRAITS, PlacementRule, ShardingType
from tutorec.distributed.planner.options import (
    PartitionByType,
    ShardingOption,
    check_tables_are_distinct,
)
from tutorec.distributed.planner.topology import Ints, Topology, device_memory
from tutorec.distributed.planner.types import Partitioner
from tutorec.errors import PlannerError, PlannerErrorType


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
        >>> from tutorec.distributed.planner.options import Shard
        >>> from tutorec.distributed.planner.topology import Perf, Storage
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
        check_tables_are_distinct("proposal", proposal)
        ranks = _Ranks(storage_constraint, hbm_per_device)
        placed = [
            (option, shard_ranks)
            for group in self._groups(proposal)
            for option, shard_ranks in zip(group, ranks.place(group), strict=True)
        ]
        for option, shard_ranks in placed:  # once all shards fit
            option.place(shard_ranks)

        return proposal

    def _groups(self, options: Sequence[ShardingOption]) -> list[list[ShardingOption]]:
        """Groups of dependent tables, and single tables, in placing order."""
        per_collection = Counter(option.path for option in options)
        groups: dict[str, list[ShardingOption]] = {}
        uniform = PartitionByType.UNIFORM.value
        for option in options:
            label = None if option.partition_by == uniform else option.dependency
            groups.setdefault(label or option.fqn, []).append(option)

        def size(group: list[ShardingOption]) -> tuple[float, ...]:
            if group[0].partition_by == uniform:
                return (1,)

            few = -per_collection[group[0].path] if self._balance_modules else 0
            if self._sort_by is SortBy.PERF:
                return 0, few, sum(option.total_perf for option in group)

            memory = [option.memory().sum(axis=0) for option in group]
            return 0, few, *np.sum(memory, axis=0).tolist()

        return sorted(groups.values(), key=size, reverse=True)


class _Ranks:
    """The free resources of the ranks during placing; a host is L consecutive ranks.

    Args:
        topology: The ranks, before anything is placed.
        hbm: Bytes of HBM per rank; the topology's by default.
    """

    def __init__(self, topology: Any, hbm: int | None) -> None:
        self.room = device_memory(topology)  # [W, 3] bytes: HBM, DDR, SSD
        if hbm:
            self.room[:, 0] = hbm

        self.load = np.array([device.perf.total for device in topology.devices], np.float64)
        ranks = np.arange(len(self.load))

        # Ties go to the lowest local rank: the ranks of a host share its memory, so hosts should
        # fill evenly.
        self.order = np.lexsort((ranks, ranks % topology.local_world_size))
        local_size = getattr(topology, "intra_group_size", None) or topology.local_world_size
        self.hosts = ranks[: len(ranks) // local_size * local_size].reshape(-1, local_size)

    def place(self, group: Sequence[ShardingOption]) -> list[Ints]:
        """Place dependent tables, or one table, on the first targets on which all of them fit.

        Returns:
            The ranks of each table's shards.

        Raises:
            PlannerError: They fit on no targets (with the reason for the first ones), or this
                placing is not possible.
        """
        refusal: PlannerError | None = None
        for targets in self._targets(group):
            room = self.room.copy()
            load = self.load.copy()
            try:
                return [self._put(option, targets) for option in group]
            except PlannerError as error:
                self.room = room
                self.load = load
                refusal = refusal or error

        assert refusal is not None, "there are targets"
        raise refusal

    def _targets(self, group: Sequence[ShardingOption]) -> Sequence[Ints]:
        """The sets of ranks that may hold a group, in the order in which they are tried.

        Raises:
            PlannerError: Tables depend on one another but not all are on one host, or shards do not
                fill whole hosts.
        """
        first = group[0]
        by = PartitionByType(group[0].partition_by)
        hosts = self.hosts[np.argsort(self.load[self.hosts].sum(axis=1), kind="stable")]
        if by is PartitionByType.HOST:
            return list(hosts)
        if len(group) > 1:
            names = [option.name for option in group]
            raise _refusal(
                first,
                f"tables {names} depend on one another, and only tables of one host can",
            )
        if by is PartitionByType.UNIFORM:
            return [np.arange(len(self.load))]
        if by is PartitionByType.DEVICE:
            return [self.order]

        blocks, rest = divmod(first.num_shards, hosts.shape[1])
        if rest:
            raise _refusal(
                first,
                f"its {first.num_shards} shards do not fill whole hosts of {hosts.shape[1]} ranks",
            )

        # Neighbors in the list of hosts by load; if there are more blocks than hosts, a host holds
        # several.
        starts = range(max(len(hosts) - blocks, 0) + 1)
        return [hosts[np.arange(start, start + blocks) % len(hosts)].ravel() for start in starts]

    def _put(self, option: ShardingOption, targets: Ints) -> Ints:
        """Place a table: shard i on target i, or each shard on the least loaded target that fits.

        Returns:
            The rank of each shard.

        Raises:
            PlannerError: A shard does not fit, or the number of shards is not that of the targets.
        """
        placement = SHARDING_TRAITS[ShardingType(option.sharding_type)].placement
        by_device = option.partition_by == PartitionByType.DEVICE.value
        anywhere = by_device or placement is PlacementRule.ONE_HOST
        if not anywhere and option.num_shards != len(targets):
            raise _refusal(
                option,
                f"its {option.num_shards} shards go one to each of {len(targets)} ranks",
            )

        ranks = np.empty(option.num_shards, np.int64)
        amounts = zip(option.memory(), option.times().tolist(), strict=True)
        for shard, (memory, ms) in enumerate(amounts):
            candidates = targets if anywhere else targets[shard : shard + 1]
            fitting = candidates[(self.room[candidates] >= memory).all(axis=1)]
            if not len(fitting):
                where = f"one of {len(targets)} ranks" if anywhere else f"rank {candidates[0]}"
                left = _bytes(self.room[candidates].max(axis=0))
                raise _refusal(
                    option,
                    f"shard {shard} needs {_bytes(memory)}, and the most that {where} has left "
                    f"is {left}",
                )

            ranks[shard] = rank = fitting[self.load[fitting].argmin()]
            self.room[rank] -= memory
            self.load[rank] += ms

        return ranks


def _refusal(option: ShardingOption, problem: str) -> PlannerError:
    """The error for a table that cannot be placed."""
    return PlannerError(
        f"table {option.name!r} as {option.sharding_type}: {problem}; propose another of its "
        "options, or give it more memory or ranks",
        PlannerErrorType.PARTITION,
    )


def _bytes(memory: Ints) -> str:
    """Text of the kinds of memory that are not zero."""
    counts = zip(memory.tolist(), ("HBM", "DDR", "SSD"), strict=True)
    return (
        " and ".join(f"{count:,} bytes of {name}" for count, name in counts if count) or "no memory"
    )

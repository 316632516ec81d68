"""Partitioners: which rank each shard of a proposal lies on.

Corresponds to TorchRec's ``torchrec.distributed.planner.partitioners``: the same rules, on arrays. What is even goes
first, one piece for each rank; then one table after the other, the largest first, goes where there is the least to do.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from tutorec.distributed.plan import ShardingType
from tutorec.distributed.planner.input_checks import finite, whole
from tutorec.distributed.planner.interfaces import Partitioner
from tutorec.distributed.planner.options import (
    PERF_FIELDS,
    Floats,
    Ints,
    PartitionByType,
    ShardingOption,
    check_one_each,
)
from tutorec.distributed.planner.perf_models import NoopPerfModel
from tutorec.distributed.planner.topology import MOST_BYTES
from tutorec.errors import PlannerError, PlannerErrorType

if TYPE_CHECKING:
    from tutorec.distributed.planner.topology import Topology

logger = logging.getLogger(__name__)

CLOSE_ENOUGH = 10 * 1024 * 1024
"""Bytes: the search for the least memory ends once it is known this closely."""


class SortBy(Enum):
    """Which tables are placed first: those that need the most storage, or the most time."""

    STORAGE = "storage"
    PERF = "perf"


class GreedyPerfPartitioner(Partitioner):
    """Places each shard on the rank that has the least to do, of those that have room for it.

    Row-wise and data-parallel tables are placed first: their shards have their ranks. Then the others, the largest
    first; of equal ranks the one with the lowest number on its host is taken, so that hosts fill evenly. Table-row-wise
    and table-column-wise tables go to the host that has the least to do, a grid to several of them.

    Args:
        sort_by: What "largest" means.
        balance_modules: Tables of collections that have fewer tables go first.

    Raises:
        PlannerError: ``sort_by`` is no `SortBy`.

    Example:
        The table of 3 ms goes first, to rank 0; then rank 1 has the least to do until it has 4 ms:

        >>> from types import SimpleNamespace
        >>> from tutorec.distributed.planner.options import Perf, Shard, Storage
        >>> import torch
        >>> ranks = [SimpleNamespace(rank=r, storage=Storage(9, 0), perf=Perf(0, 0, 0, 0)) for r in range(2)]
        >>> two_ranks = SimpleNamespace(world_size=2, local_world_size=2, devices=ranks)
        >>> def option(name, ms):
        ...     shard = Shard([8, 4], [0, 0], Storage(2, 0), Perf(ms, 0, 0, 0))
        ...     table = name, torch.empty(8, 4), ("", torch.nn.Identity())
        ...     return ShardingOption(*table, [1.0], 2, "table_wise", "device", "fused", [shard])
        >>> proposal = [option("a", 2.0), option("b", 3.0), option("c", 2.0)]
        >>> plan = GreedyPerfPartitioner(SortBy.PERF).partition(proposal, two_ranks)
        >>> [(each.name, each.shards[0].rank) for each in plan]
        [('a', 1), ('b', 0), ('c', 1)]

    Source:
        TorchRec's ``GreedyPerfPartitioner``. A proposal that does not fit is left as it was here.
    """

    def __init__(self, sort_by: SortBy = SortBy.STORAGE, balance_modules: bool = False) -> None:
        if not isinstance(sort_by, SortBy):
            raise PlannerError(
                f"sort_by={sort_by!r} is no SortBy: give SortBy.STORAGE or SortBy.PERF",
                PlannerErrorType.INPUT_VALIDATION,
            )
        self._sort_by: SortBy = sort_by
        self._balance_modules: bool = balance_modules

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology, hbm_per_device: int | None = None
    ) -> list[ShardingOption]:
        """Give every shard a rank.

        Args:
            proposal: An estimated option for each table; ranks are written into it.
            storage_constraint: The ranks and their storage; not changed.
            hbm_per_device: Bytes of HBM of each rank, in place of the topology's.

        Returns:
            The proposal.

        Raises:
            PlannerError: A shard fits nowhere, the number of shards does not suit the ranks, or a table is there twice.
            ValueError: An option is not estimated.
        """
        check_one_each("proposal", proposal)
        ranks = _Ranks.of(storage_constraint)
        if hbm_per_device:
            finite("hbm_per_device", hbm_per_device, "give bytes of a rank, or None", most=MOST_BYTES)
            ranks.room[:, 0] = hbm_per_device
        return self._partition(proposal, ranks)

    def _partition(self, proposal: list[ShardingOption], ranks: _Ranks) -> list[ShardingOption]:
        """The same on given ranks. Places are written once all are known."""
        items = [_Item.of(option) for option in proposal]
        for item in items:
            if item.by == PartitionByType.UNIFORM.value:
                _place_in_order(item, ranks, np.arange(len(ranks.room)))
        for group in self._groups(items):
            _place_group(group, ranks)
        for item in items:
            item.option.place(item.ranks)
        return proposal

    def _groups(self, items: Sequence[_Item]) -> list[list[_Item]]:
        """Tables that are not spread evenly, those that lie together as one, in the order in which they are placed."""
        tables_of: dict[str, int] = {}
        groups: dict[str, list[_Item]] = {}
        for item in items:
            tables_of[item.option.path] = tables_of.get(item.option.path, 0) + 1
            if item.by != PartitionByType.UNIFORM.value:
                groups.setdefault(item.option.dependency or item.option.fqn, []).append(item)

        def size(group: list[_Item]) -> tuple[float, ...]:
            first = -tables_of[group[0].option.path] if self._balance_modules else 0
            if self._sort_by is SortBy.PERF:
                return first, sum(float(item.times.sum()) for item in group)
            return first, *np.sum([item.memory.sum(axis=0) for item in group], axis=0).tolist()

        return sorted(groups.values(), key=size, reverse=True)


class MemoryBalancedPartitioner(Partitioner):
    """Places a proposal so that the fullest rank holds as little as possible, as long as the plan is hardly slower.

    It places greedily with all the memory there is, then searches by halving for the least memory per rank with which
    the greedy placement still succeeds, and is at most `tolerance` slower than the first.

    Args:
        max_search_count: The most halvings.
        tolerance: How much slower the plan may become: 0.02 is 2 %.
        balance_modules: Tables of collections that have fewer tables go first.

    Raises:
        PlannerError: A number that cannot be.

    Source:
        TorchRec's ``MemoryBalancedPartitioner``. On a topology without HBM it balances DDR here.
    """

    def __init__(self, max_search_count: int = 10, tolerance: float = 0.02, balance_modules: bool = False) -> None:
        finite("tolerance", tolerance, "give a part of the time, as 0.02")
        self._max_search_count: int = whole("max_search_count", max_search_count, 0, "give how often to halve")
        self._tolerance: float = tolerance
        self._greedy: GreedyPerfPartitioner = GreedyPerfPartitioner(SortBy.PERF, balance_modules)

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology, hbm_per_device: int | None = None
    ) -> list[ShardingOption]:
        """Give every shard a rank.

        Args:
            proposal: An estimated option for each table; ranks are written into it.
            storage_constraint: The ranks and their storage; not changed.
            hbm_per_device: Bytes of HBM of each rank, in place of the topology's.

        Returns:
            The proposal.

        Raises:
            PlannerError: A shard fits nowhere, the number of shards does not suit the ranks, or a table is there twice.
            ValueError: An option is not estimated.
        """
        plan = self._greedy.partition(proposal, storage_constraint, hbm_per_device)
        model = NoopPerfModel(storage_constraint)
        slowest = model.rate(plan) * (1 + self._tolerance)
        best = [_placed(option) for option in plan]
        whole = _Ranks.of(storage_constraint)
        kind = 0 if whole.room[:, 0].any() else 1
        held = np.zeros(len(whole.room), np.int64)
        pieces = [option.memory()[:, kind] for option in plan]
        for ranks, memory in zip(best, pieces, strict=True):
            np.add.at(held, ranks, memory)
        largest = max((int(memory.max(initial=0)) for memory in pieces), default=0)
        low, high = max(int(held.sum() / len(held)), largest), int(held.max())
        for _ in range(self._max_search_count):
            if low + CLOSE_ENOUGH >= high:
                break
            middle = (low + high) // 2
            ranks = _Ranks.of(storage_constraint)
            ranks.room[:, kind] = middle
            try:
                faster = model.rate(self._greedy._partition(proposal, ranks)) <= slowest
            except PlannerError:
                faster = False
            logger.info("a plan with at most %d bytes per rank: %s", middle, "taken" if faster else "none, or slower")
            if faster:
                high, best = middle, [_placed(option) for option in proposal]
            else:
                low = middle
        for option, ranks in zip(plan, best, strict=True):
            option.place(ranks)
        return plan


@dataclass
class _Ranks:
    """What is left of the ranks while tables are being placed; a host is L consecutive ranks."""

    room: Ints  # [W, 3] bytes: HBM, DDR, SSD
    perf: Floats  # [W, 6] ms, columns as the fields of Perf
    load: Floats  # [W] ms, their sums
    local_size: int  # L, ranks of a host: what table-row-wise and its kin are placed on
    order: Ints  # [W] the ranks in the order in which equal ones are taken

    @classmethod
    def of(cls, topology: Any) -> _Ranks:
        """The ranks of a topology, as they are before anything is placed."""
        devices = topology.devices
        room = np.array([[d.storage.hbm, d.storage.ddr, getattr(d.storage, "ssd", 0)] for d in devices], np.int64)
        perf = np.array([[getattr(d.perf, name, 0.0) for name in PERF_FIELDS] for d in devices], np.float64)
        numbers = np.arange(len(devices))
        # First the number on the host: a host's ranks share its memory, so that hosts are to fill evenly.
        order = np.lexsort((numbers, numbers % topology.local_world_size))
        local_size = getattr(topology, "intra_group_size", None) or topology.local_world_size
        return cls(room, perf, perf.sum(axis=1), local_size, order)

    def copy(self) -> _Ranks:
        """Ranks to try something on."""
        return _Ranks(self.room.copy(), self.perf.copy(), self.load.copy(), self.local_size, self.order)

    def take(self, tried: _Ranks) -> None:
        """Go on from what was tried."""
        self.room, self.perf, self.load = tried.room, tried.perf, tried.load

    def hosts(self) -> Ints:
        """``[H, L]``: the ranks of each host, the host that has the least to do first."""
        hosts = np.arange(len(self.room) // self.local_size * self.local_size).reshape(-1, self.local_size)
        return hosts[np.argsort(self.load[hosts].sum(axis=1), kind="stable")]

    def put(self, item: _Item, piece: int, rank: int) -> None:
        """Place a piece."""
        self.room[rank] -= item.memory[piece]
        self.perf[rank] += item.perf[piece]
        self.load[rank] = self.perf[rank].sum()
        item.ranks[piece] = rank


@dataclass
class _Item:
    """A table while it is being placed; P pieces."""

    option: ShardingOption
    by: str
    perf: Floats  # [P, 6] ms
    times: Floats  # [P] ms
    memory: Ints  # [P, 3] bytes
    ranks: Ints  # [P]

    @classmethod
    def of(cls, option: ShardingOption) -> _Item:
        """An option's numbers."""
        times, memory = option.times(), option.memory()
        perf = option.pieces().perf
        assert perf is not None, "times() has refused options without times"
        if not len(times):
            raise PlannerError(
                f"table {option.name!r} as {option.sharding_type} has no shards to place: give it some, Shard(size, "
                "offset)",
                PlannerErrorType.INPUT_VALIDATION,
            )
        return cls(option, option.partition_by, perf, times, memory, np.full(len(times), -1, np.int64))


def _placed(option: ShardingOption) -> Ints:
    """Where the shards of a placed option lie."""
    ranks = option.pieces().ranks
    assert ranks is not None, f"table {option.name!r} has been placed"
    return ranks.copy()


def _refuse(item: _Item, problem: str) -> PlannerError:
    option = item.option
    return PlannerError(
        f"table {option.name!r} as {option.sharding_type}: {problem}; propose another of its options, or "
        "give it more memory or ranks",
        PlannerErrorType.PARTITION,
    )


def _bytes(memory: Ints) -> str:
    """Bytes in words: those kinds of which there are any."""
    words = [f"{count:,} bytes of {kind}" for count, kind in zip(memory.tolist(), ("HBM", "DDR", "SSD"), strict=True)]
    return " and ".join(word for word in words if not word.startswith("0 ")) or "no memory"


def _place_in_order(item: _Item, ranks: _Ranks, targets: Ints) -> None:
    """Place piece i on the i-th of the given ranks.

    Raises:
        PlannerError: There are more or fewer pieces, or one does not fit.
    """
    if len(item.times) != len(targets):
        raise _refuse(item, f"its {len(item.times)} shards go one to each of {len(targets)} ranks")
    for piece, rank in enumerate(targets.tolist()):
        if (item.memory[piece] > ranks.room[rank]).any():
            needs, has = _bytes(item.memory[piece]), _bytes(ranks.room[rank])
            raise _refuse(item, f"shard {piece} needs {needs} on rank {rank}, where {has} are left")
        ranks.put(item, piece, rank)


def _place_least_loaded(item: _Item, ranks: _Ranks, candidates: Ints) -> None:
    """Place each piece on that candidate with room for it that has the least to do; of equal ones on the first.

    Raises:
        PlannerError: A piece fits on none.
    """
    for piece, memory in enumerate(item.memory):
        fitting = candidates[(ranks.room[candidates] >= memory).all(axis=1)]
        if not len(fitting):
            most = _bytes(ranks.room[candidates].max(axis=0))
            raise _refuse(
                item,
                f"shard {piece} needs {_bytes(memory)}, and the most that one of {len(candidates)} ranks has left is "
                f"{most}",
            )
        ranks.put(item, piece, int(fitting[np.argmin(ranks.load[fitting])]))


def _place_group(group: list[_Item], ranks: _Ranks) -> None:
    """Place tables that lie together, or one table alone.

    Raises:
        PlannerError: They do not fit, or cannot be placed together.
    """
    first = group[0]
    if first.by == PartitionByType.HOST.value:
        _place_on_a_host(group, ranks)
        return
    if len(group) > 1:
        names = [item.option.name for item in group]
        raise _refuse(
            first, f"tables {names} depend on one another, and only tables that lie on one host are placed together"
        )
    if first.by == PartitionByType.MULTI_HOST.value:
        _place_on_hosts(first, ranks)
    elif first.by == PartitionByType.DEVICE.value:
        _place_least_loaded(first, ranks, ranks.order)
    else:
        words = [kind.value for kind in PartitionByType]
        raise _refuse(first, f"partition_by={first.by!r} is none of {words}")


def _place_on_a_host(group: list[_Item], ranks: _Ranks) -> None:
    """Place tables on the ranks of one host: the first, by what there is to do, on which all of them fit.

    Raises:
        PlannerError: There is none.
    """
    needs = np.sum([item.memory.sum(axis=0) for item in group], axis=0)
    reasons = []
    for host in ranks.hosts():
        if (needs > ranks.room[host].sum(axis=0)).any():
            continue
        tried = ranks.copy()
        try:
            for item in group:
                if item.option.sharding_type == ShardingType.TABLE_ROW_WISE.value:
                    _place_in_order(item, tried, host)
                elif item.option.sharding_type == ShardingType.TABLE_COLUMN_WISE.value:
                    _place_least_loaded(item, tried, host)
                else:
                    raise _refuse(item, "only table_row_wise and table_column_wise tables lie on one host")
        except PlannerError as error:
            reasons.append(str(error))
            continue
        ranks.take(tried)
        return
    most = _bytes(ranks.room[ranks.hosts()].sum(axis=1).max(axis=0))
    why = f" ({reasons[-1]})" if reasons else ""
    raise _refuse(group[0], f"{_bytes(needs)} fit on no host; the most that one has left is {most}{why}")


def _place_on_hosts(item: _Item, ranks: _Ranks) -> None:
    """Place blocks of L pieces, each on a host: on neighbours among the hosts sorted by what there is to do.

    Raises:
        PlannerError: They do not fit, or the last block has fewer pieces than a host has ranks.
    """
    if item.option.sharding_type != ShardingType.GRID_SHARD.value:
        raise _refuse(item, "only grid_shard tables are spread over several hosts")
    blocks, rest = divmod(len(item.times), ranks.local_size)
    if rest:
        raise _refuse(item, f"its {len(item.times)} shards are no whole number of hosts of {ranks.local_size} ranks")
    hosts = ranks.hosts()
    # More blocks than hosts go round: a host then has several.
    starts = range(len(hosts) - blocks + 1) if blocks < len(hosts) else range(1)
    error: PlannerError | None = None
    for start in starts:
        tried = ranks.copy()
        try:
            _place_in_order(item, tried, hosts[np.arange(start, start + blocks) % len(hosts)].ravel())
        except PlannerError as refused:
            error = error or refused
            continue
        ranks.take(tried)
        return
    assert error is not None, "every start was refused"
    raise error

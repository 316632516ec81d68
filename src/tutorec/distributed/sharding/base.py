"""The contract of a sharding type: where ids are sent, who looks them up, and how results return.

::

    local samples | input_dist | all samples | lookup | all samples | output_dist | local samples

A *slot* is a feature together with one shard that looks it up. Every rank computes every rank's
slots from the plan, ordered by rank, group, shard and feature, so only ids and rows are sent. A
sharding type decides which shards there are and how pooled rows return; ids find their slots in one
of two ways::

    whole rows (tw, cw, twcw)   all ids of a feature go to every slot that reads it
    split rows (rw, twrw, grid) the ids of a feature fall into one bucket per range of rows
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import mul
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutorec._kernels.specs import PoolingKind
from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.kjt import KJTAllToAll, KJTArrival
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.initial_rows import InitialRows
from tutorec.distributed.core.orders import OutputColumns
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.raw_ids import RawIds
from tutorec.distributed.core.tables import Table, TableGroup, group_tables
from tutorec.distributed.lookup.grouped import EmbeddingLookup, GroupedPooledEmbeddingsLookup
from tutorec.distributed.plan.geometry import TableShard
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


@dataclass(frozen=True)
class Slot:
    """A feature and one shard that looks it up.

    Args:
        feature: The feature.
        key: The output that the looked-up columns belong to.
        table: The table.
        shard: The shard.
    """

    feature: str
    key: str
    table: Table
    shard: TableShard

    def output(self) -> OutputColumns:
        """The columns that the lookup returns."""
        return OutputColumns(self.key, self.shard.column_offset, self.shard.columns)


class PlacedSlots:
    """The slots of every rank.

    Args:
        tables: The tables of one sharding, in the collection's order.
        env: The ranks.

    Attributes:
        raw_ids: Where ids are remapped on the ranks that look them up: how they find these; else
            None.
    """

    def __init__(self, tables: Sequence[Table], env: ShardingEnv) -> None:
        self.env = env
        self.raw_ids: RawIds | None = None
        self.tables = list(tables)
        self.groups_per_rank = [group_tables(tables, rank) for rank in range(env.world_size)]
        self.per_rank = [_slots_of(groups) for groups in self.groups_per_rank]

    @property
    def local_groups(self) -> list[TableGroup]:
        """The groups of this rank."""
        return self.groups_per_rank[self.env.rank]

    @property
    def counts(self) -> list[int]:
        """Number of slots of each rank."""
        return [len(slots) for slots in self.per_rank]

    @property
    def columns(self) -> list[int]:
        """Number of columns that each rank looks up."""
        return [sum(slot.shard.columns for slot in slots) for slots in self.per_rank]

    def process_group(self) -> dist.ProcessGroup | None:
        """The process group; None only in a world of 1."""
        return self.env.group_for(f"{self.tables[0].sharding_type.value} sharding")

    @property
    def ids_dtype(self) -> torch.dtype:
        """Data type in which ids are sent: int64 for raw ids, else that of rows."""
        return torch.int64 if self.raw_ids is not None else self.rows_dtype

    @property
    def rows_dtype(self) -> torch.dtype:
        """Data type of row numbers: int32 if every table has less than 2 ** 31 rows."""
        return torch.int32 if all(table.rows <= 2**31 - 1 for table in self.tables) else torch.int64


@dataclass(frozen=True)
class Route:
    """How the ids of a batch reach their slots.

    Args:
        features: Features that ``input_dist`` takes.
        positions: For each rank and slot, the position of its feature in ``features``.
        order: For each slot, rank after rank, the position of its input in the batch that is sent:
            the feature's or, for split rows, that of one bucket of the feature. The batch has the
            first bucket of all features, then the second of all, and so on.
        bounds: For split rows: for each feature the first row of each bucket, and the end of the
            last.
        poolings: The pooling of each feature.
    """

    features: list[str]
    positions: list[list[int]]
    order: list[int]
    bounds: list[list[int]]
    poolings: list[PoolingKind]

    @classmethod
    def to_whole_rows(cls, slots: PlacedSlots) -> Route:
        """Route for whole rows: every slot gets all ids of its feature, which is sent once."""
        names = dict.fromkeys(feature for table in slots.tables for feature in table.features)
        index = {feature: number for number, feature in enumerate(names)}
        positions = [[index[slot.feature] for slot in rank_slots] for rank_slots in slots.per_rank]
        return cls(list(names), positions, list(chain.from_iterable(positions)), [], [])

    @classmethod
    def to_split_rows(cls, slots: PlacedSlots) -> Route:
        """Route for split rows: every slot gets the ids in its row range.

        A feature is sent once per table that reads it.
        """
        readers = [(feature, table) for table in slots.tables for feature in table.features]
        index = {(feature, table.name): number for number, (feature, table) in enumerate(readers)}

        positions: list[list[int]] = []
        order: list[int] = []
        for rank_slots in slots.per_rank:
            rank_positions = [index[slot.feature, slot.table.name] for slot in rank_slots]
            positions.append(rank_positions)
            for slot, position in zip(rank_slots, rank_positions, strict=True):
                order.append(_bucket(slot.table, slot.shard) * len(readers) + position)

        features = [feature for feature, _ in readers]
        bounds = [[*_row_starts(table), table.rows] for _, table in readers]
        poolings: list[PoolingKind] = [table.pooling for _, table in readers]
        return cls(features, positions, order, bounds, poolings)


def elements_out(slots: PlacedSlots, arrived: Sequence[Sequence[int]] | None) -> list[int]:
    """For a variable batch: how many looked-up elements go to each rank.

    Args:
        slots: The slots of every rank.
        arrived: Samples of each local slot, ``[W][slots]``.
    """
    assert arrived is not None, "a variable batch stores how many samples of each slot have arrived"
    columns = [slot.shard.columns for slot in slots.per_rank[slots.env.rank]]
    return [sum(map(mul, samples, columns)) for samples in arrived]


def elements_in(
    slots: PlacedSlots, route: Route, samples: Sequence[int], ranks: Iterable[int]
) -> list[int]:
    """For a variable batch: how many elements each of ``ranks`` looks up for the local samples.

    Args:
        slots: The slots of every rank.
        route: How ids reached the slots.
        samples: Local samples of each feature of the route.
        ranks: The ranks to count.
    """
    counts = []
    for rank in ranks:
        slots_and_positions = zip(slots.per_rank[rank], route.positions[rank], strict=True)
        counts.append(
            sum(samples[position] * slot.shard.columns for slot, position in slots_and_positions)
        )
    return counts


def _slots_of(groups: Sequence[TableGroup]) -> list[Slot]:
    """The slots of a rank: group by group, shard by shard, feature by feature."""
    slots = []
    for group in groups:
        for table, shard in zip(group.tables, group.shards, strict=True):
            for feature, key in zip(table.features, table.output_keys, strict=True):
                slots.append(Slot(feature, key, table, shard))
    return slots


def _row_starts(table: Table) -> list[int]:
    """First row of each range of rows of a table; all its column shards share the ranges."""
    first = min(shard.column_offset for shard in table.shards)
    return sorted(shard.row_offset for shard in table.shards if shard.column_offset == first)


def _bucket(table: Table, shard: TableShard) -> int:
    """Index of a shard's row range in its table.

    Empty ranges may start at the same row, so their order decides.
    """
    same_columns = [other for other in table.shards if other.column_offset == shard.column_offset]
    return sorted(same_columns, key=lambda other: other.row_offset).index(shard)


@dataclass
class EmbeddingShardingContext:
    """State of one sharding and one batch that ``output_dist`` needs from ``input_dist``.

    Args:
        batch_size_per_rank: B of each rank whose samples have arrived.
        batch_size_per_rank_per_feature: For a variable batch, the samples of each local slot,
            ``[W][slots]``.
        batch_size_per_feature_pre_a2a: Local samples of each feature, in ``feature_names()`` order.
        factors: For row-split tables, the factor of each feature's pooled rows, ``[B]`` each, None
            for 1. None if no feature has one.
        places: For row-split tables without pooling, the position of each local id among the ids
            sent.
        sent_counts: Local ids sent to each rank, for each of its slots, ``[W][slots of the rank]``.
        arrived_counts: Ids that arrived from each rank for each local slot, ``[W][slots]``, where
            they were counted.

    Source:
        TorchRec's ``torchrec.distributed.embedding_sharding.EmbeddingShardingContext``.
    """

    batch_size_per_rank: list[int] = field(default_factory=list)
    batch_size_per_rank_per_feature: list[list[int]] | None = None
    batch_size_per_feature_pre_a2a: list[int] = field(default_factory=list)
    factors: list[torch.Tensor | None] | None = None
    places: torch.Tensor | None = None
    sent_counts: list[list[int]] = field(default_factory=list)
    arrived_counts: list[list[int]] = field(default_factory=list)


class SparseFeaturesDist(nn.Module, ABC):
    """Input dist: sends ids to the ranks that hold their rows."""

    # The exchange; its number and title let ranks check that they run the same one.
    _dist: KJTAllToAll

    def identify(self, number: int, title: str) -> None:
        """Set a number that is the same on every rank, and a title for messages."""
        self._dist.number = number
        self._dist.title = title

    def send_status(self, status: int, device: torch.device) -> Awaitable[Any]:
        """Take part in the exchange without a batch, see `KJTAllToAll.send_status`."""
        return self._dist.send_status(status, device)

    @abstractmethod
    def forward(
        self, features: KeyedJaggedTensor, ctx: EmbeddingShardingContext
    ) -> Awaitable[KJTArrival]:
        """Send ids; the nested awaitable gives the sizes first, then the ids of local slots."""


class PooledEmbeddingDist(nn.Module, ABC):
    """Output dist: sends pooled rows to the ranks of their samples."""

    @abstractmethod
    def build(self) -> None:
        """Build the exchange, at the first batch.

        A sharded module that never runs a batch needs no process group.
        """

    @abstractmethod
    def forward(
        self, pooled: torch.Tensor, ctx: EmbeddingShardingContext
    ) -> Awaitable[torch.Tensor]:
        """``[all samples, local columns]`` -> awaitable of ``[local samples, all columns]``.

        A variable batch is flat on both sides: the input has, for each rank and each local slot,
        the columns of its samples; the output has, for each output shard, those of the local
        samples.
        """


class EmbeddingSharding(ABC):
    """All tables of a collection that have one sharding type.

    Args:
        tables: The tables, in the collection's order.
        env: The ranks.
        codecs: Name of an exchange -> data type in which rows are sent; float32 if absent.

    Source:
        TorchRec's ``torchrec.distributed.embedding_sharding.EmbeddingSharding``.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        env: ShardingEnv,
        codecs: Mapping[str, QuantizedCommCodecs],
    ) -> None:
        self._slots = PlacedSlots(tables, env)
        self._codecs = codecs
        self._route = self._find_route()

    @property
    def slots(self) -> PlacedSlots:
        """Who looks up what."""
        return self._slots

    @property
    def route(self) -> Route:
        """How ids find the slots."""
        return self._route

    @abstractmethod
    def _find_route(self) -> Route:
        """Return how ids reach the slots."""

    def feature_names(self) -> list[str]:
        """Features in the order in which ``input_dist`` takes them; a name may occur twice."""
        return self._route.features

    @abstractmethod
    def create_input_dist(self) -> SparseFeaturesDist:
        """Build the input dist."""

    @abstractmethod
    def create_lookup(self, initial_rows: InitialRows, device: torch.device) -> EmbeddingLookup:
        """Build the lookup of this rank's shards, whose rows ``initial_rows`` writes."""

    @abstractmethod
    def create_output_dist(self) -> Any:
        """Build the output dist."""


class PooledEmbeddingSharding(EmbeddingSharding):
    """A sharding whose lookups pool bags."""

    def create_lookup(self, initial_rows: InitialRows, device: torch.device) -> EmbeddingLookup:
        """Build the lookup of this rank's shards, whose rows ``initial_rows`` writes."""
        return GroupedPooledEmbeddingsLookup(self._slots.local_groups, initial_rows, device)

    @abstractmethod
    def output_columns(self) -> Sequence[OutputColumns]:
        """Column shards in the order in which ``output_dist`` returns them."""

    @abstractmethod
    def output_features(self) -> Sequence[int]:
        """For each of these column shards, its position in ``feature_names()``."""

    @abstractmethod
    def create_output_dist(self) -> PooledEmbeddingDist:
        """Build the output dist."""

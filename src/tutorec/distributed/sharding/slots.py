"""Slots: which shard looks up which feature, ordered by rank, group, shard and feature.

A *slot* is a feature together with one shard that looks it up. Every rank computes every rank's
slots from the plan, so only ids and rows are sent. A sharding type decides which shards there are;
the rest is the same for all types::

    whole rows (tw, cw, twcw)   all ids of a feature go to every slot that reads it
    split rows (rw, twrw, grid) the ids of a feature fall into one bucket per range of rows
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tutorec._kernels.pooling import PoolingKind
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.grouping import TableGroup, group_tables
from tutorec.distributed.core.orders import ColumnPiece
from tutorec.distributed.core.tables import PlacedTable, TableShard, shards_on_rank
from tutorec.distributed.sharding.raw_ids import RawIds


@dataclass(frozen=True)
class Slot:
    """A feature and one shard that looks it up.

    Args:
        feature: The feature.
        key: The output that the looked-up columns belong to.
        shard: The shard.
    """

    feature: str
    key: str
    shard: TableShard

    def output(self) -> ColumnPiece:
        """The columns that the lookup returns."""
        return ColumnPiece(self.key, self.shard.piece.column_offset, self.shard.piece.columns)


class PlacedSlots:
    """The slots of every rank.

    Args:
        tables: The tables of one sharding, in the collection's order.
        env: The ranks.

    Attributes:
        raw_ids: Where ids are remapped on the ranks that look them up: how they find these; else
            None.
    """

    def __init__(self, tables: Sequence[PlacedTable], env: ShardingEnv) -> None:
        self.env = env
        self.raw_ids: RawIds | None = None
        self.tables = list(tables)
        self.groups_per_rank: list[list[TableGroup]] = [
            group_tables(shards_on_rank(tables, rank)) for rank in range(env.world_size)
        ]
        self.per_rank: list[list[Slot]] = [
            [
                Slot(feature, key, shard)
                for group in groups
                for shard in group.shards
                for feature, key in zip(shard.table.features, shard.table.output_keys, strict=True)
            ]
            for groups in self.groups_per_rank
        ]

    @property
    def mine(self) -> list[TableGroup]:
        """The groups of this rank."""
        return self.groups_per_rank[self.env.rank]

    @property
    def counts(self) -> list[int]:
        """Number of slots of each rank."""
        return [len(slots) for slots in self.per_rank]

    @property
    def columns(self) -> list[int]:
        """Number of columns that each rank looks up."""
        return [sum(slot.shard.piece.columns for slot in slots) for slots in self.per_rank]

    def process_group(self) -> dist.ProcessGroup | None:
        """The process group; None only in a world of 1."""
        return self.env.group_for(f"{self.tables[0].sharding_type.value} sharding")

    @property
    def ids_dtype(self) -> torch.dtype:
        """Data type in which ids are sent: int64 for raw ids, else that of rows."""
        return torch.int64 if self.raw_ids is not None else self.rows_dtype

    @property
    def rows_dtype(self) -> torch.dtype:
        """Data type of row numbers: int32 for tables of up to 2 ** 31 rows."""
        return torch.int32 if all(table.rows <= 2**31 - 1 for table in self.tables) else torch.int64


@dataclass(frozen=True)
class Route:
    """How the ids of a batch reach their slots.

    Args:
        features: Features that ``input_dist`` takes.
        positions: For each rank and slot, the position of its feature in ``features``.
        order: For each slot, rank after rank, the position of its input: the feature's or, if
            features are bucketized, the bucket's (buckets are the outer dimension).
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
        features = list(
            dict.fromkeys(feature for table in slots.tables for feature in table.features)
        )
        place = {feature: index for index, feature in enumerate(features)}
        positions = [[place[slot.feature] for slot in of_rank] for of_rank in slots.per_rank]
        return cls(
            features, positions, [place for of_rank in positions for place in of_rank], [], []
        )

    @classmethod
    def to_split_rows(cls, slots: PlacedSlots) -> Route:
        """Route for split rows: every slot gets the ids in its row range.

        A feature is sent once per table that reads it.
        """
        readers = [(feature, table) for table in slots.tables for feature in table.features]
        place = {(feature, table.name): index for index, (feature, table) in enumerate(readers)}
        positions = [
            [place[slot.feature, slot.shard.table.name] for slot in of_rank]
            for of_rank in slots.per_rank
        ]
        order = [
            _bucket_of(slot.shard) * len(readers) + position
            for of_rank, places in zip(slots.per_rank, positions, strict=True)
            for slot, position in zip(of_rank, places, strict=True)
        ]
        bounds = [[*_row_starts(table), table.rows] for _, table in readers]
        return cls(
            [feature for feature, _ in readers],
            positions,
            order,
            bounds,
            [t.pooling for _, t in readers],
        )


def elements_out(slots: PlacedSlots, arrived: Sequence[Sequence[int]] | None) -> list[int]:
    """For a variable batch: how many looked-up elements go to each rank.

    Args:
        slots: The slots of every rank.
        arrived: Samples of each local slot, ``[W][slots]``.
    """
    assert arrived is not None, "a variable batch stores how many samples of each slot have arrived"
    columns = [slot.shard.piece.columns for slot in slots.per_rank[slots.env.rank]]
    return [
        sum(count * width for count, width in zip(of_rank, columns, strict=True))
        for of_rank in arrived
    ]


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
    return [
        sum(
            samples[place] * slot.shard.piece.columns
            for place, slot in zip(places, of_rank, strict=True)
        )
        for places, of_rank in ((route.positions[rank], slots.per_rank[rank]) for rank in ranks)
    ]


def _row_starts(table: PlacedTable) -> list[int]:
    """First row of each range of rows of a table; all its column shards share the ranges."""
    first = min(piece.column_offset for piece in table.pieces)
    return sorted(piece.row_offset for piece in table.pieces if piece.column_offset == first)


def _bucket_of(shard: TableShard) -> int:
    """Index of a shard's row range in its table.

    Empty ranges may start at the same row, so their order decides.
    """
    of_slice = [
        piece for piece in shard.table.pieces if piece.column_offset == shard.piece.column_offset
    ]
    return sorted(of_slice, key=lambda piece: piece.row_offset).index(shard.piece)

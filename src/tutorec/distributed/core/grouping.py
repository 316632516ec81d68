"""Grouping of a rank's tables: each group is looked up in one operator call.

A table-batched operator pools and updates all its tables in the same way. Tables are therefore
grouped by pooling, weights, dtype, kernel, optimizer and the file that stores them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec._kernels.pooling import PoolingKind
from tutorec._kernels.row_file import CacheSpec
from tutorec._kernels.table_specs import GroupSpec, TableSpec
from tutorec.distributed.core.cache_params import cache_spec
from tutorec.distributed.core.tables import PlacedTable, TableShard
from tutorec.distributed.plan.plan import EmbeddingComputeKernel


@dataclass(frozen=True)
class TableGroup:
    """The shards of one rank that one operator looks up.

    Args:
        shards: In table order; features and columns follow them.
        parameter_names: ``table.weight`` of each shard; ``table.weight_1`` and so on for further
            shards of a table on the rank, which may be in several groups.
    """

    shards: tuple[TableShard, ...]
    parameter_names: tuple[str, ...]

    @property
    def kernel(self) -> EmbeddingComputeKernel:
        """The compute kernel."""
        return self.shards[0].table.kernel

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """The optimizer applied during backward; None for tables with gradients."""
        return self.shards[0].table.optimizer

    @property
    def cache(self) -> CacheSpec | None:
        """For tables in a file: the cache, with its rows per shard."""
        caches = [
            (shard.table.cache, shard.piece.rows)
            for shard in self.shards
            if shard.table.cache is not None
        ]
        return cache_spec(caches) if caches else None

    @property
    def virtual(self) -> bool:
        """Whether rows take memory when they are written."""
        return self.shards[0].table.virtual

    @property
    def features(self) -> list[str]:
        """Input features in the order in which the operator reads them."""
        return [feature for shard in self.shards for feature in shard.table.features]

    @property
    def output_keys(self) -> list[str]:
        """Names of the outputs, one per feature."""
        return [key for shard in self.shards for key in shard.table.output_keys]

    @property
    def columns(self) -> list[int]:
        """Width of each output."""
        return [shard.piece.columns for shard in self.shards for _ in shard.table.features]

    def spec(self) -> GroupSpec:
        """The group in the operator's form."""
        first = self.shards[0].table
        return GroupSpec(
            tables=tuple(
                TableSpec(
                    shard.table.name, shard.piece.rows, shard.piece.columns, shard.table.dtype
                )
                for shard in self.shards
            ),
            feature_tables=tuple(
                index for index, shard in enumerate(self.shards) for _ in shard.table.features
            ),
            pooling=_lookup_pooling(first),
            weighted=first.weighted,
        )


def group_tables(shards: Sequence[TableShard]) -> list[TableGroup]:
    """Group the shards of one rank; groups and their members keep the order of first appearance."""
    groups: dict[tuple[object, ...], list[tuple[TableShard, str]]] = {}
    pieces = Counter[str]()
    for shard in shards:
        table = shard.table
        name = (
            f"{table.name}.weight_{pieces[table.name]}"
            if pieces[table.name]
            else f"{table.name}.weight"
        )
        pieces[table.name] += 1
        pooling = _lookup_pooling(table)
        # Unpooled rows fit into one tensor only if they have equal widths.
        width = shard.piece.columns if pooling == "none" else 0
        cache = None if table.cache is None else table.cache._replace(load_factor=0.0)
        alike = (
            pooling,
            table.weighted,
            table.dtype,
            table.kernel,
            table.optimizer,
            cache,
            table.virtual,
            width,
        )
        groups.setdefault(alike, []).append((shard, name))
    return [TableGroup(*zip(*members, strict=True)) for members in groups.values()]


def _lookup_pooling(table: PlacedTable) -> PoolingKind:
    """The pooling of the lookup: row-split tables are summed, and divided after the exchange."""
    return "sum" if table.splits_rows and table.pooling != "none" else table.pooling

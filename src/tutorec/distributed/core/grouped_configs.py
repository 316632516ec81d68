"""TorchRec's descriptions of a rank's lookups, for code that reads ``lookup.grouped_configs``.

Lookups are built from `TableGroup`; these descriptions are derived from it, and the library does
not read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata

from tutorec.distributed.core.tables import Table, TableGroup
from tutorec.distributed.plan.geometry import TableShard
from tutorec.distributed.plan.plan import EmbeddingComputeKernel
from tutorec.modules.embedding_configs import PoolingType
from tutorec.types import DataType, dtype_to_data_type


@dataclass
class ShardedEmbeddingTable:
    """A shard of a table on this rank.

    Args:
        num_embeddings: R of the whole table.
        embedding_dim: D of the whole table.
        name: Name of the table.
        data_type: Data type of its rows.
        feature_names: Features that read it.
        pooling: How bags are pooled.
        is_weighted: Whether ids carry weights.
        has_feature_processor: TorchRec's; always False.
        embedding_names: Names of its outputs, one per feature.
        compute_kernel: Its compute kernel.
        local_rows: R of the shard.
        local_cols: D of the shard.
        local_metadata: Sizes, offsets and placement of the shard; the placement is the rank.
        fused_params: Always None; the optimizer belongs to the group.

    Source:
        TorchRec's ``torchrec.distributed.embedding_types.ShardedEmbeddingTable``.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    pooling: PoolingType = PoolingType.SUM
    is_weighted: bool = False
    has_feature_processor: bool = False
    embedding_names: list[str] = field(default_factory=list)
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.DENSE
    local_rows: int = 0
    local_cols: int = 0
    local_metadata: ShardMetadata | None = None
    fused_params: dict[str, Any] | None = None

    def num_features(self) -> int:
        """F of the table."""
        return len(self.feature_names)


@dataclass
class GroupedEmbeddingConfig:
    """The shards of a rank that one operator looks up.

    Example:
        >>> item = ShardedEmbeddingTable(
        ...     8, 4, "item", feature_names=["bought", "seen"], local_rows=8, local_cols=4
        ... )
        >>> fused = EmbeddingComputeKernel.FUSED
        >>> group = GroupedEmbeddingConfig(
        ...     DataType.FP32, PoolingType.SUM, False, False, fused, [item]
        ... )
        >>> group.num_features(), group.dim_sum(), group.embedding_dims()
        (2, 8, [4, 4])

    Source:
        TorchRec's ``torchrec.distributed.embedding_types.GroupedEmbeddingConfig``.
    """

    data_type: DataType
    pooling: PoolingType
    is_weighted: bool
    has_feature_processor: bool
    compute_kernel: EmbeddingComputeKernel
    embedding_tables: list[ShardedEmbeddingTable]
    fused_params: dict[str, Any] | None = None
    enable_embedding_update: bool = False

    def feature_hash_sizes(self) -> list[int]:
        """R of the table of each feature."""
        return [
            table.num_embeddings for table in self.embedding_tables for _ in table.feature_names
        ]

    def num_features(self) -> int:
        """F of all tables."""
        return len(self.feature_names())

    def dim_sum(self) -> int:
        """D of all features together."""
        return sum(self.embedding_dims())

    def table_names(self) -> list[str]:
        """Table name of each shard."""
        return [table.name for table in self.embedding_tables]

    def feature_names(self) -> list[str]:
        """Features of all tables, in order."""
        return [name for table in self.embedding_tables for name in table.feature_names]

    def embedding_dims(self) -> list[int]:
        """D of each feature."""
        return [table.local_cols for table in self.embedding_tables for _ in table.feature_names]

    def embedding_names(self) -> list[str]:
        """Names of the outputs, one per feature."""
        return [name for table in self.embedding_tables for name in table.embedding_names]

    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """Metadata of the shard that each feature reads."""
        return [
            table.local_metadata for table in self.embedding_tables for _ in table.feature_names
        ]


def grouped_config(group: TableGroup, device: torch.device) -> GroupedEmbeddingConfig:
    """Describe a group of this rank's shards on ``device`` in TorchRec's form."""
    first = group.tables[0]

    return GroupedEmbeddingConfig(
        dtype_to_data_type(first.dtype),
        _pooling(first.pooling),
        first.weighted,
        False,
        group.kernel,
        [
            _sharded_table(table, shard, device)
            for table, shard in zip(group.tables, group.shards, strict=True)
        ],
    )


def _sharded_table(table: Table, shard: TableShard, device: torch.device) -> ShardedEmbeddingTable:
    metadata = ShardMetadata(shard.offsets, shard.sizes, f"rank:{shard.rank}/{device}")
    return ShardedEmbeddingTable(
        table.rows,
        table.columns,
        table.name,
        dtype_to_data_type(table.dtype),
        list(table.features),
        _pooling(table.pooling),
        table.weighted,
        False,
        list(table.output_keys),
        table.kernel,
        shard.rows,
        shard.columns,
        metadata,
    )


def _pooling(pooling: str) -> PoolingType:
    return PoolingType[pooling.upper()]

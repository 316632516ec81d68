"""Table-wise sharding (TW): every table lives whole on one rank.

    my samples, every feature    KJT [F x B]
      | input_dist    ids travel to the rank that owns their table      (all-to-all)
    every sample, my features    KJT [F_mine x W*B]
      | lookup        pool rows out of my tables                        (no traffic)
    every sample, my columns     [W*B, D_mine]
      | output_dist   pooled rows travel back to their sample's rank    (all-to-all)
    my samples, every column     [B, D]

Bytes that rank r sends in one step, with F_s features and D_s columns on rank s, N_rs of r's ids for s, and ids of
8 bytes (4 where all ranks use int32):

    input sizes        24 * (W - 1)
    input ids          sum over s != r of  8 * (F_s * B_r + N_rs)
    output rows        sum over s != r of  4 * B_s * D_r
    output gradients   sum over s != r of  4 * B_r * D_s

A table that no rank can hold alone, or one that is read far more than the others, wants another type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
import torch.distributed as dist

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.kjt import KJTAllToAll, KJTArrival
from tutorec.distributed.collectives.pooled import PooledEmbeddingsAllToAll
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.grouping import group_tables
from tutorec.distributed.lookup.grouped import GroupedPooledEmbeddingsLookup
from tutorec.distributed.sharding.base import PooledEmbeddingDist, PooledEmbeddingSharding, SparseFeaturesDist
from tutorec.distributed.tables import PlacedTable, shards_on_rank
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


@final
class TwSparseFeaturesDist(SparseFeaturesDist):
    """My samples, every feature -> every sample, the features of my tables.

    Args:
        pg: The ranks.
        features_per_rank: F_r, how many features each rank looks up.
    """

    def __init__(self, pg: dist.ProcessGroup | None, features_per_rank: Sequence[int]) -> None:
        super().__init__()
        self._dist = KJTAllToAll(pg, features_per_rank)

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[KJTArrival]:
        """``features`` stand in rank order."""
        return self._dist(features)


@final
class TwPooledEmbeddingDist(PooledEmbeddingDist):
    """Every sample, the columns of my tables -> my samples, every column.

    Args:
        pg: The ranks.
        columns_per_rank: D_r, how many columns each rank looks up.
    """

    def __init__(self, pg: dist.ProcessGroup | None, columns_per_rank: Sequence[int]) -> None:
        super().__init__()
        self._pg = pg
        self._columns_per_rank = list(columns_per_rank)
        self._dist: PooledEmbeddingsAllToAll | None = None

    def build(self) -> None:
        """Make the exchange."""
        if self._dist is None:
            self._dist = PooledEmbeddingsAllToAll(self._pg, self._columns_per_rank)

    def forward(self, pooled: torch.Tensor, batch_size_per_rank: Sequence[int]) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D_mine]`` -> promise of ``[B_mine, sum of D_r]``."""
        assert self._dist is not None, "the exchange is built at the first batch, before anything comes home"
        return self._dist(pooled, batch_size_per_rank)


@final
class TwPooledEmbeddingSharding(PooledEmbeddingSharding):
    """The table-wise tables of a collection of pooled embeddings.

    Args:
        tables: They, in the collection's order.
        env: The ranks.
    """

    def __init__(self, tables: Sequence[PlacedTable], env: ShardingEnv) -> None:
        self._env = env
        # Every rank knows every rank's groups: their order is the order in which things travel.
        self._groups_per_rank = [group_tables(shards_on_rank(tables, rank)) for rank in range(env.world_size)]

    def feature_names(self) -> list[str]:
        """Features in rank order."""
        return [feature for groups in self._groups_per_rank for group in groups for feature in group.features]

    def output_keys(self) -> list[str]:
        """Output keys in rank order."""
        return [key for groups in self._groups_per_rank for group in groups for key in group.output_keys]

    def output_columns(self) -> list[int]:
        """D of each output key."""
        return [columns for groups in self._groups_per_rank for group in groups for columns in group.columns]

    def create_input_dist(self) -> TwSparseFeaturesDist:
        """Ids to the owners of their tables."""
        counts = [sum(len(group.features) for group in groups) for groups in self._groups_per_rank]
        return TwSparseFeaturesDist(self._env.group_for("table-wise sharding"), counts)

    def create_lookup(self, weights: Mapping[str, torch.Tensor], device: torch.device) -> GroupedPooledEmbeddingsLookup:
        """My tables, whole."""
        return GroupedPooledEmbeddingsLookup(self._groups_per_rank[self._env.rank], weights, device)

    def create_output_dist(self) -> TwPooledEmbeddingDist:
        """Pooled rows to the ranks of their samples."""
        columns = [sum(sum(group.columns) for group in groups) for groups in self._groups_per_rank]
        return TwPooledEmbeddingDist(self._env.group_for("table-wise sharding"), columns)

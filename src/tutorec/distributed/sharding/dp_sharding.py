"""Data-parallel sharding (DP): every rank has every table whole.

    my samples, every feature    KJT [F x B]
      | input_dist    nothing to do
      | lookup        pool rows of my replicas                    forward:  no traffic
      |                                                           backward: batches and gradients to all ranks
      | output_dist   nothing to do
    my samples, every column     [B, D]

    the replicas of two ranks            the bag [0, 3] of rank 0, with the gradient g of its sum

        rank 0   rows 0, 1, 2, 3         both ranks get  ids 0, 3 and g
        rank 1   rows 0, 1, 2, 3         both ranks move rows 0 and 3 of their replica by g / 2

What travels is the batch with the gradients of its pooled rows, or, where that is more bytes, the gradient of the whole
table: `collectives.sparse_gradients` has the formula. Every rank then makes the update for all ranks' samples.

For tables that are small, or read in every sample: each rank has all their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch

from tutorec.awaitable import Awaitable, NoWait
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.layout import ColumnPiece
from tutorec.distributed.lookup.data_parallel import ReplicatedEmbeddingsLookup, ReplicatedPooledEmbeddingsLookup
from tutorec.distributed.lookup.grouped import EmbeddingLookup, ShardRows
from tutorec.distributed.qcomm import QuantizedCommCodecs
from tutorec.distributed.sharding.base import (
    EmbeddingShardingContext,
    PooledEmbeddingDist,
    PooledEmbeddingSharding,
    SparseFeaturesDist,
)
from tutorec.distributed.sharding.sequence_sharding import (
    SequenceEmbeddingDist,
    SequenceEmbeddingSharding,
    SlotSequenceEmbeddingSharding,
)
from tutorec.distributed.sharding.slots import Route
from tutorec.distributed.sharding.tw_dist import TwSparseFeaturesDist
from tutorec.distributed.tables import PlacedTable


class DpPooledEmbeddingDist(PooledEmbeddingDist):
    """My samples, every column: they are at home."""

    def build(self) -> None:
        """Nothing."""

    def forward(self, pooled: torch.Tensor, ctx: EmbeddingShardingContext) -> Awaitable[torch.Tensor]:
        """``pooled`` itself."""
        return NoWait(pooled)


@final
class DpPooledEmbeddingSharding(PooledEmbeddingSharding):
    """The data-parallel tables of a collection of pooled embeddings: a shard of all rows and columns on each rank.

    Args:
        tables: The tables, in the collection's order.
        env: The ranks.
        codecs: As of the other types; gradients of replicas travel in float32.
    """

    def __init__(
        self, tables: Sequence[PlacedTable], env: ShardingEnv, codecs: Mapping[str, QuantizedCommCodecs]
    ) -> None:
        # Forward each rank is a world of its own.
        super().__init__(tables, ShardingEnv.from_local(1, 0), codecs)
        self._ranks = env

    def _find_route(self) -> Route:
        return Route.to_whole_rows(self._slots)

    def output_pieces(self) -> list[ColumnPiece]:
        """Whole outputs."""
        return [slot.output() for slot in self._slots.per_rank[0]]

    def output_features(self) -> list[int]:
        """Which feature each piece comes from."""
        return self._route.order

    def create_input_dist(self) -> TwSparseFeaturesDist:
        """My ids stay."""
        return TwSparseFeaturesDist(None, self._slots, self._route)

    def create_lookup(self, rows_of: ShardRows, device: torch.device) -> EmbeddingLookup:
        """Every table; in a world of 1 as any other lookup."""
        if self._ranks.world_size == 1:
            return super().create_lookup(rows_of, device)
        return ReplicatedPooledEmbeddingsLookup(self._slots.mine, rows_of, device, self._ranks, self._slots.ids_dtype)

    def create_output_dist(self) -> DpPooledEmbeddingDist:
        """My rows stay."""
        return DpPooledEmbeddingDist()


@final
class DpSequenceEmbeddingSharding(SequenceEmbeddingSharding):
    """The data-parallel tables of a collection whose rows are not pooled.

    Args:
        tables: The tables, in the collection's order.
        env: The ranks.
        codecs: As of the other types; gradients of replicas travel in float32.
    """

    def __init__(
        self, tables: Sequence[PlacedTable], env: ShardingEnv, codecs: Mapping[str, QuantizedCommCodecs]
    ) -> None:
        self._at_home = SlotSequenceEmbeddingSharding(tables, ShardingEnv.from_local(1, 0), {})
        super().__init__(tables, ShardingEnv.from_local(1, 0), codecs)
        self._ranks = env

    def _find_route(self) -> Route:
        return Route.to_whole_rows(self._slots)

    def output_keys(self) -> list[str]:
        """Names of the results, table by table."""
        return self._at_home.output_keys()

    def create_input_dist(self) -> SparseFeaturesDist:
        """My ids stay."""
        return self._at_home.create_input_dist()

    def create_lookup(self, rows_of: ShardRows, device: torch.device) -> EmbeddingLookup:
        """Every table; in a world of 1 as any other lookup."""
        if self._ranks.world_size == 1:
            return self._at_home.create_lookup(rows_of, device)
        return ReplicatedEmbeddingsLookup(self._slots.mine, rows_of, device, self._ranks, self._slots.ids_dtype)

    def create_output_dist(self) -> SequenceEmbeddingDist:
        """My rows stay."""
        return self._at_home.create_output_dist()

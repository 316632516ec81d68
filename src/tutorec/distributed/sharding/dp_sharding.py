"""Data-parallel sharding (DP): every rank holds a replica of every table.

::

    local samples, all features  KJT [F x B]
      | input_dist    none
      | lookup        pool rows of the local replicas   forward:  no communication
      |                                                 backward: batches and gradients to all ranks
      | output_dist   none
    local samples, all columns   [B, D]

    the replicas of two ranks            the bag [0, 3] of rank 0, with the gradient g of its sum

        rank 0   rows 0, 1, 2, 3         both ranks receive ids 0, 3 and g
        rank 1   rows 0, 1, 2, 3         both ranks update rows 0 and 3 of their replica with g / 2

Backward sends the batch with the gradients of its pooled rows or, if that is fewer bytes, the
gradient of the whole table; `collectives.sparse_gradients` has the formula. Every rank then applies
the update of all ranks' samples.

Use it for small tables, and for tables that every sample reads: every rank stores all their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch

from tutorec.awaitable import Awaitable, NoWait
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.initial_rows import InitialRows
from tutorec.distributed.core.orders import OutputColumns
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.tables import Table
from tutorec.distributed.lookup.data_parallel import (
    ReplicatedEmbeddingsLookup,
    ReplicatedPooledEmbeddingsLookup,
)
from tutorec.distributed.lookup.grouped import EmbeddingLookup
from tutorec.distributed.sharding.base import (
    EmbeddingShardingContext,
    PooledEmbeddingDist,
    PooledEmbeddingSharding,
    Route,
    SparseFeaturesDist,
)
from tutorec.distributed.sharding.sequence_sharding import (
    SequenceEmbeddingDist,
    SequenceEmbeddingSharding,
    SlotSequenceEmbeddingSharding,
)
from tutorec.distributed.sharding.tw_sharding import TwSparseFeaturesDist


class DpPooledEmbeddingDist(PooledEmbeddingDist):
    """Output dist without an exchange: the pooled rows are those of the local samples."""

    def build(self) -> None:
        """Do nothing."""

    def forward(
        self, pooled: torch.Tensor, ctx: EmbeddingShardingContext
    ) -> Awaitable[torch.Tensor]:
        """Return ``pooled``."""
        return NoWait(pooled)


@final
class DpPooledEmbeddingSharding(PooledEmbeddingSharding):
    """The data-parallel tables of a collection of pooled embeddings: one replica per rank.

    Args:
        tables: The tables, in the collection's order.
        env: The ranks.
        codecs: Has no effect: gradients of replicas are sent in float32.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        env: ShardingEnv,
        codecs: Mapping[str, QuantizedCommCodecs],
    ) -> None:
        # In forward, every rank acts as a world of 1.
        super().__init__(tables, ShardingEnv.from_local(1, 0), codecs)
        self._ranks = env

    def _find_route(self) -> Route:
        return Route.to_whole_rows(self._slots)

    def output_columns(self) -> list[OutputColumns]:
        """One shard per output: replicas have all columns."""
        return [slot.output() for slot in self._slots.per_rank[0]]

    def output_features(self) -> list[int]:
        """For each output, its position in ``feature_names()``."""
        return self._route.order

    def create_input_dist(self) -> TwSparseFeaturesDist:
        """Input dist without an exchange."""
        return TwSparseFeaturesDist(None, self._slots, self._route)

    def create_lookup(self, initial_rows: InitialRows, device: torch.device) -> EmbeddingLookup:
        """Build the lookup of every table; in a world of 1, the same as for any other type."""
        if self._ranks.world_size == 1:
            return super().create_lookup(initial_rows, device)
        return ReplicatedPooledEmbeddingsLookup(
            self._slots.local_groups, initial_rows, device, self._ranks, self._slots.ids_dtype
        )

    def create_output_dist(self) -> DpPooledEmbeddingDist:
        """Output dist without an exchange."""
        return DpPooledEmbeddingDist()


@final
class DpSequenceEmbeddingSharding(SequenceEmbeddingSharding):
    """The data-parallel tables of a collection of unpooled embeddings.

    Args:
        tables: The tables, in the collection's order.
        env: The ranks.
        codecs: Has no effect: gradients of replicas are sent in float32.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        env: ShardingEnv,
        codecs: Mapping[str, QuantizedCommCodecs],
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
        """Input dist without an exchange."""
        return self._at_home.create_input_dist()

    def create_lookup(self, initial_rows: InitialRows, device: torch.device) -> EmbeddingLookup:
        """Build the lookup of every table; in a world of 1, the same as for any other type."""
        if self._ranks.world_size == 1:
            return self._at_home.create_lookup(initial_rows, device)
        return ReplicatedEmbeddingsLookup(
            self._slots.local_groups, initial_rows, device, self._ranks, self._slots.ids_dtype
        )

    def create_output_dist(self) -> SequenceEmbeddingDist:
        """Output dist without an exchange."""
        return self._at_home.create_output_dist()

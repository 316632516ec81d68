"""The contract of a sharding type: where ids are sent, who looks them up, and how results return.

::

    local samples | input_dist | all samples | lookup | all samples | output_dist | local samples

Every type is one final class in a file of this package; no type inherits from another. A type
decides which *slots* (`slots`) each rank has, how ids reach them, and how pooled rows return.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.kjt import KJTAllToAll, KJTArrival
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.orders import ColumnPiece
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.tables import PlacedTable
from tutorec.distributed.lookup.grouped import (
    EmbeddingLookup,
    GroupedPooledEmbeddingsLookup,
    ShardRows,
)
from tutorec.distributed.sharding.slots import PlacedSlots, Route
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


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
        self._dist.number, self._dist.title = number, title

    def send_status(self, status: int) -> Awaitable[Any]:
        """Take part in the exchange without a batch, see `KJTAllToAll.send_status`."""
        return self._dist.send_status(status)

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
        the columns of its samples; the output has, for each output piece, those of the local
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
        tables: Sequence[PlacedTable],
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
    def create_lookup(self, rows_of: ShardRows, device: torch.device) -> EmbeddingLookup:
        """Build the lookup of this rank's shards, whose rows are written by ``rows_of``."""

    @abstractmethod
    def create_output_dist(self) -> Any:
        """Build the output dist."""


class PooledEmbeddingSharding(EmbeddingSharding):
    """A sharding whose lookups pool bags."""

    def create_lookup(self, rows_of: ShardRows, device: torch.device) -> EmbeddingLookup:
        """Build the lookup of this rank's shards, whose rows are written by ``rows_of``."""
        return GroupedPooledEmbeddingsLookup(self._slots.mine, rows_of, device)

    @abstractmethod
    def output_pieces(self) -> Sequence[ColumnPiece]:
        """Column shards in the order in which ``output_dist`` returns them."""

    @abstractmethod
    def output_features(self) -> Sequence[int]:
        """For each of these column shards, its position in ``feature_names()``."""

    @abstractmethod
    def create_output_dist(self) -> PooledEmbeddingDist:
        """Build the output dist."""

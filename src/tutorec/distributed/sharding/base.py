"""What a sharding type answers: where each feature goes, who looks it up, and how results come home.

    my samples, every feature  | input_dist |  my features, every sample  | lookup |  | output_dist |  my samples

A type is one final class in one file beside this one, and no type is another's parent. What a type decides is which
*slots* a rank has (`slots`), how ids find them and how pooled rows come home.
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
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.layout import ColumnPiece
from tutorec.distributed.lookup.grouped import EmbeddingLookup, GroupedPooledEmbeddingsLookup, ShardRows
from tutorec.distributed.qcomm import QuantizedCommCodecs
from tutorec.distributed.sharding.slots import PlacedSlots, Route
from tutorec.distributed.tables import PlacedTable
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


@dataclass
class EmbeddingShardingContext:
    """What the way home must know of the way in: one sharding, one batch.

    Args:
        batch_size_per_rank: B of each rank, whose samples have arrived here.
        batch_size_per_rank_per_feature: Of a variable batch: samples of each slot of mine, ``[W][slots]``.
        batch_size_per_feature_pre_a2a: My samples of each feature, in ``feature_names()`` order.
        factors: Of rows that are split: for each feature what its pooled bags are multiplied by at home, ``[B]`` each,
            None for 1; None where no feature has any.
        places: Of split rows that come home one by one: where each of my ids stood among those that I sent.

    Source:
        TorchRec's ``torchrec.distributed.embedding_sharding.EmbeddingShardingContext``.
    """

    batch_size_per_rank: list[int] = field(default_factory=list)
    batch_size_per_rank_per_feature: list[list[int]] | None = None
    batch_size_per_feature_pre_a2a: list[int] = field(default_factory=list)
    factors: list[torch.Tensor | None] | None = None
    places: torch.Tensor | None = None


class SparseFeaturesDist(nn.Module, ABC):
    """The way in: ids to the ranks that hold their rows."""

    # The exchange; its number and title let ranks see that they mean the same one.
    _dist: KJTAllToAll

    def identify(self, number: int, title: str) -> None:
        """Say which exchange this is: a number that is the same on every rank, and words for messages."""
        self._dist.number, self._dist.title = number, title

    def send_status(self, status: int) -> Awaitable[Any]:
        """Take part without a batch: see `KJTAllToAll.send_status`."""
        return self._dist.send_status(status)

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor, ctx: EmbeddingShardingContext) -> Awaitable[KJTArrival]:
        """My samples, ``feature_names()`` -> promise of a promise: sizes first, then ids of my slots."""


class PooledEmbeddingDist(nn.Module, ABC):
    """The way home: pooled rows to the ranks of their samples."""

    @abstractmethod
    def build(self) -> None:
        """Make the exchange, at the first batch: a sharded module that is only looked at needs no process group."""

    @abstractmethod
    def forward(self, pooled: torch.Tensor, ctx: EmbeddingShardingContext) -> Awaitable[torch.Tensor]:
        """``[every sample, my columns]`` -> promise of ``[my samples, columns of this sharding]``.

        With a variable batch both are flat: for each rank (here: none, mine) and each slot (each output piece) its
        samples' columns.
        """


class EmbeddingSharding(ABC):
    """All tables of a collection that are sharded in one way.

    Args:
        tables: They, in the collection's order.
        env: The ranks.
        codecs: Name of a move -> what rows travel as in it; float32 where it has none.

    Source:
        TorchRec's ``torchrec.distributed.embedding_sharding.EmbeddingSharding``.
    """

    def __init__(
        self, tables: Sequence[PlacedTable], env: ShardingEnv, codecs: Mapping[str, QuantizedCommCodecs]
    ) -> None:
        self._slots = PlacedSlots(tables, env)
        self._codecs = codecs
        self._route = self._find_route()

    @abstractmethod
    def _find_route(self) -> Route:
        """How ids find the slots."""

    def feature_names(self) -> list[str]:
        """Features in the order in which ``input_dist`` wants them; a name may stand here twice."""
        return self._route.features

    @abstractmethod
    def create_input_dist(self) -> SparseFeaturesDist:
        """The way in."""

    @abstractmethod
    def create_lookup(self, rows_of: ShardRows, device: torch.device) -> EmbeddingLookup:
        """This rank's shards, filled by ``rows_of``."""

    @abstractmethod
    def create_output_dist(self) -> Any:
        """The way home."""


class PooledEmbeddingSharding(EmbeddingSharding):
    """A sharding whose lookups pool bags."""

    def create_lookup(self, rows_of: ShardRows, device: torch.device) -> EmbeddingLookup:
        """This rank's shards, filled by ``rows_of``."""
        return GroupedPooledEmbeddingsLookup(self._slots.mine, rows_of, device)

    @abstractmethod
    def output_pieces(self) -> Sequence[ColumnPiece]:
        """What ``output_dist`` delivers, in that order."""

    @abstractmethod
    def output_features(self) -> Sequence[int]:
        """For each of these pieces which of ``feature_names()`` it comes from."""

    @abstractmethod
    def create_output_dist(self) -> PooledEmbeddingDist:
        """The way home."""

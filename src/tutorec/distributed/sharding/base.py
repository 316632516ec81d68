"""What a sharding type answers: where each feature goes, who looks it up, and how results come home.

    my samples, every feature  | input_dist |  my features, every sample  | lookup |  | output_dist |  my samples

A type is one final class in one file beside this one; types share functions, not parents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from tutorec.awaitable import Awaitable
from tutorec.distributed.lookup.grouped import GroupedPooledEmbeddingsLookup
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


class FeatureArrival(Protocol):
    """Features on their way to the ranks that look them up, of which the sizes are known."""

    # B of each rank whose samples arrive: what the way home needs.
    batch_size_per_rank: list[int]

    def wait(self) -> KeyedJaggedTensor:
        """Every sample, my features."""
        ...


class SparseFeaturesDist(nn.Module, ABC):
    """The way in: ids to the ranks that hold their rows."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> Awaitable[FeatureArrival]:
        """My samples, the features of this sharding -> promise of a promise: sizes first, then ids."""


class PooledEmbeddingDist(nn.Module, ABC):
    """The way home: pooled rows to the ranks of their samples."""

    @abstractmethod
    def build(self) -> None:
        """Make the exchange, at the first batch: a sharded module that is only looked at needs no process group."""

    @abstractmethod
    def forward(self, pooled: torch.Tensor, batch_size_per_rank: Sequence[int]) -> Awaitable[torch.Tensor]:
        """``[every sample, my columns]`` -> promise of ``[my samples, columns of this sharding]``."""


class PooledEmbeddingSharding(ABC):
    """All tables of a collection that are sharded in one way.

    Source:
        TorchRec's ``torchrec.distributed.embedding_sharding.EmbeddingSharding``.
    """

    @abstractmethod
    def feature_names(self) -> list[str]:
        """Features in the order in which ``input_dist`` wants them; one that two tables read stands here twice."""

    @abstractmethod
    def output_keys(self) -> list[str]:
        """Output keys in the order in which ``output_dist`` delivers their columns."""

    @abstractmethod
    def output_columns(self) -> list[int]:
        """D of each output key."""

    @abstractmethod
    def create_input_dist(self) -> SparseFeaturesDist:
        """The way in."""

    @abstractmethod
    def create_lookup(self, weights: Mapping[str, torch.Tensor], device: torch.device) -> GroupedPooledEmbeddingsLookup:
        """This rank's tables, filled with ``weights`` (table name -> rows of this rank's shard)."""

    @abstractmethod
    def create_output_dist(self) -> PooledEmbeddingDist:
        """The way home."""

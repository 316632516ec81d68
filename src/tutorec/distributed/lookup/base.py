"""What every lookup answers: its rows by name, and what updates them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tutorec._kernels.tbe import FirstRows
from tutorec.distributed.grouping import TableGroup
from tutorec.distributed.tables import TableShard
from tutorec.optim.fused import EmbeddingFusedOptimizer

# Writes the initial rows of a shard where they are to lie: a part of the unsharded table, or newly drawn.
ShardRows = Callable[[TableShard, torch.Tensor], None]


class EmbeddingLookup(nn.Module, ABC):
    """This rank's shards of one sharding: rows out of them forward, gradients into them backward."""

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(``table.weight``, its rows as a parameter); ``table.weight_1`` ... for further pieces of the table here."""

    @abstractmethod
    def fused_optimizers(self) -> list[EmbeddingFusedOptimizer]:
        """Those that update rows during backward."""

    def prefetch(self, ids: Any) -> None:
        """Bring rows of a coming batch, the argument of its ``forward``, into memory; without a cache nothing."""

    @abstractmethod
    def rebind(self) -> None:
        """Point parameters at the operators' memory again, after it has moved."""


def first_rows(group: TableGroup, rows_of: ShardRows) -> FirstRows:
    """``rows_of`` by the number of a shard in its group, as operators ask for rows."""
    return lambda number, rows: rows_of(group.shards[number], rows)

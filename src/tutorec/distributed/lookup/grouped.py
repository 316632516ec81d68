"""The lookup of one rank: one table-batched operator for each group of its tables."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from tutorec.distributed.grouped_configs import GroupedEmbeddingConfig, grouped_config
from tutorec.distributed.grouping import TableGroup
from tutorec.distributed.lookup.base import EmbeddingLookup, ShardRows, first_rows
from tutorec.distributed.lookup.dense import BatchedDenseEmbeddingBag
from tutorec.distributed.lookup.fused import BatchedFusedEmbeddingBag
from tutorec.distributed.lookup.variable import flatten_by_rank, pad_bags
from tutorec.distributed.plan import EmbeddingComputeKernel
from tutorec.optim.fused import EmbeddingFusedOptimizer
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_KERNELS: dict[EmbeddingComputeKernel, type[BatchedFusedEmbeddingBag] | type[BatchedDenseEmbeddingBag]] = {
    EmbeddingComputeKernel.FUSED: BatchedFusedEmbeddingBag,
    EmbeddingComputeKernel.FUSED_UVM: BatchedFusedEmbeddingBag,
    EmbeddingComputeKernel.FUSED_UVM_CACHING: BatchedFusedEmbeddingBag,
    EmbeddingComputeKernel.DENSE: BatchedDenseEmbeddingBag,
}
SUPPORTED_KERNELS = tuple(_KERNELS)
_CACHING = EmbeddingComputeKernel.FUSED_UVM_CACHING
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # of a group: ids [N], offsets [F*B+1], weights [N]


class GroupedLookup(EmbeddingLookup):
    """One operator for each group of this rank's tables; a subclass divides what arrives among them."""

    _emb_modules: nn.ModuleList
    _groups: Sequence[TableGroup]

    @property
    def grouped_configs(self) -> list[GroupedEmbeddingConfig]:
        """What each group holds, in TorchRec's words."""
        weights = (next(bags.named_weights())[1] for bags in self._bags())
        return [grouped_config(group, weight.device) for group, weight in zip(self._groups, weights, strict=True)]

    @abstractmethod
    def _batches(self, ids: Any) -> list[Batch]:
        """What arrives -> the batch of each group."""

    def prefetch(self, ids: Any) -> None:
        """Bring rows of a coming batch into memory, where a group has a cache."""
        cached = [group for group, bags in enumerate(self._bags()) if bags.kernel is _CACHING]
        if cached:
            batches = self._batches(ids)
            for group in cached:
                values, offsets, _ = batches[group]
                cast(BatchedFusedEmbeddingBag, self._emb_modules[group]).prefetch(values, offsets)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(``table.weight``, its rows as a parameter), group after group."""
        for bags in self._bags():
            yield from bags.named_weights()

    def fused_optimizers(self) -> list[EmbeddingFusedOptimizer]:
        """One for each group that is updated during backward."""
        return [bags.fused_optimizer for bags in self._bags() if isinstance(bags, BatchedFusedEmbeddingBag)]

    def rebind(self) -> None:
        """Point parameters at the operators' memory again, after it has moved."""
        for bags in self._bags():
            bags.rebind()

    def _bags(self) -> Iterator[BatchedFusedEmbeddingBag | BatchedDenseEmbeddingBag]:
        for bags in self._emb_modules:
            assert isinstance(bags, BatchedFusedEmbeddingBag | BatchedDenseEmbeddingBag), f"unexpected {type(bags)}"
            yield bags


class GroupedPooledEmbeddingsLookup(GroupedLookup):
    """Every sample, my slots -> every sample, my columns.

    Args:
        groups: This rank's tables; none on a rank that holds none.
        rows_of: Writes the initial rows of a shard.
        device: Where the rows live.

    Source:
        TorchRec's ``GroupedPooledEmbeddingsLookup``.
    """

    def __init__(self, groups: Sequence[TableGroup], rows_of: ShardRows, device: torch.device) -> None:
        super().__init__()
        self._groups = groups
        self._splits = [len(group.features) for group in groups]
        self._columns = [columns for group in groups for columns in group.columns]
        self._emb_modules = nn.ModuleList()
        for group in groups:
            self._emb_modules.append(_KERNELS[group.kernel](group, first_rows(group, rows_of), device))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """My slots, sum of B samples, in group order -> ``[sum of B, D_mine]``.

        Of a variable batch: for each rank and each slot its samples' columns, flattened.
        """
        if not self._splits:
            return torch.empty(features.stride(), 0, dtype=torch.float32, device=features.device())
        if features.variable_stride_per_key():
            return flatten_by_rank(self.forward(pad_bags(features)), features, self._columns)
        if torch.is_inference_mode_enabled():
            # fbgemm registers its training operators for autograd only, which inference mode leaves out.
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(features)
        batches = self._batches(features)
        pooled = [bags(*batch) for bags, batch in zip(self._emb_modules, batches, strict=True)]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)

    def _batches(self, ids: KeyedJaggedTensor) -> list[Batch]:
        """The slots of each group."""
        features = pad_bags(ids) if ids.variable_stride_per_key() else ids
        parts = [features] if len(self._splits) == 1 else features.split(self._splits)
        return [(part.values(), part.offsets(), part.weights_or_none()) for part in parts]

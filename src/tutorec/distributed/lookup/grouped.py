"""The lookup of one rank: one table-batched operator per group of tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from tutorec._kernels.specs import FirstRows, GroupSpec
from tutorec._kernels.tbe_build import build_table_batch
from tutorec.distributed.core.grouped_configs import GroupedEmbeddingConfig, grouped_config
from tutorec.distributed.core.initial_rows import InitialRows
from tutorec.distributed.core.tables import TableGroup
from tutorec.distributed.lookup.variable_batch import flatten_by_rank, pad_bags
from tutorec.distributed.plan.plan import EmbeddingComputeKernel
from tutorec.optim.fused import EmbeddingFusedOptimizer, FusedOptimizerModule
from tutorec.optim.in_backward import InBackwardParameter
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


class EmbeddingLookup(nn.Module, ABC):
    """Base of lookups in this rank's shards of one sharding."""

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(``table.weight``, parameter); further shards of a table are ``table.weight_1`` etc."""

    @abstractmethod
    def fused_optimizers(self) -> list[EmbeddingFusedOptimizer]:
        """The optimizers that update rows during backward."""

    def prefetch(self, ids: Any) -> None:
        """Prefetch the rows of a coming batch; no effect without a cache."""

    @abstractmethod
    def rebind(self) -> None:
        """Update parameters after the operators' memory has moved."""


class BatchedEmbeddingBag(nn.Module):
    """The pooled lookup of one group.

    Args:
        group: The shards.
        weights: Initial rows ``[R, D]`` of each shard, or a function that writes them.
        device: Device of the rows.
        spec: The operator's tables and features; by default the group's features, each once.
    """

    def __init__(
        self,
        group: TableGroup,
        weights: FirstRows,
        device: torch.device,
        spec: GroupSpec | None = None,
    ) -> None:
        super().__init__()
        self._group = group
        self._emb_module = build_table_batch(
            spec or group.spec(),
            optimizer=group.optimizer,
            device=device,
            weights=weights,
            cache=group.cache,
            virtual=group.virtual,
        )

    def forward(
        self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """``values [N]``, ``offsets [F * B + 1]``, ``weights [N]`` -> pooled ``[B, D]``."""
        return self._emb_module(values, offsets, weights)

    @property
    def kernel(self) -> EmbeddingComputeKernel:
        """The compute kernel of the group."""
        return self._group.kernel

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(``table.weight``, parameter), in group order."""
        yield from zip(self._group.parameter_names, self._parameters_of_tables(), strict=True)

    def _parameters_of_tables(self) -> list[nn.Parameter]:
        return cast(list[nn.Parameter], self._emb_module.table_weights())

    def rebind(self) -> None:
        """Update parameters after the operator's memory has moved."""


class BatchedDenseEmbeddingBag(BatchedEmbeddingBag):
    """Pooled lookup of a group without fused optimizer; backward fills a dense ``.grad``."""


class BatchedFusedEmbeddingBag(BatchedEmbeddingBag, FusedOptimizerModule):
    """Pooled lookup of a group with a fused optimizer, which backward applies.

    Args:
        group: The shards, all with one optimizer.
        weights: Initial rows ``[R, D]`` of each shard, or a function that writes them.
        device: Device of the rows.
        spec: The operator's tables and features; by default the group's features, each once.
        path: Path of the tables in the collection, for the optimizer's names.
    """

    def __init__(
        self,
        group: TableGroup,
        weights: FirstRows,
        device: torch.device,
        spec: GroupSpec | None = None,
        path: str = "embedding_bags",
    ) -> None:
        super().__init__(group, weights, device, spec)

        # Views of the operator's rows: writing to a parameter changes the rows.
        self._weights = [InBackwardParameter(rows) for rows in self._emb_module.table_weights()]
        names = [f"{path}.{name}" for name in group.parameter_names]
        self._optimizer = EmbeddingFusedOptimizer(self._emb_module, names, self._weights)
        for parameter in self._weights:
            parameter._in_backward_optimizers = [self._optimizer]  # pyright: ignore[reportAttributeAccessIssue]

    def forward(
        self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """``values [N]``, ``offsets [F * B + 1]``, ``weights [N]`` -> pooled ``[B, D]``."""
        self._optimizer.check_parameters()
        self._optimizer.apply_learning_rate()
        return self._optimizer.passes.watch(self._emb_module(values, offsets, weights))

    def prefetch(self, values: torch.Tensor, offsets: torch.Tensor) -> None:
        """Prefetch rows of a coming batch, the ids and offsets of its ``forward``."""
        self._emb_module.prefetch(values, offsets)

    @property
    def fused_optimizer(self) -> EmbeddingFusedOptimizer:
        """The optimizer that backward applies."""
        return self._optimizer

    def _parameters_of_tables(self) -> list[nn.Parameter]:
        return list[nn.Parameter](self._weights)

    def rebind(self) -> None:
        """Update parameters and optimizer after the operator's memory has moved."""
        for parameter, rows in zip(self._weights, self._emb_module.table_weights(), strict=True):
            parameter.data = rows
        self._optimizer.rebind()


_CACHING = EmbeddingComputeKernel.FUSED_UVM_CACHING
# of a group: ids [N], offsets [F*B+1], weights [N]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class GroupedLookup(EmbeddingLookup):
    """Base of lookups with one operator per group; a subclass splits the input among the groups."""

    _emb_modules: nn.ModuleList
    _groups: Sequence[TableGroup]

    @property
    def grouped_configs(self) -> list[GroupedEmbeddingConfig]:
        """TorchRec's description of each group."""
        weights = (next(bags.named_weights())[1] for bags in self._bags())
        return [
            grouped_config(group, weight.device)
            for group, weight in zip(self._groups, weights, strict=True)
        ]

    @abstractmethod
    def _batches(self, ids: Any) -> list[Batch]:
        """The batch of each group, from the input of ``forward``."""

    def prefetch(self, ids: Any) -> None:
        """Prefetch rows of a coming batch, for groups with a cache."""
        cached = [group for group, bags in enumerate(self._bags()) if bags.kernel is _CACHING]
        if cached:
            batches = self._batches(ids)
            for group in cached:
                values, offsets, _ = batches[group]
                cast(BatchedFusedEmbeddingBag, self._emb_modules[group]).prefetch(values, offsets)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(``table.weight``, parameter), group after group."""
        for bags in self._bags():
            yield from bags.named_weights()

    def fused_optimizers(self) -> list[EmbeddingFusedOptimizer]:
        """One optimizer per group that is updated during backward."""
        return [
            bags.fused_optimizer
            for bags in self._bags()
            if isinstance(bags, BatchedFusedEmbeddingBag)
        ]

    def rebind(self) -> None:
        """Update parameters after the operators' memory has moved."""
        for bags in self._bags():
            bags.rebind()

    def _bags(self) -> Iterator[BatchedEmbeddingBag]:
        for bags in self._emb_modules:
            assert isinstance(bags, BatchedEmbeddingBag), f"unexpected {type(bags)}"
            yield bags


class GroupedPooledEmbeddingsLookup(GroupedLookup):
    """All samples, local slots -> all samples, local columns.

    Args:
        groups: This rank's tables; empty on a rank without tables.
        initial_rows: Writes the initial rows of each shard.
        device: Device of the rows.

    Source:
        TorchRec's ``GroupedPooledEmbeddingsLookup``.
    """

    def __init__(
        self, groups: Sequence[TableGroup], initial_rows: InitialRows, device: torch.device
    ) -> None:
        super().__init__()
        self._groups = groups
        self._splits = [len(group.features) for group in groups]
        self._columns = [columns for group in groups for columns in group.columns]

        self._emb_modules = nn.ModuleList()
        for group in groups:
            dense = group.kernel is EmbeddingComputeKernel.DENSE
            lookup = BatchedDenseEmbeddingBag if dense else BatchedFusedEmbeddingBag
            weights = partial(initial_rows.write, group)
            self._emb_modules.append(lookup(group, weights, device))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Local slots, sum of B samples, in group order -> ``[sum of B, D_local]``.

        A variable batch is flat: for each rank and each slot, the columns of its samples.
        """
        if not self._splits:
            return torch.empty(features.stride(), 0, dtype=torch.float32, device=features.device())

        if features.variable_stride_per_key():
            return flatten_by_rank(self.forward(pad_bags(features)), features, self._columns)
        if torch.is_inference_mode_enabled():
            # fbgemm registers its training operators for autograd only, which inference mode
            # disables.
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(features)

        # One call per group: its slots are consecutive columns of the result.
        batches = self._batches(features)
        pooled = [bags(*batch) for bags, batch in zip(self._emb_modules, batches, strict=True)]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)

    def _batches(self, ids: KeyedJaggedTensor) -> list[Batch]:
        """The slots of each group."""
        features = pad_bags(ids) if ids.variable_stride_per_key() else ids
        batches = [features] if len(self._splits) == 1 else features.split(self._splits)
        return [(batch.values(), batch.offsets(), batch.weights_or_none()) for batch in batches]

"""Tables of one group whose rows are updated during backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from tutorec._kernels.tbe import FirstRows, GroupSpec
from tutorec._kernels.tbe_build import build_table_batch
from tutorec.distributed.grouping import TableGroup
from tutorec.distributed.plan import EmbeddingComputeKernel
from tutorec.optim.fused import EmbeddingFusedOptimizer, FusedOptimizerModule


class BatchedFusedEmbeddingBag(nn.Module, FusedOptimizerModule):
    """Bags of one group, looked up in one call; backward applies the optimizer and leaves no gradient.

    Args:
        group: The shards, all of one optimizer.
        weights: Initial rows ``[R, D]`` of each shard, or what writes them.
        device: Where the rows live.
        spec: What the operator looks up; the group's features, each once, by default.
        path: Where the tables stand in the collection, for the optimizer's names.
    """

    def __init__(
        self,
        group: TableGroup,
        weights: FirstRows,
        device: torch.device,
        spec: GroupSpec | None = None,
        path: str = "embedding_bags",
    ) -> None:
        super().__init__()
        self._group = group
        assert group.optimizer is not None, "a fused group has an optimizer"
        self._emb_module = build_table_batch(
            spec or group.spec(), optimizer=group.optimizer, device=device, weights=weights, cache=group.cache
        )
        # Views of the operator's rows: writing into a parameter moves the rows.
        self._weights = [nn.Parameter(rows) for rows in self._emb_module.table_weights()]
        names = [f"{path}.{name}" for name in group.parameter_names]
        self._optimizer = EmbeddingFusedOptimizer(self._emb_module, names, self._weights)
        for parameter in self._weights:
            parameter._in_backward_optimizers = [self._optimizer]  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """``values [N]``, ``offsets [F * B + 1]``, ``weights [N]`` -> pooled ``[B, D]``."""
        self._optimizer.check_parameters()
        self._optimizer.apply_learning_rate()
        return self._emb_module(values, offsets, weights)

    def prefetch(self, values: torch.Tensor, offsets: torch.Tensor) -> None:
        """Bring rows of a coming batch, ids and offsets of its ``forward``, into memory; without a cache nothing."""
        self._emb_module.prefetch(values, offsets)

    @property
    def fused_optimizer(self) -> EmbeddingFusedOptimizer:
        """What backward applies."""
        return self._optimizer

    @property
    def kernel(self) -> EmbeddingComputeKernel:
        """How the rows are kept."""
        return self._group.kernel

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(``table.weight``, its rows as a parameter), in group order."""
        yield from zip(self._group.parameter_names, self._weights, strict=True)

    def rebind(self) -> None:
        """Point parameters and optimizer at the operator's memory again, after it has moved."""
        for parameter, rows in zip(self._weights, self._emb_module.table_weights(), strict=True):
            parameter.data = rows
        self._optimizer.rebind()

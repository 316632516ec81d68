"""Tables of one group whose gradients are kept, to be looked at or to be applied by an optimizer of the caller's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from tutorec._kernels.tbe import FirstRows, GroupSpec
from tutorec._kernels.tbe_build import build_table_batch
from tutorec.distributed.grouping import TableGroup
from tutorec.distributed.plan import EmbeddingComputeKernel


class BatchedDenseEmbeddingBag(nn.Module):
    """Bags of one group, looked up in one call; backward fills ``.grad`` with a gradient as large as the table.

    Args:
        group: The shards, without an optimizer.
        weights: Initial rows ``[R, D]`` of each shard, or what writes them.
        device: Where the rows live.
        spec: What the operator looks up; the group's features, each once, by default.
    """

    def __init__(
        self,
        group: TableGroup,
        weights: FirstRows,
        device: torch.device,
        spec: GroupSpec | None = None,
    ) -> None:
        super().__init__()
        assert group.optimizer is None, "a dense group has no optimizer: its gradients are the caller's"
        self._group = group
        self._emb_module = build_table_batch(spec or group.spec(), optimizer=None, device=device, weights=weights)

    def forward(self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """``values [N]``, ``offsets [F * B + 1]``, ``weights [N]`` -> pooled ``[B, D]``."""
        return self._emb_module(values, offsets, weights)

    @property
    def kernel(self) -> EmbeddingComputeKernel:
        """How the rows are kept."""
        return self._group.kernel

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(``table.weight``, its rows as a parameter), in group order."""
        for name, rows in zip(self._group.parameter_names, self._emb_module.table_weights(), strict=True):
            assert isinstance(rows, nn.Parameter), (
                "a dense operator's rows are parameters: backward gives them gradients"
            )
            yield name, rows

    def rebind(self) -> None:
        """Nothing: the parameters are the operator's own and move with it."""

"""Rows by index, whose gradients are summed in float32; TorchRec has it since 1.9.2."""

import torch
from torch import Tensor

__all__ = ["maybe_sorted_index_select", "sorted_index_select"]


def sorted_index_select(embeddings: Tensor, reverse_indices: Tensor) -> Tensor:
    """Rows by index; the gradients of rows of half precision are summed in float32.

    The result is that of ``embeddings.index_select(0, reverse_indices)``.

    Args:
        embeddings: Rows [U, D].
        reverse_indices: Which row each of N ids takes, [N].

    Returns:
        [N, D], of the rows' type.

    Example:
        >>> rows = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
        >>> sorted_index_select(rows, torch.zeros(1000, dtype=torch.long)).sum().backward()
        >>> rows.grad.item()
        1000.0

    Source:
        TorchRec's ``torchrec.modules.sorted_index_select``, which sums sorted rows by Triton.
    """
    wide = torch.promote_types(embeddings.dtype, torch.float32)
    return embeddings.to(wide).index_select(0, reverse_indices).to(embeddings.dtype)


def maybe_sorted_index_select(embeddings: Tensor, indices: Tensor, use_sorted: bool) -> Tensor:
    """`sorted_index_select`, or torch's own ``index_select`` where ``use_sorted`` is False."""
    if use_sorted:
        return sorted_index_select(embeddings, indices)
    return embeddings.index_select(0, indices)

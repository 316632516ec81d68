"""Poolings as weighted sums: the factor of each id's row that makes a bag's sum its pooling.

Kernels sum and average. ``sqrtn`` divides a bag's sum by the root of its number of ids, which keeps
the variance of the result independent of that number; it and the weighted mean reach the kernels as
weights of a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bag_weights"]


def bag_weights(
    pooling: str, offsets: Tensor, weights: Tensor | None, count: int | None = None
) -> Tensor | None:
    """Weight of each id with which a kernel's plain sum (or unweighted mean) gives the pooling.

    Of a bag of n ids, with the weights w where there are any, id i gets:

    =================  ========================================================================
    ``sum``, ``none``  ``w[i]``
    ``mean``           ``w[i] / n``; None without weights, where the kernel divides
    ``sqrtn``          ``1 / sqrt(n)``, or ``w[i] / sqrt(sum(w**2))``; 0 if all weights are 0
    =================  ========================================================================

    Args:
        pooling: ``"sum"``, ``"mean"``, ``"sqrtn"`` or ``"none"``.
        offsets: Where each bag begins and the last one ends [L+1].
        weights: Weight of each id [N], or None; gradients flow through to them.
        count: N, where the caller has it: saves a sync point on a device.

    Returns:
        Weights [N], or None where the kernel needs none; float32 where they are not the caller's
        own.

    Example:
        >>> import torch
        >>> from tutorec._kernels.pooling import bag_weights
        >>> bag_weights("sqrtn", torch.tensor([0, 4, 4, 5]), None)
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 1.0000])
        >>> bag_weights("sqrtn", torch.tensor([0, 2]), torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])

    See Also:
        ``sqrtn`` of TensorFlow's ``tf.nn.safe_embedding_lookup_sparse``; TorchRec has none.
    """
    if pooling not in ("mean", "sqrtn") or (pooling == "mean" and weights is None):
        return weights

    lengths = offsets.diff()
    count = count if weights is None else weights.shape[0]
    if pooling == "mean":
        assert weights is not None, "an unweighted mean is the kernel's own"
        return weights / lengths.repeat_interleave(lengths, output_size=count)
    if weights is None:
        return lengths.float().rsqrt().repeat_interleave(lengths, output_size=count)

    weights = weights.float()
    bags = torch.arange(lengths.shape[0], device=lengths.device).repeat_interleave(
        lengths, output_size=count
    )
    if weights.is_cuda:
        # In a fixed order: copies of a table on several ranks would drift apart by what additions
        # in any order round.
        squares = torch.segment_reduce(weights.square(), "sum", lengths=lengths, unsafe=True)
    else:
        squares = weights.new_zeros([lengths.shape[0]]).index_add(0, bags, weights.square())
    empty = squares == 0
    # A root of 0 has no gradient: bags without weight are given a 1 to divide by, and their weights
    # are 0 already.
    return weights * squares.masked_fill(empty, 1.0).rsqrt().index_select(0, bags)

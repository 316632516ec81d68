"""The update of a fused lookup in plain torch: sort the rows, sum their gradients, move each row once.

No gradient of the size of the table is made, and none of the size [N, D] either: ``embedding_bag`` sums the bags'
gradients of each row directly, a slice of the rows at a time so that the sums stay in the processor's cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from tutorec._kernels.tbe import OptimizerSpec

__all__ = ["RowGroups", "apply_update", "sort_rows"]

# Bytes of summed gradients worked on at a time; measured best between 1 and 4 MiB on 2 cores with 512 KiB of L2 each.
_SLICE_BYTES = 2 << 20


@dataclass(frozen=True)
class RowGroups:
    """The ids of a batch sorted by row: which rows are touched, and by which bags.

    Attributes:
        rows: The U different rows, rising [U].
        starts: Where each row's bags begin in ``bags`` [U+1].
        bags: For each id, sorted by row, the row of the gradient that it receives [N].
        weights: The ids' weights in the same order [N], or None.
    """

    rows: Tensor
    starts: Tensor
    bags: Tensor
    weights: Tensor | None


def sort_rows(ids: Tensor, bags: Tensor | None, weights: Tensor | None, rows: int, bag_count: int) -> RowGroups:
    """Sort a batch by row.

    Args:
        ids: Row of each id [N].
        bags: Bag of each id [N]; None where every id is its own bag.
        weights: Weight of each id [N], or None.
        rows: Number of rows of the matrix.
        bag_count: Number of bags.

    Example:
        >>> import torch
        >>> from tutorec._kernels.tbe_update import sort_rows
        >>> groups = sort_rows(torch.tensor([5, 2, 5]), torch.tensor([0, 0, 1]), None, rows=9, bag_count=2)
        >>> groups.rows.tolist(), groups.starts.tolist(), groups.bags.tolist()
        ([2, 5], [0, 1, 3], [0, 0, 1])
    """
    if ids.device.type == "cpu" and weights is None and rows * max(bag_count, 1) < 2**62:
        # Row and bag packed into one number: numpy sorts plain integers several times faster than (key, index) pairs.
        packed = ids.long() * bag_count
        packed += torch.arange(ids.numel()) if bags is None else bags
        packed.numpy().sort()
        ordered = packed.div(bag_count, rounding_mode="floor")
        sorted_bags, sorted_weights = packed.sub_(ordered * bag_count), None
    else:
        ordered, places = torch.sort(ids.long(), stable=True)
        sorted_bags = places if bags is None else bags[places]
        sorted_weights = None if weights is None else weights[places]
    unique, counts = torch.unique_consecutive(ordered, return_counts=True)
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=ids.device)
    torch.cumsum(counts, 0, out=starts[1:])
    return RowGroups(unique, starts, sorted_bags, sorted_weights)


@torch.no_grad()
def apply_update(
    matrix: Tensor, momentum: Tensor, grad: Tensor, groups: RowGroups, rule: OptimizerSpec, learning_rate: float
) -> None:
    """Move every touched row once by its summed gradient.

    Args:
        matrix: Rows [R, D], changed in place.
        momentum: State [R] of row-wise Adagrad, changed in place; empty for sgd.
        grad: Gradient of each bag [bags, D].
        groups: The batch sorted by row.
        rule: The optimizer.
        learning_rate: The rate.
    """
    step = max(_SLICE_BYTES // (4 * matrix.shape[1]), 1)
    bounds = groups.starts[::step].tolist() if grad.device.type == "cpu" else [0, groups.bags.numel()]
    if grad.device.type != "cpu":
        step = groups.rows.numel()
    elif (groups.starts.numel() - 1) % step:
        bounds.append(groups.bags.numel())
    for index, (first, last) in enumerate(pairwise(bounds)):
        rows = groups.rows[index * step : (index + 1) * step]
        starts = groups.starts[index * step : index * step + rows.numel() + 1] - first
        weights = None if groups.weights is None else groups.weights[first:last]
        bags = groups.bags[first:last]
        sums = F.embedding_bag(bags, grad, starts, mode="sum", per_sample_weights=weights, include_last_offset=True)
        if rule.kind == "rowwise_adagrad":
            momentum.index_add_(0, rows, sums.square().mean(1))
            state = momentum.index_select(0, rows)
            sums *= (-learning_rate / (state.sqrt() + rule.eps)).unsqueeze(1)
        else:
            sums *= -learning_rate
        matrix.index_add_(0, rows, sums)

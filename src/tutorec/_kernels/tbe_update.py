"""The update of a fused lookup in torch: sort rows, sum gradients, update each row once.

No gradient of the size of the table is made, and none of the size [N, D] either: ``embedding_bag``
sums the bags' gradients of each row directly, a slice of the rows at a time so that the sums stay
in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tutorec._kernels.row_rules import move_rows
from tutorec._kernels.specs import UpdateStep

__all__ = ["RowGroups", "apply_update", "sort_ids", "sort_rows", "sum_rows"]

# Bytes of summed gradients worked on at a time; measured best between 1 and 4 MiB on 2 cores with
# 512 KiB of L2 each.
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


def sort_rows(ids: Tensor, bags: Tensor | None, weights: Tensor | None, rows: int) -> RowGroups:
    """Sort a batch by row.

    Args:
        ids: Row of each id [N].
        bags: Bag of each id [N]; None where every id is its own bag.
        weights: Weight of each id [N], or None.
        rows: Number of rows of the matrix.

    Example:
        >>> import torch
        >>> from tutorec._kernels.tbe_update import sort_rows
        >>> groups = sort_rows(torch.tensor([5, 2, 5]), torch.tensor([0, 0, 1]), None, rows=9)
        >>> groups.rows.tolist(), groups.starts.tolist(), groups.bags.tolist()
        ([2, 5], [0, 1, 3], [0, 0, 1])
    """
    unique, starts, positions = sort_ids(ids, rows)
    weights = None if weights is None else weights[positions]
    return RowGroups(unique, starts, positions if bags is None else bags[positions], weights)


def sort_ids(ids: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The different ids, where each one's occurrences begin, and where in ``ids`` those are.

    Args:
        ids: [N], from 0 on.
        rows: What they stay below.

    Returns:
        Rising ids [U], starts [U + 1], places [N]; the occurrences of an id keep their order.

    Example:
        >>> import torch
        >>> from tutorec._kernels.tbe_update import sort_ids
        >>> [part.tolist() for part in sort_ids(torch.tensor([5, 2, 5]), rows=9)]
        [[2, 5], [0, 1, 3], [1, 0, 2]]
    """
    count = ids.numel()
    shift = max(count - 1, 1).bit_length()
    if ids.device.type == "cpu" and count and rows.bit_length() + shift < 63:
        # Id and place packed into one number: numpy sorts plain integers several times faster than
        # (key, index) pairs.
        packed = (ids.long() << shift).add_(torch.arange(count))
        numbers = packed.numpy()
        numbers.sort()
        ordered = numbers >> shift
        numbers &= (1 << shift) - 1
        begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1], [True])))
        return torch.from_numpy(ordered[begins[:-1]]), torch.from_numpy(begins), packed

    in_order, positions = torch.sort(ids.long(), stable=True)
    unique, counts = torch.unique_consecutive(in_order, return_counts=True)
    return unique, F.pad(counts.cumsum(0), (1, 0)), positions


def sum_rows(grad: Tensor, groups: RowGroups) -> Tensor:
    """The summed gradient of each touched row: grad [bags, D] -> [U, D]."""
    weights = None if groups.weights is None else groups.weights.to(grad.dtype)
    return F.embedding_bag(
        groups.bags,
        grad,
        groups.starts,
        mode="sum",
        per_sample_weights=weights,
        include_last_offset=True,
    )


@torch.no_grad()
def apply_update(
    matrix: Tensor, states: Sequence[Tensor], grad: Tensor, groups: RowGroups, step: UpdateStep
) -> None:
    """Move every touched row once by its summed gradient.

    Args:
        matrix: Rows [R, D], changed in place.
        states: What the rule keeps, [R] or [R, D] each, changed in place; nothing for sgd.
        grad: Gradient of each bag [bags, D].
        groups: The batch sorted by row.
        step: The optimizer, its rate, and which step it is.
    """
    for chunk in _slices(groups, grad):
        move_rows(matrix, states, chunk.rows, sum_rows(grad, chunk), step)


def _slices(groups: RowGroups, grad: Tensor) -> Iterator[RowGroups]:
    """The rows in chunks whose summed gradients fit in cache; on a device all rows at once."""
    step = (
        max(_SLICE_BYTES // (4 * grad.shape[1]), 1) if grad.is_cpu else max(groups.rows.numel(), 1)
    )
    bounds = groups.starts[::step].tolist() if grad.is_cpu else [0, groups.bags.numel()]
    if grad.is_cpu and (groups.starts.numel() - 1) % step:
        bounds.append(groups.bags.numel())

    for index, (first, last) in enumerate(pairwise(bounds)):
        rows = groups.rows[index * step : (index + 1) * step]
        starts = groups.starts[index * step : index * step + rows.numel() + 1] - first
        weights = None if groups.weights is None else groups.weights[first:last]
        yield RowGroups(rows, starts, groups.bags[first:last], weights)

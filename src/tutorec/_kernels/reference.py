"""Jagged kernels in few lines of torch, which run wherever fbgemm is missing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["bucketize", "jagged_to_padded_dense", "lengths_to_offsets"]


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Offsets of bags from lengths: [L] -> [L+1], or row by row [F, L] -> [F, L+1].

    Example:
        >>> import torch
        >>> from tutorec._kernels.reference import lengths_to_offsets
        >>> lengths_to_offsets(torch.tensor([2, 0, 3])).tolist()
        [0, 2, 2, 5]
    """
    offsets = lengths.new_zeros([*lengths.shape[:-1], lengths.shape[-1] + 1])
    torch.cumsum(lengths, -1, out=offsets[..., 1:])
    return offsets


def jagged_to_padded_dense(
    values: Tensor, offsets: Tensor, max_length: int, padding: float = 0.0
) -> Tensor:
    """Rows of different length, padded: [N] or [N, D] -> [B, max_length] or [B, max_length, D].

    Rows longer than ``max_length`` are cut, shorter ones are filled with ``padding``.

    Example:
        >>> import torch
        >>> from tutorec._kernels.reference import jagged_to_padded_dense
        >>> jagged_to_padded_dense(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), 2).tolist()
        [[1, 2], [3, 0]]
    """
    lengths = offsets.diff()
    batch = lengths.numel()
    place = torch.arange(max_length, device=values.device)
    present = place < lengths.unsqueeze(1)
    source = (offsets[:-1].unsqueeze(1) + place)[present]
    dense = values.new_full((batch, max_length, *values.shape[1:]), padding)
    return dense.index_put((present,), values[source])


def bucketize(
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    segments: Sequence[int],
    bounds: Sequence[Sequence[int]],
    keep_places: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Bucketize ids by row range: lengths [S], values [N] -> [buckets * S], and three [N].

    See ``bucketize.py`` for the arguments.

    Example:
        >>> import torch
        >>> from tutorec._kernels.reference import bucketize
        >>> lengths, ids = torch.tensor([3, 1]), torch.tensor([4, 0, 2, 3])
        >>> bucketize(lengths, ids, None, [2], [[0, 3, 5]])[:2]
        (tensor([2, 0, 1, 1]), tensor([0, 2, 1, 0]))
    """
    lists, count, buckets = lengths.numel(), values.numel(), len(bounds[0]) - 1
    firsts = torch.tensor(bounds, dtype=torch.int64, device=values.device)[:, :-1]
    per_feature = torch.tensor(list(segments), device=values.device)
    feature = torch.arange(len(bounds), device=values.device).repeat_interleave(
        per_feature, output_size=lists
    )
    bag = torch.arange(lists, device=values.device).repeat_interleave(lengths, output_size=count)
    bucket = torch.zeros_like(bag)
    for later in firsts[:, 1:].unbind(1):
        bucket += values >= later[feature[bag]]
    # Of bytes a stable sort is a tenth of one of int64.
    order = (bucket.to(torch.uint8) if buckets <= 256 else bucket).argsort(stable=True)
    counts = lengths.new_zeros(buckets * lists)
    counts.index_add_(0, bucket * lists + bag, torch.ones_like(bag, dtype=lengths.dtype))
    inside = values - firsts[feature[bag], bucket].to(values.dtype)
    return (
        counts,
        inside[order],
        None if weights is None else weights[order],
        order.argsort() if keep_places else None,
    )

"""Bucketize ids by row range: what ranks that share the rows of a table send to each other.

It runs fbgemm's operator where fbgemm was chosen and plain torch elsewhere, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tutorec._kernels.backend import backend

__all__ = ["Bucketized", "bucketize"]


@dataclass(frozen=True)
class Bucketized:
    """Ids bucketized by row range: all bags of bucket 0 by feature, then all of bucket 1.

    Args:
        lengths: Ids of each bag in each bucket, ``[buckets * S]``.
        values: Ids, counted from the first row of their range, ``[N]``.
        weights: Their weights ``[N]``, or None.
        places: Where each id of the input stands now, ``[N]``, or None where that was not asked
            for.
    """

    lengths: Tensor
    values: Tensor
    weights: Tensor | None
    places: Tensor | None


def bucketize(
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    segments: Sequence[int],
    bounds: Sequence[Sequence[int]],
    keep_places: bool = False,
) -> Bucketized:
    """Deal the ids of each bag out by row range, as the ranks that share a table's rows want them.

    Inside a bag of a bucket ids keep their order. Ids are rows of their table, which is not looked
    at here: what becomes of others is not defined. No gradient flows to the weights.

    Args:
        lengths: Ids of each bag, feature after feature, ``[S]``.
        values: Ids ``[N]``, of any integer dtype that holds the bounds.
        weights: ``[N]`` or None.
        segments: Bags of each feature, together S.
        bounds: For each feature the first row of each bucket's range and the end of the last,
            ``[F][buckets + 1]``, from 0 on and never falling; a range may be empty.
        keep_places: Whether to say where each id went.

    Returns:
        The buckets.

    Example:
        >>> import torch
        >>> from tutorec._kernels.bucketize import bucketize
        >>> found = bucketize(
        ...     torch.tensor([3, 1]), torch.tensor([4, 0, 2, 3]), None, [2], [[0, 3, 5]], True
        ... )
        >>> found.lengths.tolist(), found.values.tolist(), found.places.tolist()
        ([2, 0, 1, 1], [0, 2, 1, 0], [2, 0, 1, 3])

    Source:
        fbgemm's ``block_bucketize_sparse_features``.
    """
    if not bounds:
        return Bucketized(lengths, values, weights, torch.arange(0) if keep_places else None)
    if not values.is_cpu or backend().name != "fbgemm" or is_compiling():
        return _in_torch(lengths, values, weights, segments, bounds, keep_places)

    # The operator takes equal dtypes of what it compares, and numbers of bags only where features
    # differ in them.
    dtype = values.dtype
    samples = max(segments)
    uneven = min(segments) < samples
    blocks, feature_bounds = _row_ranges(tuple(map(tuple, bounds)))

    counts, ids, moved, _, positions = torch.ops.fbgemm.block_bucketize_sparse_features(
        lengths,
        values.detach(),
        False,
        keep_places,
        blocks.to(dtype),
        len(bounds[0]) - 1,
        None if weights is None else weights.detach(),
        *((torch.tensor(segments, dtype=lengths.dtype), samples) if uneven else (None, -1)),
        None if feature_bounds is None else [row_bounds.to(dtype) for row_bounds in feature_bounds],
    )
    return Bucketized(counts, ids, moved, None if positions is None else positions.long())


def _in_torch(
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    segments: Sequence[int],
    bounds: Sequence[Sequence[int]],
    keep_places: bool,
) -> Bucketized:
    lists = lengths.numel()
    count = values.numel()
    buckets = len(bounds[0]) - 1
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
    moved = None if weights is None else weights[order]
    return Bucketized(counts, inside[order], moved, order.argsort() if keep_places else None)


@lru_cache(maxsize=64)
def _row_ranges(bounds: tuple[tuple[int, ...], ...]) -> tuple[Tensor, list[Tensor] | None]:
    """Block sizes [F] of features with equal ranges, else ones, with the bounds of the ranges."""
    table = torch.tensor(bounds)
    rows = table[:, -1:]
    block = table[:, 1:2]
    equal = torch.minimum(torch.arange(table.shape[1]) * block, rows)
    if bool((block > 0).all()) and torch.equal(equal, table):
        return block[:, 0].clone(), None
    return torch.ones(len(bounds), dtype=torch.int64), list(table)

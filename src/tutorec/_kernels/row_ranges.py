"""Ids into buckets by row range on the CPU: by fbgemm's operator, or by numpy, which takes a third of its time.

fbgemm walks over the ids twice, branching for each. By numpy nothing is divided and hardly anything branches: comparing
all ids with a range's first row, finding the places where that holds, and picking those are passes that the
processor's vector units make. Each costs something to begin with, and there is one for each range, so that few ids and
many ranges are fbgemm's. Where there is no fbgemm, one stable sort by bucket takes care of many ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutorec._kernels.backend import backend

__all__ = ["bucketize_on_cpu"]

Array = np.ndarray[Any, Any]
Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]

# Where numpy's passes are faster than fbgemm: up to so many ranges, from so many ids for each of them on.
_FEW_RANGES, _IDS_PER_RANGE = 5, 3000
# From so many ranges on, a sort takes less time than a pass for each.
_MANY_RANGES = 8


def bucketize_on_cpu(
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    segments: Sequence[int],
    bounds: Sequence[Sequence[int]],
    keep_places: bool = False,
) -> Parts:
    """`jagged.bucketize` for tensors of the CPU: lengths, values, weights and places."""
    ranges = _prepared(tuple(map(tuple, bounds)))
    ids = values.numel()
    numpy_is_faster = ranges.buckets <= _FEW_RANGES and ids >= _IDS_PER_RANGE * ranges.buckets
    if numpy_is_faster or backend().name != "fbgemm":
        return _by_numpy(lengths, values.detach(), weights, segments, ranges, keep_places)
    return _by_fbgemm(lengths, values.detach(), weights, segments, ranges, keep_places)


@dataclass(frozen=True)
class _Ranges:
    """The row ranges of all features, in the forms in which they are read.

    Args:
        table: Their bounds, ``[F, buckets + 1]``.
        blocks: Rows of a range ``[F]`` where all ranges of a feature are equal but the last ones, else None.
        as_tensors: The bounds of each feature.
    """

    table: Array
    blocks: Tensor | None
    as_tensors: list[Tensor]

    @property
    def buckets(self) -> int:
        """Ranges of a feature."""
        return self.table.shape[1] - 1


@lru_cache(maxsize=64)
def _prepared(bounds: tuple[tuple[int, ...], ...]) -> _Ranges:
    table = np.array(bounds, dtype=np.int64)
    rows, block = table[:, -1:], table[:, 1:2]
    equal = np.minimum(np.arange(table.shape[1]) * block, rows)
    blocks = torch.from_numpy(block[:, 0].copy()) if (equal == table).all() and (block > 0).all() else None
    return _Ranges(table, blocks, list(torch.from_numpy(table)))


def _by_fbgemm(
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    segments: Sequence[int],
    ranges: _Ranges,
    keep_places: bool,
) -> Parts:
    # The operator wants equal dtypes of what it compares, and numbers of bags only where features differ in them.
    dtype = values.dtype
    samples = max(segments)
    uneven = min(segments) < samples
    blocks = ranges.blocks
    if blocks is None:
        blocks = torch.ones(len(segments), dtype=dtype)
        bounds = [of_feature.to(dtype) for of_feature in ranges.as_tensors]
    else:
        blocks, bounds = blocks.to(dtype), None
    counts, moved, moved_weights, _, places = torch.ops.fbgemm.block_bucketize_sparse_features(
        lengths,
        values,
        False,
        keep_places,
        blocks,
        ranges.buckets,
        None if weights is None else weights.detach(),
        torch.tensor(segments, dtype=lengths.dtype) if uneven else None,
        samples if uneven else -1,
        bounds,
    )
    return counts, moved, moved_weights, None if places is None else places.long()


def _by_numpy(
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    segments: Sequence[int],
    ranges: _Ranges,
    keep_places: bool,
) -> Parts:
    ids, bags = values.numpy(), lengths.numpy()
    ends = np.zeros(bags.size + 1, np.int64)
    np.cumsum(bags, out=ends[1:])
    per_feature = np.diff(ends[[0, *accumulate(segments)]])
    split = _by_comparing if ranges.buckets < _MANY_RANGES else _by_sorting
    counts, order, moved = split(ids, bags, ends, per_feature, ranges.table.astype(ids.dtype))
    places = None
    if keep_places:
        places = torch.empty(ids.size, dtype=torch.int64)
        places.numpy()[order] = np.arange(ids.size)
    picked = None if weights is None else weights.detach().index_select(0, torch.from_numpy(order))
    return torch.from_numpy(counts.astype(bags.dtype, copy=False)), torch.from_numpy(moved), picked, places


def _by_comparing(ids: Array, bags: Array, ends: Array, per_feature: Array, table: Array) -> tuple[Array, Array, Array]:
    """A pass for each range.

    Args:
        ids: ``[N]``.
        bags: Ids of each bag ``[S]``.
        ends: Their running sum, from 0, ``[S + 1]``.
        per_feature: Ids of each feature ``[F]``.
        table: Bounds ``[F, buckets + 1]``, of the ids' dtype.

    Returns:
        Ids of each bag in each bucket ``[buckets * S]``, which id stands where in the buckets ``[N]``, and the ids
        there ``[N]``.
    """
    buckets = table.shape[1] - 1
    counts, order, moved = np.empty((buckets, bags.size), bags.dtype), np.empty(ids.size, np.int64), np.empty_like(ids)
    running = np.zeros(ids.size + 1, np.int32 if ids.size < 2**31 else np.int64)
    starts = np.concatenate(([0], np.cumsum(per_feature)))
    # Ids from this bucket on, and from the next one on: which they are, and how many of them each bag has.
    here, left, first = np.ones(ids.size, bool), bags, 0
    for bucket in range(buckets):
        if bucket + 1 < buckets:
            beyond = ids >= _each(table[:, bucket + 1], per_feature)
            np.cumsum(beyond, out=running[1:])
            left_beyond = np.diff(running.take(ends))
            np.subtract(left, left_beyond, out=counts[bucket], casting="same_kind")
            found = np.flatnonzero(here ^ beyond)
            here, left = beyond, left_beyond
        else:
            counts[bucket] = left
            found = np.flatnonzero(here)
        place = slice(first, first + found.size)
        order[place] = found
        # Of each feature, how many of its ids are in this bucket: those that stand before its end.
        own = np.diff(found.searchsorted(starts))
        np.subtract(ids.take(found), _each(table[:, bucket], own), out=moved[place])
        first += found.size
    return counts.reshape(-1), order, moved


def _by_sorting(ids: Array, bags: Array, ends: Array, per_feature: Array, table: Array) -> tuple[Array, Array, Array]:
    """One stable sort for all ranges; as ``_by_comparing``."""
    buckets, lists = table.shape[1] - 1, bags.size
    bucket = np.empty(ids.size, np.uint8 if buckets <= 256 else np.int32)
    moved = np.empty_like(ids)
    first = 0
    for bounds, count in zip(table, per_feature.tolist(), strict=True):
        own, place = ids[first : first + count], slice(first, first + count)
        bucket[place] = found = bounds[1:-1].searchsorted(own, side="right")
        np.subtract(own, bounds.take(found), out=moved[place])
        first += count
    order = bucket.argsort(kind="stable")
    bag = np.repeat(np.arange(lists), bags)
    counts = np.bincount(bucket * np.int64(lists) + bag, minlength=buckets * lists)
    return counts, order, moved.take(order)


def _each(of_feature: Array, counts: Array) -> Array:
    """A number for each id, from one for each feature; one for all where features agree."""
    if (of_feature == of_feature[0]).all():
        return of_feature[0]
    return np.repeat(of_feature, counts)

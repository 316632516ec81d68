"""Feature-major batches, and functions that cut them and column blocks for the operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["PooledBatch", "column_slices", "empty_bags", "pick_columns", "select_features"]

Slices = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PooledBatch:
    """The bags that all features look up, feature after feature.

    Attributes:
        values: Ids [N].
        offsets: Bag bounds [F * B + 1].
        weights: Factor of each id [N], or None for 1; without gradient.
        mean: Whether a bag's sum is divided by its number of ids.
        feature_tables: For each feature the index of its table [F].
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    mean: bool
    feature_tables: tuple[int, ...]


def select_features(
    values: Tensor, offsets: Tensor, weights: Tensor | None, features: Sequence[int], total: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Take some features of a feature-major batch, in the given order.

    Args:
        values: Ids [N].
        offsets: Bag bounds [F*B+1].
        weights: One weight for each id [N], or None.
        features: Which features, in which order.
        total: F, the number of features of the batch.

    Returns:
        (values, offsets, weights) of the chosen features.

    Example:
        >>> import torch
        >>> from tutorec._kernels.tbe_layout import select_features
        >>> ids, bounds, _ = select_features(
        ...     torch.tensor([7, 8, 9]), torch.tensor([0, 1, 3]), None, [1, 0], total=2
        ... )
        >>> ids.tolist(), bounds.tolist()
        ([8, 9, 7], [0, 2, 3])
    """
    batch = (offsets.numel() - 1) // total
    bounds = offsets[:: max(batch, 1)].tolist() if batch else [0] * (total + 1)
    lengths = offsets.diff().view(total, batch)[list(features)].view(-1)
    chosen = torch.zeros(lengths.numel() + 1, dtype=offsets.dtype, device=offsets.device)
    torch.cumsum(lengths, 0, out=chosen[1:])

    def take(ids: Tensor) -> Tensor:
        return torch.cat([ids[bounds[feature] : bounds[feature + 1]] for feature in features])

    return take(values), chosen, None if weights is None else take(weights)


def empty_bags(
    values: Tensor, offsets: Tensor, weights: Tensor | None, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same bags, without the ids of those that are not kept.

    Args:
        values: Ids [N].
        offsets: Bag bounds [L+1].
        weights: One weight for each id [N], or None.
        kept: Whether a bag keeps its ids [L].

    Returns:
        (values, offsets, weights), of L bags.

    Example:
        >>> import torch
        >>> from tutorec._kernels.tbe_layout import empty_bags
        >>> kept = torch.tensor([False, True])
        >>> ids, bounds, _ = empty_bags(
        ...     torch.tensor([7, 8, 9]), torch.tensor([0, 1, 3]), None, kept
        ... )
        >>> ids.tolist(), bounds.tolist()
        ([8, 9], [0, 0, 2])
    """
    lengths = offsets.diff()
    keeps_id = kept.repeat_interleave(lengths, output_size=values.numel())
    bounds = torch.zeros_like(offsets)
    torch.cumsum(lengths * kept, 0, out=bounds[1:])
    return values[keeps_id], bounds, None if weights is None else weights[keeps_id]


def column_slices(
    features: Sequence[int], columns: Sequence[int], strides: Sequence[int]
) -> Slices:
    """Where each feature's columns stand in an output whose features were reordered and padded.

    Args:
        features: Order of the features in the output.
        columns: True width of each feature, in input order.
        strides: Width with padding of each feature, in input order.

    Returns:
        (start, stop) for each feature in input order; neighbours that touch are merged. Nothing
        where the output is as it should be.

    Example:
        >>> from tutorec._kernels.tbe_layout import column_slices
        >>> column_slices([0, 1, 2], columns=[3, 4, 4], strides=[4, 4, 4])
        ((0, 3), (4, 12))
    """
    starts = dict(
        zip(
            features,
            accumulate((strides[feature] for feature in features), initial=0),
            strict=False,
        )
    )
    merged: list[tuple[int, int]] = []
    for feature, width in enumerate(columns):
        start = starts[feature]
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], start + width)
        else:
            merged.append((start, start + width))
    return () if merged == [(0, sum(strides))] else tuple(merged)


def pick_columns(pooled: Tensor, slices: Sequence[tuple[int, int]]) -> Tensor:
    """Cut the columns that ``column_slices`` found; the tensor itself where it found nothing to cut."""  # noqa: E501
    if not slices:
        return pooled
    return torch.cat([pooled[:, start:stop] for start, stop in slices], dim=1)

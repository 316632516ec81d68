"""The naive rivals of click models and of retrieval: count clicks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tutorec._check import require_finite
from tutorec.datasets.utils import Batch
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def click_count_baseline(
    train: Iterable[Batch],
    test: Iterable[Batch],
    keys: Sequence[str] = ("user", "item"),
    smoothing: float = 10.0,
) -> Tensor:
    """Score rows by earlier clicks: each key adds the log-odds of its id's click rate.

    Rates are smoothed: every id starts with ``smoothing`` rows at the mean click rate. A bag of
    several ids counts with the mean of their log-odds, an empty bag and an id that was never seen
    with those of the mean click rate.

    Args:
        train: batches to count in.
        test: batches to score.
        keys: the features to count.
        smoothing: weight of the mean click rate, in rows.

    Returns:
        Scores [N], one for each row of ``test``; larger for likelier clicks.

    Raises:
        ValueError: there are no training rows, or they hold clicks only or none, or ``smoothing``
            is negative.

    Example:
        >>> from tutorec.datasets.random import shop
        >>> from tutorec.models.baseline import click_count_baseline
        >>> from tutorec.models.metrics import auc
        >>> small = shop(rows=20_000, test_rows=5_000)
        >>> scores = click_count_baseline(
        ...     small.batches(1024), small.batches(1024, split="test")
        ... )
        >>> 0.55 < auc(small.labels("test"), scores) < small.best_auc - 0.1
        True
    """
    counts = {key: torch.zeros(2, 0, dtype=torch.float64) for key in keys}
    clicks = 0.0
    rows = 0
    for batch in train:
        clicks = clicks + float(batch.labels.sum())
        rows = rows + batch.labels.numel()

        for key in keys:
            ids, sample, _ = _ids(batch.sparse_features, key)
            counts[key] = _add(counts[key], ids, batch.labels.double()[sample])

    require_finite("click_count_baseline: smoothing", smoothing, least=0)
    if not 0 < clicks < rows:
        raise ValueError(
            f"click_count_baseline: {clicks:.0f} clicks in {rows} training rows; both classes "
            "are needed"
        )

    rate = clicks / rows
    odds = {
        key: torch.logit((count[1] + smoothing * rate) / (count[0] + smoothing))
        for key, count in counts.items()
    }
    mean = torch.logit(torch.tensor(rate, dtype=torch.float64))
    scores = [torch.zeros(0, dtype=torch.float64)]
    for batch in test:
        nothing = torch.zeros(batch.labels.numel(), dtype=torch.float64)
        scores.append(sum((_bag_means(batch, key, odds[key], mean) for key in keys), nothing))
    return torch.cat(scores)


def click_counts(batches: Iterable[Batch], feature: str, rows: int) -> Tensor:
    """Number of clicks of each id of a feature: [rows] in int64.

    Its largest entries are what a shop shows that knows nothing of its users; a retrieval model has
    to find more.

    Args:
        batches: to count in.
        feature: whose ids.
        rows: ids are 0 .. rows-1.

    Raises:
        ValueError: an id is not among them.

    Example:
        >>> from tutorec.datasets.random import shop
        >>> from tutorec.models.baseline import click_counts
        >>> small = shop(rows=1000)
        >>> counts = click_counts(small.batches(100), "item", rows=200)
        >>> int(counts.sum()) == int(small.labels("train").sum())
        True
    """
    counts = torch.zeros(rows, dtype=torch.int64)
    for batch in batches:
        ids, sample, _ = _ids(batch.sparse_features, feature)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
            ends = f"{int(ids.min())} to {int(ids.max())}"
            raise ValueError(
                f"click_counts: '{feature}' holds ids from {ends}, and {rows=} counts 0 to "
                f"{rows - 1}"
            )
        counts += torch.bincount(ids[batch.labels[sample] != 0], minlength=rows)

    return counts


def _ids(features: KeyedJaggedTensor, key: str) -> tuple[Tensor, Tensor, Tensor]:
    """A key's ids [N], the sample [N] each belongs to, and lengths [B]."""
    bag = features[key]
    lengths = bag.lengths().long()
    return (
        bag.values().long(),
        torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        lengths,
    )


def _add(count: Tensor, ids: Tensor, clicked: Tensor) -> Tensor:
    """Rows and clicks [2, ids] of every id, grown where an id is new."""
    size = max(count.shape[1], int(ids.max()) + 1 if ids.numel() else 0)
    grown = torch.zeros(2, size, dtype=torch.float64)
    grown[:, : count.shape[1]] = count
    grown[0] += torch.bincount(ids, minlength=size)
    grown[1] += torch.bincount(ids, weights=clicked, minlength=size)
    return grown


def _bag_means(batch: Batch, key: str, odds: Tensor, mean: Tensor) -> Tensor:
    """Mean log-odds [B] of each bag's ids."""
    ids, sample, lengths = _ids(batch.sparse_features, key)
    known = torch.cat([odds, mean.reshape(1)])[ids.clamp(max=len(odds))]
    sums = torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, sample, known)
    return torch.where(lengths > 0, sums / lengths.clamp(min=1), mean)

"""Metrics of a click model: AUC and normalized entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def auc(labels: Tensor, scores: Tensor) -> float:
    """Area under the ROC curve: the share of (click, non-click) pairs in order; a tie counts 1/2.

    Computed from ranks (Mann-Whitney): one sort, O(N log N).

    Args:
        labels: [N], nonzero for a click.
        scores: [N], larger for likelier clicks; any monotone scale.

    Returns:
        A number from 0 to 1; 0.5 is chance.

    Raises:
        ValueError: shapes differ, a score or a label is NaN, or one of the two classes is absent.

    Example:
        >>> import torch
        >>> from tutorec.models.metrics import auc
        >>> auc(torch.tensor([0, 0, 1, 1]), torch.tensor([0.1, 0.4, 0.4, 0.8]))
        0.875
    """
    labels, scores = _columns("auc", labels, scores)
    clicks = int(labels.sum())
    others = len(labels) - clicks
    if clicks == 0 or others == 0:
        raise ValueError(
            f"auc: {clicks} clicks and {others} non-clicks; both classes are needed: judge "
            "more samples"
        )

    _, group, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    # all members of a group of ties get the group's mean rank
    mean_rank = counts.cumsum(0).double() - (counts.double() - 1) / 2
    rank_sum = float(mean_rank[group][labels].sum())
    return (rank_sum - clicks * (clicks + 1) / 2) / (clicks * others)


def normalized_entropy(labels: Tensor, probabilities: Tensor) -> float:
    """Log loss over that of predicting the mean click rate; below 1 is better than the mean.

    From "Practical lessons from predicting clicks on ads at Facebook" (He et al., 2014).

    Args:
        labels: [N], nonzero for a click.
        probabilities: [N], predicted click probabilities in 0..1 (not logits).

    Returns:
        The ratio; infinity when a prediction of exactly 0 or 1 is wrong.

    Raises:
        ValueError: shapes differ, a prediction is outside 0..1, a label is NaN, or one of the two
            classes is absent.

    Example:
        >>> import torch
        >>> from tutorec.models.metrics import normalized_entropy
        >>> normalized_entropy(torch.tensor([1, 0, 0, 1]), torch.full((4,), 0.5))
        1.0
    """
    labels, p = _columns("normalized_entropy", labels, probabilities)
    if float(p.min()) < 0.0 or float(p.max()) > 1.0:
        ends = f"{float(p.min()):.4g} to {float(p.max()):.4g}"
        raise ValueError(
            f"normalized_entropy: predictions run from {ends}, not 0 to 1: apply torch.sigmoid "
            "to logits"
        )
    loss = -float(torch.where(labels, p.log(), torch.log1p(-p)).mean())
    return loss / base_entropy(labels)


def base_entropy(labels: Tensor) -> float:
    """Log loss in nats of predicting the mean click rate, the divisor of normalized entropy.

    Raises:
        ValueError: one of the two classes is absent, or both are.

    Example:
        >>> import torch
        >>> from tutorec.models.metrics import base_entropy
        >>> round(base_entropy(torch.tensor([1, 0, 0, 1])), 4)  # ln 2
        0.6931
    """
    rate = float((labels != 0).double().mean())
    if not 0.0 < rate < 1.0:
        raise ValueError(
            f"the click rate of {len(labels)} labels is {rate}; both classes are needed"
        )
    return -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def _columns(name: str, labels: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Labels [N] as bool and scores [N] as float64 on the CPU, checked."""
    if labels.numel() == 0 or labels.numel() != scores.numel():
        raise ValueError(
            f"{name}: {labels.numel()} labels and {scores.numel()} scores; need as many, at "
            "least one"
        )

    labels = labels.detach().reshape(-1).cpu()
    scores = scores.detach().reshape(-1).double().cpu()
    for column, values in (("labels", labels), ("scores", scores)):
        bad = values.isnan().nonzero()
        if len(bad):
            raise ValueError(
                f"{name}: {len(bad)} of {len(values)} {column} are NaN, the first at sample "
                f"{int(bad[0])}"
            )

    return labels != 0, scores

"""Normalized entropy: log loss over that of predicting the mean label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tutorec.metrics.metrics_namespace import MetricName, MetricNameBase
from tutorec.metrics.rec_metric import SumsOfSamples

ETA = 1e-12  # predictions are clamped to ETA .. 1 - ETA


class NEMetricComputation(SumsOfSamples):
    """Normalized entropy; below 1 is better than the mean click rate.

    From "Practical lessons from predicting clicks on ads at Facebook" (He et al., 2014).

    Args:
        args: Those of `RecMetricComputation`.
        include_logloss: Whether the log loss, in bits, is reported, too.
        allow_missing_label_with_zero_weight: Whether a task whose samples all have weight 0 gets
            1e-12 in place of NaN.
        kwargs: Those of `RecMetricComputation`.
    """

    SUMS = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")

    def __init__(
        self,
        *args: Any,
        include_logloss: bool = False,
        allow_missing_label_with_zero_weight: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._include_logloss = include_logloss
        self._allow_zero_weight = allow_missing_label_with_zero_weight

    def sums(
        self, predictions: Tensor, labels: Tensor, weights: Tensor, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Each sum over one batch, ``[n_tasks]``."""
        positive = weights * labels
        negative = weights * (1.0 - labels)

        return {
            "cross_entropy_sum": _entropy(predictions, positive, negative).sum(dim=-1),
            "weighted_num_samples": weights.sum(dim=-1),
            "pos_labels": positive.sum(dim=-1),
            "neg_labels": negative.sum(dim=-1),
        }

    def values(self, sums: Mapping[str, Tensor]) -> dict[MetricNameBase, Tensor]:
        """The reported values, ``[n_tasks]`` each."""
        total = sums["weighted_num_samples"]
        positive = sums["pos_labels"]
        negative = sums["neg_labels"]
        mean_label = positive / total.clamp(min=ETA)
        ne = sums["cross_entropy_sum"] / _entropy(mean_label, positive, negative)

        if self._allow_zero_weight:
            ne = torch.where(total > 0, ne, ETA)
        values: dict[MetricNameBase, Tensor] = {MetricName.NE: ne}
        if self._include_logloss:
            samples = (positive + negative).clamp(min=ETA)
            values[MetricName.LOG_LOSS] = sums["cross_entropy_sum"] / samples
        return values


def _entropy(predictions: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Cross entropy in bits of labels with these weights."""
    p = predictions.double().clamp(min=ETA, max=1 - ETA)
    return -positive * torch.log2(p) - negative * torch.log2(1.0 - p)

"""The share of samples on the right side of a threshold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tutorec.metrics.metrics_namespace import MetricName, MetricNameBase
from tutorec.metrics.rec_metric import SumsOfSamples, weighted_mean


class AccuracyMetricComputation(SumsOfSamples):
    """Weighted share of samples whose prediction and label agree.

    Args:
        args: Those of `RecMetricComputation`.
        threshold: The prediction from which a sample counts as label 1.
        kwargs: Those of `RecMetricComputation`.
    """

    SUMS = ("accuracy_sum", "weighted_num_samples")

    def __init__(self, *args: Any, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._threshold = threshold

    @torch.no_grad()
    def update(
        self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any
    ) -> None:
        """Add a batch, as `SumsOfSamples.update` does; without weights each sample counts 1."""
        if weights is None:
            weights = torch.ones_like(labels)
        super().update(predictions=predictions, labels=labels, weights=weights, **kwargs)

    def sums(
        self, predictions: Tensor, labels: Tensor, weights: Tensor, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Each sum over one batch, ``[n_tasks]``."""
        right = (predictions.double() >= self._threshold) == labels
        return {
            "accuracy_sum": (weights * right).sum(dim=-1),
            "weighted_num_samples": weights.sum(dim=-1),
        }

    def values(self, sums: Mapping[str, Tensor]) -> dict[MetricNameBase, Tensor]:
        """The reported values, ``[n_tasks]``."""
        accuracy = weighted_mean(sums["accuracy_sum"], sums["weighted_num_samples"])
        return {MetricName.ACCURACY: accuracy}

"""Mean absolute error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tutorec.metrics.metrics_namespace import MetricName, MetricNameBase
from tutorec.metrics.rec_metric import SumsOfSamples, weighted_mean


class MAEMetricComputation(SumsOfSamples):
    """Mean absolute error. Its arguments are those of `RecMetricComputation`."""

    SUMS = ("error_sum", "weighted_num_samples")

    def sums(
        self, predictions: Tensor, labels: Tensor, weights: Tensor, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Each sum over one batch, ``[n_tasks]``."""
        errors = labels - predictions.double()
        return {
            "error_sum": (weights * errors.abs()).sum(dim=-1),
            "weighted_num_samples": weights.sum(dim=-1),
        }

    def values(self, sums: Mapping[str, Tensor]) -> dict[MetricNameBase, Tensor]:
        """The reported values, ``[n_tasks]``."""
        mae = weighted_mean(sums["error_sum"], sums["weighted_num_samples"])
        return {MetricName.MAE: mae}

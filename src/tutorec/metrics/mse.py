"""Mean squared error, its root, and the share of the variance that predictions explain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tutorec.metrics.metrics_namespace import MetricName, MetricNameBase
from tutorec.metrics.rec_metric import SumsOfSamples, weighted_mean


class MSEMetricComputation(SumsOfSamples):
    """Mean squared error and its root.

    Args:
        args: Those of `RecMetricComputation`.
        include_r_squared: Whether R squared is reported, too.
        kwargs: Those of `RecMetricComputation`.
    """

    SUMS = ("error_sum", "weighted_num_samples", "label_sum", "label_squared_sum")

    def __init__(self, *args: Any, include_r_squared: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._include_r_squared = include_r_squared

    def sums(
        self, predictions: Tensor, labels: Tensor, weights: Tensor, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Each sum over one batch, ``[n_tasks]``."""
        errors = labels - predictions.double()
        return {
            "error_sum": (weights * errors.square()).sum(dim=-1),
            "weighted_num_samples": weights.sum(dim=-1),
            "label_sum": (weights * labels).sum(dim=-1),
            "label_squared_sum": (weights * labels.square()).sum(dim=-1),
        }

    def values(self, sums: Mapping[str, Tensor]) -> dict[MetricNameBase, Tensor]:
        """The reported values, ``[n_tasks]`` each."""
        weight = sums["weighted_num_samples"]
        mse = weighted_mean(sums["error_sum"], weight)
        values: dict[MetricNameBase, Tensor] = {MetricName.MSE: mse, MetricName.RMSE: mse.sqrt()}

        if self._include_r_squared:
            variance = sums["label_squared_sum"] - sums["label_sum"].square() / weight
            explained = 1.0 - sums["error_sum"] / variance
            values[MetricName.R_SQUARED] = torch.where(variance == 0.0, 1.0, explained)
        return values

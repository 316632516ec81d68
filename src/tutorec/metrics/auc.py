"""Area under the ROC curve over a window of samples, over all of them or within groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutorec.metrics.metrics_namespace import MetricName, MetricPrefix
from tutorec.metrics.rec_metric import (
    MetricComputationReport,
    RecMetricComputation,
    RecMetricException,
    check_inputs,
)

NO_SIGNAL = 0.5  # where one of the two classes is absent


class AUCMetricComputation(RecMetricComputation):
    """Area under the ROC curve over the last ``window_size`` samples of each rank.

    Samples with equal predictions count in the order in which torch sorts them, as in TorchRec;
    `tutorec.models.metrics.auc` counts their pairs as halves.

    Args:
        args: Those of `RecMetricComputation`.
        grouped_auc: Whether the mean of the areas of groups is reported, too. `update` then takes
            ``required_inputs={"grouping_keys": keys}``, a key for each sample.
        apply_bin: Whether a label of 0.039 or more counts as 1, and a smaller one as 0.
        kwargs: Those of `RecMetricComputation`.
    """

    def __init__(
        self, *args: Any, grouped_auc: bool = False, apply_bin: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._grouped_auc = grouped_auc
        self._apply_bin = apply_bin
        self._names = ["predictions", "labels", "weights"]
        for name in self._names:
            empty = torch.empty(self._n_tasks, 0)
            self._add_state(name, [empty], add_window_state=False)

        if grouped_auc:
            self._names.append("grouping_keys")
            keys = torch.empty(0, dtype=torch.int64)
            self._add_state("grouping_keys", [keys], add_window_state=False)

    @torch.no_grad()
    def update(
        self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any
    ) -> None:
        """Add a batch: predictions, labels and weights of the samples, ``[n_tasks, B]`` each.

        Raises:
            RecMetricException: An input is missing, or shapes differ.
        """
        added = check_inputs(self, predictions=predictions, labels=labels, weights=weights)
        added = {name: values.float() for name, values in added.items()}
        if self._grouped_auc:
            keys = kwargs.get("required_inputs", {}).get("grouping_keys")
            if keys is None or keys.numel() != labels.shape[-1]:
                raise RecMetricException(
                    f"AUCMetricComputation.update needs required_inputs={{'grouping_keys': keys}} "
                    f"with {labels.shape[-1]} keys, one for each sample"
                )
            added["grouping_keys"] = keys.reshape(-1)

        for name, values in added.items():
            batches: list[Tensor] = getattr(self, name)
            batches.append(values.detach())
            _keep_last(batches, self._window_size)

    def _compute(self) -> list[MetricComputationReport]:
        predictions, labels, weights, *keys = (
            torch.cat(getattr(self, name), dim=-1) for name in self._names
        )
        if self._apply_bin:
            binned = (labels >= 0.039).float()
        else:
            binned = labels

        tasks = zip(predictions, binned, weights, strict=True)
        areas = torch.stack([_area(*task) for task in tasks])
        reports = [MetricComputationReport(MetricName.AUC, MetricPrefix.WINDOW, areas)]
        if self._grouped_auc:
            tasks = zip(predictions, labels, weights, strict=True)
            means = torch.stack([_mean_of_groups(*task, keys[0]) for task in tasks])
            report = MetricComputationReport(MetricName.GROUPED_AUC, MetricPrefix.WINDOW, means)
            reports.append(report)
        return reports


def _keep_last(batches: list[Tensor], samples: int) -> None:
    """Drop the oldest samples of a list of batches, so that at most ``samples`` stay."""
    surplus = sum(batch.shape[-1] for batch in batches) - samples
    while surplus > 0:
        oldest = batches.pop(0)
        if oldest.shape[-1] > surplus:
            batches.insert(0, oldest[..., surplus:])
        surplus -= oldest.shape[-1]


def _area(predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The area for one task; all arguments ``[N]``."""
    order = predictions.argsort(descending=True)
    sorted_labels = labels[order]
    sorted_weights = weights[order]
    false_positives = (sorted_weights * (1.0 - sorted_labels)).cumsum(dim=0)
    true_positives = (sorted_weights * sorted_labels).cumsum(dim=0)
    if len(order) == 0 or false_positives[-1] * true_positives[-1] == 0:
        return predictions.new_tensor(NO_SIGNAL)

    area = torch.trapezoid(true_positives, false_positives)
    return area / false_positives[-1] / true_positives[-1]


def _mean_of_groups(predictions: Tensor, labels: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Mean area of the groups of samples with the same key."""
    areas = []
    for key in keys.unique():
        own = keys == key
        areas.append(_area(predictions[own], labels[own], weights[own]))
    if not areas:
        return predictions.new_tensor(NO_SIGNAL)
    return torch.stack(areas).mean()

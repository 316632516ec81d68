"""AUC within each session, averaged: does a list show first what was clicked?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tutorec.metrics.metrics_namespace import MetricName, MetricNameBase
from tutorec.metrics.rec_metric import RecMetricException, SumsOfSamples


class GAUCMetricComputation(SumsOfSamples):
    """Mean AUC of the sessions that have clicked and other samples, and different predictions.

    `update` also takes ``num_candidates``, the samples of each session; the samples of a session
    follow one another. Its other arguments are those of `RecMetricComputation`.
    """

    SUMS = ("auc_sum", "num_samples")

    def sums(
        self, predictions: Tensor, labels: Tensor, weights: Tensor, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Each sum over one batch, ``[n_tasks]``.

        Raises:
            RecMetricException: ``num_candidates`` is missing, or does not add up to the samples.
        """
        sizes = kwargs.get("num_candidates")
        if sizes is None or int(sizes.sum()) != labels.shape[-1]:
            total = None if sizes is None else int(sizes.sum())
            raise RecMetricException(
                f"GAUCMetricComputation.update: num_candidates adds up to {total}, and there are "
                f"{labels.shape[-1]} samples: pass the number of samples of each session"
            )

        areas, judged = _session_areas(predictions, labels, weights.double(), sizes)
        return {
            "auc_sum": (areas * judged).sum(dim=-1),
            "num_samples": judged.sum(dim=-1).double(),
        }

    def values(self, sums: Mapping[str, Tensor]) -> dict[MetricNameBase, Tensor]:
        """The reported values, ``[n_tasks]`` each."""
        sessions = sums["num_samples"]
        return {
            MetricName.GAUC: (sums["auc_sum"] + 1e-9) / (sessions + 2e-9),  # 0.5 without a session
            MetricName.GAUC_NUM_SAMPLES: sessions.clone(),
        }


def _session_areas(
    predictions: Tensor, labels: Tensor, weights: Tensor, sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """AUC of each session, ``[n_tasks, sessions]``, and whether it is judged."""
    tasks = len(predictions)
    sessions = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    session_index = sessions.expand(tasks, -1)

    def by_session(values: Tensor) -> Tensor:
        return values.new_zeros(tasks, len(sizes)).scatter_add(1, session_index, values)

    positive = weights * labels
    negative = weights * (1.0 - labels)
    # Sorted by prediction, and then, as the second sort is stable, by session.
    by_prediction = predictions.argsort(dim=-1)
    in_sessions = session_index.gather(1, by_prediction).argsort(dim=-1, stable=True)
    order = by_prediction.gather(1, in_sessions)
    ranked_lower = negative.gather(1, order).cumsum(dim=-1)
    total_negative = by_session(negative)
    earlier_negative = total_negative.cumsum(dim=-1) - total_negative
    ranked_lower = ranked_lower - earlier_negative.gather(1, session_index)
    pairs = by_session(positive.gather(1, order) * ranked_lower)

    total_positive = by_session(positive)
    areas = pairs / (total_positive * total_negative + 1e-10)
    starts = (sizes.cumsum(dim=0) - sizes).clamp(max=max(predictions.shape[1] - 1, 0))
    first = predictions[:, starts].gather(1, session_index)
    differs = ((predictions != first) & (predictions != 0)).double()
    judged = (total_positive > 0) & (total_negative > 0) & (by_session(differs) > 0)
    return areas, judged

"""Metrics over a lifetime, a window and ranks, against plain sums and a loop over pairs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tutorec import spmd
from tutorec.metrics.accuracy import AccuracyMetricComputation
from tutorec.metrics.auc import AUCMetricComputation
from tutorec.metrics.gauc import GAUCMetricComputation
from tutorec.metrics.mae import MAEMetricComputation
from tutorec.metrics.metrics_namespace import MetricName, MetricPrefix
from tutorec.metrics.mse import MSEMetricComputation
from tutorec.metrics.ne import NEMetricComputation
from tutorec.metrics.rec_metric import (
    MetricComputationReport,
    RecMetricComputation,
    RecMetricException,
)
from tutorec.models.metrics import auc, normalized_entropy

METRICS = [
    AccuracyMetricComputation,
    AUCMetricComputation,
    GAUCMetricComputation,
    MAEMetricComputation,
    MSEMetricComputation,
    NEMetricComputation,
]
TASKS = 2
SAMPLES = 6  # of a batch


def batch_of(seed: int, samples: int = SAMPLES) -> dict[str, Tensor]:
    """Two tasks; all predictions differ; both labels occur."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples).expand(TASKS, -1) % 2
    return {
        "predictions": torch.rand(TASKS, samples, generator=draw),
        "labels": labels.float(),
        "weights": 0.5 + torch.rand(TASKS, samples, generator=draw),
        "num_candidates": torch.tensor([samples - 2, 0, 2]),
    }


def make(kind: type[RecMetricComputation], window: int = 100, **more: Any) -> RecMetricComputation:
    given = {"my_rank": 0, "batch_size": SAMPLES, "n_tasks": TASKS, "window_size": window}
    return kind(**(given | more))


def numbers(reports: list[MetricComputationReport]) -> dict[str, Tensor]:
    return {f"{report.metric_prefix}{report.name}": report.value for report in reports}


def joined(batches: list[dict[str, Tensor]], key: str) -> Tensor:
    return torch.cat([batch[key] for batch in batches], dim=-1)


def test_ne_is_the_log_loss_over_that_of_the_mean():
    batches = [batch_of(seed) for seed in range(3)]
    metric = make(NEMetricComputation, include_logloss=True)
    for batch in batches:
        metric.update(**batch | {"weights": torch.ones(TASKS, SAMPLES)})
    found = numbers(metric.compute())
    for task in range(TASKS):
        labels = joined(batches, "labels")[task]
        predictions = joined(batches, "predictions")[task]
        expected = normalized_entropy(labels, predictions)
        assert found["lifetime_ne"][task].item() == pytest.approx(expected)
        bits = torch.nn.functional.binary_cross_entropy(predictions, labels) / torch.log(
            torch.tensor(2.0)
        )
        assert found["lifetime_logloss"][task].item() == pytest.approx(bits.item())


def test_errors_are_weighted_means():
    batch = batch_of(0)
    errors = (batch["labels"] - batch["predictions"]).double()
    weights = batch["weights"].double()
    total = weights.sum(dim=1)
    labels = batch["labels"].double()

    mse = make(MSEMetricComputation, include_r_squared=True)
    mse.update(**batch)
    found = numbers(mse.compute())
    squared = (weights * errors.square()).sum(dim=1)
    assert_close(found["lifetime_mse"], squared / total)
    assert_close(found["window_rmse"], (squared / total).sqrt())
    mean = (weights * labels).sum(dim=1, keepdim=True) / total[:, None]
    variance = (weights * (labels - mean).square()).sum(dim=1)
    assert_close(found["lifetime_r_squared"], 1 - squared / variance)

    mae = make(MAEMetricComputation)
    mae.update(**batch)
    assert_close(numbers(mae.compute())["lifetime_mae"], (weights * errors.abs()).sum(1) / total)


def test_accuracy_counts_the_right_side_of_the_threshold():
    metric = make(AccuracyMetricComputation, n_tasks=1, threshold=0.75)
    predictions = torch.tensor([[0.6, 0.75, 0.8, 0.1]])
    labels = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    metric.update(predictions=predictions, labels=labels, weights=None)
    assert numbers(metric.compute())["lifetime_accuracy"].tolist() == [0.5]


def test_auc_is_that_of_the_samples_in_the_window():
    batches = [batch_of(seed) for seed in range(4)]
    metric = make(AUCMetricComputation, window=15)
    for batch in batches:
        metric.update(**batch | {"weights": torch.ones(TASKS, SAMPLES)})
    found = numbers(metric.compute())["window_auc"]
    for task in range(TASKS):
        last = joined(batches, "labels")[task, -15:], joined(batches, "predictions")[task, -15:]
        assert found[task].item() == pytest.approx(auc(*last))


def test_auc_without_a_class_or_a_sample_is_a_half():
    metric = make(AUCMetricComputation, n_tasks=1)
    assert numbers(metric.compute())["window_auc"].tolist() == [0.5]
    ones = torch.ones(1, 3)
    metric.update(predictions=torch.rand(1, 3), labels=ones, weights=ones)
    assert numbers(metric.compute())["window_auc"].tolist() == [0.5]


def test_auc_of_groups_is_their_mean():
    metric = make(AUCMetricComputation, n_tasks=1, grouped_auc=True, window=5)
    ones = torch.ones(1, 3)
    for predictions, labels, keys in (
        ([[0.9, 0.8, 0.7]], [[0.0, 1.0, 0.0]], [9, 7, 7]),
        ([[0.2, 0.1, 0.3]], [[1.0, 0.0, 0.0]], [8, 8, 8]),
    ):
        metric.update(
            predictions=torch.tensor(predictions),
            labels=torch.tensor(labels),
            weights=ones,
            required_inputs={"grouping_keys": torch.tensor(keys)},
        )
    # The first sample has left the window: group 7 is in order, half of the pairs of group 8 are.
    assert numbers(metric.compute())["window_grouped_auc"].tolist() == [0.75]
    with pytest.raises(RecMetricException, match="3 keys"):
        metric.update(predictions=ones, labels=ones, weights=ones)


def test_auc_bins_soft_labels():
    soft = torch.tensor([[0.03, 0.5, 0.039]])
    predictions = torch.tensor([[0.1, 0.2, 0.3]])
    metric = make(AUCMetricComputation, n_tasks=1, apply_bin=True)
    metric.update(predictions=predictions, labels=soft, weights=torch.ones(1, 3))
    assert numbers(metric.compute())["window_auc"].tolist() == [1.0]


def session_auc(predictions: Tensor, labels: Tensor, weights: Tensor) -> float | None:
    """By pairs; None for a session without pairs, or with equal predictions."""
    ordered = total = 0.0
    for i, j in itertools.product(range(len(labels)), repeat=2):
        weight = float(weights[i] * weights[j] * labels[i] * (1 - labels[j]))
        total += weight
        ordered += weight * float(predictions[i] > predictions[j])
    if total == 0 or bool((predictions == predictions[0]).all()):
        return None
    return ordered / total


def test_gauc_is_the_mean_of_the_sessions_that_have_pairs():
    sizes = torch.tensor([4, 0, 1, 5, 3, 2])
    draw = torch.Generator().manual_seed(3)
    predictions = torch.rand(TASKS, 15, generator=draw)
    labels = torch.randint(2, (TASKS, 15), generator=draw).float()
    weights = torch.rand(TASKS, 15, generator=draw)
    predictions[:, 13:] = 0.25  # the last session has equal predictions
    metric = make(GAUCMetricComputation)
    metric.update(predictions=predictions, labels=labels, weights=weights, num_candidates=sizes)
    found = numbers(metric.compute())
    for task in range(TASKS):
        parts = [values[task].split(sizes.tolist()) for values in (predictions, labels, weights)]
        areas = [session_auc(*session) for session in zip(*parts, strict=True) if len(session[0])]
        judged = [area for area in areas if area is not None]
        assert found["lifetime_gauc_num_samples"][task].item() == len(judged)
        assert found["lifetime_gauc"][task].item() == pytest.approx(sum(judged) / len(judged))


def test_gauc_wants_the_size_of_each_session():
    metric = make(GAUCMetricComputation)
    batch = batch_of(0) | {"num_candidates": torch.tensor([3, 2])}
    with pytest.raises(RecMetricException, match="adds up to 5, and there are 6"):
        metric.update(**batch)


@pytest.mark.parametrize("kind", METRICS)
def test_a_window_has_the_last_batches(kind):
    batches = [batch_of(seed) for seed in range(5)]
    metric = make(kind, window=2 * SAMPLES)
    for batch in batches:
        metric.update(**batch)
    fresh = make(kind)
    for batch in batches[-2:]:
        fresh.update(**batch)
    found, expected = numbers(metric.compute()), numbers(fresh.compute())
    for name in found:
        if name.startswith("window_"):
            assert_close(found[name].double(), expected[name].double())


@pytest.mark.parametrize("kind", METRICS)
def test_reset_forgets_and_computing_twice_changes_nothing(kind):
    metric = make(kind)
    at_first = numbers(metric.compute())
    metric.update(**batch_of(0))
    first = numbers(metric.compute())
    second = numbers(metric.compute())
    metric.reset()
    forgotten = numbers(metric.compute())
    for name in first:
        assert torch.equal(first[name], second[name])
        assert_close(forgotten[name], at_first[name], equal_nan=True)


@pytest.mark.parametrize("kind", METRICS)
def test_all_of_a_metric_moves_with_it(kind):
    metric = make(kind)
    metric.update(**batch_of(0))
    metric.to("meta")
    lists = [part for name in ("predictions", "labels") for part in getattr(metric, name, [])]
    batches = [added for window in metric._windows.values() for added, _ in window.batches]
    assert all(tensor.is_meta for tensor in [*metric.buffers(), *lists, *batches])
    metric.reset()
    assert all(part.is_meta for part in getattr(metric, "predictions", []))


def test_a_lifetime_is_saved_and_a_window_is_not():
    metric = make(NEMetricComputation)
    metric.update(**batch_of(0))
    saved = metric.state_dict()
    assert sorted(saved) == sorted(NEMetricComputation.SUMS)
    other = make(NEMetricComputation)
    other.load_state_dict(saved)
    value = numbers(metric.compute())["lifetime_ne"]
    assert torch.equal(numbers(other.compute())["lifetime_ne"], value)


def update_and_compute(kind: type[RecMetricComputation], everywhere: bool) -> Any:
    """Rank r has r + 1 batches."""
    rank = torch.distributed.get_rank()
    metric = make(kind, my_rank=rank, compute_on_all_ranks=everywhere).to(spmd.device())
    for seed in range(rank + 1):
        batch = {
            name: values.to(spmd.device()) for name, values in batch_of(10 * rank + seed).items()
        }
        metric.update(**batch)
    before = numbers(metric.local_compute())
    found = numbers(metric.compute())
    after = numbers(metric.local_compute())
    assert all(torch.equal(before[name], after[name]) for name in before), "local states changed"
    return {name: value.cpu() for name, value in found.items()}


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("kind", METRICS)
def test_ranks_together_judge_all_samples(ranks, kind, everywhere):
    on_ranks = ranks(2).run(update_and_compute, kind, everywhere)
    whole = make(kind)
    for seed in (0, 10, 11):
        whole.update(**batch_of(seed))
    expected = numbers(whole.compute())
    for found in on_ranks[: 2 if everywhere else 1]:
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert_close(value.double(), expected[name].double())
    if not everywhere:
        assert on_ranks[1] == {}


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"predictions": None}, "needs predictions"),
        ({"labels": torch.zeros(TASKS, SAMPLES + 1)}, r"'labels': \(2, 7\)"),
        ({"predictions": torch.zeros(SAMPLES)}, r"2 tasks.*'predictions': \(6,\)"),
    ],
)
def test_what_cannot_be_judged_is_refused(kind, change, words):
    with pytest.raises(RecMetricException, match=words):
        make(kind).update(**batch_of(0) | change)


class Largest(RecMetricComputation):
    """A metric as TorchRec's users write one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        start = torch.zeros(self._n_tasks)
        self._add_state("largest", start, False, dist_reduce_fx="max", persistent=True)
        self._add_state("last", start, True, dist_reduce_fx=lambda of_ranks: of_ranks[-1])

    def update(self, *, predictions, labels, weights, **kwargs):
        largest = predictions.amax(dim=-1)
        self.largest = torch.maximum(self.largest, largest)
        self.last = largest
        self._aggregate_window_state("last", largest, predictions.shape[-1])

    def _compute(self):
        states = self.largest, self.last, self.get_window_state("last")
        return [MetricComputationReport(MetricName.MAE, MetricPrefix.LIFETIME, torch.stack(states))]


def largest_of_rank(tasks: int) -> list[Any]:
    rank = torch.distributed.get_rank()
    metric = make(Largest, my_rank=rank, n_tasks=tasks)
    for value in (3.0 - rank, 1.0 + rank):
        predictions = torch.full((tasks, 2), value)
        metric.update(predictions=predictions, labels=None, weights=None)
    return [report.value.tolist() for report in metric.compute()]


def test_a_metric_of_ones_own_reduces_its_states(ranks):
    assert ranks(2).run(largest_of_rank, 1) == [[[[3.0], [2.0], [4.0]]], []]


def test_a_window_needs_a_size():
    with pytest.raises(RuntimeError, match="window_size is 0"):
        make(NEMetricComputation, window=0)

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutorec.models.metrics import auc, normalized_entropy

# few distinct scores: ties within and across the classes
_SAMPLES = st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=40)


@given(samples=_SAMPLES)
def test_auc_is_the_share_of_pairs_in_order(samples: list[tuple[bool, int]]) -> None:
    clicks = [score for label, score in samples if label]
    others = [score for label, score in samples if not label]
    labels, scores = torch.tensor([s[0] for s in samples]), torch.tensor([s[1] for s in samples])
    if not clicks or not others:
        with pytest.raises(ValueError, match=f"{len(clicks)} clicks and {len(others)} non-clicks"):
            auc(labels, scores)
        return
    wins = sum((c > o) + 0.5 * (c == o) for c in clicks for o in others)
    assert auc(labels, scores) == pytest.approx(wins / (len(clicks) * len(others)), abs=1e-12)


def test_auc_does_not_change_under_a_monotone_map() -> None:
    labels, scores = torch.randint(0, 2, (500,)), torch.randn(500)
    assert auc(labels, scores) == auc(labels.float(), scores.sigmoid())


def test_auc_keeps_scores_apart_that_float32_would_merge() -> None:
    assert auc(torch.tensor([0, 1]), torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)) == 1.0


@pytest.mark.parametrize("metric", [auc, normalized_entropy])
def test_metrics_name_the_first_nan_and_unequal_lengths(metric) -> None:
    with pytest.raises(ValueError, match=r"1 of 3 scores.*NaN.* sample 1"):
        metric(torch.tensor([0, 1, 1]), torch.tensor([0.5, math.nan, 0.2]))
    with pytest.raises(ValueError, match="2 labels and 3 scores"):
        metric(torch.tensor([0, 1]), torch.zeros(3))
    with pytest.raises(ValueError, match="0 labels and 0 scores"):
        metric(torch.zeros(0), torch.zeros(0))


@given(st.lists(st.tuples(st.booleans(), st.floats(0.01, 0.99)), min_size=2, max_size=30))
def test_normalized_entropy_is_the_ratio_of_two_log_losses(
    samples: list[tuple[bool, float]],
) -> None:
    labels = [float(label) for label, _ in samples]
    rate = sum(labels) / len(labels)
    if rate in (0.0, 1.0):
        with pytest.raises(ValueError, match="both classes are needed"):
            normalized_entropy(torch.tensor(labels), torch.tensor([p for _, p in samples]))
        return
    loss = -sum(math.log(p if label else 1 - p) for label, p in samples)
    naive = -sum(math.log(rate if label else 1 - rate) for label, _ in samples)
    found = normalized_entropy(
        torch.tensor(labels), torch.tensor([p for _, p in samples], dtype=torch.float64)
    )
    assert found == pytest.approx(loss / naive, rel=1e-9)


def test_normalized_entropy_of_logits_says_sigmoid() -> None:
    with pytest.raises(ValueError, match=r"-1 to 2, .* torch\.sigmoid"):
        normalized_entropy(torch.tensor([0, 1]), torch.tensor([-1.0, 2.0]))


def test_normalized_entropy_of_a_certain_mistake_is_infinite_and_of_a_certain_truth_zero() -> None:
    assert normalized_entropy(torch.tensor([0, 1]), torch.tensor([1.0, 1.0])) == math.inf
    assert normalized_entropy(torch.tensor([0, 1]), torch.tensor([0.0, 1.0])) == 0.0

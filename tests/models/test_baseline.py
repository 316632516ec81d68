from __future__ import annotations

import math

import pytest
import torch

from tutorec.datasets.utils import Batch
from tutorec.models.baseline import click_count_baseline
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def _batch(users: list[list[int]], labels: list[float]) -> Batch:
    values = torch.tensor([user for bag in users for user in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in users])
    return Batch(
        torch.zeros(len(users), 1),
        KeyedJaggedTensor(["user"], values, lengths=lengths),
        torch.tensor(labels),
    )


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_scores_are_smoothed_log_odds_by_hand() -> None:
    train = [_batch([[0], [0]], [1.0, 1.0]), _batch([[1], [2, 1]], [0.0, 0.0])]
    test = [_batch([[0], [1]], [0.0, 0.0]), _batch([[1, 0], [], [9]], [0.0, 0.0, 0.0])]
    scores = click_count_baseline(train, test, keys=["user"], smoothing=2.0)
    zero, one, mean = _logit(3 / 4), _logit(1 / 4), 0.0
    torch.testing.assert_close(scores.tolist(), [zero, one, (zero + one) / 2, mean, mean])


def test_keys_add_up() -> None:
    def two(batch: Batch) -> Batch:
        ids = batch.sparse_features.values()
        kjt = KeyedJaggedTensor(
            ["user", "item"],
            torch.cat([ids, ids]),
            lengths=torch.ones(2 * len(ids), dtype=torch.int32),
        )
        return Batch(batch.dense_features, kjt, batch.labels)

    train, test = two(_batch([[0], [1]], [1.0, 0.0])), two(_batch([[0], [1]], [0.0, 0.0]))
    once = click_count_baseline([train], [test], keys=["user"])
    torch.testing.assert_close(
        click_count_baseline([train], [test], keys=["user", "item"]), 2 * once
    )


@pytest.mark.parametrize("labels", [[0.0, 0.0], [1.0, 1.0]])
def test_one_class_only_raises_with_the_counts(labels: list[float]) -> None:
    with pytest.raises(ValueError, match=f"{sum(labels):.0f} clicks in 2 training rows"):
        click_count_baseline([_batch([[0], [1]], labels)], [], keys=["user"])

"""The turning shop: a catalogue that changes as it says, and a truth that is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tutorec.datasets.turnover import TurningShop
from tutorec.models.metrics import auc


def test_as_many_products_are_replaced_each_day_as_said_and_none_comes_back():
    store = TurningShop(users=10, products=40, days=6, visits=10, turnover=0.1)
    seen = set(store.catalogue[0].tolist())
    for before, after in zip(store.catalogue[:-1], store.catalogue[1:], strict=True):
        new = set(after.tolist()) - set(before.tolist())
        assert len(new) == 4 and not new & seen
        seen |= new
    assert len(seen) == 40 + 5 * 4


def test_batches_are_the_visits_of_a_day_in_order():
    store = TurningShop(users=10, products=40, days=2, visits=25)
    batches = list(store.batches(1, 10))
    assert [len(batch.labels) for batch in batches] == [10, 10, 5]
    assert torch.equal(torch.cat([batch.labels for batch in batches]), store.labels(1))
    items = torch.cat([batch.sparse_features["item"].values() for batch in batches])
    assert torch.isin(items, store.catalogue[1]).all()
    again = list(TurningShop(users=10, products=40, days=2, visits=25).batches(1, 10))
    assert torch.equal(
        items, torch.cat([batch.sparse_features["item"].values() for batch in again])
    )


def test_products_are_shown_as_often_as_their_share_says():
    store = TurningShop(users=10, products=20, days=1, visits=100_000)
    [batch] = store.batches(0, 100_000)
    shown = (batch.sparse_features["item"].values()[:, None] == store.catalogue[0]).double().mean(0)
    torch.testing.assert_close(shown, store.share, atol=0.006, rtol=0)
    assert 0.2 < store.labels(0).mean() < 0.5


def test_no_ranking_by_user_and_product_alone_beats_the_truth_by_more_than_chance():
    """Click rates of (user, product) pairs, counted on a very long day, come close to the best
    possible AUC.
    """
    store = TurningShop(users=5, products=4, days=1, visits=200_000)
    [batch] = store.batches(0, 200_000)
    pair = batch.sparse_features["user"].values() * 4 + torch.searchsorted(
        store.catalogue[0].sort().values, batch.sparse_features["item"].values()
    )
    rate = pair.bincount(batch.labels.double(), 20) / pair.bincount(minlength=20)
    assert abs(auc(batch.labels, rate[pair]) - store.best_auc(0)) < 1e-3


@pytest.mark.parametrize(
    "words", [{"products": 0}, {"days": 1.5}, {"turnover": 1.5}, {"seed": -1}, {"exponent": -1.0}]
)
def test_sizes_that_cannot_be_are_refused(words: dict[str, Any]):
    (name,) = words
    with pytest.raises(ValueError, match=f"TurningShop: {name}"):
        TurningShop(**words)

"""The matrix of the book: it finds sharded collections equal, and would find it if they
were not.
"""

from __future__ import annotations

import pytest

from tutorec.teach import equivalence
from tutorec.teach.equivalence import Case, measure

CASES = [
    Case("grid_shard", "MEAN", "rowwise_adagrad"),
    Case("row_wise", "rows", "sgd"),
    Case("data_parallel", "SUM, weighted", "rowwise_adagrad"),
    Case("column_wise", "SUM", "adam"),
    Case("table_row_wise", "rows", "partial_rowwise_adam"),
    Case("table_wise", "SUM, weighted", "adagrad"),
]


def test_sharded_and_unsharded_come_out_alike(ranks):
    found = measure(ranks(2), CASES, steps=2)
    assert list(found) == CASES
    assert all(distance.largest < 1e-6 for distance in found.values())
    assert found[CASES[1]].state == 0


@pytest.mark.parametrize(("name", "value"), [("_RATE", 0.11), ("_EPS", 0.5)])
def test_another_update_is_seen_in_weights_and_not_in_the_first_output(
    ranks, monkeypatch, name, value
):
    monkeypatch.setattr(equivalence, name, value)
    [distance] = measure(ranks(2), CASES[:1], steps=1).values()
    assert distance.outputs < 1e-6
    assert distance.weights > 1e-2


@pytest.mark.parametrize(("name", "value"), [("_BETA1", 0.8), ("_DECAY", 0.3)])
def test_another_adam_is_seen(ranks, monkeypatch, name, value):
    monkeypatch.setattr(equivalence, name, value)
    [distance] = measure(ranks(2), CASES[3:4], steps=2).values()
    assert distance.weights > 1e-2


def test_uncut_state_is_seen(ranks, monkeypatch):
    monkeypatch.setattr(equivalence, "_CUT", ())
    [distance] = measure(ranks(2), CASES[:1], steps=1).values()
    assert distance.state > 1e-2

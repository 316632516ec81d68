"""Weights with which a sum is the pooling, against plain lists."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import halves
from torch.testing import assert_close

from tutorec._kernels.pooling import bag_weights
from tutorec._kernels.specs import POOLINGS, PoolingKind, kernel_pooling

BAGS = st.lists(st.lists(halves, max_size=4), max_size=5)


def factor(pooling: PoolingKind, bag: list[float], weighted: bool) -> float:
    """What a bag's sum is multiplied by."""
    if pooling == "mean":
        return 1 / len(bag)
    if pooling == "sqrtn":
        norm = math.sqrt(sum(weight**2 for weight in bag)) if weighted else math.sqrt(len(bag))
        return 1 / norm if norm else 0.0
    return 1.0


@given(bags=BAGS, weighted=st.booleans(), pooling=st.sampled_from(POOLINGS), known=st.booleans())
def test_weights_are_those_of_plain_lists(
    bags: list[list[float]], weighted: bool, pooling: PoolingKind, known: bool
) -> None:
    offsets = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
    weights = torch.tensor([weight for bag in bags for weight in bag])
    found = bag_weights(
        pooling, offsets, weights if weighted else None, len(weights) if known else None
    )
    if not weighted and pooling != "sqrtn":
        assert found is None
        return
    expected = [
        (weight if weighted else 1.0) * factor(pooling, bag, weighted)
        for bag in bags
        for weight in bag
    ]
    assert found is not None
    assert_close(found, torch.tensor(expected, dtype=torch.float32))


def test_gradients_reach_the_weights_and_a_bag_without_weight_has_finite_ones() -> None:
    weights = torch.tensor([3.0, 4.0, 0.0, 0.0], requires_grad=True)
    found = bag_weights("sqrtn", torch.tensor([0, 2, 4]), weights)
    assert found is not None
    (found * torch.tensor([1.0, 0.0, 1.0, 1.0])).sum().backward()
    # d/dw1 of w1 / sqrt(w1^2 + w2^2) is w2^2 / 125, and d/dw2 is -w1 w2 / 125
    assert weights.grad is not None
    assert_close(weights.grad[:2], torch.tensor([16 / 125, -12 / 125]))
    assert bool(weights.grad.isfinite().all())


@pytest.mark.parametrize(
    ("pooling", "weighted", "asked"),
    [
        ("sum", False, "sum"),
        ("sum", True, "sum"),
        ("mean", False, "mean"),
        ("mean", True, "sum"),
        ("sqrtn", False, "sum"),
        ("sqrtn", True, "sum"),
        ("none", False, "none"),
    ],
)
def test_kernels_are_asked_for_what_they_have(
    pooling: PoolingKind, weighted: bool, asked: str
) -> None:
    assert kernel_pooling(pooling, weighted) == asked

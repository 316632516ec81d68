"""The oracles against torch's own modules and numbers worked out by hand."""

import pytest
import torch
from kernels.oracles import (
    adagrad_update,
    adam_update,
    embedding_bag_forward,
    embedding_bag_gradient,
    rowwise_adagrad_update,
    sgd_update,
    update,
)
from torch.testing import assert_close

from tutorec._kernels.specs import OptimizerSpec

IDS = torch.tensor([1, 1, 4, 0])
OFFSETS = torch.tensor([0, 2, 2, 4])


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_forward_and_gradient_equal_torch_embedding_bag(pooling: str):
    bag = torch.nn.EmbeddingBag(5, 3, mode=pooling, include_last_offset=True)
    weight = bag.weight.detach()
    assert_close(embedding_bag_forward(weight, IDS, OFFSETS, pooling), bag(IDS, OFFSETS).detach())

    grad = torch.randn(3, 3)
    bag(IDS, OFFSETS).backward(grad)
    share = grad / (OFFSETS.diff().clamp(min=1).unsqueeze(1) if pooling == "mean" else 1)
    assert_close(embedding_bag_gradient(weight, IDS, share[[0, 0, 2, 2]]), bag.weight.grad)


def test_weighted_mean_divides_by_the_number_of_ids():
    table = torch.tensor([[1.0], [10.0]])
    pooled = embedding_bag_forward(
        table, torch.tensor([0, 1]), torch.tensor([0, 2]), "mean", torch.tensor([4.0, 1.0])
    )
    assert pooled.tolist() == [[7.0]]


def test_unpooled_forward_is_the_rows():
    table = torch.randn(5, 3)
    assert torch.equal(embedding_bag_forward(table, IDS, OFFSETS, "none"), table[IDS])


def test_sgd_equals_torch_sgd_and_leaves_absent_rows():
    weight, grads = torch.randn(5, 3), torch.randn(4, 3)
    leaf = weight.clone().requires_grad_()
    leaf.grad = embedding_bag_gradient(weight, IDS, grads)
    torch.optim.SGD([leaf], lr=0.3).step()
    new = sgd_update(weight, IDS, grads, 0.3)
    assert_close(new, leaf.detach())
    assert torch.equal(new[[2, 3]], weight[[2, 3]])


def test_rowwise_adagrad_of_one_column_equals_torch_adagrad():
    weight, grads = torch.randn(5, 1), torch.randn(4, 1)
    leaf = weight.clone().requires_grad_()
    optimizer = torch.optim.Adagrad([leaf], lr=0.3, eps=1e-3)
    momentum = torch.zeros(5)
    for _ in range(3):
        leaf.grad = embedding_bag_gradient(weight, IDS, grads)
        optimizer.step()
        weight, momentum = rowwise_adagrad_update(weight, momentum, IDS, grads, 0.3, 1e-3)
    assert_close(weight, leaf.detach())
    assert_close(momentum, optimizer.state[leaf]["sum"].flatten())


def test_updates_by_hand():
    zeros, once = torch.zeros(1, 2), torch.tensor([0])
    grads = torch.tensor([[3.0, -4.0]])
    weight, momentum = adagrad_update(zeros, zeros, once, grads, 0.5)
    assert (weight.tolist(), momentum.tolist()) == ([[-0.5, 0.5]], [[9.0, 16.0]])

    twice = torch.tensor([[3.0, 3.0], [1.0, 1.0]])
    state = torch.zeros(2, 2), torch.zeros(2)
    weight, momentum = rowwise_adagrad_update(*state, torch.tensor([0, 0]), twice, 0.5)
    assert (weight.tolist(), momentum.tolist()) == ([[-0.5, -0.5], [0.0, 0.0]], [16.0, 0.0])

    rule = OptimizerSpec("adam", eps=0.0)
    weight, _ = adam_update(rule, zeros, (zeros, zeros), once, grads, 0.5, number=1)
    assert weight.tolist() == [[-0.5, 0.5]], "the first step is the rate, whatever the gradient"

    sgd, ones = OptimizerSpec("sgd"), torch.ones(2, 1)
    weight, _ = update(sgd, ones, (), torch.tensor([1]), torch.ones(1, 1), rate=0.25, number=1)
    assert weight.flatten().tolist() == [1.0, 0.75]

"""One bag over all features, its rows on several ranks, against ``nn.EmbeddingBag`` over the
concatenated table.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tutorec.distributed.mix_vocab import Mode, ParallelMixVocabEmbeddingBag
from tutorec.sparse.deferred import raise_deferred_id_errors
from tutorec.spmd import device

ROWS = [5, 26, 1, 9]
STARTS = torch.tensor([0, 5, 31, 32])
COLUMNS, RATE = 8, 0.25


def weight(rows: list[int]) -> torch.Tensor:
    # Below zero: a row of zeros for ids that a rank does not own would be the maximum.
    return torch.randn(sum(rows), COLUMNS, generator=torch.Generator().manual_seed(3)) - 5


def ids(rank: int, rows: list[int]) -> torch.Tensor:
    """Ranks bring different numbers of samples, rank 1 none; ids repeat between samples."""
    samples = (6, 0, 3, 1)[rank]
    random = torch.Generator().manual_seed(rank)
    return torch.stack([torch.randint(each, (samples,), generator=random) for each in rows], dim=1)


def reference(
    mode: Mode, world_size: int, rows: list[int]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each rank's output, and the gradient of the mean over ranks of the sum of squares."""
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0)[:-1].tolist()])
    bag = nn.EmbeddingBag(sum(rows), COLUMNS, mode=mode, _weight=weight(rows))
    outputs = [bag(ids(rank, rows) + starts) for rank in range(world_size)]
    (torch.cat(outputs).square().sum() / world_size).backward()
    assert bag.weight.grad is not None
    return [each.detach() for each in outputs], bag.weight.grad


def on_rank(rank: int, mode: Mode, rows: list[int], fused: bool) -> dict[str, torch.Tensor]:
    """My output, my rows' gradient, and my rows before and after the backward pass."""
    params = {"optimizer": "sgd", "learning_rate": RATE} if fused else None
    bag = ParallelMixVocabEmbeddingBag(rows, COLUMNS, mode, weight(rows), fused_params=params)
    before = {name: each.detach().clone().cpu() for name, each in bag.named_parameters()}
    output = bag(ids(rank, rows).to(device()))
    assert output.device.type == device().type
    output.square().sum().backward()
    found = {"output": output.detach().cpu()}
    for each in bag.parameters():
        found["before"], found["after"] = before.popitem()[1], each.detach().cpu()
        if each.grad is not None:
            found["grad"] = each.grad.cpu()
    return found


def together(found: list[dict[str, torch.Tensor]], what: str) -> torch.Tensor:
    return torch.cat([each.get(what, torch.empty(0, COLUMNS)) for each in found])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_over_ranks_equals_the_unsharded_one(ranks, mode, world_size):
    found = ranks(world_size).run(on_rank, mode, ROWS, False)
    outputs, grad = reference(mode, world_size, ROWS)
    for mine, expected in zip(found, outputs, strict=True):
        assert_close(mine["output"], expected)
    assert_close(together(found, "before"), weight(ROWS))
    assert_close(together(found, "grad"), grad)
    assert_close(together(found, "after"), weight(ROWS))


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_rows_are_updated_during_backward_where_an_optimizer_is_given(ranks, mode):
    found = ranks(2).run(on_rank, mode, ROWS, True)
    _, grad = reference(mode, 2, ROWS)
    assert_close(together(found, "after"), weight(ROWS) - RATE * grad)


def test_a_maximum_with_fewer_rows_than_ranks(ranks):
    found = ranks(4).run(on_rank, "max", [1, 1, 1], False)
    outputs, grad = reference("max", 4, [1, 1, 1])
    for mine, expected in zip(found, outputs, strict=True):
        assert_close(mine["output"], expected)
    assert_close(together(found, "grad"), grad)


def test_without_ranks_it_is_a_module_of_one_process():
    bag = ParallelMixVocabEmbeddingBag(ROWS, COLUMNS, "max", weight(ROWS))
    x = ids(0, ROWS)
    expected = nn.EmbeddingBag.from_pretrained(weight(ROWS), mode="max")(x + STARTS)
    assert_close(bag(x.to(device())).cpu(), expected)
    assert [name for name, _ in bag.named_parameters()] == ["collection.embeddings.all_rows.weight"]


def test_an_id_of_the_next_feature_is_refused():
    bag = ParallelMixVocabEmbeddingBag(ROWS, COLUMNS)
    with pytest.raises(
        ValueError,
        match=r"5 rows \(ids 0 to 4\).*feature 'feature_0', sample 1.*id 5",
    ):
        bag(torch.tensor([[0, 0, 0, 0], [5, 0, 0, 0]], device=device()))
        raise_deferred_id_errors(block=True)  # on a GPU what a check finds is raised later
    with pytest.raises(ValueError, match=r"ids have shape \(3,\): expected \[B, 4\]"):
        bag(torch.tensor([1, 2, 3], device=device()))


def test_what_cannot_be_built_says_why():
    with pytest.raises(ValueError, match=r"mode='min'.*\['sum', 'mean', 'max'\]"):
        ParallelMixVocabEmbeddingBag(ROWS, COLUMNS, "min")
    with pytest.raises(ValueError, match=r"features \[1\].*no.*embeddings_per_feat=\[5, 0\]"):
        ParallelMixVocabEmbeddingBag([5, 0], COLUMNS)
    with pytest.raises(ValueError, match=r"40 rows.*41: \[5, 26, 1, 9\]"):
        ParallelMixVocabEmbeddingBag(ROWS, COLUMNS, weight=torch.zeros(40, COLUMNS))

"""The loops around a model: the same numbers on one rank and on several."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import nn

from tutorec.datasets.random import shop
from tutorec.datasets.utils import Batch
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from tutorec.models.dlrm import DLRM, DLRMTrain
from tutorec.models.metrics import auc, normalized_entropy
from tutorec.models.training import Metrics, combined_optimizer, evaluate, train
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Ranks

STORE = shop(users=40, items=20, rows=600, test_rows=101)
TABLES = "model.sparse_arch.embedding_bag_collection"


def _model() -> DLRMTrain:
    torch.manual_seed(1)
    tables = [
        EmbeddingBagConfig(40, 4, "t_user", feature_names=["user"]),
        EmbeddingBagConfig(20, 4, "t_item", feature_names=["item", "clicked"]),
    ]
    return DLRMTrain(DLRM(EmbeddingBagCollection(tables), 4, [4], [8, 1]))


def _parallel(world_size: int) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    model = _model()
    cuts = {"t_user": row_wise(), "t_item": table_wise(rank=world_size - 1)}
    collection = model.model.sparse_arch.embedding_bag_collection
    plan = construct_module_sharding_plan(collection, cuts, world_size=world_size)
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.1}
    )
    parallel = DistributedModelParallel(
        model, plan=ShardingPlan({TABLES: plan}), sharders=[sharder]
    )
    return parallel, combined_optimizer(parallel, lambda params: torch.optim.Adam(params, lr=0.01))


def _trained(
    rank: int, world_size: int, together: int = 40
) -> tuple[list[float], int, Metrics, bool]:
    model, optimizer = _parallel(world_size)
    batches = STORE.batches(together // world_size, rank, world_size)
    done = train(model, batches, optimizer, progress=False)
    model.eval()
    found = evaluate(model, STORE.batches(16, rank, world_size, split="test"))
    return done.losses.tolist(), done.samples, found, model.training


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.world4)])
def test_losses_and_metrics_are_those_of_one_process_on_every_rank(
    ranks: Callable[..., Ranks], world_size: int
) -> None:
    [(losses, samples, metrics, _)] = ranks(1).run(_trained)
    assert len(losses) == 15 and samples == 600 and metrics.samples == 101
    for of_rank, samples_there, metrics_there, training in ranks(world_size).run(_trained):
        assert of_rank == pytest.approx(losses, abs=1e-5)
        assert samples_there == 600
        assert astuple(metrics_there) == pytest.approx(astuple(metrics), abs=1e-4)
        assert training is False


class _Known(nn.Module):
    """Answers with given logits, whatever it is given."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits, self.at = logits, 0

    def forward(self, batch: Batch) -> Any:
        assert not torch.is_grad_enabled() and not self.training
        count = len(batch.labels)
        logits, self.at = self.logits[self.at : self.at + count], self.at + count
        return logits.mean(), (logits.mean(), logits, batch.labels)


def _labelled(labels: torch.Tensor) -> Batch:
    return Batch(torch.zeros(len(labels), 1), KeyedJaggedTensor.empty(), labels)


def _judged(rank: int, world_size: int, together: bool) -> tuple[Metrics, float, bool]:
    # rank 0 ranks all of its clicks first, rank 1 too, but all of rank 1's scores are below rank
    # 0's
    labels = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0])][rank]
    logits = [torch.tensor([3.0, 2.0, 1.0]), torch.tensor([-1.0, -2.0])][rank]
    model = _Known(logits)
    found = evaluate(model, [_labelled(labels)], progress=together)
    return found, auc(labels, logits), model.training


def test_metrics_are_over_all_samples_and_no_mean_over_ranks(ranks: Callable[..., Ranks]) -> None:
    labels, logits = (
        torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]),
        torch.tensor([3.0, 2.0, 1.0, -1.0, -2.0]),
    )
    loss = nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double()).item()
    expected = (auc(labels, logits), normalized_entropy(labels, logits.double().sigmoid()), loss, 5)
    for found, own_auc, training in ranks(2).run(_judged, together=False):
        assert astuple(found) == pytest.approx(expected)
        assert own_auc == 1.0 > found.auc
        assert training


def test_confident_and_wrong_logits_have_a_finite_entropy() -> None:
    model = _Known(torch.tensor([200.0, -200.0]))
    found = evaluate(model, [_labelled(torch.tensor([0.0, 1.0]))])
    assert found.loss == 200.0 and found.auc == 0.0
    assert str(found).startswith(
        "AUC 0.0000, normalized entropy 288.5390, log loss 200.0000 over 2 samples"
    )


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "0 labels and 0 scores"),
        ([torch.ones(2)], "2 clicks and 0 non-clicks"),
    ],
)
def test_what_has_no_auc_is_refused(batches: list[torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        evaluate(_Known(torch.ones(2)), [_labelled(each) for each in batches])


def _shown(rank: int, world_size: int, progress: bool) -> str:
    model, optimizer = _parallel(world_size)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        train(model, STORE.batches(20, rank, world_size), optimizer, steps=3, progress=progress)
        evaluate(model, STORE.batches(16, rank, world_size, split="test"), progress=progress)
    return stderr.getvalue()


def test_the_bar_is_shown_on_rank_0_alone(ranks: Callable[..., Ranks]) -> None:
    first, second = ranks(2).run(_shown, progress=True)
    assert "3/3" in first and "loss=0." in first and "4/4" in first
    assert second == ""
    assert ranks(2).run(_shown, progress=False) == ["", ""]


def test_batches_are_taken_ahead_of_their_step_and_know_where_the_data_stood_after_it() -> None:
    model = nn.Linear(4, 1)

    class Clicks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over = model

        def forward(self, batch: Batch) -> Any:
            loss = self.over(batch.dense_features).square().mean()
            return loss, (loss.detach(), loss.detach(), batch.labels)

    batches = shop(rows=500, test_rows=50).batches(100)
    seen: list[tuple[int, int]] = []
    train(
        Clicks(),
        batches,
        torch.optim.SGD(model.parameters(), 0.1),
        progress=False,
        after_step=lambda step: seen.append((batches.position_after(step), batches.position)),
    )
    assert seen == [(100, 300), (200, 400), (300, 500), (400, 500), (500, 500)]


def test_training_takes_as_many_batches_as_it_makes_steps_and_counts_on() -> None:
    model, called = _model(), []
    optimizer = combined_optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    batches = STORE.batches(50)
    done = train(
        model, batches, optimizer, steps=3, first_step=10, progress=False, after_step=called.append
    )
    assert (done.steps, done.samples, called, batches.position) == (3, 150, [11, 12, 13], 150)
    assert train(model, batches, optimizer, progress=False).steps == 9
    assert train(model, batches, optimizer, progress=False).losses.tolist() == []


def _diverged(rank: int, world_size: int) -> str:
    model, optimizer = _parallel(world_size)
    broken = [*STORE.batches(20, rank, world_size)][:4]
    if rank == 1:
        broken[2].dense_features[0, 0] = float("nan")
    try:
        train(model, broken, optimizer, first_step=100, progress=False)
    except FloatingPointError as error:
        return str(error)
    return "nothing was raised"


def test_a_loss_that_is_no_number_is_named_on_every_rank(ranks: Callable[..., Ranks]) -> None:
    first, second = ranks(2).run(_diverged)
    assert first == second
    assert first.startswith(
        "the loss of step 103 is nan, and 2 of 4 are not finite: lower the learning rate"
    )


def _names(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    model, optimizer = _parallel(world_size)
    return sorted(optimizer.params), sorted(model.fused_optimizer.params)


def test_the_combined_optimizer_has_every_parameter_once(ranks: Callable[..., Ranks]) -> None:
    dense = {name for name, _ in _model().named_parameters() if "embedding_bags" not in name}
    for both, fused in ranks(2).run(_names):
        assert set(both) == dense | set(fused)
        assert len(both) == len(dense) + len(fused)
        assert all("t_user" in name or "t_item" in name for name in fused)


def test_an_unsharded_model_has_one_optimizer_for_everything() -> None:
    model = _model()
    optimizer = combined_optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    assert set(optimizer.params) == {name for name, _ in model.named_parameters()}


def test_a_parameter_that_no_optimizer_trains_is_named_before_the_first_step() -> None:
    model, steps = _model(), []
    over = model.model.over_arch
    top = torch.optim.SGD(over.parameters(), lr=0.1)
    model.model.dense_arch.requires_grad_(False)
    with pytest.warns(UserWarning, match="train: no optimizer trains ") as said:
        train(model, STORE.batches(20), top, steps=1, progress=False, after_step=steps.append)
    [message] = [str(each.message) for each in said]
    rest = {name for name, _ in model.named_parameters() if "over_arch" not in name}
    assert {name for name in rest if repr(name) in message} == {
        name for name in rest if "dense_arch" not in name
    }
    assert "requires_grad_(False)" in message
    model.model.sparse_arch.requires_grad_(False)
    train(model, STORE.batches(20), top, steps=1, progress=False, after_step=steps.append)
    assert steps == [1, 1]
    with pytest.raises(ValueError, match=r"no group holds 'model\.over_arch.*bias'"):
        combined_optimizer(model, lambda params: torch.optim.SGD(params[:-1], lr=0.1))


def test_a_parameter_that_two_optimizers_train_is_named() -> None:
    model = _model()
    every = dict(model.named_parameters())
    one = KeyedOptimizerWrapper(every, lambda params: torch.optim.SGD(params, lr=0.1))
    over = {name: each for name, each in every.items() if "over_arch" in name}
    two = KeyedOptimizerWrapper(over, lambda params: torch.optim.Adam(params, lr=0.1))
    both = CombinedOptimizer([("one", one), ("two", two)])
    with pytest.raises(ValueError, match="train: two optimizers train ") as refused:
        train(model, STORE.batches(20), both, steps=1, progress=False)
    assert all(repr(name) in str(refused.value) for name in over)


class _Answers(nn.Module):
    """Answers with a part of what a click model answers with."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.layer, self.which = nn.Linear(4, 1), which

    def forward(self, batch: Batch) -> Any:
        logits = self.layer(batch.dense_features).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return {
            "logits": logits,
            "loss": loss,
            "loss and logits": (loss, logits),
            "loss and two": (loss, (logits, batch.labels)),
            "a dict": {"loss": loss},
        }[self.which]


@pytest.mark.parametrize("which", ["logits", "loss", "loss and logits", "loss and two", "a dict"])
@pytest.mark.parametrize("doing", ["train", "evaluate"])
def test_a_model_that_answers_with_something_else_is_told_what_to_answer(
    which: str, doing: str
) -> None:
    model = _Answers(which)
    with pytest.raises(TypeError, match=r"\(loss\.detach\(\), logits\.detach\(\)"):
        if doing == "evaluate":
            evaluate(model, STORE.batches(20, split="test"))
        else:
            train(
                model,
                STORE.batches(20),
                torch.optim.SGD(model.parameters(), lr=0.1),
                progress=False,
            )

"""Edge cases of the loops around models: ranks without samples, loaders of unequal length, invalid
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models.test_training import STORE, _model, _parallel
from torch import nn

from tutorec.datasets.utils import Batch
from tutorec.errors import RankError
from tutorec.models.baseline import click_count_baseline, click_counts
from tutorec.models.dlrm import DLRMTrain
from tutorec.models.metrics import auc, base_entropy
from tutorec.models.retrieval import CandidateIndex, build_index, recall_at
from tutorec.models.training import evaluate, train
from tutorec.models.two_tower import TwoTower, TwoTowerTrain, clicks_of
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Ranks


def first_samples(batch: Batch, samples: int) -> Batch:
    """The first samples of a batch; none for 0."""
    bags = [batch.sparse_features[key] for key in batch.sparse_features.keys()]
    lengths = [bag.lengths()[:samples] for bag in bags]
    values = [bag.values()[: int(length.sum())] for bag, length in zip(bags, lengths, strict=True)]
    features = KeyedJaggedTensor(
        batch.sparse_features.keys(), torch.cat(values), lengths=torch.cat(lengths)
    )
    return Batch(batch.dense_features[:samples], features, batch.labels[:samples])


def batches(count: int, rank: int = 0, world_size: int = 1) -> list[Batch]:
    source = STORE.batches(20, rank, world_size)
    return [next(source) for _ in range(count)]


def test_a_batch_without_samples_has_the_loss_0_and_moves_nothing() -> None:
    model = _model()
    loss, (detached, logits, labels) = model(first_samples(batches(1)[0], 0))
    loss.backward()
    assert (loss.item(), detached.item(), len(logits), len(labels)) == (0.0, 0.0, 0, 0)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert not any(p.grad is not None and p.grad.isnan().any() for p in model.parameters())


def test_the_loss_of_a_traced_model_is_that_of_the_model() -> None:
    class Loss(nn.Module):
        def __init__(self, model: DLRMTrain) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, dense: torch.Tensor, features: KeyedJaggedTensor, labels: torch.Tensor
        ) -> torch.Tensor:
            return self.model(Batch(dense, features, labels))[0]

    model = _model()
    traced = torch.fx.symbolic_trace(DLRMTrain(model.model))
    for batch in (batches(1)[0], first_samples(batches(1)[0], 0)):
        assert torch.equal(traced(batch)[0], model(batch)[0])


def trained_with_an_empty_rank(
    empty: list[int], rank: int, world_size: int
) -> tuple[list[float], int]:
    model, optimizer = _parallel(world_size)
    given = [
        first_samples(batch, 0) if step in empty and rank == world_size - 1 else batch
        for step, batch in enumerate(batches(3, rank, world_size))
    ]
    done = train(model, given, optimizer, progress=False)
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    return done.losses.tolist(), done.samples


def test_a_rank_without_samples_takes_part_and_counts_for_nothing(
    ranks: Callable[..., Ranks],
) -> None:
    whole = ranks(2).run(trained_with_an_empty_rank, [])
    one, other = ranks(2).run(trained_with_an_empty_rank, [1])
    assert one == other
    assert one[1] == 100 and whole[0][1] == 120
    assert one[0][0] == whole[0][0][0]
    assert 0.3 < one[0][1] < 1.5


class Mean(nn.Module):
    """A model whose mean over no samples is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, batch: Batch) -> Any:
        logits = batch.dense_features @ self.weight
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def test_a_step_without_samples_has_the_loss_0_whatever_the_model_says() -> None:
    model, full = Mean(), batches(1)[0]
    done = train(
        model,
        [full, first_samples(full, 0)],
        torch.optim.SGD(model.parameters(), 0.1),
        progress=False,
    )
    assert done.losses[1] == 0.0 and done.losses[0] > 0 and done.samples == 20


def uneven(what: str, rank: int, world_size: int) -> str:
    model, optimizer = _parallel(world_size)
    given = batches(3 if rank else 2, rank, world_size)
    try:
        if what == "train":
            train(model, given, optimizer, progress=False)
        elif what == "steps":
            train(model, iter(given), optimizer, steps=1 + rank, progress=False)
        elif what == "none":
            train(model, given if rank else [], optimizer, progress=False)
        else:
            evaluate(model, given)
    except ValueError as error:
        return str(error)
    return "went through"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "train",
            (
                "train: ranks have different numbers of batches: rank 0 2, rank 1 3; give the "
                "others empty"
            ),
        ),
        ("steps", "train: ranks have different numbers of batches: rank 0 1, rank 1 2;"),
        ("none", "train: ranks have different numbers of batches: rank 0 0, rank 1 3;"),
        ("evaluate", "evaluate: ranks have different numbers of batches: rank 0 2, rank 1 3;"),
    ],
)
def test_a_rank_with_fewer_batches_is_named_before_the_first_step(
    ranks: Callable[..., Ranks], what: str, said: str
) -> None:
    for message in ranks(2).run(uneven, what):
        assert message.startswith(said), message


def test_batches_that_cannot_be_counted_are_trained_with() -> None:
    def stream() -> Iterator[Batch]:
        yield from batches(2)

    model = _model()
    assert (
        train(model, stream(), torch.optim.SGD(model.parameters(), 0.1), progress=False).steps == 2
    )
    assert train(model, [], torch.optim.SGD(model.parameters(), 0.1), progress=False).samples == 0


def test_labels_and_scores_that_would_spoil_a_metric_are_refused() -> None:
    with pytest.raises(ValueError, match=r"auc: 1 of 2 labels.*NaN.* sample 1"):
        auc(torch.tensor([1.0, torch.nan]), torch.tensor([0.1, 0.2]))
    with pytest.raises(ValueError, match=r"0 labels is nan.*both classes"):
        base_entropy(torch.zeros(0))


def tables() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(40, 4, "t_user", feature_names=["user"]),
            EmbeddingBagConfig(20, 4, "t_item", feature_names=["item", "clicked"]),
        ]
    )


def towers(**options: Any) -> TwoTowerTrain:
    return TwoTowerTrain(TwoTower(tables(), ["user", "clicked"], ["item"], [4]), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda index: index.retrieve(torch.zeros(2, 3), 0), "k=0 must be a whole number, 1 to 5"),
        (lambda index: index.retrieve(torch.zeros(2, 3), 6), "k=6 must be a whole number, 1 to 5"),
        (
            lambda index: index.retrieve(torch.zeros(1, 3), 2, -1),
            "block=-1 must be a whole number, at least 1",
        ),
        (
            lambda index: CandidateIndex(torch.arange(4), torch.zeros(5, 3)),
            r"got ids \[4\] and vectors \[5, 3",
        ),
        (lambda index: build_index(towers().model, torch.arange(0)), "0 ids for 1 rank"),
        (lambda index: recall(ks=[0, 5]), "k=0 must be a whole number, at least 1"),
        (
            lambda index: recall(items=torch.arange(20)),
            r"recall at 5 of \d+ samples: \[20\] items were retrieved",
        ),
        (lambda index: recall(feature="clicked"), "feature 'clicked': sample .* ids and needs one"),
        (
            lambda index: towers(negatives="random", rows=0),
            "rows=0 must be a whole number, at least 1",
        ),
        (lambda index: towers(negatives="radom"), "did you mean 'random'"),
        (lambda index: towers(frequency=-torch.ones(20)), r"numbers from 0, got \[20\]"),
    ],
)
def test_what_would_give_other_results_in_silence_is_refused(
    call: Callable[[CandidateIndex], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(CandidateIndex(torch.arange(5), torch.zeros(5, 3)))


def clicks() -> Batch:
    return clicks_of(batches(1)[0])


def recall(
    ks: Any = (5,), items: torch.Tensor | None = None, feature: str = "item"
) -> dict[int, float]:
    batch = clicks()
    whole = torch.arange(20).expand(len(batch.labels), -1) if items is None else items
    return recall_at(ks, [batch], lambda _: whole, feature)


def differing(what: str, rank: int) -> None:
    if what == "ids":
        build_index(towers().model, torch.arange(20 - rank))
    elif what == "batch_size":
        build_index(towers().model, torch.arange(20), batch_size=4 + rank)
    else:
        recall(ks=[5] if rank else [5, 10])


@pytest.mark.parametrize("what", ["ids", "batch_size", "ks"])
def test_ranks_that_look_for_different_things_are_told(
    ranks: Callable[..., Ranks], what: str
) -> None:
    with pytest.raises(
        RankError,
        match=rf"ranks disagree in (build_index|recall_at): .*{what}.* on rank 1 and .*rank 0",
    ):
        ranks(2).run(differing, what)


def test_baselines_refuse_what_they_cannot_count() -> None:
    with pytest.raises(ValueError, match=r"'item'.*0 to 19.*rows=3.*0 to 2"):
        click_counts(STORE.batches(600), "item", 3)
    with pytest.raises(ValueError, match=r"smoothing=-5\.0 must be a finite number"):
        click_count_baseline(batches(2), batches(1), smoothing=-5.0)
    assert click_count_baseline(batches(2), []).shape == (0,)
    assert click_count_baseline(batches(2), batches(1), keys=[]).tolist() == [0.0] * 20

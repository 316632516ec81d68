"""Two towers: their loss by hand, and what they learn from the shop's clicks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tutorec.datasets.random import shop
from tutorec.datasets.utils import Batch
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from tutorec.models.baseline import click_counts
from tutorec.models.retrieval import build_index, recall_at
from tutorec.models.training import combined_optimizer, train
from tutorec.models.two_tower import TwoTower, TwoTowerTrain, clicks_of, with_empty_bags
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Ranks, device


def _towers(
    users: int = 9, items: int = 6, columns: int = 4, layers: tuple[int, ...] = (5, 3)
) -> TwoTower:
    torch.manual_seed(2)
    tables = [
        EmbeddingBagConfig(
            users, columns, "t_user", feature_names=["user"], pooling=PoolingType.MEAN
        ),
        EmbeddingBagConfig(
            items, columns, "t_item", feature_names=["item", "clicked"], pooling=PoolingType.MEAN
        ),
    ]
    return TwoTower(EmbeddingBagCollection(tables), ["user", "clicked"], ["item"], list(layers))


def _batch(items: list[int]) -> Batch:
    count = len(items)
    features = KeyedJaggedTensor(
        ["user", "item", "clicked"],
        torch.tensor([*range(count), *items, *([1, 2] if count else [])], dtype=torch.long),
        lengths=torch.tensor(
            [1] * 2 * count + ([2] + [0] * (count - 1) if count else []), dtype=torch.int32
        ),
    )
    return Batch(torch.zeros(count, 1), features, torch.ones(count))


def _by_hand(scores: list[list[float]], own: list[int]) -> float:
    """Mean cross-entropy; a None in a row is left out."""
    losses = [
        math.log(sum(math.exp(score) for score in row if score is not None)) - row[place]
        for row, place in zip(scores, own, strict=True)
    ]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("corrected", [False, True])
def test_in_batch_loss_leaves_out_the_same_item_and_corrects_for_frequency(corrected: bool) -> None:
    towers, items = _towers(), [3, 0, 3]
    frequency = torch.tensor([4, 0, 0, 9, 0, 0])
    queries, candidates = towers(_batch(items).sparse_features)
    scores: Any = (queries @ candidates.t()).tolist()
    if corrected:
        scores = [
            [s - math.log(int(frequency[i]) + 1) for s, i in zip(row, items, strict=True)]
            for row in scores
        ]
    scores[0][2] = scores[2][0] = None
    loss, (detached, _, own) = TwoTowerTrain(towers, frequency=frequency if corrected else None)(
        _batch(items)
    )
    assert loss.item() == pytest.approx(_by_hand(scores, [0, 1, 2]), abs=1e-5)
    assert own.tolist() == [0, 1, 2]
    assert not detached.requires_grad and loss.requires_grad


def test_random_candidates_are_a_function_of_the_batch_and_the_own_one_is_first() -> None:
    towers, items = _towers(), [3, 0, 5]
    model = TwoTowerTrain(towers, "random", rows=6, drawn=4)
    loss, (_, scores, own) = model(_batch(items))
    assert scores.shape == (3, 5) and own.tolist() == [0, 0, 0]
    torch.manual_seed(99)
    assert torch.equal(model(_batch(items))[1][1], scores)
    others = TwoTowerTrain(towers, "random", rows=6, drawn=4)(_batch([3, 0, 4]))[1][1]
    assert not torch.equal(others[:2, 1:], scores[:2, 1:])
    queries, mine = towers(_batch(items).sparse_features)
    every = towers.candidates(
        KeyedJaggedTensor(["item"], torch.arange(6), lengths=torch.ones(6, dtype=torch.int32))
    )
    torch.testing.assert_close(scores[:, 0], (queries * mine).sum(1))
    of_all = (queries @ every.t()).detach()
    for row in range(3):
        for score in scores[row, 1:].tolist():
            if score == -math.inf:
                continue
            near = (of_all[row] - score).abs().argmin()
            assert float(of_all[row][near]) == pytest.approx(score, abs=1e-5)
            assert int(near) != items[row]
    kept: Any = [[None if s == -math.inf else s for s in row] for row in scores.tolist()]
    assert loss.item() == pytest.approx(_by_hand(kept, [0, 0, 0]), abs=1e-5)


def test_a_candidate_that_is_drawn_by_chance_is_left_out() -> None:
    scores = TwoTowerTrain(_towers(items=3), "random", rows=2, drawn=50)(_batch([1, 0]))[1][1]
    out = scores == -math.inf
    assert not bool(out[:, 0].any())
    # each drawn id is the own one of exactly one of the two samples
    assert torch.equal(out[0, 1:], ~out[1, 1:])


def test_a_tower_needs_its_own_features_only() -> None:
    towers, batch = _towers(), _batch([3, 0, 5])
    queries, candidates = towers(batch.sparse_features)
    of_query = KeyedJaggedTensor(
        ["clicked", "user"], torch.tensor([1, 2, 0, 1, 2]), lengths=torch.tensor([2, 0, 0, 1, 1, 1])
    )
    of_candidate = KeyedJaggedTensor(
        ["item"], torch.tensor([3, 0, 5]), lengths=torch.tensor([1, 1, 1])
    )
    torch.testing.assert_close(towers.queries(of_query), queries)
    torch.testing.assert_close(towers.candidates(of_candidate), candidates)
    assert with_empty_bags(batch.sparse_features, ["item"]) is batch.sparse_features


@pytest.mark.parametrize(
    ("query", "candidate", "message"),
    [
        (
            [],
            ["item"],
            r"query_features=\[\] must name at least one of \['clicked', 'item', 'user'\]",
        ),
        (
            ["user"],
            ["itm"],
            r"candidate_features=\['itm'\] must name at least one of \['clicked', 'item'",
        ),
    ],
)
def test_towers_without_known_features_are_refused(
    query: list[str], candidate: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TwoTower(_towers().embedding_bag_collection, query, candidate, [3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"negatives": "hard"}, "negatives='hard' must be one of 'in_batch', 'random'"),
        ({"negatives": "random"}, "rows=None must be a whole number, at least 1"),
        (
            {"negatives": "random", "rows": 6, "drawn": 0},
            "drawn=0 must be a whole number, at least 1",
        ),
    ],
)
def test_negatives_that_cannot_be_drawn_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TwoTowerTrain(_towers(), **options)


def test_random_candidates_of_two_features_are_refused() -> None:
    towers = TwoTower(_towers().embedding_bag_collection, ["user"], ["item", "clicked"], [3])
    with pytest.raises(ValueError, match=r"use 'in_batch'.*\['item', 'clicked'\]"):
        TwoTowerTrain(towers, "random", rows=6)


def test_a_sample_with_two_candidates_is_named() -> None:
    features = KeyedJaggedTensor(
        ["user", "item", "clicked"],
        torch.tensor([0, 1, 3, 4, 5]),
        lengths=torch.tensor([1, 1, 1, 2, 0, 0]),
    )
    with pytest.raises(ValueError, match=r"feature 'item': sample 1 has 2 ids"):
        TwoTowerTrain(_towers())(Batch(torch.zeros(2, 1), features, torch.ones(2)))


def test_clicks_are_the_clicked_samples_with_their_bags_and_weights() -> None:
    batch = next(shop(rows=200).batches(50, weighted=True))
    clicks, rows = clicks_of(batch), batch.labels.nonzero().view(-1).tolist()
    assert 0 < len(rows) < 50
    assert torch.equal(clicks.dense_features, batch.dense_features[rows])
    for key in batch.sparse_features.keys():
        ours, whole = clicks.sparse_features[key], batch.sparse_features[key]
        expected = [whole.to_dense()[row].tolist() for row in rows]
        assert [bag.tolist() for bag in ours.to_dense()] == expected
        assert [w.tolist() for w in ours.to_dense_weights()] == [
            whole.to_dense_weights()[r].tolist() for r in rows
        ]


def _stepped(rank: int, negatives: Any) -> tuple[float, list[Tensor]]:
    sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": 0.1})
    made = TwoTowerTrain(_towers(), negatives, frequency=torch.ones(6), rows=6, drawn=4)
    model = DistributedModelParallel(made, sharders=[sharder])
    optimizer = combined_optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    done = train(model, [_batch([] if rank == 1 else [3, 0, 5])], optimizer, progress=False)
    towers = model.module.model
    index = build_index(towers, torch.arange(6))
    return float(done.losses), [index.vectors]


@pytest.mark.parametrize("negatives", ["in_batch", "random"])
def test_a_rank_without_clicks_takes_part(ranks: Callable[..., Ranks], negatives: str) -> None:
    found = ranks(2).run(_stepped, negatives)
    assert found[0][0] == found[1][0] > 0
    assert torch.equal(found[0][1][0], found[1][1][0])
    assert bool(found[0][1][0].isfinite().all())


def _explained(rank: int, negatives: Any) -> str:
    sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": 0.1})
    model = DistributedModelParallel(
        TwoTowerTrain(_towers(), negatives, rows=6, drawn=4), sharders=[sharder]
    )
    optimizer = combined_optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    return TrainPipelineSparseDist(model, optimizer, device()).explain()


@pytest.mark.parametrize("negatives", ["in_batch", "random"])
def test_a_train_pipeline_starts_the_tables_early(
    ranks: Callable[..., Ranks], negatives: str
) -> None:
    assert (
        ranks(2).run(_explained, negatives) == ["model.embedding_bag_collection: started early"] * 2
    )


@pytest.mark.slow
def test_towers_find_more_than_what_is_popular_and_need_the_correction() -> None:
    store = shop(rows=80_000)
    counts = click_counts(store.batches(8192), "item", 200)

    def recall(model: TwoTowerTrain | None) -> float:
        def found(batch: Batch) -> Tensor:
            if model is None:
                return counts.topk(10).indices.expand(len(batch.labels), -1)
            return index.retrieve(model.model.queries(batch.sparse_features).detach(), 10)[0]

        index = build_index(model.model, torch.arange(200)) if model is not None else None
        return recall_at([10], map(clicks_of, store.batches(4096, split="test")), found, "item")[10]

    def trained(frequency: Tensor | None) -> TwoTowerTrain:
        towers = _towers(500, 200, 16, (32, 16))
        apply_optimizer_in_backward(
            RowWiseAdagrad, towers.embedding_bag_collection.parameters(), {"lr": 0.1}
        )
        model = TwoTowerTrain(towers, frequency=frequency)
        optimizer = combined_optimizer(model, lambda params: torch.optim.Adam(params, lr=0.003))
        train(model, map(clicks_of, store.batches(512, epochs=2)), optimizer, progress=False)
        return model

    popular, best = recall(None), store.best_recall(10)
    assert popular < best
    assert (recall(trained(counts)) - popular) / (best - popular) > 0.5
    assert recall(trained(None)) < popular

"""Exercises of chapter 05: bytes on the wire, the averaged gradient, a second collection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.lists import kjt_from_lists
from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import on_ranks

__all__ = ["EXERCISES"]

_ROWS = {"user": 40, "item": 30, "query": 20, "page": 10}
_BATCHES = (
    {"user": [[3], [7]], "item": [[1, 2], []], "query": [[9], [0, 9]], "page": [[4], [5]]},
    {"user": [[3], [8]], "item": [[2], [2, 5]], "query": [[], [9]], "page": [[4], [4]]},
)


class _TwoCollections(nn.Module):
    """Two collections, `shop` and `search`, of two tables each, and a layer for their rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shop: EmbeddingBagCollection = _collection("user", "item")
        self.search: EmbeddingBagCollection = _collection("query", "page")
        self.score = nn.Linear(16, 1)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        pooled = [self.shop(ids).values(), self.search(ids).values()]
        return self.score(torch.cat(pooled, dim=1)).squeeze(1)


def _collection(*features: str) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"{feature}_table",
                num_embeddings=_ROWS[feature],
                embedding_dim=4,
                feature_names=[feature],
            )
            for feature in features
        ]
    )


def _shard(model: _TwoCollections, paths: tuple[str, ...], last: int, rate: float) -> nn.Module:
    """Shards the collections at these paths; the second table of each is on rank `last`."""
    plans = {}
    for path in paths:
        collection: EmbeddingBagCollection = getattr(model, path)
        first, second = (config.name for config in collection.embedding_bag_configs())
        placement = {first: table_wise(rank=0), second: table_wise(rank=last)}
        plans[path] = construct_module_sharding_plan(collection, placement, world_size=2)

    fused = {"optimizer": "exact_sgd", "learning_rate": rate}
    sharders = [EmbeddingBagCollectionSharder(fused)]
    return DistributedModelParallel(model, plan=ShardingPlan(plans), sharders=sharders)


def _on_two_ranks(function: Callable[[_TwoCollections], Any]) -> Any:
    """Tables that each of two ranks holds, and its scores before and after a step.

    Raises:
        ValueError: The function fails on a rank.
    """

    def step(rank: int) -> Any:
        model = function(_TwoCollections())
        if model is ... or model is None:
            return ...

        shapes = {
            name.split(".")[-2]: list(weight.shape)
            for name, weight in model.named_parameters()
            if "_table" in name
        }

        batch = kjt_from_lists(_BATCHES[rank]).to(device())
        scores = model(batch)
        scores.square().mean().backward()
        return shapes, scores.tolist(), model(batch).tolist()

    return on_ranks(2, step, timeout=60)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="05.1",
        compared="1,000 pooled rows of 64 floats for each rank that is not the owner",
        solution=3 * 1_000 * 64 * 4,
        mistakes=(
            Mistake(
                "sends its own samples' rows too",
                4 * 1_000 * 64 * 4,
                "That counts 1,000 rows for each of the four ranks. Which rank's rows need not be "
                "sent?",
            ),
            Mistake(
                "sends the table",
                1_000 * 64 * 4,
                "That is what one other rank receives. How many other ranks have samples?",
            ),
            Mistake(
                "counts numbers, not bytes",
                3 * 1_000 * 64,
                "Those are numbers; a float32 has more than one byte.",
            ),
        ),
        shape="a number of bytes",
    ),
    Exercise(
        id="05.2",
        compared="gradients 1 and 3 of two of the 8 samples of the global mean",
        solution=0.8 * (1 + 3) / 8,
        mistakes=(
            Mistake(
                "adds the means of the ranks",
                0.8 * (1 + 3) / 4,
                "That adds the two ranks' means. The gradients of two ranks are averaged, not "
                "added.",
            ),
            Mistake(
                "ignores rank 1",
                0.8 * 1 / 4,
                "That is rank 0 alone. The gradient of rank 1 goes to the same row.",
            ),
            Mistake(
                "ignores rank 0",
                0.8 * 3 / 4,
                "That is rank 1 alone. The gradient of rank 0 goes to the same row.",
            ),
            Mistake(
                "averages over the two samples that read the row",
                0.8 * (1 + 3) / 2,
                "The loss is a mean over all samples, and not only over those with this row.",
            ),
            Mistake(
                "ignores the means",
                0.8 * (1 + 3),
                "That is the gradient of the sum of all losses; the loss here is a mean.",
            ),
        ),
        shape="one number",
    ),
    Exercise(
        id="05.3",
        compared="each table on one of two ranks, and the scores before and after a step",
        solution=lambda model: _shard(model, ("shop", "search"), last=1, rate=0.5),
        measure=_on_two_ranks,
        tolerance=1e-5,
        mistakes=(
            Mistake(
                "leaves the second collection out of the plan",
                lambda model: _shard(model, ("shop",), last=1, rate=0.5),
                "Both ranks hold `query_table` and `page_table`: a collection that the plan does "
                "not name is copied.",
            ),
            Mistake(
                "puts all tables on rank 0",
                lambda model: _shard(model, ("shop", "search"), last=0, rate=0.5),
                "Rank 0 holds all four tables. Which ones should rank 1 hold?",
            ),
            Mistake(
                "names no optimizer for the tables",
                lambda model: _shard(model, ("shop", "search"), last=1, rate=0.01),
                "Each table is on the right rank, but its rows move too little. Which line names "
                "the optimizer of the tables?",
            ),
        ),
        shape="a function that returns the sharded model",
    ),
)

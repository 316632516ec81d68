"""Exercises of chapter 05: bytes on the wire, the averaged gradient, a second collection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.lists import kjt_from_lists
from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import on_ranks

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
            EmbeddingBagConfig(_ROWS[feature], 4, f"{feature}_table", feature_names=[feature])
            for feature in features
        ]
    )


def _on_two_ranks(function: Callable[[_TwoCollections], Any]) -> Any:
    """Tables that each of two ranks holds, and its scores before and after a step.

    Raises:
        ValueError: The function fails on a rank.
    """

    def step(rank: int) -> Any:
        model = function(_TwoCollections())
        if model is ... or model is None:
            return ...

        names = [name for name, _ in model.named_parameters() if "_table" in name]
        batch = kjt_from_lists(_BATCHES[rank]).to(device())
        scores = model(batch)
        scores.square().mean().backward()
        tables = {name.split(".")[-2].removesuffix("_table") for name in names}
        return tables, scores.tolist(), model(batch).tolist()

    return on_ranks(2, step, timeout=60)


def _in_one_process(
    *held: set[str], rate: float = 0.5, trained: tuple[str, ...] = ("shop", "search")
) -> list[Any]:
    """What two ranks that hold these tables return, of a model that is not sharded.

    Args:
        held: Tables of each rank.
        rate: Of the tables.
        trained: The collections whose tables move.
    """
    model = _TwoCollections()
    batches = [kjt_from_lists(batch) for batch in _BATCHES]
    before = [model(batch) for batch in batches]
    torch.cat(before).square().mean().backward()
    for collection in trained:
        torch.optim.SGD(model.get_submodule(collection).parameters(), rate).step()
    after = [model(batch).detach() for batch in batches]
    return [
        (tables, scores.detach(), later)
        for tables, scores, later in zip(held, before, after, strict=True)
    ]


EXERCISES = (
    Exercise(
        "05.1",
        compared="1,000 pooled rows of 64 floats for each rank that is not the owner",
        right=768_000,
        mistakes={
            "That counts 1,000 rows for each of the four ranks. Which rank's rows need not be "
            "sent?": 1_024_000,
            "That is what one other rank receives. How many other ranks have samples?": 256_000,
            "Those are numbers; a float32 has more than one byte.": 192_000,
        },
        shape="a number of bytes",
    ),
    Exercise(
        "05.2",
        compared="gradients 1 and 3 of two of the 8 samples of the global mean",
        right=0.4,
        mistakes={
            "That adds the two ranks' means. The gradients of two ranks are averaged, not "
            "added.": 0.8,
            "That is rank 0 alone. The gradient of rank 1 goes to the same row.": 0.2,
            "That is rank 1 alone. The gradient of rank 0 goes to the same row.": 0.6,
            "The loss is a mean over all samples, and not only over those with this row.": 1.6,
            "That is the gradient of the sum of all losses; the loss here is a mean.": 3.2,
        },
        shape="one number",
    ),
    Exercise(
        "05.3",
        compared="each table on one of two ranks, and the scores before and after a step",
        right=_in_one_process({"user", "query"}, {"item", "page"}),
        measure=_on_two_ranks,
        mistakes={
            "Both ranks hold `query_table` and `page_table`: a collection that the plan does "
            "not name is copied.": _in_one_process(
                {"user", "query", "page"}, {"item", "query", "page"}, trained=("shop",)
            ),
            "Rank 0 holds all four tables. Which ones should rank 1 hold?": _in_one_process(
                {"user", "item", "query", "page"}, set()
            ),
            "Each table is on the right rank, but its rows move too little. Which line names "
            "the optimizer of the tables?": _in_one_process(
                {"user", "query"}, {"item", "page"}, rate=0.01
            ),
        },
        tolerance=1e-05,
        shape="a function that returns the sharded model",
    ),
)

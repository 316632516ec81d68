"""Exercises of chapter 20: rows copied into the shards of any plan, and a paired ratio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
)
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import on_ranks

_SAVED = torch.arange(1.0, 33).view(4, 8)  # of each table
_TOP, _BOTTOM = _SAVED.chunk(2)
_LEFT, _RIGHT = _SAVED.chunk(2, dim=1)


def _loaded(answer: Callable[..., Any]) -> Any:
    """The rows that two ranks hold after the answer has loaded three tables into zeros.

    Raises:
        ValueError: It fails on a rank.
    """

    def load() -> Any:
        ways = {
            "by_rows": row_wise(),
            "by_columns": column_wise(ranks=[0, 1]),
            "replicated": data_parallel(),
        }
        tables = [EmbeddingBagConfig(4, 8, name, feature_names=[name]) for name in ways]
        collection = EmbeddingBagCollection(tables, device=device())
        for weight in collection.parameters():
            nn.init.zeros_(weight)
        plan = ShardingPlan({"": construct_module_sharding_plan(collection, ways, world_size=2)})
        sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": 0.1})
        model = DistributedModelParallel(collection, plan=plan, sharders=[sharder])

        with torch.no_grad():
            result = answer(model, {name: _SAVED.clone() for name in model.state_dict()})
        return ... if result is ... else [_held(value) for value in model.state_dict().values()]

    return on_ranks(2, load)


def _held(value: Any) -> Any:
    """The numbers of a table that this rank holds."""
    [rows] = [s.tensor for s in value.local_shards()] if hasattr(value, "local_shards") else [value]
    return rows.tolist()


EXERCISES = (
    Exercise(
        "20.1",
        compared="the rows of three tables on two ranks: by rows, by columns, replicated",
        right=[(_TOP, _LEFT, _SAVED), (_BOTTOM, _RIGHT, _SAVED)],
        measure=_loaded,
        mistakes={
            "The second rank gets the numbers of the first. What does `shard_offsets` of its "
            "shards say?": [(_TOP, _LEFT, _SAVED)] * 2,
            "The table that is cut by rows is right. Where do the columns of the second rank "
            "begin in the table that is cut by columns?": [
                (_TOP, _LEFT, _SAVED),
                (_BOTTOM, _LEFT, _SAVED),
            ],
            "The two tables with shards are right. Every rank has all rows of a replicated "
            "table, as a plain tensor: who fills it?": [
                (_TOP, _LEFT, 0 * _SAVED),
                (_BOTTOM, _RIGHT, 0 * _SAVED),
            ],
        },
        shape="a function that fills the model and returns nothing",
    ),
    Exercise(
        "20.2",
        compared="the ratios of three machines",
        right=[2, 1.1, 1.1],
        cases=(
            ([2.0, 6.0, 2.2, 6.3, 2.1], [1.0, 3.0, 1.0, 1.0, 3.0]),
            ([1.0, 9.0, 1.1], [1.0, 1.0, 1.0]),
            ([3.0, 1.0, 1.2, 3.6], [1.0, 1.0, 3.0, 3.0]),
        ),
        mistakes={
            "Each median may come from another round, a fast one or a slow one. What does a "
            "slow round not change?": [2.2, 1.1, 1.05],
            "You divide round by round, as you should. One round that was disturbed in the "
            "middle moves your number; which kind of average does it hardly move?": [
                2.64,
                3.7,
                1.4,
            ],
            "A slow round takes three times as long, and counts three times in a sum.": [
                18.6 / 9,
                3.7,
                1.1,
            ],
            "How many times as long do *they* take?": [0.5, 1 / 1.1, 0.5 * (1 + 1 / 1.2)],
        },
        shape="a function that returns a number",
    ),
)

"""Exercises of chapter 20: rows copied into the shards of any plan, and a paired ratio."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

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
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import on_ranks

__all__ = ["EXERCISES"]

_ROWS = 4
_COLUMNS = 8
_TABLES: tuple[str, ...] = ("by_rows", "by_columns", "replicated")


def _write(
    model: nn.Module,
    saved: Mapping[str, Tensor],
    part: Callable[[Tensor, Sequence[int], Sequence[int]], Tensor],
    replicas: bool = True,
) -> None:
    """Each shard gets a part of its table, found by its offsets and sizes."""
    for name, value in model.state_dict().items():
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                metadata = shard.metadata
                shard.tensor.copy_(part(saved[name], metadata.shard_offsets, metadata.shard_sizes))
        elif replicas:
            value.copy_(saved[name])


def _rectangle(table: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    row, column = offsets
    rows, columns = sizes
    return table[row : row + rows, column : column + columns]


def _load_rows(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Each shard gets its rectangle of the table, a replica the whole table."""
    _write(model, saved, _rectangle)


def _from_the_first_row(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """As `_load_rows`, with the sizes of a shard and without its offsets."""
    _write(model, saved, lambda table, _, sizes: _rectangle(table, (0, 0), sizes))


def _from_the_first_column(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """As `_load_rows`, without the offset of the columns."""
    _write(model, saved, lambda table, at, sizes: _rectangle(table, (at[0], 0), sizes))


def _shards_only(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """As `_load_rows`, without the replicas."""
    _write(model, saved, _rectangle, replicas=False)


def _loaded(answer: Callable[..., Any]) -> Any:
    """The rows that two ranks hold after the answer has loaded three tables.

    Number n of a saved table is n + 1, and every row is zero before.

    Raises:
        ValueError: It fails on a rank.
    """

    def load() -> Any:
        tables = [
            EmbeddingBagConfig(_ROWS, _COLUMNS, name, feature_names=[name]) for name in _TABLES
        ]
        collection = EmbeddingBagCollection(tables, device=device())
        for weight in collection.parameters():
            nn.init.zeros_(weight)

        ways = dict(
            zip(_TABLES, (row_wise(), column_wise(ranks=[0, 1]), data_parallel()), strict=True)
        )
        plan = ShardingPlan({"": construct_module_sharding_plan(collection, ways, world_size=2)})
        sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": 0.1})
        model = DistributedModelParallel(collection, plan=plan, sharders=[sharder])

        table = torch.arange(1.0, _ROWS * _COLUMNS + 1).view(_ROWS, _COLUMNS)
        with torch.no_grad():
            result = answer(model, {name: table.clone() for name in model.state_dict()})
        return ... if result is ... else [_held(value) for value in model.state_dict().values()]

    return on_ranks(2, load)


def _held(value: Any) -> list[Any]:
    """The numbers of a table that this rank holds."""
    if not hasattr(value, "local_shards"):
        return value.tolist()
    return [shard.tensor.tolist() for shard in value.local_shards()]


def _paired(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return median(a / b for a, b in zip(theirs, ours, strict=True))


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="20.1",
        compared="the rows of three tables on two ranks: by rows, by columns, replicated",
        solution=_load_rows,
        measure=_loaded,
        mistakes=(
            Mistake(
                "takes every shard to begin at the table's first row and column",
                _from_the_first_row,
                "The second rank gets the numbers of the first. What does `shard_offsets` of its "
                "shards say?",
            ),
            Mistake(
                "takes every shard to begin at the table's first column",
                _from_the_first_column,
                "The table that is cut by rows is right. Where do the columns of the second rank "
                "begin in the table that is cut by columns?",
            ),
            Mistake(
                "takes every table to have shards",
                _shards_only,
                "The two tables with shards are right. Every rank has all rows of a replicated "
                "table, as a plain tensor: who fills it?",
            ),
        ),
        shape="a function that fills the model and returns nothing",
    ),
    Exercise(
        id="20.2",
        compared="the ratios of four machines",
        solution=_paired,
        cases=(
            ([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]),
            ([2.0, 6.0, 2.2, 6.3, 2.1], [1.0, 3.0, 1.0, 1.0, 3.0]),
            ([1.0, 9.0, 1.1], [1.0, 1.0, 1.0]),
            ([3.0, 1.0, 1.2, 3.6], [1.0, 1.0, 3.0, 3.0]),
        ),
        mistakes=(
            Mistake(
                "divides the medians",
                lambda theirs, ours: median(theirs) / median(ours),
                "Each median may come from another round, a fast one or a slow one. What does a "
                "slow round not change?",
            ),
            Mistake(
                "takes the mean of the ratios",
                lambda theirs, ours: mean(a / b for a, b in zip(theirs, ours, strict=True)),
                "You divide round by round, as you should. One round that was disturbed in the "
                "middle moves your number; which kind of average does it hardly move?",
            ),
            Mistake(
                "divides the sums",
                lambda theirs, ours: sum(theirs) / sum(ours),
                "A slow round takes three times as long, and counts three times in a sum.",
            ),
            Mistake(
                "divides ours by theirs",
                lambda theirs, ours: _paired(ours, theirs),
                "How many times as long do *they* take?",
            ),
        ),
        shape="a function that returns a number",
    ),
)

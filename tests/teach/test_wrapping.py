"""The diagram of a wrapped model shows the replica and the shards of each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import tutorec
from tutorec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
)
from tutorec.distributed.types import ShardingPlan
from tutorec.teach import draw

MODEL = nn.ModuleDict({"tables": nn.Linear(3, 3), "dense": nn.Linear(9, 100)})


def plan(how: Any, names: tuple[str, ...] = ("user", "item"), path: str = "tables") -> Any:
    """Tables of 8 rows and 16 columns, for two ranks."""
    tables = [
        tutorec.EmbeddingBagConfig(
            name=name, num_embeddings=8, embedding_dim=16, feature_names=[name]
        )
        for name in names
    ]
    module = tutorec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    ways = {name: how for name in names}
    return ShardingPlan({path: construct_module_sharding_plan(module, ways, world_size=2)})


def test_each_rank_has_a_replica_and_its_rows() -> None:
    chart = draw.wrapped(MODEL, plan(row_wise()), claim="{dense} and {held}")
    assert chart.claim == "4 kB and 512 B"
    written = [text.get_text() for axes in chart.figure.axes for text in axes.texts]
    assert {"rank 0: user", "rank 1: item", "gradients: mean"} <= set(written)
    assert written.count("rows 0 to 3") == written.count("rows 4 to 7") == 2
    assert written.count("1,000 numbers") == 2

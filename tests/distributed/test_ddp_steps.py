"""Inside DistributedDataParallel every rank keeps its own shards, and only dense gradients are
reduced.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.cases import KINDS, ROWS, batch, collection, tables, word
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tutorec.distributed import comm
from tutorec.distributed.data_parallel import sharded_parameter_names
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel, get_module
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

WIDTH = sum(config.embedding_dim * len(config.feature_names) for config in tables())
STEPS = 10
# Of these every rank has shards of its own; of data-parallel tables all have the same copy.
CUT = [*(kind for kind in KINDS if kind != "data_parallel"), "mixed"]


class Model(nn.Module):
    """Tables and dense parameters, both nested."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.ModuleDict({"tables": collection()})
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.sparse["tables"](features).values()).mean()


def wrapped(
    rank: int, world_size: int, kind: str, fill: float | None = None
) -> DistributedModelParallel:
    """The model over all ranks; ``fill`` puts one number into every row of every table that this
    rank brings.
    """
    torch.manual_seed(3)
    model = Model()
    tables = model.sparse["tables"]
    if fill is not None:
        with torch.no_grad():
            for bag in tables.embedding_bags.values():
                bag.get_parameter("weight").fill_(fill)
    local_size = comm.get_local_size(world_size)
    names = [config.name for config in tables.embedding_bag_configs()]
    words = {name: word(kind, index, world_size, local_size) for index, name in enumerate(names)}
    plan = construct_module_sharding_plan(
        tables, words, local_size=local_size, world_size=world_size
    )
    sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": 0.5})
    return DistributedModelParallel(
        model, plan=ShardingPlan({"sparse.tables": plan}), sharders=[sharder]
    )


def shards(model: DistributedModelParallel) -> dict[str, Tensor]:
    return {
        name: p.detach().clone()
        for name, p in model.module.named_parameters()
        if "embedding_bags" in name
    }


def ten_steps(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    model = wrapped(rank, world_size, kind, fill=rank + 1.0)
    at_wrapping = {name: rows.unique().tolist() for name, rows in shards(model).items()}
    pieces = {}
    for step in range(STEPS):
        model(batch(100 * step + rank, 4)).backward()
    for name, value in model.state_dict().items():
        if "embedding_bags" in name:
            # Ids are below ROWS: rows from there on have no reason to move.
            pieces[name] = [
                (s.metadata.shard_offsets[0], s.tensor.clone())
                for s in value.local_shards()
                if s.tensor.numel()
            ]
    untouched = [
        float(row[0])
        for of_table in pieces.values()
        for first, rows in of_table
        for number, row in enumerate(rows, first)
        if number >= ROWS
    ]
    moved = any(
        bool((rows != rank + 1.0).any()) for of_table in pieces.values() for _, rows in of_table
    )
    ddp = get_module(model)
    assert isinstance(ddp, DistributedDataParallel)
    dense = [
        name
        for name, p in model.module.named_parameters()
        if any(p is each for each in ddp._module_parameters)
    ]
    return {
        "wrapping": at_wrapping,
        "untouched": sorted(set(untouched)),
        "moved": moved,
        "reduced": dense,
        "bytes": ddp._get_ddp_logging_data()["total_parameter_size_bytes"],
        "ignored": sorted(sharded_parameter_names(model.module)) == sorted(shards(model)),
    }


def of_every_kind(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    return {kind: ten_steps(rank, world_size, kind) for kind in CUT}


@pytest.mark.parametrize(
    ("world_size", "hosts"),
    [(2, 1), pytest.param(4, 2, marks=pytest.mark.world4)],
    ids=["w2", "w4"],
)
def test_rank_distinct_shards_of_every_type_survive_wrapping_and_ten_steps(
    ranks, world_size, hosts
):
    results = ranks(world_size, hosts=hosts).run(of_every_kind)
    for kind in CUT:
        of_kind = [result[kind] for result in results]
        for rank, found in enumerate(of_kind):
            where = f"{kind}, rank {rank}"
            assert all(numbers in ([rank + 1.0], []) for numbers in found["wrapping"].values()), (
                where
            )
            assert found["untouched"] in ([rank + 1.0], []), where
            assert found["reduced"] == ["over.weight", "over.bias"], where
            assert found["bytes"] == 4 * (WIDTH + 1), where
            assert found["ignored"], where
        assert any(found["moved"] for found in of_kind), kind
        assert sum(bool(found["untouched"]) for found in of_kind) >= 1, kind


def copies(
    rank: int, world_size: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str], int]:
    model = wrapped(rank, world_size, "data_parallel")
    before = shards(model)
    for step in range(STEPS):
        model(batch(100 * step + rank, 4)).backward()
    ddp = get_module(model)
    assert isinstance(ddp, DistributedDataParallel)
    ignored = sorted(sharded_parameter_names(model.module))
    return before, shards(model), ignored, ddp._get_ddp_logging_data()["total_parameter_size_bytes"]


def test_copies_of_data_parallel_tables_stay_alike_and_out_of_the_reducer(ranks):
    (before, after, ignored, reduced), (_, others, _, _) = ranks(2).run(copies)
    assert len(after) == 3
    assert ignored == sorted(after)
    assert reduced == 4 * (WIDTH + 1)
    for name, rows in after.items():
        assert torch.equal(rows, others[name]), name
        assert not torch.equal(rows, before[name]), name

"""The bytes that a rank holds of a model: sharded, replicated, unsharded, on the meta device."""

from __future__ import annotations

import torch
from torch import nn

from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from tutorec.distributed.types import ShardingPlan
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim import RowWiseAdagrad, apply_optimizer_in_backward
from tutorec.spmd import Ranks, device, held_bytes

SIZES = {"item": (1001, 8), "user": (300, 16), "day": (7, 4)}
TYPES = {"item": "row_wise", "user": "column_wise", "day": "data_parallel"}


def collection(made_on: str = "cpu") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(rows, columns, name, feature_names=[name])
            for name, (rows, columns) in SIZES.items()
        ],
        device=torch.device(made_on),
    )


def sharder(optimizer: str) -> EmbeddingBagCollectionSharder:
    return EmbeddingBagCollectionSharder({"optimizer": optimizer, "learning_rate": 0.1})


def wrapped_bytes(rank: int, plan: ShardingPlan, optimizer: str) -> tuple[int, int]:
    """Bytes of the wrapped model, and of its sharded collection alone."""
    model = DistributedModelParallel(collection(), plan=plan, sharders=[sharder(optimizer)])
    return held_bytes(model), held_bytes(model.module)


def test_rank_holds_the_bytes_that_the_plan_has_estimated():
    constraints = {
        name: ParameterConstraints(
            sharding_types=[kind], min_partition=8 if name == "user" else None
        )
        for name, kind in TYPES.items()
    }
    planner = EmbeddingShardingPlanner(Topology(2, device().type), constraints=constraints)
    with Ranks(2, timeout=120) as world:
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad"):
            plan = planner.plan(collection("meta"), [sharder(optimizer)])
            found = world.run(wrapped_bytes, ShardingPlan(plan.plan), optimizer)
            assert plan.report is not None
            assert [whole for whole, _ in found] == plan.report.held_bytes
            assert [part for _, part in found] == plan.report.held_bytes


def test_unsharded_model_is_its_parameters_and_the_state_in_backward():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    assert held_bytes(model) == 4 * (4 * 3 + 3 + 2 * 3), "buffers do not count"
    tables = collection()
    weights = sum(4 * rows * columns for rows, columns in SIZES.values())
    assert held_bytes(tables) == weights
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
    state = held_bytes(tables) - weights
    rows = sum(rows for rows, _ in SIZES.values())
    steps = 4 * len(SIZES)
    assert state in (4 * rows, 4 * rows + steps), "a number for each row, and a count of steps"


def test_shared_memory_counts_once_and_the_meta_device_not_at_all():
    one = nn.Linear(4, 4, bias=False)
    other = nn.Linear(4, 4, bias=False)
    other.weight = one.weight
    assert held_bytes(nn.ModuleList([one, other])) == 64
    both = nn.ParameterList([one.weight.detach()[:2], one.weight.detach()[2:]])
    assert held_bytes(both) == 64
    assert held_bytes(collection("meta")) == 0

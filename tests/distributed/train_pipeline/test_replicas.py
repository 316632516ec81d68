"""Pipelines average the replicas of a `DMPCollection` every so many batches, as TorchRec's do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from distributed.cases import group, optimizer_words, word
from distributed.train_pipeline.pipeline_cases import (
    PIPELINES,
    STEPS,
    Bags,
    assert_same,
    dense_optimizer,
    here,
    pipelined,
    samples,
    state,
)
from torch import nn

from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DMPCollection
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan
from tutorec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from tutorec.distributed.train_pipeline.pipeline_context import TrainPipelineContext

INTERVAL = "dmp_collection_sync_interval_batches"


def replicated(world_size: int, group_size: int) -> DMPCollection:
    """Replicas of all tables, each on ``group_size`` ranks."""
    model = Bags()
    words = {
        config.name: word("table_wise", index, group_size, group_size)
        for index, config in enumerate(model.tables.embedding_bag_configs())
    }
    plan = construct_module_sharding_plan(
        model.tables, words, local_size=group_size, world_size=group_size
    )
    return DMPCollection(
        model,
        here(),
        ShardingPlan({"tables": plan}),
        world_size,
        group_size,
        group(),
        node_group_size=group_size,
        sharders=[EmbeddingBagCollectionSharder(optimizer_words("exact_row_wise_adagrad"))],
    )


def averaged_loop(rank: int, world_size: int, group_size: int, every: int | None) -> dict[str, Any]:
    """The plain loop of TorchRec's rule: the mean is taken after the backward of batch 0, n, 2n."""
    model = replicated(world_size, group_size)
    optimizer = dense_optimizer(model)
    for number, each in enumerate(samples("bags", rank)):
        optimizer.zero_grad()
        loss, _ = model(each)
        loss.backward()
        if every is not None and number % every == 0:
            model.sync()
        optimizer.step()
    return state(model, optimizer)


def averaged_pipeline(
    rank: int, world_size: int, group_size: int, name: str, **options: Any
) -> dict[str, Any]:
    model = replicated(world_size, group_size)
    optimizer = dense_optimizer(model)
    pipeline = PIPELINES[name](model, optimizer, here(), **options)
    assert len(pipelined(pipeline, samples("bags", rank))) == STEPS
    return state(model, optimizer)


def tables_of(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name.startswith("tables")}


@pytest.mark.parametrize("name", ["sparse dist", "semi-sync"])
@pytest.mark.parametrize(
    ("world_size", "group_size"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.world4)]
)
def test_replicas_are_averaged_at_the_batches_that_are_multiples(
    ranks, world_size, group_size, name
):
    pool = ranks(world_size)
    loops = {every: pool.run(averaged_loop, group_size, every) for every in (1, 2, 3, None)}
    default = pool.run(averaged_pipeline, group_size, name)
    for every, wanted in loops.items():
        found = pool.run(averaged_pipeline, group_size, name, **{INTERVAL: every})
        for rank in range(world_size):
            assert_same(wanted[rank], found[rank], f"every {every} batches, on rank {rank}")
    for rank in range(world_size):
        assert_same(loops[1][rank], default[rank], f"by default, on rank {rank}")
    # The last of the five batches is number 4, a multiple of 1 and 2. Ranks 0 and 1 hold the same
    # shards.
    for every, alike in ((1, True), (2, True), (3, False), (None, False)):
        one, other = (tables_of(loops[every][rank]) for rank in (0, 1))
        assert all(torch.equal(one[key], other[key]) for key in one) == alike, every


class _Counted(nn.Linear):
    """A model with a method of that name, which is nobody's replica."""

    synced = 0

    def sync(self) -> None:
        self.synced += 1


def test_other_models_are_not_averaged():
    model = _Counted(2, 1, device=here())
    pipeline = TrainPipelineSparseDist(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        here(),
        custom_model_fwd=lambda batch: (model(batch).sum(), 0),
    )
    assert pipelined(pipeline, iter([torch.ones(1, 2)] * 2)) == [0, 0]
    pipeline.sync_embeddings(model, 1, TrainPipelineContext(index=0))
    assert model.synced == 0


@pytest.mark.parametrize("name", ["sparse dist", "semi-sync"])
@pytest.mark.parametrize("interval", [0, -1, 1.5, True])
def test_an_interval_is_a_number_of_batches(name, interval):
    model = nn.Linear(2, 1, device=here())
    message = rf"{INTERVAL}={interval} must be a whole number, at least 1"
    with pytest.raises(ValueError, match=message):
        PIPELINES[name](
            model, torch.optim.SGD(model.parameters(), 0.1), here(), **{INTERVAL: interval}
        )


def calls(rank: int, world_size: int) -> list[list[int | None]]:
    """Of which batches `sync_embeddings` takes the mean; None is a call without a batch."""
    model = replicated(world_size, 1)
    pipeline = TrainPipelineBase(model, dense_optimizer(model), here())
    found: list[list[int | None]] = []
    for interval in (1, 2, None):
        found.append([])
        for number in (None, 0, 1, 2, 3):
            vars(model)["sync"] = partial(found[-1].append, number)
            context = None if number is None else TrainPipelineContext(index=number)
            pipeline.sync_embeddings(model, interval, context)
    return found


def test_a_program_can_ask_for_the_mean_itself(ranks):
    for of_rank in ranks(2).run(calls):
        assert of_rank == [[None, 0, 1, 2, 3], [None, 0, 2], []]


def evaluated(rank: int, world_size: int) -> list[int]:
    model = replicated(world_size, 1).eval()
    found: list[int] = []
    vars(model)["sync"] = partial(found.append, 1)
    pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), here())
    assert len(pipelined(pipeline, samples("bags", rank))) == STEPS
    return found


def test_nothing_is_averaged_in_evaluation(ranks):
    assert ranks(2).run(evaluated) == [[], []]

"""Sharding without a wrapper: the collections of a model, or one of them."""

from __future__ import annotations

import pytest
import torch
from distributed.cases import serving
from quant.equals import bags
from torch import nn

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.shard import shard, shard_modules
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

TABLES = [EmbeddingBagConfig(8, 4, name, feature_names=[name]) for name in ("item", "user")]
ALONE = ShardingEnv.from_local(1, 0)


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["item", "user"], torch.tensor([3, 1, 7]), lengths=torch.tensor([2, 1])
    ).to(device())


@pytest.mark.parametrize(
    "plan",
    [
        table_wise(rank=0),
        {"item": row_wise(), "user": table_wise(rank=0)},
        construct_module_sharding_plan(
            EmbeddingBagCollection(TABLES), {"item": row_wise(), "user": row_wise()}, world_size=1
        ),
    ],
)
def test_a_collection_is_sharded_by_a_word_by_words_or_by_a_plan(plan):
    ebc = EmbeddingBagCollection(TABLES).to(device())
    sharded = shard(ebc, plan, ALONE)
    assert torch.equal(sharded(batch()).values(), ebc(batch()).values())
    assert type(ebc).__name__ == "EmbeddingBagCollection"


def test_collections_inside_a_model_are_replaced_and_the_rest_is_left_alone():
    dense = nn.Linear(8, 1)
    model = nn.Sequential(EmbeddingBagCollection(TABLES), dense)
    model.again = model[0]
    sharded = shard_modules(model, ALONE)
    assert sharded is model
    assert type(model[0]).__name__ == "ShardedEmbeddingBagCollection"
    assert model.again is model[0]
    assert model[1] is dense


def test_a_plan_may_leave_collections_out():
    model = nn.Sequential(EmbeddingBagCollection(TABLES), bags(TABLES, torch.int8)[1])
    words = {"item": table_wise(0), "user": table_wise(1)}
    plan = ShardingPlan({"1": construct_module_sharding_plan(model[1], words, world_size=2)})
    shard_modules(model, ShardingEnv.from_local(2, 0), serving(2), plan=plan)
    assert [type(part).__name__ for part in model] == [
        "EmbeddingBagCollection",
        "ShardedQuantEmbeddingBagCollection",
    ]


def test_parts_on_the_meta_device_are_allocated_where_asked():
    model = nn.Sequential(EmbeddingBagCollection(TABLES), nn.Linear(8, 1, device="meta"))
    assert shard_modules(model, ALONE, init_params=False)[1].weight.is_meta
    model = nn.Sequential(EmbeddingBagCollection(TABLES), nn.Linear(8, 1, device="meta"))
    assert not shard_modules(model, ALONE, init_params=True)[1].weight.is_meta


def sharded_by_ranks() -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(EmbeddingBagCollection(TABLES)).to(device())
    expected = model(batch()).values()
    shard_modules(model)
    return (model(batch()).values() - expected).detach().abs().max()


def test_ranks_shard_together(ranks):
    assert all(float(gap) < 1e-6 for gap in ranks(2).run(sharded_by_ranks))


def test_what_cannot_be_sharded_says_why():
    ebc = EmbeddingBagCollection(TABLES)
    with pytest.raises(ValueError, match=r"no.*Linear: pass sharder="):
        shard(nn.Linear(1, 1), table_wise(rank=0), ALONE)
    with pytest.raises(ValueError, match="shard needs a process group"):
        shard(ebc, table_wise(rank=0))
    with pytest.raises(ValueError, match="shard_modules needs a process group"):
        shard_modules(nn.Sequential(ebc))
    with pytest.raises(ValueError, match=r"module 'no'.* does not have"):
        plan = construct_module_sharding_plan(
            ebc, {"item": table_wise(0), "user": table_wise(0)}, world_size=1
        )
        shard_modules(nn.Sequential(ebc), ALONE, plan=ShardingPlan({"no": plan}))
    with pytest.raises(TypeError, match=r"tables \['item'\].*table_wise"):
        shard(
            ebc,
            {"item": table_wise(0), "user": plan["user"]},
            ALONE,
            sharder=EmbeddingBagCollectionSharder(),
        )

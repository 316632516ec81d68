"""Ranks that mean different things: an error on every rank, before any exchange, that says which
rank and what.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.cases import batch, collection, group, shard
from torch import nn

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.qcomm import CommType, QCommsConfig, get_qcomm_codecs_registry
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import EmbeddingModuleShardingPlan, ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

TABLE = {"num_embeddings": 10, "embedding_dim": 4, "name": "item", "feature_names": ["f"]}
USER = {"num_embeddings": 10, "embedding_dim": 4, "name": "user", "feature_names": ["u"]}


def caught(action: Any) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def shard_differing(
    rank: int, world_size: int, odd: int, changes: dict[str, Any]
) -> tuple[str, str]:
    """Every rank shards one table on rank 0; rank ``odd`` differs in ``changes``."""
    mine = changes if rank == odd else {}
    spec = {**TABLE, **mine.get("table", {})}
    configs = [EmbeddingBagConfig(**USER), EmbeddingBagConfig(**spec)]
    if mine.get("reversed"):
        configs.reverse()
    ebc = EmbeddingBagCollection(configs, is_weighted=mine.get("weighted", False))
    kernel = mine.get("kernel", "fused")
    words = {
        config.name: table_wise(rank=mine.get("rank", 0), compute_kernel=kernel)
        for config in configs
    }
    plan = construct_module_sharding_plan(ebc, words, world_size=8)
    if mine.get("without"):
        del plan[mine["without"]]
    sharder = EmbeddingBagCollectionSharder(mine.get("fused_params", {"learning_rate": 0.1}))
    env = ShardingEnv(world_size, rank, group(), local_size=mine.get("local_size"))
    return caught(lambda: sharder.shard(ebc, plan, env))


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        (
            {"table": {"embedding_dim": 8}},
            "table 'item': embedding_dim is 8 on rank 1 and 4 on rank 0",
        ),
        ({"table": {"num_embeddings": 11}}, "table 'item': rows is 11 on rank 1 and 10 on rank 0"),
        (
            {"table": {"feature_names": ["g"]}},
            "table 'item': features is g on rank 1 and f on rank 0",
        ),
        (
            {"table": {"pooling": PoolingType.MEAN}},
            "table 'item': pooling is mean on rank 1 and sum on rank 0",
        ),
        (
            {"table": {"name": "article"}},
            "tables is user, article on rank 1 and user, item on rank 0",
        ),
        ({"reversed": True}, "tables is item, user on rank 1 and user, item on rank 0"),
        ({"rank": 1}, "table 'item': ranks is [1] on rank 1 and [0] on rank 0"),
        ({"weighted": True}, "table 'item': weighted is True on rank 1 and False on rank 0"),
        (
            {"kernel": "dense"},
            "table 'item': compute kernel is dense on rank 1 and fused on rank 0",
        ),
        ({"fused_params": {"learning_rate": 0.2}}, "learning_rate=0.2"),
        ({"local_size": 1}, "ranks per host is 1 on rank 1 and 2 on rank 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ranks_that_differ_are_named_with_the_fact_on_every_rank(ranks, changes, fact):
    results = ranks(2).run(shard_differing, odd=1, changes=changes)
    assert results[0] == results[1]
    kind, message = results[0]
    assert kind == "AgreementError"
    assert message.startswith("ranks disagree in sharding an EmbeddingBagCollection: ")
    assert fact in message


@pytest.mark.world4
def test_the_rank_that_differs_from_most_is_the_one_named(ranks):
    results = ranks(4).run(shard_differing, odd=0, changes={"table": {"embedding_dim": 8}})
    assert {kind for kind, _ in results} == {"AgreementError"}
    assert "embedding_dim is 8 on rank 0 and 4 on rank 1" in results[2][1]
    assert "on rank 2 " not in results[2][1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 5}, "the plan puts table 'user' on rank 5, and the world has 2 ranks: 0 to 1"),
        ({"without": "item"}, "the plan says nothing about table 'item'; it names ['user']"),
    ],
    ids=["rank", "table"],
)
def test_a_rank_whose_own_plan_is_wrong_stops_the_others(ranks, changes, words):
    (kind, told), (own_kind, own) = ranks(2).run(shard_differing, odd=1, changes=changes)
    assert (own_kind, own) == ("ValueError", words)
    assert kind == "AgreementError"
    assert f"was aborted on every rank: rank 1 raised ValueError: {words}" in told


def first_batch(rank: int, world_size: int, trouble: str) -> tuple[tuple[str, str], bool]:
    """Rank 1's first batch is wrong; the next one is right on both ranks."""
    sharded = shard(collection(weighted=trouble == "weights"))
    good = batch(rank, 3, weighted=trouble == "weights")
    bad = good
    if trouble == "feature":
        bad = good.split([1, 3])[1]
    elif trouble == "id":
        bad = KeyedJaggedTensor(good.keys(), good.values() + 100, lengths=good.lengths())
    elif trouble == "weights":
        bad = KeyedJaggedTensor(good.keys(), good.values(), lengths=good.lengths())
    error = caught(lambda: sharded(bad if rank == 1 else good))
    return error, bool(torch.isfinite(sharded(good).values()).all())


@pytest.mark.parametrize(
    ("trouble", "kind", "words"),
    [
        (
            "feature",
            "KeyError",
            "the batch has no feature 'f3', which table 't2' reads; its keys are ",
        ),
        ("id", "ValueError", "table 't"),
        (
            "weights",
            "ValueError",
            "a weighted collection needs one weight per id, and the batch (keys",
        ),
    ],
)
def test_a_rank_whose_first_batch_is_wrong_stops_the_others_and_the_next_batch_works(
    ranks, trouble, kind, words
):
    ((told, told_message), finite), ((own, own_message), also_finite) = ranks(2).run(
        first_batch, trouble=trouble
    )
    assert own == kind
    assert words in own_message
    assert told == "AgreementError"
    assert words in told_message
    assert "rank 1 raised" in told_message
    assert finite
    assert also_finite


def no_plan_type(rank: int, world_size: int) -> tuple[str, str]:
    from tutorec.distributed.plan.plan import ShardingPlan

    ebc = collection()
    plan: Any = ShardingPlan({"": EmbeddingModuleShardingPlan()})
    return caught(
        lambda: EmbeddingBagCollectionSharder().shard(
            ebc, plan, ShardingEnv.from_process_group(group())
        )
    )


def test_a_whole_plan_in_the_place_of_a_modules_plan_is_explained(ranks):
    for kind, message in ranks(2).run(no_plan_type):
        assert kind == "TypeError"
        assert "got ShardingPlan; of a ShardingPlan, pass plan.plan[path of the module]" in message


def shard_with_codecs(rank: int, world_size: int, rows: bool) -> tuple[str, str]:
    registry = (
        get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16))
        if rank == 1
        else None
    )
    env = ShardingEnv.from_process_group(group())
    if rows:
        ec = EmbeddingCollection([EmbeddingConfig(8, 4, "item", feature_names=["f"])])
        plan = construct_module_sharding_plan(ec, {"item": row_wise()})
        return caught(lambda: EmbeddingCollectionSharder(None, registry).shard(ec, plan, env))
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item", feature_names=["f"])])
    plan = construct_module_sharding_plan(ebc, {"item": table_wise(0)})
    return caught(lambda: EmbeddingBagCollectionSharder(None, registry).shard(ebc, plan, env))


@pytest.mark.parametrize("rows", [False, True], ids=["pooled", "rows"])
def test_ranks_that_send_rows_in_different_types_are_told_before_they_send(ranks, rows):
    for kind, message in ranks(2).run(shard_with_codecs, rows=rows):
        assert kind == "AgreementError"
        assert "qcomm_codecs_registry is" in message
        assert "torch.float16" in message


def parallel_differing(rank: int, world_size: int, what: str) -> tuple[str, str]:
    odd = rank == 1
    first = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item", feature_names=["f"])])
    second = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item", feature_names=["f"])])
    model = nn.Sequential(first, second, nn.Linear(3 if odd and what == "dense" else 4, 1))
    plan: Any = ShardingPlan(
        {path: construct_module_sharding_plan(first, {"item": row_wise()}) for path in "01"}
    )
    if odd:
        if what == "collection":
            del plan.plan["1"]
        plan = {"no plan": None, "a part": plan.plan["0"]}.get(what, plan)
    return caught(lambda: DistributedModelParallel(model, plan=plan))


@pytest.mark.parametrize(
    ("what", "own", "words"),
    [
        (
            "collection",
            "AgreementError",
            "that the plan shards is ['0'] on rank 1 and ['0', '1'] on rank 0",
        ),
        (
            "dense",
            "AgreementError",
            "parameter '2.weight': shape is [1, 3] on rank 1 and [1, 4] on rank 0",
        ),
        ("no plan", "AgreementError", "a plan is given is False on rank 1 and True on rank 0"),
        ("a part", "TypeError", "plan is a EmbeddingModuleShardingPlan and no ShardingPlan"),
    ],
)
def test_ranks_whose_models_or_plans_differ_are_told_by_model_parallel(ranks, what, own, words):
    (told, message), (own_kind, own_message) = ranks(2).run(parallel_differing, what=what)
    assert (told, own_kind) == ("AgreementError", own)
    assert words in message
    assert words in own_message


def two_collections(rank: int, world_size: int, first: bool) -> tuple[str, str]:
    """Rank 0 calls one collection and then the other, rank 1 the reverse; ids and shapes would fit
    either.
    """
    env = ShardingEnv.from_process_group(group())
    sharded = []
    for name in ("item", "user"):
        config = EmbeddingBagConfig(
            num_embeddings=8, embedding_dim=4, name=f"{name}_table", feature_names=[name]
        )
        ebc = EmbeddingBagCollection([config])
        plan = construct_module_sharding_plan(ebc, {f"{name}_table": row_wise()})
        sharded.append(EmbeddingBagCollectionSharder().shard(ebc, plan, env))
    batches = [
        KeyedJaggedTensor([name], torch.tensor([rank]), lengths=torch.tensor([1])).to(device())
        for name in ("item", "user")
    ]
    if not first:
        for module, features in zip(sharded, batches, strict=True):
            module(features)

    def swapped() -> None:
        for index in (rank, 1 - rank):
            sharded[index](batches[index]).wait()

    return caught(swapped)


@pytest.mark.parametrize("first", [True, False], ids=["first batch", "later batch"])
def test_collections_that_ranks_call_in_different_order_are_refused_on_every_rank(ranks, first):
    found = ranks(2).run(two_collections, first=first)
    if first:
        assert [kind for kind, _ in found] == ["AgreementError"] * 2
        assert all(
            "tables 'item_table'" in text and "tables 'user_table'" in text for _, text in found
        )
    else:
        assert [kind for kind, _ in found] == ["ValueError"] * 2
        for (_, text), name in zip(found, ("item", "user"), strict=True):
            assert f"tables '{name}_table', which is exchange" in text
            assert "in the same order on every rank" in text

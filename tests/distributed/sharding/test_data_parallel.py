"""Tables that every rank has: copies that stay equal, gradients that travel as bags or as sums,
nothing forward.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from distributed import row_cases
from distributed.cases import (
    OPTIMIZERS,
    Piece,
    batch,
    coefficients,
    collection,
    group,
    on_rank,
    operator_name,
    samples_of,
    seed_of,
    shard,
    tables,
)
from distributed.cases import held as pooled_held
from torch import Tensor
from torch.testing import assert_close

from tutorec._kernels.backend import use_backend
from tutorec.distributed.collectives.sparse_gradients import CopiedTable, cheaper_as_bags
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    table_wise,
)
from tutorec.distributed.traffic import Traffic, count_traffic
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

STEPS = 3
DP = "data_parallel"
Held = dict[str, list[Piece]]


def pooled_loss(out: Tensor, seed: int) -> Tensor:
    return (out * coefficients(out, seed)).sum()


def trained(rank: int, world_size: int) -> dict[tuple[str, ...], Held]:
    """What each kind of copies is after three steps."""
    found: dict[tuple[str, ...], Held] = {}
    for optimizer, backend in product(OPTIMIZERS, ("auto", "torch")):
        with use_backend(backend):
            bags, rows = (
                shard(collection(), optimizer, kind=DP),
                row_cases.shard(row_cases.collection(), optimizer, kind=DP),
            )
            for step in range(STEPS):
                seed = seed_of(rank, step)
                features = batch(seed, samples_of(rank, step))
                pooled_loss(bags(features).values(), seed).backward()
                row_cases.loss(rows(features).wait(), seed).backward()
        found["bags", optimizer, backend] = pooled_held(bags)
        found["rows", optimizer, backend] = row_cases.held(rows)
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.world4)])
def test_copies_are_the_same_to_the_last_bit(ranks, world_size):
    first, *others = ranks(world_size).run(trained)
    for other in others:
        for case, of_tables in first.items():
            for name, [(place, rows, state)] in of_tables.items():
                [(same_place, same_rows, same_state)] = other[case][name]
                assert place == same_place == [0, 0]
                assert torch.equal(rows, same_rows), (case, name)
                assert bool(state) == ("exact_sgd" not in case)
                assert state.keys() == same_state.keys()
                assert all(torch.equal(kept, same_state[key]) for key, kept in state.items()), (
                    case,
                    name,
                )


def few(rank: int, world_size: int) -> int:
    """Samples with which some tables travel as bags and some as sums."""
    return 6 // world_size + rank % 2


def counted(rank: int, world_size: int) -> tuple[Traffic, Traffic]:
    """Of a lookup alone, and of a step."""
    sharded = shard(collection(weighted=True), kind=DP)
    sharded(batch(rank, 2, weighted=True)).values()
    with count_traffic() as forward, torch.no_grad():
        sharded(batch(rank, 2, weighted=True)).values()
    with count_traffic() as step:
        sharded(batch(5 + rank, few(rank, world_size), weighted=True)).values().sum().backward()
    return forward, step


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.world4)])
def test_nothing_travels_forward_and_what_is_fewer_bytes_travels_backward(ranks, world_size):
    samples = [few(rank, world_size) for rank in range(world_size)]
    batches = [batch(5 + rank, samples[rank], weighted=True) for rank in range(world_size)]
    ids = [dict(zip(each.keys(), each.length_per_key(), strict=True)) for each in batches]
    as_bags, elements = [], 0
    for table in tables():
        bags = len(table.feature_names) * sum(samples)
        own = sum(of_rank[feature] for of_rank in ids for feature in table.feature_names)
        if (
            8 * own + 4 * bags * (1 + table.embedding_dim)
            <= 8 * table.num_embeddings * table.embedding_dim
        ):
            as_bags.append(table)
        else:
            elements += table.num_embeddings * table.embedding_dim
    assert 0 < len(as_bags) < len(tables()), "both ways are to be seen"
    parts = [elements // world_size + (rank < elements % world_size) for rank in range(world_size)]
    for rank, (forward, step) in enumerate(ranks(world_size).run(counted)):
        assert forward.total() == 0 and not forward.issues
        count = sum(ids[rank][feature] for table in as_bags for feature in table.feature_names)
        features = sum(len(table.feature_names) for table in as_bags)
        columns = sum(table.embedding_dim * len(table.feature_names) for table in as_bags)
        for other in set(range(world_size)) - {rank}:
            assert {stage: step.row(world_size, stage)[other] for stage in step.issues} == {
                "gradient sizes": 8 * (1 + 5),
                "gradient ids": 4 * (features * samples[rank] + count),
                "gradient weights": 4 * count,
                "gradient rows": 4 * samples[rank] * columns,
                "gradient sums": 4 * (parts[other] + parts[rank]),
            }
        assert step.issues == {
            "gradient sizes": 1,
            "gradient ids": 1,
            "gradient weights": 1,
            "gradient rows": 1,
        } | {"gradient sums": 2}


def test_the_choice_is_made_at_equal_bytes():
    table = CopiedTable(rows=100, columns=8, features=1)
    assert cheaper_as_bags(table, bytes_of_ids=0, bags=200)
    assert not cheaper_as_bags(table, bytes_of_ids=0, bags=201)


def odd_batches(rank: int, world_size: int) -> dict[str, Any]:
    """Batches without samples on one rank and on all; two lookups before their backwards; the rate
    of the lookup.
    """
    found: dict[str, Any] = {}
    for name, empty in (("one", (0,)), ("all", range(world_size))):
        sharded = shard(collection(), kind=DP)
        pooled_loss(sharded(batch(rank, 0 if rank in empty else 4)).values(), rank).backward()
        found[f"empty on {name}"] = pooled_held(sharded)
    sharded = shard(collection(), kind=DP)
    outs = [sharded(batch(10 * i + rank, 3)).values() for i in range(2)]
    for i in (1, 0):
        pooled_loss(outs[i], rank).backward()
    found["two"] = pooled_held(sharded)
    sharded = shard(collection(), kind=DP)
    out = sharded(batch(rank, 3)).values()
    sharded.fused_optimizer.param_groups[0]["lr"] = 0.0
    pooled_loss(out, rank).backward()
    found["rate"] = pooled_held(sharded)
    return found


def moved(batches: list[tuple[KeyedJaggedTensor, int]], world_size: int) -> dict[str, Tensor]:
    """The tables after one step of SGD per batch and rank, on the mean."""
    ebc = collection()
    weights = {name: bag.get_parameter("weight") for name, bag in ebc.embedding_bags.items()}
    loss = sum(
        (pooled_loss(ebc(each).values(), seed) for each, seed in batches), start=torch.zeros(())
    )
    grads = (
        torch.autograd.grad(loss, list(weights.values()))
        if loss.requires_grad
        else [torch.zeros(())] * 3
    )
    return {
        name: (rows - 0.05 * grad / world_size).detach()
        for (name, rows), grad in zip(weights.items(), grads, strict=True)
    }


def test_empty_batches_overlapping_batches_and_a_changed_rate(ranks):
    expected = {
        "empty on one": moved([(batch(1, 4), 1)], 2),
        "empty on all": moved([], 2),
        "two": moved([(batch(10 * i + rank, 3), rank) for i in range(2) for rank in range(2)], 2),
        "rate": moved([(batch(rank, 3), rank) for rank in range(2)], 2),
    }
    for found in ranks(2).run(odd_batches):
        for case, tables_after in expected.items():
            for name, rows in tables_after.items():
                assert_close(
                    found[case][name][0][1], rows, rtol=1e-5, atol=1e-6, msg=f"{case}: {name}"
                )


def different_rows(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """Each rank brings rows of its own, or draws them with a seed of its own."""
    torch.manual_seed(rank)
    found = {}
    ebc = EmbeddingBagCollection(tables())
    found["brought"] = [bag.get_parameter("weight").detach() for bag in ebc.embedding_bags.values()]
    found["bags"] = [parameter.detach().clone() for parameter in shard(ebc, kind=DP).parameters()]
    meta = shard(EmbeddingBagCollection(tables(), device=torch.device("meta")), kind=DP)
    found["meta"] = [parameter.detach().clone() for parameter in meta.parameters()]
    rows = row_cases.shard(row_cases.EmbeddingCollection(row_cases.tables()), kind=DP)
    found["rows"] = [parameter.detach().clone() for parameter in rows.parameters()]
    return found


def test_copies_begin_as_those_of_rank_0(ranks):
    first, second = ranks(2).run(different_rows)
    assert not any(
        torch.equal(a, b) for a, b in zip(first["brought"], second["brought"], strict=True)
    )
    for kind in ("bags", "meta", "rows"):
        assert len(first[kind]) == 3
        assert all(torch.equal(a, b) for a, b in zip(first[kind], second[kind], strict=True)), kind
    assert all(torch.equal(a, b) for a, b in zip(first["bags"], first["brought"], strict=True))
    assert all(rows.unique().numel() > rows.shape[0] for rows in first["meta"])


def dense_steps(rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
    """Copies with gradients: two backwards, then an optimizer outside."""
    found: dict[str, dict[str, Tensor]] = {}
    sharded = shard(collection(), kernel="dense", kind=DP)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.05)
    for step in range(2):
        pooled_loss(sharded(batch(10 * step + rank, 3 + rank)).values(), rank).backward()
    found["grad"] = {
        name: p.grad.clone() for name, p in sharded.named_parameters() if p.grad is not None
    }
    optimizer.step()
    found["rows"] = {name: p.detach().clone() for name, p in sharded.named_parameters()}
    asked = dict(sharded.named_parameters())
    out = sharded(batch(rank, 3)).values()
    gradients = torch.autograd.grad(pooled_loss(out, rank), list(asked.values()))
    found["asked"] = dict(zip(asked, gradients, strict=True))
    return found


def test_dense_copies_add_up_mean_gradients_and_step_like_fused_ones(ranks):
    first, second = ranks(2).run(dense_steps)
    after = moved(
        [(batch(10 * step + rank, 3 + rank), rank) for step in range(2) for rank in range(2)], 2
    )
    before = {
        name: bag.get_parameter("weight").detach()
        for name, bag in collection().embedding_bags.items()
    }
    for name, rows in after.items():
        key = f"embedding_bags.{name}.weight"
        assert_close(first["rows"][key], rows, rtol=1e-5, atol=1e-6)
        assert_close(first["grad"][key], (before[name] - rows) / 0.05, rtol=1e-4, atol=1e-5)
    for kind, of_tables in first.items():
        assert all(torch.equal(value, second[kind][name]) for name, value in of_tables.items()), (
            kind
        )
        assert len(of_tables) == 3, kind


def lists_on_rank_0(rank: int) -> KeyedJaggedTensor:
    """A batch that stores lists once, different numbers of each feature, on rank 0 alone."""
    return row_cases.lists(3, 4) if rank == 0 else batch(rank, 3)


def variable_step(rank: int, world_size: int) -> tuple[Tensor, dict[str, Tensor]]:
    env = ShardingEnv.from_process_group(group())
    ebc = collection()
    words = {"t0": data_parallel(), "t1": table_wise(1), "t2": data_parallel()}
    sharded = EmbeddingBagCollectionSharder({"learning_rate": 0.05}).shard(
        ebc, construct_module_sharding_plan(ebc, words), env
    )
    out = sharded(lists_on_rank_0(rank)).values()
    pooled_loss(out, rank).backward()
    return out.detach(), {
        name.split(".")[1]: p.detach().clone() for name, p in sharded.named_parameters()
    }


def test_one_rank_may_bring_a_variable_batch_to_a_mixed_plan(ranks):
    ebc = collection()
    outputs = [ebc(lists_on_rank_0(rank)).values() for rank in range(2)]
    loss = pooled_loss(outputs[0], 0) + pooled_loss(outputs[1], 1)
    weights = {name: bag.get_parameter("weight") for name, bag in ebc.embedding_bags.items()}
    gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    for rank, (out, tables_after) in enumerate(ranks(2).run(variable_step)):
        assert_close(out, outputs[rank].detach(), rtol=1e-5, atol=1e-6)
        assert sorted(tables_after) == (["t0", "t1", "t2"] if rank == 1 else ["t0", "t2"])
        for name, rows in tables_after.items():
            assert_close(
                rows, (weights[name] - 0.05 * gradients[name] / 2).detach(), rtol=1e-5, atol=1e-6
            )


def stored(rank: int, world_size: int) -> tuple[list[str], bool, bool]:
    sharded, other = shard(collection(), kind=DP), shard(collection(), kind=DP)
    pooled_loss(sharded(batch(rank, 3)).values(), rank).backward()
    state = sharded.state_dict()
    plain = not any(hasattr(value, "local_shards") for value in state.values())
    other.load_state_dict(state)
    unsharded = on_rank(collection())
    unsharded.load_state_dict(state)
    features = batch(7, 4)
    return list(state), plain, torch.equal(other(features).values(), unsharded(features).values())


def test_the_state_dict_holds_plain_tensors_that_any_collection_loads(ranks):
    names = [f"embedding_bags.{name}.weight" for name in ("t0", "t1", "t2")]
    assert ranks(2).run(stored) == [(names, True, True)] * 2


def printed(rank: int, world_size: int) -> str:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(4, 4, "item", feature_names=["item"])])
    return repr(shard(ebc, kind=DP))


def test_the_printed_form_says_what_is_replicated(ranks):
    assert (
        ranks(2)
        .run(printed)[0]
        .startswith(
            "ShardedEmbeddingBagCollection(\n"
            "  (lookups): \n"
            "   ReplicatedPooledEmbeddingsLookup(\n"
            "      (_lookup): GroupedPooledEmbeddingsLookup(\n"
            "        (_emb_modules): ModuleList(\n"
            "          (0): BatchedFusedEmbeddingBag(\n"
            f"            (_emb_module): {operator_name()}()\n"
        )
    )


def test_training_copies_without_a_process_group_says_what_is_missing():
    ebc = collection()
    plan = construct_module_sharding_plan(
        ebc, {name: data_parallel() for name in ("t0", "t1", "t2")}, world_size=2
    )
    sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, ShardingEnv.from_local(2, 0))
    features = batch(1, 3).to(device())
    with torch.no_grad():
        assert_close(sharded(features).values(), ebc.to(device())(features).values())
    with pytest.raises(ValueError, match=r"data_parallel.*2 ranks needs a process group"):
        sharded(features)

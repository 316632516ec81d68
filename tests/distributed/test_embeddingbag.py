"""ShardedEmbeddingBagCollection: its printed form, key order, weights, batches in
flight, traffic.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from distributed.cases import (
    FEATURES,
    batch,
    collection,
    group,
    home,
    local_weights,
    operator_name,
    samples_of,
    shard,
    tables,
)
from torch import Tensor

from tutorec._kernels.backend import use_backend
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding_types import KJTList
from tutorec.distributed.embeddingbag import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionSharder,
)
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from tutorec.distributed.traffic import count_traffic
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

BEFORE = """ShardedEmbeddingBagCollection(
  (lookups): 
   GroupedPooledEmbeddingsLookup(
      (_emb_modules): ModuleList(
        (0): BatchedFusedEmbeddingBag(
          (_emb_module): {kernel}()
        )
      )
    )
   (_output_dists): 
   TwPooledEmbeddingDist()
  (embedding_bags): ModuleDict(
    (product_table): Module()
    (user_table): Module()
  )
)"""  # noqa: W291 - the printed form has these spaces
AFTER = """ShardedEmbeddingBagCollection(
  (lookups): 
   GroupedPooledEmbeddingsLookup(
      (_emb_modules): ModuleList(
        (0): BatchedFusedEmbeddingBag(
          (_emb_module): {kernel}()
        )
      )
    )
   (_input_dists): 
   TwSparseFeaturesDist(
      (_dist): KJTAllToAll()
    )
   (_output_dists): 
   TwPooledEmbeddingDist(
      (_dist): PooledEmbeddingsAllToAll()
    )
  (embedding_bags): ModuleDict(
    (product_table): Module()
    (user_table): Module()
  )
)"""  # noqa: W291


def tutorial_collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                num_embeddings=4096,
                embedding_dim=64,
                name="product_table",
                feature_names=["product"],
            ),
            EmbeddingBagConfig(
                num_embeddings=4096, embedding_dim=64, name="user_table", feature_names=["user"]
            ),
        ]
    ).to(device())


def tutorial_batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["product", "user"],
        torch.tensor([1, 2, 1, 5, 2, 3, 4, 1]),
        lengths=torch.tensor([3, 1, 2, 2]),
    ).to(device())


def alone(ebc: EmbeddingBagCollection, **fused_params: Any):
    plan = construct_module_sharding_plan(
        ebc, {config.name: table_wise(rank=0) for config in ebc.embedding_bag_configs()}
    )
    return EmbeddingBagCollectionSharder(fused_params).shard(
        ebc, plan, ShardingEnv.from_local(1, 0)
    )


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_printed_form_gains_dists_at_the_first_batch(backend):
    with use_backend(backend):
        sharded = alone(tutorial_collection())
    kernel = operator_name(backend)
    assert repr(sharded) == BEFORE.format(kernel=kernel)
    sharded(tutorial_batch())
    assert repr(sharded) == AFTER.format(kernel=kernel)
    assert repr(sharded._input_dists) == "[TwSparseFeaturesDist(\n  (_dist): KJTAllToAll()\n)]"
    assert (
        repr(sharded._output_dists)
        == "[TwPooledEmbeddingDist(\n  (_dist): PooledEmbeddingsAllToAll()\n)]"
    )
    assert type(sharded._lookups[0]).__name__ == "GroupedPooledEmbeddingsLookup"


def test_result_is_lazy_and_prints_without_waiting():
    result = alone(tutorial_collection())(tutorial_batch())
    assert type(result) is EmbeddingBagCollectionAwaitable
    assert repr(result).startswith(
        "<tutorec.distributed.embeddingbag.EmbeddingBagCollectionAwaitable object at 0x"
    )
    keyed = result.wait()
    assert keyed is result.wait()
    assert (keyed.keys(), list(keyed.values().shape)) == (["product", "user"], [2, 128])


def test_weights_are_those_of_the_module_and_move_apart_from_it():
    ebc = tutorial_collection()
    before = {name: parameter.detach().clone() for name, parameter in ebc.named_parameters()}
    sharded = alone(ebc)
    assert {name: list(p.shape) for name, p in sharded.named_parameters()} == {
        "embedding_bags.product_table.weight": [4096, 64],
        "embedding_bags.user_table.weight": [4096, 64],
    }
    assert torch.equal(sharded(tutorial_batch()).values(), ebc(tutorial_batch()).values())
    sharded(tutorial_batch()).values().sum().backward()
    assert all(torch.equal(parameter, before[name]) for name, parameter in ebc.named_parameters())
    moved = (
        sharded.get_parameter("embedding_bags.user_table.weight")
        != before["embedding_bags.user_table.weight"]
    ).any(1)
    assert moved.nonzero().view(-1).tolist() == [1, 2, 3, 4]


def test_writing_into_a_parameter_moves_the_rows_also_of_padded_tables():
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(5, 3, "odd", feature_names=["f"])])
    sharded = alone(ebc)
    with torch.no_grad():
        sharded.get_parameter("embedding_bags.odd.weight").copy_(torch.arange(15.0).view(5, 3))
    one = KeyedJaggedTensor(["f"], torch.tensor([4]), lengths=torch.tensor([1])).to(device())
    assert sharded(one).values().tolist() == [[12.0, 13.0, 14.0]]
    loaded = sharded.state_dict()
    loaded["embedding_bags.odd.weight"] = torch.zeros(5, 3)
    sharded.load_state_dict(loaded)
    assert sharded(one).values().tolist() == [[0.0, 0.0, 0.0]]


def initial_rows(rank: int, world_size: int, places: list[int]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    configs = [EmbeddingBagConfig(50, 4, name, feature_names=[name]) for name in ("x", "y", "z")]
    configs[2].init_fn = lambda weight: weight.fill_(2.5)
    ebc = EmbeddingBagCollection(configs, device=torch.device("meta"))
    words = {name: table_wise(rank=place) for name, place in zip("xyz", places, strict=True)}
    env = ShardingEnv.from_process_group(group())
    return local_weights(
        EmbeddingBagCollectionSharder().shard(ebc, construct_module_sharding_plan(ebc, words), env)
    )


def test_meta_tables_are_drawn_as_unsharded_ones_whatever_the_plan(ranks):
    results = [ranks(2).run(initial_rows, places=places) for places in ([0, 1, 0], [1, 0, 1])]
    one, other = (
        {name: rows for of_rank in result for name, rows in of_rank.items()} for result in results
    )
    assert all(torch.equal(one[name], other[name]) for name in "xyz")
    assert not torch.equal(one["x"], one["y"])
    bound = 50**-0.5
    for name in "xy":
        assert -bound <= float(one[name].min()) < -0.9 * bound
        assert 0.9 * bound < float(one[name].max()) <= bound
    assert bool((one["z"] == 2.5).all())


def in_many_orders(rank: int, world_size: int, kind: str) -> list[tuple[bool, list[str]]]:
    ebc = collection().to(device())
    sharded = shard(ebc, kind=kind)
    results = []
    for seed in range(6):
        features = batch(10 * seed + rank, 3)
        order = list(range(len(FEATURES)))
        random.Random(seed + 7 * rank).shuffle(order)  # ranks need not even agree
        shuffled = features.permute(order)
        extra = KeyedJaggedTensor(
            ["unused"], torch.tensor([10**9]), lengths=torch.tensor([1, 0, 0])
        ).to(device())
        shuffled = KeyedJaggedTensor.concat([extra, shuffled]) if seed % 2 else shuffled
        result = sharded(shuffled).wait()
        results.append(
            (torch.allclose(result.values(), ebc(features).values(), atol=1e-6), result.keys())
        )
    return results


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "mixed"])
def test_key_order_may_change_from_batch_to_batch_and_the_result_keeps_the_tables_order(
    ranks, kind
):
    for results in ranks(2).run(in_many_orders, kind=kind):
        assert results == [(True, ["f0", "f1@t0", "f1@t1", "f2", "f3"])] * 6


def test_input_dist_delivers_a_batch_for_each_sharding_as_a_list_that_records_streams(monkeypatch):
    whole = collection()
    words = {
        "t0": table_wise(0, compute_kernel="fused"),
        "t1": row_wise(compute_kernel="fused"),
        "t2": table_wise(0, compute_kernel="fused"),
    }
    plan = construct_module_sharding_plan(whole, words, local_size=1, world_size=1)
    ebc = EmbeddingBagCollectionSharder().shard(whole, plan, ShardingEnv.from_local(1, 0), device())
    arrived = ebc.input_dist(ebc.create_context(), batch(0, 3).to(device())).wait().wait()
    assert isinstance(arrived, KJTList) and len(arrived) == len(list(arrived)) == 2
    recorded: list[Any] = []
    monkeypatch.setattr(
        KeyedJaggedTensor, "record_stream", lambda self, stream: recorded.append((self, stream))
    )
    arrived.record_stream("stream")
    assert recorded == [(each, "stream") for each in arrived.features]
    arrived[0] = arrived[1]
    assert arrived.features[0] is arrived[1]


def two_in_flight(rank: int, world_size: int, overlapped: bool) -> list[Tensor]:
    """Both batches are looked up before either is learnt from; overlapped, both leave before either
    arrives.
    """
    sharded = shard(collection(), "exact_row_wise_adagrad", kind="mixed")
    results = []
    for step in range(3):
        pair = [batch(100 * step + 10 * i + rank, samples_of(rank, step + i)) for i in range(2)]
        if overlapped:
            contexts = [sharded.create_context() for _ in pair]
            sizes = [
                sharded.input_dist(ctx, each) for ctx, each in zip(contexts, pair, strict=True)
            ]
            arriving = [each.wait() for each in sizes]
            features = [each.wait() for each in arriving]
            looked_up = [
                sharded.compute(ctx, each) for ctx, each in zip(contexts, features, strict=True)
            ]
            lazy = [
                sharded.output_dist(ctx, each)
                for ctx, each in zip(contexts, looked_up, strict=True)
            ]
        else:
            lazy = [sharded(each) for each in pair]
        for each in lazy:
            out = each.wait().values()
            (out * torch.arange(1, out.shape[1] + 1, device=out.device)).sum().backward()
            results.append(out.detach())
    return [*results, *(parameter.detach().clone() for parameter in sharded.parameters())]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.world4)])
def test_two_batches_in_flight_equal_one_after_the_other(ranks, world_size):
    apart = ranks(world_size).run(two_in_flight, overlapped=False)
    together = ranks(world_size).run(two_in_flight, overlapped=True)
    for a, b in zip(apart, together, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def first_touched_without_grad(rank: int, world_size: int, kind: str) -> bool:
    sharded = shard(collection(), kind=kind)
    before = [parameter.detach().clone() for parameter in sharded.parameters()]
    result = sharded(batch(rank, 3))
    with torch.no_grad():
        assert result.values().shape[0] == 3
    result.values().sum().backward()
    return any(not torch.equal(a, b) for a, b in zip(before, sharded.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["table_wise", "mixed"])
def test_result_first_touched_without_grad_still_trains(ranks, kind):
    assert any(ranks(2).run(first_touched_without_grad, kind=kind))


def results_used_in_another_order(rank: int, world_size: int, kind: str) -> list[float]:
    """The largest gradient of a row in each of two modules of one size, whose losses count once and
    three times.
    """
    modules = [shard(collection(), kernel="dense", kind=kind) for _ in range(2)]
    results = [module(ids_of_one_row()) for module in modules]
    summed: dict[int, Tensor] = {}
    for index in (0, 1) if rank == 0 else (1, 0):
        summed[index] = (1 + 2 * index) * results[index].values().sum()
    (summed[0] + summed[1]).backward()
    found = [
        [p.grad.max() for p in module.parameters() if p.grad is not None and p.numel()]
        for module in modules
    ]
    return [float(torch.stack(of_module).max()) for of_module in found]


def ids_of_one_row() -> KeyedJaggedTensor:
    ids, lengths = torch.tensor([1, 2, 3, 4]), torch.ones(4, dtype=torch.int64)
    return KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths).to(device())


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_ranks_that_use_two_results_in_different_order_get_the_gradients_of_each(ranks, kind):
    for found in ranks(2).run(results_used_in_another_order, kind=kind):
        assert found == [1.0, 3.0]


@pytest.mark.world4
def test_steps_between_hosts_start_in_one_order_whatever_is_used_first(ranks):
    for found in ranks(4, hosts=2).run(results_used_in_another_order, kind="table_row_wise"):
        assert found[1] == 3 * found[0]


def tensor_dict_and_batch(rank: int, world_size: int, weighted: bool) -> list[bool]:
    from tutorec.sparse.tensor_dict import kjt_to_td

    sharded = shard(collection(weighted=weighted), kind="mixed")
    features = batch(rank, 3, weighted)
    shuffled = features.permute([2, 0, 3, 1])
    expected = sharded(features).wait()
    results = [sharded(kjt_to_td(each)).wait() for each in (features, shuffled)]
    return [
        torch.equal(result.values(), expected.values()) and result.keys() == expected.keys()
        for result in results
    ]


@pytest.mark.skipif(
    "TUTOREC_PRETEND_GPUS" in os.environ, reason="a pretended GPU has no nested tensors"
)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_tensor_dict_is_looked_up_like_the_batch_it_holds(ranks, weighted):
    pytest.importorskip("tensordict", reason="the extra tensordict is not installed")
    assert ranks(2).run(tensor_dict_and_batch, weighted=weighted) == [[True, True]] * 2


def counted_step(rank: int, world_size: int) -> dict[str, list[int]]:
    sharded = shard(collection(), "exact_sgd")
    sharded(batch(rank, 2))
    with count_traffic() as traffic:
        sharded(batch(5 + rank, 3 + rank)).values().sum().backward()
    return {stage: traffic.row(world_size, stage) for stage in traffic.issues} | {
        "rounds": [traffic.issues[stage] for stage in traffic.issues]
    }


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.world4)])
def test_counted_bytes_equal_the_formula_of_the_figure(ranks, world_size):
    places = {config.name: home(index, world_size) for index, config in enumerate(tables())}
    features: list[list[str]] = [[] for _ in range(world_size)]
    columns = [0] * world_size
    for config in tables():
        features[places[config.name]] += config.feature_names
        columns[places[config.name]] += config.embedding_dim * len(config.feature_names)
    for rank, counted in enumerate(ranks(world_size).run(counted_step)):
        mine, samples = batch(5 + rank, 3 + rank), [3 + other for other in range(world_size)]
        ids = dict(zip(mine.keys(), mine.length_per_key(), strict=True))
        others = [other for other in range(world_size) if other != rank]
        sent = {
            stage: [0] * world_size
            for stage in ("input sizes", "input ids", "output rows", "output gradients")
        }
        for other in others:
            sent["input sizes"][other] = 24
            sent["input ids"][other] = 4 * sum(
                samples[rank] + ids[feature] for feature in features[other]
            )
            sent["output rows"][other] = 4 * samples[other] * columns[rank]
            sent["output gradients"][other] = 4 * samples[rank] * columns[other]
        assert counted == sent | {"rounds": [1, 1, 1, 1]}


def test_learning_rate_is_the_python_float_that_was_given():
    sharded = alone(
        tutorial_collection(), optimizer="exact_row_wise_adagrad", learning_rate=0.02, eps=0.002
    )
    assert (
        repr(sharded.fused_optimizer)
        == ": EmbeddingFusedOptimizer (\nParameter Group 0\n    lr: 0.02\n)"
    )
    assert repr(type(sharded.fused_optimizer)) == "<class 'tutorec.optim.keyed.CombinedOptimizer'>"
    assert repr(alone(tutorial_collection()).fused_optimizer).endswith("    lr: 0.01\n)")


def test_optimizer_state_is_found_by_name():
    sharded = alone(tutorial_collection(), optimizer="exact_row_wise_adagrad")
    sharded(tutorial_batch()).values().sum().backward()
    state = sharded.fused_optimizer.state_dict()["state"]
    assert {
        name: {key: list(value.shape) for key, value in of.items()} for name, of in state.items()
    } == {
        "embedding_bags.product_table.weight": {"product_table.momentum1": [4096]},
        "embedding_bags.user_table.weight": {"user_table.momentum1": [4096]},
    }
    momentum = state["embedding_bags.product_table.weight"]["product_table.momentum1"]
    assert momentum[:6].tolist() == [0.0, 4.0, 1.0, 0.0, 0.0, 1.0]


def test_a_collection_without_tables_gives_no_columns():
    sharded = alone(EmbeddingBagCollection([]))
    assert list(sharded(tutorial_batch()).values().shape) == [2, 0]
    assert repr(sharded) == "ShardedEmbeddingBagCollection(\n  (embedding_bags): ModuleDict()\n)"


def test_moving_the_module_keeps_parameters_and_rows_together():
    sharded = alone(tutorial_collection()).to(device()).share_memory()
    sharded(tutorial_batch()).values().sum().backward()
    before = sharded(tutorial_batch()).values().detach()
    with torch.no_grad():
        sharded.get_parameter("embedding_bags.product_table.weight").zero_()
    after = sharded(tutorial_batch()).values()
    assert bool((after[:, :64] == 0).all())
    assert torch.equal(after[:, 64:], before[:, 64:])
    with pytest.raises(ValueError, match=r"product_table.*float64.*float32"):
        sharded.double()

"""Compressed tables over ranks: planned, sharded, trained, saved and quantized as the plain tables
that they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.cases import coefficients, group, on_rank, seed_of, word
from torch import Tensor, nn
from torch.testing import assert_close

import tutorec
from tutorec.distributed.checkpoint import full_state_dict, load_checkpoint, save_checkpoint
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan
from tutorec.inference.modules import shard_quant_model
from tutorec.modules.compressed_collection import CompressedEmbeddingBagCollection
from tutorec.modules.compressions import QR, Block, Compression, Hash
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.optim import (
    CombinedOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from tutorec.optim.optimizers import in_backward_optimizer_filter
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

R, RATE = 13, 0.1
HOW: dict[str, Compression] = {
    "multiply": QR(4),
    "add": QR(4, "add"),
    "concatenate": QR(4, "concatenate"),
    "hashed": Hash(5),
    "hashes": Hash(5, 2),
    "importance": Hash(5, 2, importance=True),
    "block": Block(4),
}
KINDS = ["table_wise", "row_wise", "data_parallel"]


def model(
    weighted: bool = False,
    device: torch.device | None = None,
    pooling: PoolingType = PoolingType.SUM,
) -> CompressedEmbeddingBagCollection:
    """A plain table and one of each compression; features are shared."""
    names = ["plain", *HOW]
    tables = [
        EmbeddingBagConfig(
            R,
            8,
            name,
            feature_names=[f"f{index % 2}", f"f{index % 2 + 1}"],
            pooling=pooling,
            weight_init_min=0.5,
            weight_init_max=1.0,
        )
        for index, name in enumerate(names)
    ]
    torch.manual_seed(7)
    return CompressedEmbeddingBagCollection(tables, HOW, weighted, device)


def batch(seed: int, weighted: bool = False, samples: int = 3) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * samples,), generator=draw)
    count = int(lengths.sum())
    values = torch.randint(0, R, (count,), generator=draw)
    weights = torch.rand(count, generator=draw) if weighted else None
    return on_rank(
        KeyedJaggedTensor(["f2", "f0", "f1"], values, weights, lengths=lengths, stride=samples)
    )


def loss(pooled: Any, seed: int) -> Tensor:
    return (pooled.values() * coefficients(pooled.values(), seed)).sum()


def sharded(
    module: CompressedEmbeddingBagCollection,
    kind: str | None,
    optimizer: str = "exact_sgd",
    kernel: str = "fused",
    **cache: float,
) -> DistributedModelParallel:
    """By one type of sharding, or as the planner likes."""
    params = {"optimizer": optimizer, "learning_rate": RATE, **cache}
    sharders: list[Any] = [
        EmbeddingBagCollectionSharder(params),
        EmbeddingCollectionSharder(params),
    ]
    if kind is None:
        return DistributedModelParallel(module, sharders=sharders)
    env, plan = ShardingEnv.from_process_group(group()), {}
    for path in ("pooled", "rows"):
        collection: Any = module.get_submodule(path)
        configs = (
            collection.embedding_bag_configs()
            if path == "pooled"
            else collection.embedding_configs()
        )
        words = {
            config.name: word(kind, index, env.world_size, env.local_size, kernel)
            for index, config in enumerate(configs)
        }
        plan[path] = construct_module_sharding_plan(collection, words, local_size=env.local_size)
    return DistributedModelParallel(module, plan=ShardingPlan(plan), sharders=sharders)


def dense_optimizer(wrapped: DistributedModelParallel) -> KeyedOptimizerWrapper:
    dense = dict(in_backward_optimizer_filter(wrapped.named_parameters()))
    return KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=RATE))


def trained(
    rank: int, world_size: int, kind: str | None, weighted: bool, pooling: PoolingType
) -> tuple[list[Tensor], dict[str, Tensor]]:
    wrapped = sharded(model(weighted, pooling=pooling), kind)
    assert {name for name, _ in wrapped.named_parameters()} <= {
        name for name, _ in model().named_parameters()
    }
    optimizer = dense_optimizer(wrapped)
    outputs = []
    for step in range(3):
        optimizer.zero_grad()
        pooled = wrapped(batch(seed_of(rank, step), weighted))
        outputs.append(pooled.values().detach().cpu().clone())
        loss(pooled, seed_of(rank, step)).backward()
        optimizer.step()
    return outputs, full_state_dict(wrapped)


@pytest.mark.parametrize(
    ("weighted", "pooling"),
    [
        (False, PoolingType.SUM),
        (True, PoolingType.SUM),
        (False, PoolingType.MEAN),
        (False, PoolingType.SQRTN),
        (True, PoolingType.SQRTN),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", [*KINDS, None])
def test_training_over_ranks_equals_one_process(
    ranks, kind: str | None, world_size: int, weighted: bool, pooling: PoolingType
) -> None:
    whole = model(weighted, pooling=pooling)
    optimizer = torch.optim.SGD(whole.parameters(), lr=RATE)
    wanted: list[list[Tensor]] = []
    for step in range(3):
        optimizer.zero_grad()
        pooled = [whole(batch(seed_of(rank, step), weighted)) for rank in range(world_size)]
        wanted.append([of_rank.values().detach() for of_rank in pooled])
        sum(loss(one, seed_of(rank, step)) for rank, one in enumerate(pooled)).div(
            world_size
        ).backward()  # type: ignore[union-attr]
        optimizer.step()
    for rank, (outputs, state) in enumerate(
        ranks(world_size).run(trained, kind, weighted, pooling)
    ):
        for step, output in enumerate(outputs):
            assert_close(output, wanted[step][rank], rtol=1e-4, atol=1e-5)
        if rank == 0:
            assert set(state) == set(whole.state_dict())
            for name, weight in whole.state_dict().items():
                assert_close(state[name].cpu(), weight, rtol=1e-4, atol=1e-5, msg=name)


def operators(rank: int, world_size: int) -> list[list[str]]:
    """The tables of each operator that looks rows up, of a quotient-remainder table on one rank."""
    tables = [EmbeddingBagConfig(R, 8, "t", feature_names=["f"])]
    found = []
    for how, path in ((QR(4), "rows"), (QR(4, "add"), "pooled")):
        module = CompressedEmbeddingBagCollection(tables, {"t": how})
        sharder: Any = (
            EmbeddingCollectionSharder() if path == "rows" else EmbeddingBagCollectionSharder()
        )
        collection = module.get_submodule(path)
        words = {
            name: word("table_wise", 0, world_size, 1) for name in ("t_quotient", "t_remainder")
        }
        plan = construct_module_sharding_plan(collection, words, world_size=world_size)
        made = DistributedModelParallel(module, plan=ShardingPlan({path: plan}), sharders=[sharder])
        (lookup,) = made.module.get_submodule(path)._lookups
        found += [[name for name, _ in bags.named_weights()] for bags in lookup._bags()]
    return found


def test_both_lookups_of_quotient_and_remainder_are_one_call(ranks) -> None:
    assert ranks(1).run(operators) == [[["t_quotient.weight", "t_remainder.weight"]] * 2]


def saved(rank: int, world_size: int, path: Path) -> Tensor:
    module = model()
    assert module.pooled is not None
    assert module.rows is not None
    for inner in (module.pooled, module.rows):
        apply_optimizer_in_backward(RowWiseAdagrad, inner.parameters(), {"lr": RATE})
    wrapped = sharded(module, "row_wise")
    loss(wrapped(batch(rank)), rank).backward()
    save_checkpoint(path, wrapped)
    return wrapped(batch(5)).values().detach().cpu().clone()


def loaded(rank: int, world_size: int, path: Path) -> Tensor:
    module = model()
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()
    wrapped = sharded(module, "table_wise")
    load_checkpoint(path, wrapped, optimizer_state=False)
    return wrapped(batch(5)).values().detach().cpu().clone()


def test_two_ranks_save_and_one_loads(ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(saved, tmp_path / "model")
    assert torch.equal(first, second)
    (alone,) = ranks(1).run(loaded, tmp_path / "model")
    assert_close(alone, first, rtol=1e-5, atol=1e-6)
    whole = model()
    load_checkpoint(tmp_path / "model", whole, optimizer_state=False)
    assert_close(whole(batch(5)).values(), first, rtol=1e-5, atol=1e-6)
    exact, close = (
        whole(batch(5)).values().detach(),
        tutorec.quantize(whole, torch.int8)(batch(5)).values().detach(),
    )
    assert float((exact - close).abs().max()) < 0.02 * float(exact.abs().max())


def step_of(wrapped: DistributedModelParallel, optimizer: CombinedOptimizer, seed: int) -> None:
    optimizer.zero_grad()
    loss(wrapped(batch(seed)), seed).backward()
    optimizer.step()


def resumed(
    rank: int, world_size: int, path: Path, optimizer: str, kernel: str, **cache: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights after three steps, and after two, a checkpoint, another plan, and the third."""
    found = []
    for plans in (["row_wise"], ["row_wise", "table_wise"]):
        steps = [0, 1, 2]
        for number, kind in enumerate(plans):
            wrapped = sharded(model(), kind, optimizer, kernel, **cache)
            both = CombinedOptimizer([wrapped.fused_optimizer, dense_optimizer(wrapped)])
            if number:
                load_checkpoint(path, wrapped, both)
            while len(steps) > (number + 1 < len(plans)):
                step_of(wrapped, both, seed_of(rank, steps.pop(0)))
            if steps:
                save_checkpoint(path, wrapped, both)
        found.append(full_state_dict(wrapped))
    return found[0], found[1]


IN_FILES = pytest.mark.skipif(torch.cuda.is_available(), reason="tables in files are on the CPU")


@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad", "adam"])
@pytest.mark.parametrize(
    ("kernel", "cache"),
    [
        ("fused", {}),
        pytest.param("fused_uvm_caching", {"cache_load_factor": 0.4}, marks=IN_FILES),
    ],
)
def test_training_goes_on_under_another_plan(ranks, tmp_path: Path, optimizer, kernel, cache):
    for whole, parts in ranks(2).run(resumed, tmp_path / "model", optimizer, kernel, **cache):
        assert whole.keys() == parts.keys()
        for name, weight in whole.items():
            assert_close(parts[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("weighted", [False, True])
def test_quantized_tables_on_two_devices_are_those_on_one(weighted: bool) -> None:
    quantized = tutorec.quantize(nn.Sequential(model(weighted)), torch.int8)
    features = batch(5, weighted)
    whole = quantized(features).values().detach()
    divided, plan = shard_quant_model(quantized, world_size=2)
    assert set(plan.plan) == {"0.pooled", "0.rows"}
    assert torch.equal(divided(features).values(), whole)


def from_meta(rank: int, world_size: int) -> dict[str, Tensor]:
    wrapped = sharded(model(device=torch.device("meta")), "row_wise")
    loss(wrapped(batch(rank)), rank).backward()
    return full_state_dict(wrapped)


def test_tables_on_the_meta_device_are_drawn_where_they_go(ranks) -> None:
    state = ranks(2).run(from_meta)[0]
    assert {name: weight.shape for name, weight in state.items()} == {
        name: weight.shape for name, weight in model().state_dict().items()
    }
    assert all(bool(weight.isfinite().all()) and bool(weight.any()) for weight in state.values())


def variable(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Features with different numbers of lists, and which of them each sample means."""
    keys, lengths, values = (
        ["f2", "f0", "f1"],
        torch.tensor([2, 0, 1, 3, 1]),
        torch.tensor([10, 3, 7, 0, 0, 5, 9]),
    )
    means = torch.tensor([[0, 1, 0], [0, 0, 1], [0, 0, 0]])
    lists = KeyedJaggedTensor(
        keys,
        values,
        lengths=lengths,
        stride_per_key_per_rank=[[2], [2], [1]],
        inverse_indices=(keys, means),
    )
    whole = on_rank(model())(on_rank(lists)).values().detach().cpu()
    return sharded(model(), "row_wise")(on_rank(lists)).values().detach().cpu().clone(), whole


def test_lists_that_several_samples_mean_are_sent_once(ranks) -> None:
    for got, wanted in ranks(2).run(variable):
        assert_close(got, wanted)

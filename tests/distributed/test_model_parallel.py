"""DistributedModelParallel: tables sharded, the rest in DDP, together equal to one process with the
whole batch.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import random
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import batch, collection, home, on_rank, tables
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tutorec.distributed import comm
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.data_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    sharded_parameter_names,
)
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel, get_module
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tutorec.optim.optimizers import in_backward_optimizer_filter
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

RATE = 0.1
WIDTH = sum(config.embedding_dim * len(config.feature_names) for config in tables())


class Sparse(nn.Module):
    """A part of a model that holds the tables and a dense parameter, so that both are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = collection()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.tables(features).values() * self.scale


class Model(nn.Module):
    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        self.sparse = Sparse()
        torch.manual_seed(seed)
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, features: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        logits = self.over(self.sparse(features)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def plan_of(
    ebc: EmbeddingBagCollection, world_size: int, path: str = "sparse.tables"
) -> ShardingPlan:
    words = {
        config.name: table_wise(rank=home(index, world_size))
        for index, config in enumerate(ebc.embedding_bag_configs())
    }
    return ShardingPlan({path: construct_module_sharding_plan(ebc, words, world_size=world_size)})


def parallel(
    model: Model, world_size: int, rate: float = RATE, **options: Any
) -> DistributedModelParallel:
    sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": rate})
    return DistributedModelParallel(
        model, plan=plan_of(model.sparse.tables, world_size), sharders=[sharder], **options
    )


def data(rank: int, step: int, samples: int = 4) -> tuple[KeyedJaggedTensor, Tensor]:
    draw = torch.Generator().manual_seed(50 * step + rank)
    return batch(100 * step + rank, samples), on_rank(
        torch.randint(0, 2, (samples,), generator=draw).float()
    )


def train(rank: int, world_size: int, steps: int = 4) -> tuple[list[float], dict[str, Tensor]]:
    # Only rank 0's dense weights count: DDP hands them out.
    model = parallel(Model(seed=5 + rank), world_size)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.SGD(params, lr=RATE),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*data(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {
        name: parameter.detach().clone() for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.world4)])
def test_training_equals_one_process_with_the_global_batch(ranks, world_size):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses: list[list[float]] = []
    for step in range(4):
        optimizer.zero_grad()
        of_ranks = [model(*data(rank, step)) for rank in range(world_size)]
        torch.stack(of_ranks).mean().backward()
        optimizer.step()
        losses.append([float(loss.detach()) for loss in of_ranks])
    seen: set[str] = set()
    for rank, (got, weights) in enumerate(ranks(world_size).run(train)):
        assert got == pytest.approx([of_step[rank] for of_step in losses], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(
                weight, model.get_parameter(name).detach(), msg=f"{name} on rank {rank}"
            )
        seen |= set(weights)
    assert seen == {name for name, _ in model.named_parameters()}


def distinct_shards(rank: int, world_size: int) -> dict[str, Any]:
    model = Model()
    with torch.no_grad():
        for bag in model.sparse.tables.embedding_bags.values():
            bag.get_parameter("weight").fill_(rank + 1.0)
    wrapped = parallel(model, world_size, rate=0.0)
    names = [name for name, _ in wrapped.module.named_parameters() if "embedding_bags" in name]
    at_wrapping = {name: wrapped.module.get_parameter(name).unique().tolist() for name in names}
    for step in range(10):
        wrapped(*data(rank, step)).backward()
    after = {name: wrapped.module.get_parameter(name).unique().tolist() for name in names}
    ddp = get_module(wrapped)
    assert isinstance(ddp, DistributedDataParallel)
    reduced = [
        name
        for name, p in wrapped.module.named_parameters()
        if any(p is each for each in ddp._module_parameters)
    ]
    logged = ddp._get_ddp_logging_data()
    return {
        "wrapping": at_wrapping,
        "after": after,
        "reduced": reduced,
        "bytes": logged["total_parameter_size_bytes"],
        "ignored": sorted(sharded_parameter_names(wrapped.module)),
    }


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.world4)])
def test_rank_distinct_shards_survive_wrapping_and_ten_steps_and_ddp_reduces_dense_parameters_only(
    ranks, world_size
):
    for rank, found in enumerate(ranks(world_size).run(distinct_shards)):
        mine = [
            f"sparse.tables.embedding_bags.t{i}.weight"
            for i in range(3)
            if home(i, world_size) == rank
        ]
        assert found["wrapping"] == {name: [rank + 1.0] for name in mine}
        assert found["after"] == found["wrapping"]
        assert found["ignored"] == mine
        assert found["reduced"] == ["sparse.scale", "over.weight", "over.bias"]
        assert found["bytes"] == 4 * (WIDTH + WIDTH + 1)


def described(rank: int, world_size: int) -> dict[str, Any]:
    bare = DistributedModelParallel(collection(), plan=plan_of(collection(), world_size, path=""))
    whole = parallel(Model(), world_size)
    later = parallel(Model(), world_size, init_data_parallel=False)
    before = type(get_module(later)).__name__
    later.init_data_parallel()
    return {
        "bare": repr(bare),
        "keys": bare(batch(0, 2)).wait().keys(),
        "whole": repr(whole).splitlines()[:6],
        "module": type(whole.module).__name__,
        "later": (before, type(get_module(later)).__name__),
        "dense": [name for name, _ in in_backward_optimizer_filter(whole.named_parameters())],
        "tables": [name for name, _ in in_backward_optimizer_filter(bare.named_parameters())],
        "fused": sorted(whole.fused_optimizer.params),
        "bare names": [name for name, _ in whole.bare_named_parameters()],
        "all names": [name for name, _ in whole.named_parameters()],
        "state": sorted(whole.state_dict()),
    }


def test_printed_form_and_names(ranks):
    for rank, found in enumerate(ranks(2).run(described)):
        mine = [f"embedding_bags.t{i}.weight" for i in range(3) if home(i, 2) == rank]
        assert found["bare"].startswith(
            "DistributedModelParallel(\n  (_dmp_wrapped_module): ShardedEmbeddingBagCollection(\n"
            "    (lookups): \n     GroupedPooledEmbeddingsLookup(\n        (_emb_modules): "
            "ModuleList(\n"
        )
        assert found["keys"] == ["f0", "f1@t0", "f1@t1", "f2", "f3"]
        assert found["whole"][:3] == [
            "DistributedModelParallel(",
            "  (_dmp_wrapped_module): DistributedDataParallel(",
            "    (module): Model(",
        ]
        assert found["module"] == "Model"
        assert found["later"] == ("Model", "DistributedDataParallel")
        assert found["dense"] == ["sparse.scale", "over.weight", "over.bias"]
        assert found["bare names"] == found["all names"]
        assert sorted(found["all names"]) == sorted(
            [*found["dense"], *(f"sparse.tables.{name}" for name in mine)]
        )
        assert found["tables"] == []
        assert found["fused"] == [f"sparse.tables.{name}" for name in mine]
        assert found["state"] == sorted(
            [
                *found["dense"],
                "sparse.seen",
                *(f"sparse.tables.embedding_bags.t{i}.weight" for i in range(3)),
            ]
        )


class Tied(nn.Module):
    """Tables and dense parts, one weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = collection()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.second(self.norm(self.first(self.tables(features).values())))


def tables_on_meta(rank: int, world_size: int, **options: Any) -> DistributedModelParallel:
    with torch.device("meta"):
        model = Tied()
    model.tables = EmbeddingBagCollection(tables(), device=torch.device("meta"))
    plan = plan_of(model.tables, world_size, path="tables")
    return DistributedModelParallel(model, plan=plan, **options)


def meta_model(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = tables_on_meta(rank, world_size)
    held = {name: value.detach().clone() for name, value in model.named_parameters()}
    model(batch(rank, 4)).sum().backward()
    return {
        "on meta": [
            name
            for name, value in [*model.named_parameters(), *model.named_buffers()]
            if value.is_meta
        ],
        "tied": model.module.get_parameter("first.weight")
        is model.module.get_parameter("second.weight"),
        "first": held["first.weight"],
        "norm": [
            held["norm.weight"].unique().tolist(),
            model.module.get_buffer("norm.running_var").numel(),
        ],
        "tables": [name for name in held if name.startswith("tables.")],
    }


def test_a_model_on_the_meta_device_is_allocated_shard_by_shard_and_drawn(ranks):
    found = ranks(2).run(meta_model)
    assert torch.equal(found[0]["first"], found[1]["first"])
    assert found[0]["first"].std() > 0
    for rank, of_rank in enumerate(found):
        assert of_rank["on meta"] == []
        assert of_rank["tied"]
        assert of_rank["norm"] == [[1.0], WIDTH]
        assert of_rank["tables"] == [
            f"tables.embedding_bags.t{i}.weight" for i in range(3) if home(i, 2) == rank
        ]


def left_on_meta(rank: int, world_size: int) -> tuple[str, str, float]:
    model = tables_on_meta(rank, world_size, init_parameters=False, init_data_parallel=False)
    with pytest.raises(ValueError, match=r"parameter 'first\.weight'.*2") as refused:
        model.init_data_parallel()
    for name in ("first", "second", "norm"):
        part: Any = model.module.get_submodule(name).to_empty(device=device())
        part.reset_parameters()
    model.init_data_parallel()
    return (
        str(refused.value),
        type(get_module(model)).__name__,
        float(model(batch(rank, 4)).detach().sum()),
    )


def test_dense_parts_on_the_meta_device_are_the_callers_where_it_says_so(ranks):
    for message, wrapped, total in ranks(2).run(left_on_meta):
        assert "before init_data_parallel()" in message
        assert wrapped == "DistributedDataParallel"
        assert total == total


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_a_dense_part_that_cannot_draw_itself_is_named():
    with torch.device("meta"):
        model = nn.Sequential(Empty())
    with pytest.raises(
        ValueError,
        match=r"Empty.*\(\['scale'\]\).*reset_parameters",
    ):
        DistributedModelParallel(model, env=ShardingEnv.from_local(1, 0), plan=ShardingPlan())


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = collection()
        self.over = nn.LazyLinear(1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.tables(features).values())


def lazy(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rank)
    model = DistributedModelParallel(
        Lazy(), plan=plan_of(collection(), world_size, path="tables"), init_data_parallel=False
    )
    model(batch(rank, 3))
    model.init_data_parallel()
    model(batch(rank, 3)).sum().backward()
    weight = model.module.get_parameter("over.weight")
    assert weight.grad is not None
    return weight.detach(), weight.grad


@pytest.mark.skipif(
    "TUTOREC_PRETEND_GPUS" in os.environ, reason="a pretended GPU has no lazy layers"
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_layers_are_wrapped_after_a_first_forward(ranks):
    (weight, grad), (other_weight, other_grad) = ranks(2).run(lazy)
    assert weight.shape == (1, WIDTH)
    assert torch.equal(weight, other_weight)
    assert torch.equal(grad, other_grad)


class Sometimes(nn.Module):
    """A layer that is never used, and one that is used in odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = collection()
        self.over, self.odd, self.never = nn.Linear(WIDTH, 1), nn.Linear(1, 1), nn.Linear(2, 2)

    def forward(self, features: KeyedJaggedTensor, step: int) -> Tensor:
        out = self.over(self.tables(features).values())
        return self.odd(out) if step % 2 else out


def unused(rank: int, world_size: int, changing: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    plan = plan_of(collection(), world_size, path="tables")
    wrapper = DefaultDataParallelWrapper(find_unused_parameters=True) if changing else None
    model = DistributedModelParallel(Sometimes(), plan=plan, data_parallel_wrapper=wrapper)
    for step in range(3):
        model.zero_grad()
        model(batch(rank + step, 3), step if changing else 0).sum().backward()
    return [model.module.get_parameter(f"{name}.weight").grad for name in ("over", "never")]


@pytest.mark.parametrize("changing", [False, True])
def test_layers_without_gradients_stop_nothing(ranks, changing):
    (over, never), (other, _) = ranks(2).run(unused, changing=changing)
    assert torch.equal(over, other)
    assert never is None or not never.any()


def compressed(rank: int, world_size: int, precision: str | None) -> Tensor:
    wrapper = DefaultDataParallelWrapper(allreduce_comm_precision=precision)
    model = parallel(Model(), world_size, data_parallel_wrapper=wrapper)
    for _ in range(2):
        model.zero_grad()
        model(*data(rank, 0)).backward()
    grad = model.module.get_parameter("over.weight").grad
    assert grad is not None
    return grad


def test_dense_gradients_may_travel_as_half_precision(ranks):
    exact = ranks(2).run(compressed, precision=None)[0]
    narrow, other = ranks(2).run(compressed, precision="fp16")
    assert torch.equal(narrow, other)
    assert not torch.equal(narrow, exact)
    torch.testing.assert_close(narrow, exact, rtol=2.0**-10, atol=1e-4)


def in_bfloat16(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"'bf16'.*NCCL.*use 'fp16'"):
        compressed(rank, world_size, "bf16")


@pytest.mark.skipif(
    torch.cuda.device_count() > 1, reason="NCCL carries the gradients here, and adds bfloat16"
)
def test_bfloat16_is_refused_where_the_backend_cannot_add_it(ranks):
    ranks(2).run(in_bfloat16)


def test_a_wrapper_refuses_an_unknown_precision():
    with pytest.raises(ValueError, match=r"allreduce_comm_precision='fp8'.*\['fp16', 'bf16'\]"):
        DefaultDataParallelWrapper(allreduce_comm_precision="fp8")


class Nothing(DataParallelWrapper):
    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        dmp._dmp_wrapped_module = nn.Sequential(dmp.module)


def wrapped_otherwise(rank: int, world_size: int) -> str:
    return type(get_module(parallel(Model(), world_size, data_parallel_wrapper=Nothing()))).__name__


def test_the_wrapper_may_be_the_callers(ranks):
    assert ranks(2).run(wrapped_otherwise) == ["Sequential", "Sequential"]


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(1))


def stored(rank: int, world_size: int) -> tuple[list[str], list[float], list[str]]:
    outer = Outer(parallel(Model(), world_size))
    names = sorted(outer.state_dict())
    whole = Outer(Model(seed=9))
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.fill_(3.0)
    outer.load_state_dict(whole.state_dict())
    held = [float(value) for parameter in outer.parameters() for value in parameter.unique()]
    inner: Any = outer.inner
    inner.load_state_dict(
        {f"old.{name}": 2 * value for name, value in whole.inner.state_dict().items()}, "old."
    )
    held += [float(value) for parameter in inner.parameters() for value in parameter.unique()]
    return names, held, sorted(inner.load_state_dict({}, strict=False).missing_keys)


def test_state_of_a_part_of_a_model_goes_out_and_in_under_its_unsharded_names(ranks):
    expected = sorted(Outer(Model()).state_dict())
    for names, held, missing in ranks(2).run(stored):
        assert names == expected
        assert set(held) == {3.0, 6.0}
        assert missing
        assert all(not name.startswith("_dmp") for name in missing)


class WithSparse(Model):
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.EmbeddingBag(4, 2, sparse=True)
        self.other = nn.Embedding(4, 2)


def test_names_of_sparse_gradients_are_listed():
    model = WithSparse()
    plan = plan_of(model.sparse.tables, 1)
    wrapped = DistributedModelParallel(
        model, env=ShardingEnv.from_local(1, 0), plan=plan, init_data_parallel=False
    )
    assert wrapped.sparse_grad_parameter_names() == ["word.weight"]
    assert wrapped.sparse_grad_parameter_names(["a"], "net") == ["a", "net.word.weight"]


def halves(rank: int, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """Two models on two ranks each, planned and trained at the same time."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = groups[rank // 2]
    torch.manual_seed(rank // 2)
    model = DistributedModelParallel(Model(seed=rank // 2), env=ShardingEnv.from_process_group(own))
    losses = []
    for step in range(3):
        model.zero_grad()
        loss = model(*data(rank, step))
        loss.backward()
        with torch.no_grad():
            for _, dense in in_backward_optimizer_filter(model.named_parameters()):
                assert dense.grad is not None
                dense -= RATE * dense.grad
        losses.append(float(loss.detach()))
    return losses, {
        name: p.detach().clone() for name, p in model.named_parameters() if name.startswith("over")
    }


@pytest.mark.world4
def test_two_models_train_on_two_halves_of_the_ranks(ranks):
    found = ranks(4).run(halves)
    for rank, (losses, dense) in enumerate(found):
        other = found[rank ^ 1][1]
        assert all(torch.equal(value, other[name]) for name, value in dense.items())
        assert not torch.equal(dense["over.weight"], found[(rank + 2) % 4][1]["over.weight"])
        assert all(math.isfinite(loss) for loss in losses)


def quietly(rank: int, world_size: int) -> list[str]:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger().addHandler(keep := Keep(logging.WARNING))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            model = Model()
            apply_optimizer_in_backward(
                torch.optim.SGD, model.sparse.tables.parameters(), {"lr": 0.1}
            )
            model = DistributedModelParallel(model)
            dense = dict(in_backward_optimizer_filter(model.named_parameters()))
            optimizer = CombinedOptimizer(
                [model.fused_optimizer, KeyedOptimizerWrapper(dense, torch.optim.Adam)]
            )
            for step in range(3):
                optimizer.zero_grad()
                model(*data(rank, step)).backward()
                optimizer.step()
            model.load_state_dict(model.state_dict())
            repr(model)
    finally:
        logging.getLogger().removeHandler(keep)
    return [*said, *(str(each.message) for each in caught)]


def test_the_happy_path_says_nothing(ranks):
    # TorchRec says that it cannot determine LOCAL_WORLD_SIZE, among other things.
    assert ranks(2).run(quietly) == [[], []]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and nothing to say")
def test_a_device_that_is_not_here_becomes_the_cpu_with_one_warning():
    # The model replaced the device before the sharder saw it, and nobody said so.
    env, plan = ShardingEnv.from_local(1, 0), plan_of(Model().sparse.tables, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", RuntimeWarning)
        models = [
            DistributedModelParallel(
                Model(), env, torch.device("cuda"), plan, init_data_parallel=False
            )
            for _ in range(2)
        ]
    [warning] = caught
    assert "tables that were to live on cuda are placed on cpu" in str(warning.message)
    assert {
        each.device.type for each in models[0].state_dict().values() if isinstance(each, Tensor)
    } == {"cpu"}
    assert models[1].device == torch.device("cpu")


def planned_model(
    rank: int, world_size: int
) -> tuple[dict[str, tuple[str, list[int] | None]], float]:
    """What the planner decides, and how far three steps by it are from the unsharded model's."""
    torch.manual_seed(0)
    model, unsharded = Model(), on_rank(Model())
    unsharded.load_state_dict(model.state_dict())
    wrapped = DistributedModelParallel(model)
    plan = wrapped.plan.plan["sparse.tables"]
    with torch.no_grad():
        gap = (wrapped(*data(rank, 0)) - unsharded(*data(rank, 0))).abs().max().item()
    return {name: (sharding.sharding_type, sharding.ranks) for name, sharding in plan.items()}, gap


def test_without_a_plan_the_planner_makes_one_that_every_rank_has(ranks):
    (first, gap), (second, other_gap) = ranks(2).run(planned_model)
    assert first == second
    assert set(first) == {"t0", "t1", "t2"}
    assert max(gap, other_gap) < 1e-6


def test_without_a_process_group_the_error_names_the_cure():
    with pytest.raises(ValueError, match=r"tutorec\.spmd\.Ranks.*tutorec\.spmd\.init\(\)"):
        DistributedModelParallel(Model(), plan=ShardingPlan())


def test_plan_for_a_module_that_does_not_exist_is_refused():
    model = Model()
    plan = plan_of(model.sparse.tables, 1, path="sparse.tabels")
    with pytest.raises(
        ValueError,
        match=r"module 'sparse\.tabels'.*not have.*'sparse\.tables'",
    ):
        DistributedModelParallel(model, env=ShardingEnv.from_local(1, 0), plan=plan)


@pytest.mark.parametrize(
    ("outer", "named"), [(nn.Identity, "the module"), (nn.Sequential, "module '0'")]
)
def test_what_is_wrapped_already_is_refused(outer, named):
    # DDP was given shards as dense parameters, and the process ended with a segmentation fault.
    model = Model()
    env = ShardingEnv.from_local(1, 0)
    plan = plan_of(model.sparse.tables, 1)
    wrapped = DistributedModelParallel(model, env=env, plan=plan, init_data_parallel=False)
    again = wrapped if outer is nn.Identity else outer(wrapped)
    with pytest.raises(ValueError, match=f"{named} is already a DistributedModelParallel"):
        DistributedModelParallel(again, env=env, plan=ShardingPlan())


class Twice(nn.Module):
    """One collection in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = collection()
        self.second = self.first
        self.over = nn.Linear(2 * WIDTH, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(
            torch.cat([self.first(features).values(), self.second(features).values()], dim=1)
        )


def shared(rank: int, world_size: int) -> tuple[bool, bool]:
    model = Twice()
    unsharded = on_rank(copy.deepcopy(model))(batch(rank, 3)).detach()
    wrapped = DistributedModelParallel(model, plan=plan_of(model.first, world_size, path="first"))
    out = wrapped(batch(rank, 3))
    out.sum().backward()
    return model.first is model.second, torch.allclose(out, unsharded)


def test_a_collection_in_two_places_is_sharded_once(ranks):
    # Dense weights are drawn alike on both ranks: DDP changes nothing.
    assert ranks(2).run(shared) == [(True, True)] * 2


def shaken(rank: int, world_size: int, seed: int | None) -> list[Tensor]:
    draw = random.Random(1000 * (seed or 0) + rank)

    def sleep(_: comm.Issue) -> None:
        time.sleep(draw.random() / 100)

    if seed is not None:
        comm.observers.append(sleep)
    try:
        return list(train(rank, world_size)[1].values())
    finally:
        if seed is not None:
            comm.observers.remove(sleep)


def test_late_ranks_do_not_mix_our_exchanges_with_those_of_ddp(ranks):
    calm = ranks(2).run(shaken, seed=None)
    for seed in range(2):
        for a, b in zip(calm, ranks(2).run(shaken, seed=seed), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def without_gradients(rank: int, world_size: int) -> list[bool]:
    model = parallel(Model(), world_size).eval()
    with torch.no_grad():
        quiet = model(*data(rank, 0))
    with torch.inference_mode():
        quieter = model.module.sparse.tables(data(rank, 0)[0]).values()
    return [quiet.requires_grad, quieter.requires_grad, bool(torch.isfinite(quieter).all())]


def test_evaluation_needs_no_graph(ranks):
    assert ranks(2).run(without_gradients) == [[False, False, True]] * 2

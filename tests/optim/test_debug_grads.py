"""The gradients that backward uses up, seen in one process: against dense ones, and without a
trace.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutorec._kernels.backend import backend, use_backend
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tutorec.optim import RowWiseAdagrad, apply_optimizer_in_backward, debug_grads
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

needs_fbgemm = pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
both = pytest.mark.parametrize("name", ["torch", pytest.param("fbgemm", marks=needs_fbgemm)])
RATE = 0.25


def bags(pooling: PoolingType = PoolingType.SUM, weighted: bool = False) -> EmbeddingBagCollection:
    torch.manual_seed(1)
    tables = [
        EmbeddingBagConfig(6, 8, "t1", feature_names=["item", "user"], pooling=pooling),
        EmbeddingBagConfig(5, 4, "t2", feature_names=["item"], pooling=pooling),
        EmbeddingBagConfig(5, 6, "t3", feature_names=["seen"], pooling=pooling),
    ]
    return EmbeddingBagCollection(tables, is_weighted=weighted).to(device())


def rows() -> EmbeddingCollection:
    torch.manual_seed(1)
    return EmbeddingCollection(
        [
            EmbeddingConfig(6, 4, "t1", feature_names=["item", "user"]),
            EmbeddingConfig(5, 4, "t2", feature_names=["seen"]),
        ]
    ).to(device())


def batch(weights: Tensor | None = None) -> KeyedJaggedTensor:
    """Item: [1, 2], []; user: [2], [2, 0]; seen: nothing. Row 2 of t1 is there three times, through
    two features.
    """
    values = torch.tensor([1, 2, 2, 2, 0])
    return KeyedJaggedTensor(
        ["item", "user", "seen"], values, weights, lengths=torch.tensor([2, 0, 1, 2, 0, 0])
    ).to(device())


def loss_of(model: nn.Module, features: KeyedJaggedTensor) -> Tensor:
    found = model(features)
    if hasattr(found, "wait"):
        found = found.wait()
    parts = (
        [found.values()]
        if hasattr(found, "keys") and not isinstance(found, dict)
        else list(found.values())
    )
    flat = torch.cat(
        [(part if isinstance(part, Tensor) else part.values()).flatten() for part in parts]
    )
    return (flat * torch.linspace(0.5, 2.0, flat.numel(), device=flat.device)).sum()


def sharded(model: nn.Module, **fused_params: Any) -> nn.Module:
    kind = (
        EmbeddingBagCollectionSharder
        if isinstance(model, EmbeddingBagCollection)
        else EmbeddingCollectionSharder
    )
    path = "embedding_bags" if isinstance(model, EmbeddingBagCollection) else "embeddings"
    words = {name: table_wise(rank=0) for name, _ in model.get_submodule(path).named_children()}
    plan = construct_module_sharding_plan(model, words)
    return kind(fused_params).shard(model, plan, ShardingEnv.from_local(1, 0))


def dense_gradients(model: nn.Module, features: KeyedJaggedTensor) -> dict[str, Tensor]:
    twin = copy.deepcopy(model)
    loss_of(twin, features).backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in twin.named_parameters()
    }


@both
@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, RowWiseAdagrad, torch.optim.Adam], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_unsharded_tables_show_the_gradient_that_a_dense_one_would_have(
    name: str, kind: type[torch.optim.Optimizer], pooling: PoolingType
) -> None:
    with use_backend(name):
        model = bags(pooling)
        expected = dense_gradients(model, batch())
        twin = copy.deepcopy(model)
        for one in (model, twin):
            apply_optimizer_in_backward(kind, one.parameters(), {"lr": RATE})
        with debug_grads(model) as grads:
            loss_of(model, batch()).backward()
        loss_of(twin, batch()).backward()
    assert set(grads) == set(expected)
    for key, gradient in expected.items():
        assert grads[key].is_coalesced()
        torch.testing.assert_close(grads[key].to_dense(), gradient)
    assert grads["embedding_bags.t1.weight"].indices().tolist() == [[0, 1, 2]]
    assert grads["embedding_bags.t3.weight"]._nnz() == 0
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, other)


@both
@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad"])
@pytest.mark.parametrize(
    "build", [bags, rows, lambda: bags(PoolingType.SQRTN), lambda: bags(PoolingType.MEAN)]
)
def test_fused_tables_show_the_gradient_that_a_dense_one_would_have(
    name: str, optimizer: str, build: Any
) -> None:
    with use_backend(name):
        model = build()
        expected = dense_gradients(model, batch())
        watched, plain = (sharded(model, optimizer=optimizer, learning_rate=RATE) for _ in range(2))
        with debug_grads(watched) as grads:
            loss_of(watched, batch()).backward()
        loss_of(plain, batch()).backward()
    assert set(grads) == set(expected)
    for key, gradient in expected.items():
        torch.testing.assert_close(grads[key].to_dense(), gradient)
    for own, other in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other)


@both
def test_weighted_ids_enter_with_their_weights(name: str) -> None:
    weights = torch.tensor([0.5, 2.0, -1.0, 1.0, 3.0])
    with use_backend(name):
        model = bags(weighted=True)
        expected = dense_gradients(model, batch(weights))
        unsharded = copy.deepcopy(model)
        apply_optimizer_in_backward(RowWiseAdagrad, unsharded.parameters(), {"lr": RATE})
        for watched in (unsharded, sharded(model, optimizer="exact_sgd")):
            with debug_grads(watched) as grads:
                loss_of(watched, batch(weights)).backward()
            for key, gradient in expected.items():
                torch.testing.assert_close(grads[key].to_dense(), gradient)


@both
def test_backward_passes_add_up_and_those_outside_do_not_count(name: str) -> None:
    with use_backend(name):
        model = sharded(bags(), optimizer="exact_sgd", learning_rate=0.0)
        expected = dense_gradients(bags(), batch())["embedding_bags.t1.weight"]
        outside = loss_of(model, batch())
        with debug_grads(model) as grads:
            loss_of(model, batch()).backward()
            loss_of(model, batch()).backward()
            late = loss_of(model, batch())
        late.backward()
        outside.backward()
    torch.testing.assert_close(grads["embedding_bags.t1.weight"].to_dense(), 2 * expected)


def test_afterwards_the_model_holds_nothing() -> None:
    model = sharded(bags(), optimizer="exact_sgd")
    unsharded = bags()
    apply_optimizer_in_backward(torch.optim.SGD, unsharded.parameters(), {"lr": RATE})
    for one in (model, unsharded):
        with debug_grads(one) as grads:
            loss_of(one, batch()).backward()
        held = [weakref.ref(gradient) for gradient in grads.values()]
        assert len(held) == 3
        del grads
        gc.collect()
        assert [each() for each in held] == [None] * 3
    assert all(
        optimizer.operator.gradient_listener is None
        for _, optimizer in model.fused_optimizer.optimizers
    )
    assert all(
        getattr(parameter, "_gradient_listener", None) is None
        for parameter in unsharded.parameters()
    )
    copy.deepcopy(unsharded)


def test_a_failed_backward_ends_the_watch() -> None:
    model = sharded(bags(), optimizer="exact_sgd")
    with pytest.raises(ZeroDivisionError), debug_grads(model):
        raise ZeroDivisionError
    with debug_grads(model) as grads:
        loss_of(model, batch()).backward()
    assert len(grads) == 3


def test_names_that_are_not_there_say_why() -> None:
    model = sharded(bags(), optimizer="exact_sgd")
    early = loss_of(model, batch())
    with debug_grads(model) as grads:
        early.backward()
    assert (dict(grads), repr(grads)) == ({}, "{}")
    with pytest.raises(
        KeyError,
        match=r"no gradient of 'embedding_bags.t1.weight'.*both",
    ):
        grads["embedding_bags.t1.weight"]
    with pytest.raises(
        KeyError,
        match=r"'t1'.*not.*\['embedding_bags.t1.weight'",
    ):
        grads["t1"]


def test_where_there_is_nothing_to_watch_it_says_what_there_is() -> None:
    with (
        pytest.raises(ValueError, match=r"no table.*EmbeddingBagCollection.*backward"),
        debug_grads(bags()),
    ):
        pass


def test_a_model_is_watched_once() -> None:
    model = sharded(bags(), optimizer="exact_sgd")
    with debug_grads(model) as grads:
        with (
            pytest.raises(ValueError, match=r"watches .embedding_bags.t1.weight. already"),
            debug_grads(model),
        ):
            pass
        loss_of(model, batch()).backward()
    assert len(grads) == 3


def test_parts_of_a_model_keep_their_paths() -> None:
    model = nn.ModuleDict({"shop": bags(), "dense": nn.Linear(2, 1)})
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": RATE})
    with debug_grads(model) as grads:
        loss_of(model["shop"], batch()).backward()
    assert set(grads) == {f"shop.embedding_bags.t{number}.weight" for number in (1, 2, 3)}
    assert repr(grads).startswith("{'shop.embedding_bags.t1.weight': 3 rows of 6,")


def test_a_part_that_is_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": bags(), "embedding_bags": nn.Identity()})
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": RATE})
    with debug_grads(model) as grads:
        loss_of(model["module"], batch()).backward()
    assert set(grads) == set(model.state_dict())


@both
@pytest.mark.parametrize(
    "build", [bags, rows, lambda: bags(PoolingType.MEAN), lambda: bags(PoolingType.SQRTN)]
)
def test_it_is_the_gradient_that_the_step_is_made_with_clipped_where_that_is(
    name: str, build: Any
) -> None:
    with use_backend(name):
        model = sharded(build(), learning_rate=1.0, gradient_clipping=True, max_gradient=0.75)
        before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        with debug_grads(model) as grads:
            loss_of(model, batch()).backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(grads[key].to_dense(), before[key] - parameter.detach())
    assert build is not bags or any(
        gradient.to_dense().eq(0.75).any() for gradient in grads.values()
    )

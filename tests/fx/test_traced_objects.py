"""Objects that traced code makes of proxies are calls in the graph, as with TorchRec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutorec.awaitable import LazyAwaitable
from tutorec.fx import symbolic_trace
from tutorec.sparse.equality import kjt_is_equal
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

TRACERS = [symbolic_trace, torch.fx.symbolic_trace]


@torch.fx.wrap
def longest_first(jagged: JaggedTensor) -> Tensor:
    if jagged.values().sum() > 0:  # what no tracer can follow
        return jagged.values().flip(0)
    return jagged.values()


@torch.fx.wrap
def columns_to_zero(keyed: KeyedTensor) -> Tensor:
    values = keyed.values().clone()
    values[:, 0] = 0
    return values


@torch.fx.wrap
def ids_of(batch: KeyedJaggedTensor) -> Tensor:
    return batch.values() + int(batch.values().sum())


class OfProxies(nn.Module):
    """Makes each type in its forward, and hands it to a helper."""

    def forward(
        self, values: Tensor, lengths: Tensor, dense: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        jagged = JaggedTensor(values, lengths=lengths)
        batch = KeyedJaggedTensor(["f", "g"], values, lengths=lengths)
        keyed = KeyedTensor(["f"], [2], dense)
        return (
            longest_first(jagged),
            ids_of(batch),
            ids_of(batch.permute([1, 0])),
            columns_to_zero(keyed),
        )


@pytest.mark.parametrize("trace", TRACERS, ids=["tutorec", "torch"])
def test_a_helper_that_is_given_a_jagged_object_of_proxies_is_one_call(trace: Any) -> None:
    inputs = torch.tensor([3, 1, 2]), torch.tensor([1, 0, 1, 1]), torch.ones(2, 2)
    traced = trace(OfProxies())
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert [called.count(helper) for helper in (longest_first, ids_of, columns_to_zero)] == [
        1,
        2,
        1,
    ]
    assert {JaggedTensor, KeyedJaggedTensor, KeyedTensor} <= set(called)
    for got, expected in zip(traced(*inputs), OfProxies()(*inputs), strict=True):
        assert torch.equal(got, expected)


class Waits(LazyAwaitable[Tensor]):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self._value = value

    def _wait_impl(self) -> Tensor:
        return self._value + 1


class WaitsInside(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        waits = Waits(value + value)
        return torch.multiply(waits, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("trace", TRACERS, ids=["tutorec", "torch"])
def test_an_awaitable_made_of_a_proxy_is_one_call(trace: Any) -> None:
    traced = trace(WaitsInside())
    assert Waits in [node.target for node in traced.graph.nodes]
    assert torch.equal(traced(torch.ones(2)), torch.full((2,), 6.0))


def test_an_awaitable_of_a_tensor_is_made_while_a_graph_is_traced() -> None:
    class OfATensor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.ones(2))

        def forward(self, value: Tensor) -> Tensor:
            return value * Waits(self.one)  # type: ignore[arg-type, operator]

    assert torch.equal(symbolic_trace(OfATensor())(torch.ones(2)), torch.full((2,), 2.0))


KEYS = ["f", "g"]


def made(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch from its parts: whether there are weights is not known in a trace."""
    return KeyedJaggedTensor(KEYS, batch.values(), batch.weights_or_none(), batch.lengths())


def feature(batch: KeyedJaggedTensor) -> JaggedTensor:
    one = batch["g"]
    return JaggedTensor(one.values(), one.weights_or_none(), one.lengths())


def of_either(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Of lengths and offsets one may be missing."""
    return KeyedJaggedTensor(
        KEYS,
        batch.values(),
        batch.weights_or_none(),
        batch.lengths_or_none(),
        batch.offsets_or_none(),
    )


def again(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        batch.keys(),
        batch.values(),
        batch.weights_or_none(),
        offsets=batch.offsets(),
        inverse_indices=batch.inverse_indices_or_none(),
    )


def together(**features: JaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_jt_dict(features)


CPU = torch.empty(0).device

WAYS: dict[str, Callable[[KeyedJaggedTensor], Any]] = {
    "a dict of one feature": lambda b: together(g=b["g"]),
    "a dict of all": lambda b: KeyedJaggedTensor.from_jt_dict({key: b[key] for key in KEYS}),
    "to_dict and back": lambda b: KeyedJaggedTensor.from_jt_dict(b.to_dict()),
    "variable stride": lambda b: KeyedJaggedTensor.from_jt_dict({"g": b["g"]}, True),
    "a feature made anew": lambda b: together(g=feature(b)),
    "to_dict of a batch made anew": lambda b: KeyedJaggedTensor.from_jt_dict(made(b).to_dict()),
    "some of to_dict": lambda b: together(**{k: v for k, v in made(b).to_dict().items()}),
    "item": lambda b: together(g=made(b)["g"]),
    "permute": lambda b: made(b).permute([1, 0]),
    "split": lambda b: made(b).split([1, 1])[1],
    "split and concat": lambda b: KeyedJaggedTensor.concat(made(b).split([1, 1])),
    "from_lengths_sync": lambda b: (
        KeyedJaggedTensor.from_lengths_sync(KEYS, b.values(), b.lengths(), b.weights_or_none())
    ).permute([1, 0]),
    "of either": lambda b: again(of_either(b)),
    "permute of either": lambda b: of_either(b).permute([1, 0]),
    "to": lambda b: again(b).to(CPU),
    "to dtype": lambda b: made(b).to(CPU, dtype=torch.float64),
    "feature to": lambda b: together(g=feature(b).to(CPU)),
    "stride_per_key": lambda b: KeyedJaggedTensor(
        KEYS, b.values(), b.weights_or_none(), b.lengths(), stride_per_key=b.stride_per_key()
    ).permute([1, 0]),
    "empty_like": lambda b: KeyedJaggedTensor.empty_like(made(b)),
    "lists": lambda b: together(
        g=JaggedTensor.from_dense(b["g"].to_dense(), feature(b).to_dense_weights())
    ),
    "padded rows": lambda b: together(
        g=JaggedTensor.from_dense_lengths(
            b["g"].to_padded_dense(), b["g"].lengths(), feature(b).to_padded_dense_weights()
        )
    ),
    "an exchange": lambda b: KeyedJaggedTensor.dist_init(
        KEYS, made(b).dist_tensors(), False, 1, torch.tensor([1, 0]), [2]
    ),
}


@pytest.mark.parametrize("trace", TRACERS, ids=["tutorec", "torch"])
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_takes_batches_with_and_without_weights(way: str, trace: Any) -> None:
    class Makes(nn.Module):
        def forward(self, batch: KeyedJaggedTensor) -> Any:
            return WAYS[way](batch)

    traced = trace(Makes())
    for weights in (None, torch.arange(7.0)):
        for bounds in (
            {"lengths": torch.tensor([2, 1, 0, 4])},
            {"offsets": torch.tensor([0, 2, 3, 3, 7])},
        ):
            batch = KeyedJaggedTensor(KEYS, torch.arange(7), weights, **bounds)
            got, expected = traced(batch), Makes()(batch)
            assert kjt_is_equal(got, expected)
            assert (got.weights_or_none() is None) == (weights is None)


def test_labels_of_a_batch_made_in_a_graph_are_those_of_its_parts() -> None:
    class Labels(nn.Module):
        def forward(self, batch: KeyedJaggedTensor) -> Any:
            return made(batch).dist_labels(), made(batch).dist_splits([1, 1])

    traced, lengths = symbolic_trace(Labels()), torch.tensor([2, 1, 0, 4])
    for weights in (None, torch.arange(7.0)):
        batch = KeyedJaggedTensor(KEYS, torch.arange(7), weights, lengths)
        assert traced(batch) == Labels()(batch)

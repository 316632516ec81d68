"""Objects that traced code makes of proxies are calls in the graph, as with TorchRec."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutorec.awaitable import LazyAwaitable
from tutorec.fx import symbolic_trace
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

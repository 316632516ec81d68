"""Awaitables compute once; lazy ones stand for their value."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.fx

from tutorec.awaitable import Awaitable, LazyAwaitable, LazyGetItemMixin, LazyNoWait, NoWait


class ExampleAwaitable(LazyAwaitable[torch.Tensor]):
    def __init__(self, size: list[int]) -> None:
        super().__init__()
        self._size = size
        self.computed = 0

    def _wait_impl(self) -> torch.Tensor:
        self.computed += 1
        return torch.ones(self._size)


def test_wait_computes_once():
    awaitable = ExampleAwaitable([3, 2])
    assert awaitable.wait() is awaitable.wait()
    assert torch.equal(awaitable.wait(), torch.ones(3, 2))
    assert awaitable.computed == 1
    assert isinstance(awaitable, Awaitable)
    assert len({awaitable, awaitable}) == 1


def test_printing_does_not_wait():
    awaitable = ExampleAwaitable([1])
    assert "ExampleAwaitable object at 0x" in str(awaitable)
    assert not hasattr(awaitable, "__no_such_protocol__")
    assert awaitable.computed == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.shape == torch.Size([2]),
        lambda x: torch.equal(torch.add(x, 1), torch.full((2,), 2.0)),
        lambda x: torch.equal(torch.cat([x, torch.zeros(1)]), torch.tensor([1.0, 1.0, 0.0])),
        lambda x: torch.equal(torch.stack([x, x]), torch.ones(2, 2)),
        lambda x: torch.equal(1 - x, torch.zeros(2)),
        lambda x: torch.equal(x - ExampleAwaitable([2]), torch.zeros(2)),
        lambda x: torch.equal(-x / 2, torch.full((2,), -0.5)),
        lambda x: bool((x == 1).all()),
        lambda x: not bool((x != 1).any()),
        lambda x: x[0].item() == 1.0,
        lambda x: len(x) == 2,
        lambda x: [float(each) for each in x] == [1.0, 1.0],
        lambda x: float(x.sum()) == 2.0,
        lambda x: bool((x > 0).all()),
        lambda x: torch.equal(torch.nn.functional.relu(input=x), torch.ones(2)),
    ],
)
def test_first_use_waits(use):
    awaitable = ExampleAwaitable([2])
    assert use(awaitable)
    assert awaitable.computed <= 1


def test_attribute_that_neither_has_is_missing():
    with pytest.raises(AttributeError, match="no_such"):
        _ = ExampleAwaitable([1]).no_such
    with pytest.raises(AttributeError, match="_private"):
        _ = ExampleAwaitable([1])._private


def test_subclass_that_forgets_to_call_init_still_works():
    class Forgetful(LazyAwaitable[int]):
        def __init__(self) -> None:
            self.x = 3

        def _wait_impl(self) -> int:
            return self.x

    assert Forgetful() + 1 == 4
    assert copy.copy(Forgetful()).wait() == 3


def test_values_that_are_here_already():
    assert NoWait([1]).wait() == [1]
    assert NoWait(None).wait() is None
    assert LazyNoWait({"a": 1})["a"] == 1
    assert "a" in LazyNoWait({"a": 1})


def test_a_lazy_value_stands_behind_an_operator_of_a_traced_graph():
    class Later(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3 - LazyNoWait(x + 1) + torch.add(x, LazyNoWait(x))

    traced = torch.fx.symbolic_trace(Later())
    assert traced(torch.tensor([5.0])).tolist() == [19.0]
    assert [node.op for node in traced.graph.nodes].count("placeholder") == 1


class ByName(LazyGetItemMixin[str, torch.Tensor], LazyAwaitable[dict[str, torch.Tensor]]):
    waits = 0

    def _wait_impl(self) -> dict[str, torch.Tensor]:
        self.waits += 1
        return {"one": torch.tensor(1), "two": torch.tensor(2)}


def test_an_item_of_a_lazy_collection_is_lazy():
    lazy = ByName()
    one, two = lazy["one"], lazy["two"]
    assert isinstance(one, LazyAwaitable)
    assert lazy.waits == 0
    assert lazy._result is one._result is None
    assert torch.add(one, two) == 3
    assert one._result == 1
    assert lazy.waits == 1

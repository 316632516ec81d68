"""Collectives that autograd can go through, split in two so that there is time to compute in between.

A move is two nodes of the graph. *Issue* starts the exchange and returns at once; *collect* waits for what arrives.
Backward runs them the other way round: collect's backward issues the reverse exchange, issue's backward waits for it.

    forward    x -> issue .... (in flight: compute something else) .... collect -> y
    backward   dx <- issue's backward ......... (in flight) ......... collect's backward <- dy

What has been issued first is collected first, whatever is waited for first: backward takes collects in the reverse
order, and ranks match exchanges by order. Two ranks that wait for two results in different order still agree.

Gradients are divided by W on the way back: each rank's loss is the mean over its own samples, and the update is to be
made with the mean over all of them, as DistributedDataParallel does for the dense part. Of losses that are sums it is
the sum: `set_gradient_division` is the one switch, which every backward asks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from tutorec.awaitable import Awaitable

_divides = True  # of this process


Move = Callable[[torch.Tensor], Awaitable[torch.Tensor]]


class _Flight:
    """One move in one graph: what its two nodes hand to each other."""

    def __init__(self, move: Move, move_back: Move) -> None:
        self.move, self.move_back = move, move_back
        self.there: Awaitable[torch.Tensor] | None = None
        self.back: Awaitable[torch.Tensor] | None = None


class _Issue(torch.autograd.Function):
    """``(anchor, sent) -> token``: the token orders the collect after the issue."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, sent: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight
        flight.there = flight.move(sent)
        return anchor.new_empty(1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *_: torch.Tensor
    ) -> tuple[None, torch.Tensor | None, None]:
        back = ctx.flight.back
        assert back is not None, "the collect's backward issues the reverse exchange before this one waits for it"
        ctx.flight.back = None
        # Wait even where nobody wants the gradient: the other ranks count on this one to receive.
        gradient = back.wait()
        return None, gradient if ctx.needs_input_grad[1] else None, None


class _Collect(torch.autograd.Function):
    """``token -> received``."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight
        assert flight.there is not None, "an exchange is collected once; its awaitable remembers the value"
        received = flight.there.wait()
        flight.there = None
        return received

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        ctx.flight.back = ctx.flight.move_back(gradients[0])
        return gradients[0].new_zeros(1), None


class _Uncollected(threading.local):
    """Promises that this thread has issued and that nobody has waited for, oldest first; they may be dropped."""

    _PRUNE_ABOVE = 64

    def __init__(self) -> None:
        self._promises: list[weakref.ref[_Collected]] = []

    def add(self, promise: _Collected) -> None:
        """Note the newest."""
        if len(self._promises) > self._PRUNE_ABOVE:
            self._promises = [each for each in self._promises if each() is not None]
        self._promises.append(weakref.ref(promise))

    def take_before(self, promise: _Collected) -> list[_Collected]:
        """Those that were issued before ``promise``; they and it are forgotten."""
        place = next((index for index, each in enumerate(self._promises) if each() is promise), None)
        if place is None:
            return []
        before, self._promises = self._promises[:place], self._promises[place + 1 :]
        return [earlier for each in before if (earlier := each()) is not None]


class _Collected(Awaitable[torch.Tensor]):
    def __init__(self, token: torch.Tensor, flight: _Flight) -> None:
        self._token = token
        self._flight = flight
        self._graph_is_recorded = torch.is_grad_enabled()
        _uncollected.add(self)

    def _wait_impl(self) -> torch.Tensor:
        for earlier in _uncollected.take_before(self):
            earlier.wait()
        # The graph belongs to where the exchange was issued: a lazy value may first be touched under no_grad, e.g. to
        # print it, and still has to train.
        with torch.set_grad_enabled(self._graph_is_recorded):
            return cast(torch.Tensor, _Collect.apply(self._token, self._flight))


_uncollected = _Uncollected()


def issue(move: Move, move_back: Move, sent: torch.Tensor) -> Awaitable[torch.Tensor]:
    """Start a move of ``sent`` between ranks and record it in the graph.

    It takes part in backward on every rank, also where ``sent`` needs no gradient: a rank without tables has to receive
    the gradients that the others send.

    Args:
        move: Issues the move; its awaitable holds what arrives.
        move_back: Issues the reverse move of the gradient of what arrived; its awaitable holds the gradient of what was
            sent.
        sent: What is moved.

    Returns:
        A promise of what arrives; waiting for it adds the second node to the graph.

    Example:
        >>> import torch
        >>> from tutorec.awaitable import NoWait
        >>> x = torch.ones(3, requires_grad=True)
        >>> issue(lambda sent: NoWait(2 * sent), lambda gradient: NoWait(2 * gradient), x).wait().sum().backward()
        >>> x.grad
        tensor([2., 2., 2.])
    """
    flight = _Flight(move, move_back)
    anchor = torch.empty(0, device=sent.device, dtype=sent.dtype, requires_grad=True)
    token = cast(torch.Tensor, _Issue.apply(anchor, sent, flight))
    return _Collected(token, flight)


def set_gradient_division(val: bool) -> None:
    """Choose the mean over ranks (True, as it is from the start) or the sum (False), in this process.

    It holds for every table, fused or dense, cut up or copied, and for the dense layers of a
    `DistributedModelParallel`. Every rank makes the same choice before it shards; sharding compares them. A
    `DistributedModelParallel` keeps to what it was built with, and refuses to run under the other.

    Args:
        val: Whether gradients are divided by the number of ranks.

    Example:
        >>> set_gradient_division(False)
        >>> gradient_divisor(4)
        1
        >>> set_gradient_division(True)
        >>> gradient_divisor(4)
        4

    Source:
        TorchRec's ``torchrec.distributed.comm_ops.set_gradient_division``, which reaches tables only.
    """
    global _divides
    _divides = bool(val)


def get_gradient_division() -> bool:
    """Whether gradients are divided by the number of ranks.

    Source:
        TorchRec's ``torchrec.distributed.comm_ops.get_gradient_division``.
    """
    return _divides


def gradient_divisor(world_size: int) -> int:
    """What a rank divides its gradients by before all ranks' are added: W for the mean, 1 for the sum."""
    return world_size if _divides else 1


def division_fact() -> dict[str, str]:
    """What ranks compare before they shard."""
    return {"gradients of ranks (set_gradient_division)": "mean" if _divides else "sum"}


__all__ = [
    "Move",
    "division_fact",
    "get_gradient_division",
    "gradient_divisor",
    "issue",
    "set_gradient_division",
]

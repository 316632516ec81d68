"""Asynchronous collectives for autograd, split in two so that computation can overlap them.

An exchange is two nodes of the graph. *Issue* starts it and returns at once; *collect* waits for
the result. Backward runs them in reverse: collect's backward issues the reverse exchange, and
issue's backward waits for it.

::

    forward    x -> issue .... (in flight: compute something else) .... collect -> y
    backward   dx <- issue's backward ......... (in flight) ......... collect's backward <- dy

Exchanges are collected in the order in which they were issued, whichever is waited for first.
Backward reverses the order of the collects, and ranks match exchanges by order, so ranks that wait
for results in different orders still agree.

The exchange divides gradients by W before it sends them (`_Matrix` in ``rows.py``). Each rank's
loss is the mean over its own samples, and the update uses the mean over all ranks' samples, as
DistributedDataParallel does for the dense layers. For losses that are sums, `set_gradient_division`
turns the division off.
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
    """State that the two nodes of one exchange share."""

    def __init__(self, move: Move, move_back: Move) -> None:
        self.move = move
        self.move_back = move_back
        self.there: Awaitable[torch.Tensor] | None = None
        self.back: Awaitable[torch.Tensor] | None = None


class _Issue(torch.autograd.Function):
    """``(anchor, sent) -> token``: the token orders the collect after the issue."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, sent: torch.Tensor, flight: _Flight
    ) -> torch.Tensor:
        ctx.flight = flight
        flight.there = flight.move(sent)
        return anchor.new_empty(1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *_: torch.Tensor
    ) -> tuple[None, torch.Tensor | None, None]:
        back = ctx.flight.back
        assert back is not None, "collect's backward issues the exchange that this one waits for"
        ctx.flight.back = None
        # Wait even if nobody needs the gradient: the other ranks expect this rank to receive.
        gradient = back.wait()
        return None, gradient if ctx.needs_input_grad[1] else None, None


class _Collect(torch.autograd.Function):
    """``token -> received``."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight
        assert flight.there is not None, "an exchange is collected once"
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
    """Awaitables that this thread has issued and not waited for (weak references), oldest first."""

    _PRUNE_ABOVE = 64

    def __init__(self) -> None:
        self._promises: list[weakref.ref[_Collected]] = []

    def add(self, promise: _Collected) -> None:
        """Add the newest."""
        if len(self._promises) > self._PRUNE_ABOVE:
            self._promises = [ref for ref in self._promises if ref() is not None]
        self._promises.append(weakref.ref(promise))

    def take_before(self, promise: _Collected) -> list[_Collected]:
        """Remove and return those issued before ``promise``; ``promise`` is removed, too."""
        position = next(
            (index for index, ref in enumerate(self._promises) if ref() is promise), None
        )
        if position is None:
            return []

        before = self._promises[:position]
        self._promises = self._promises[position + 1 :]
        return [earlier for ref in before if (earlier := ref()) is not None]


class _Collected(Awaitable[torch.Tensor]):
    def __init__(self, token: torch.Tensor, flight: _Flight) -> None:
        self._token = token
        self._flight = flight
        self._graph_is_recorded = torch.is_grad_enabled()
        _uncollected.add(self)

    def _wait_impl(self) -> torch.Tensor:
        for earlier in _uncollected.take_before(self):
            earlier.wait()
        # Use the grad mode of the issue: a lazy value that is first read under no_grad, for example
        # to print it, must still be trainable.
        with torch.set_grad_enabled(self._graph_is_recorded):
            return cast(torch.Tensor, _Collect.apply(self._token, self._flight))


_uncollected = _Uncollected()


def issue(move: Move, move_back: Move, sent: torch.Tensor) -> Awaitable[torch.Tensor]:
    """Start an exchange of ``sent`` between ranks and record it in the graph.

    Every rank takes part in backward, even if its ``sent`` needs no gradient: a rank without tables
    still has to receive the gradients that the other ranks send.

    Args:
        move: Issues the exchange; its awaitable holds the received tensor.
        move_back: Issues the reverse exchange of the received tensor's gradient; its awaitable
            holds the gradient of ``sent``.
        sent: The tensor to send.

    Returns:
        An awaitable of the received tensor; waiting for it adds the second node to the graph.

    Example:
        >>> import torch
        >>> from tutorec.awaitable import NoWait
        >>> x = torch.ones(3, requires_grad=True)
        >>> issue(
        ...     lambda sent: NoWait(2 * sent), lambda gradient: NoWait(2 * gradient), x
        ... ).wait().sum().backward()
        >>> x.grad
        tensor([2., 2., 2.])
    """
    flight = _Flight(move, move_back)
    anchor = torch.empty(0, device=sent.device, dtype=sent.dtype, requires_grad=True)
    token = cast(torch.Tensor, _Issue.apply(anchor, sent, flight))
    return _Collected(token, flight)


def set_gradient_division(val: bool) -> None:
    """Choose whether gradients are averaged (True, the default) or summed (False) over ranks.

    The choice is per process. It applies to every table, fused or dense, sharded or replicated, and
    to the dense layers of a `DistributedModelParallel`. Every rank must make the same choice before
    it shards; sharding compares the choices. A `DistributedModelParallel` keeps the choice with
    which it was built and refuses to run under the other.

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
        TorchRec's ``torchrec.distributed.comm_ops.set_gradient_division``, which affects tables
        only.
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
    """The divisor of gradients before they are added over ranks: W for the mean, 1 for the sum."""
    return world_size if _divides else 1


def division_fact() -> dict[str, str]:
    """The setting, for the comparison between ranks before they shard."""
    return {"gradients of ranks (set_gradient_division)": "mean" if _divides else "sum"}


__all__ = [
    "Move",
    "division_fact",
    "get_gradient_division",
    "gradient_divisor",
    "issue",
    "set_gradient_division",
]

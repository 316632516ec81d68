"""Collectives that autograd can go through, split in two so that there is time to compute in between.

A move is two nodes of the graph. *Issue* starts the exchange and returns at once; *collect* waits for what arrives.
Backward runs them the other way round: collect's backward issues the reverse exchange, issue's backward waits for it.

    forward    x -> issue .... (in flight: compute something else) .... collect -> y
    backward   dx <- issue's backward ......... (in flight) ......... collect's backward <- dy

Gradients are divided by W on the way back: each rank's loss is the mean over its own samples, and the update is to be
made with the mean over all of them, as DistributedDataParallel does for the dense part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from tutorec.awaitable import Awaitable


class Exchange(ABC):
    """A move of a tensor between ranks and the reverse move of its gradient. Both issue now and deliver later."""

    @abstractmethod
    def issue(self, sent: torch.Tensor) -> Awaitable[torch.Tensor]:
        """Start the move; the promise holds what arrives."""

    @abstractmethod
    def issue_back(self, gradient: torch.Tensor) -> Awaitable[torch.Tensor]:
        """Start the reverse move of the gradient of what arrived; the promise holds the gradient of what was sent."""


class _Flight:
    """One use of an exchange in one graph: what its two nodes hand to each other."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.there: Awaitable[torch.Tensor] | None = None
        self.back: Awaitable[torch.Tensor] | None = None


class _Issue(torch.autograd.Function):
    """``(anchor, sent) -> token``: the token orders the collect after the issue."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, sent: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight
        flight.there = flight.exchange.issue(sent)
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
        ctx.flight.back = ctx.flight.exchange.issue_back(gradients[0])
        return gradients[0].new_zeros(1), None


class _Collected(Awaitable[torch.Tensor]):
    def __init__(self, token: torch.Tensor, flight: _Flight) -> None:
        self._token = token
        self._flight = flight
        self._graph_is_recorded = torch.is_grad_enabled()

    def _wait_impl(self) -> torch.Tensor:
        # The graph belongs to where the exchange was issued: a lazy value may first be touched under no_grad, e.g. to
        # print it, and still has to train.
        with torch.set_grad_enabled(self._graph_is_recorded):
            return cast(torch.Tensor, _Collect.apply(self._token, self._flight))


def issue(exchange: Exchange, sent: torch.Tensor) -> Awaitable[torch.Tensor]:
    """Start ``exchange`` of ``sent`` and record it in the graph.

    The exchange takes part in backward on every rank, also where ``sent`` needs no gradient: a rank without tables has
    to receive the gradients that the others send.

    Returns:
        A promise of what arrives; waiting for it adds the second node to the graph.

    Example:
        >>> import torch
        >>> from tutorec.awaitable import NoWait
        >>> class Stay(Exchange):
        ...     def issue(self, sent): return NoWait(2 * sent)
        ...     def issue_back(self, gradient): return NoWait(2 * gradient)
        >>> x = torch.ones(3, requires_grad=True)
        >>> issue(Stay(), x).wait().sum().backward()
        >>> x.grad
        tensor([2., 2., 2.])
    """
    flight = _Flight(exchange)
    anchor = torch.empty(0, device=sent.device, dtype=sent.dtype, requires_grad=True)
    token = cast(torch.Tensor, _Issue.apply(anchor, sent, flight))
    return _Collected(token, flight)


__all__ = ["Exchange", "issue"]

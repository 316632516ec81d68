"""Side streams for copies and other work, parallel to the default stream; no effect on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tutorec.awaitable import Awaitable

__all__ = ["SideStream", "on_stream", "to_device"]


def to_device(batch: Any, device: torch.device, non_blocking: bool = True) -> Any:
    """Copy a batch to a device; it may be any object with ``.to``, or a container of them.

    Example:
        >>> import torch
        >>> to_device({"ids": [torch.zeros(2)], "day": 3}, torch.device("cpu"))
        {'ids': [tensor([0., 0.])], 'day': 3}
    """
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=non_blocking)
    return _rebuilt(batch, lambda element: to_device(element, device, non_blocking))


def _rebuilt(value: Any, change: Any) -> Any:
    """A container with every element changed; any other value unchanged."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    if isinstance(value, Mapping):
        return {key: change(element) for key, element in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value,
            **{
                field.name: change(getattr(value, field.name))
                for field in dataclasses.fields(value)
                if field.init
            },
        )
    return value


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Run the block's kernels on a CUDA stream; None has no effect."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class SideStream:
    """A CUDA stream parallel to the default one.

    ``with stream.ahead(): ...`` runs a block on it; ``stream.hand_over(values)`` makes the current
    stream wait for it, ``stream.follow()`` the other way round. Values that are made on one stream
    and read on another are recorded, so that their memory is not reused too early.

    Args:
        device: The device; on a CPU the methods have no effect.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def ahead(self) -> AbstractContextManager[Any]:
        """Run the block's kernels on this stream."""
        return on_stream(self._stream)

    def follow(self) -> None:
        """Make this stream wait for what the current one has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def hand_over(self, *values: Any) -> None:
        """Make the current stream wait for this one, and record the values for it.

        A value that is awaited is recorded when it is there.
        """
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for value in values:
                _record(value, current)


def _record(value: Any, stream: torch.cuda.Stream) -> None:
    """Tell the CUDA caching allocator that a stream uses the tensors in a value.

    A TensorDict has a ``record_stream`` as well, but takes one stream in its life; its tensors take
    any number.
    """
    if isinstance(value, Awaitable):
        value.callbacks.append(lambda arrived: _recorded(arrived, stream))
        return
    if hasattr(value, "record_stream") and not isinstance(value, Mapping):
        value.record_stream(stream)
        return

    if dataclasses.is_dataclass(value):
        value = vars(value)
    elements = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )

    for element in elements:
        _record(element, stream)


def _recorded(value: Any, stream: torch.cuda.Stream) -> Any:
    """The value, recorded."""
    _record(value, stream)
    return value

"""Copies of batches to a device, and work beside its default stream. Nothing to do on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["SideStream", "to_device"]


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch on a device, without waiting: anything with ``.to``, also in containers.

    Example:
        >>> import torch
        >>> to_device({"ids": [torch.zeros(2)], "day": 3}, torch.device("cpu"))
        {'ids': [tensor([0., 0.])], 'day': 3}
    """
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    return _rebuilt(batch, lambda part: to_device(part, device))


def _rebuilt(value: Any, change: Any) -> Any:
    """A container with every part changed; any other value as it is."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    if isinstance(value, Mapping):
        return {key: change(part) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{each.name: change(getattr(value, each.name)) for each in dataclasses.fields(value) if each.init}
        )
    return value


class SideStream:
    """A CUDA stream beside the default one.

    ``with stream.ahead(): ...`` runs a block on it, ``stream.hand_over(values)`` lets the current stream go on when it
    is done. What is made on one stream and read on another is recorded, so that its memory is not reused too early.

    Args:
        device: Where; on a CPU both have no effect.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def ahead(self) -> AbstractContextManager[Any]:
        """The block's kernels run on this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def hand_over(self, *values: Any) -> None:
        """The current stream waits for this one, and keeps the memory of what it takes over."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for value in values:
                _record(value, current)


def _record(value: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that a stream reads the tensors in a value."""
    if hasattr(value, "record_stream"):
        value.record_stream(stream)
        return
    if dataclasses.is_dataclass(value):
        value = vars(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for part in parts:
        _record(part, stream)

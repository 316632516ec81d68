"""Streams and events: everything is done at once, and each thread has its current streams."""

from __future__ import annotations

import contextlib
from typing import Any

from pretend_cuda.devices import device_of, thread


class Stream:
    """A stream; everything is done when it is asked for."""

    cuda_stream = 0
    entered = False  # any of this process

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = device_of("cuda" if device is None else device)
        self._before: list[tuple[int, Stream]] = []

    def __enter__(self) -> Stream:
        index, Stream.entered = self.device.index, True
        self._before.append((thread.device, current_stream(index)))
        thread.device, thread.streams[index] = index, self
        return self

    def __exit__(self, *_: Any) -> None:
        thread.device, thread.streams[self.device.index] = self._before.pop()

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, stream: Any) -> None:
        if not isinstance(stream, Stream):
            raise TypeError(f"wait_stream takes a torch.cuda.Stream, not a {type(stream).__name__}")

    def wait_event(self, event: Any) -> None:
        if not isinstance(event, Event):
            raise TypeError(f"wait_event takes a torch.cuda.Event, not a {type(event).__name__}")

    def record_event(self, event: Any = None) -> Event:
        return Event() if event is None else event


class Event:
    """An event; it has happened when it was recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._timed = enable_timing

    def record(self, stream: Any = None) -> None:
        return None

    def wait(self, stream: Any = None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        if not self._timed:
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return 0.001


_default_streams: dict[int, Stream] = {}


def default_stream(device: Any = None) -> Stream:
    index = device_of("cuda" if device is None else device).index
    return _default_streams.setdefault(index, Stream(index))


def current_stream(device: Any = None) -> Stream:
    index = device_of("cuda" if device is None else device).index
    return thread.streams.get(index) or default_stream(index)


def set_stream(stream: Any) -> None:
    if stream is not None:
        Stream.entered = True
        thread.device, thread.streams[stream.device.index] = stream.device.index, stream


def in_stream(stream: Any) -> Any:
    return contextlib.nullcontext() if stream is None else stream

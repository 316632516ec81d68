"""Memory of side streams: another stream may read it only after ``record_stream``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pretend_cuda.devices import thread
from pretend_cuda.streams import Stream, current_stream, default_stream
from pretend_cuda.tensors import OnDevice


class StreamMemory:
    """Memory that was taken on a side stream, and the streams on which it may be read."""

    def __init__(self, stream: Stream) -> None:
        self.streams = {stream}


def note_stream(made: Any, given: Sequence[OnDevice] = ()) -> None:
    """Note on which stream a tensor was made; one that shares memory with another has its note."""
    if not isinstance(made, OnDevice) or made.made_on is not None or made.inner.is_sparse:
        return
    storage = made.inner.untyped_storage().data_ptr()
    for each in given:
        if not each.inner.is_sparse and each.inner.untyped_storage().data_ptr() == storage:
            made.made_on = each.made_on
            return
    stream = current_stream(made.where)
    if stream is not default_stream(made.where):
        made.made_on = StreamMemory(stream)


def check_streams(name: str, given: Sequence[OnDevice]) -> None:
    """Refuse memory of a side stream on another one; a backward runs on the streams of its
    forward.
    """
    for each in given:
        memory = each.made_on
        if memory is None or thread.backward or current_stream(each.where) in memory.streams:
            continue
        raise RuntimeError(
            f"{name} reads a tensor that another stream has made, and no record_stream keeps its "
            "memory"
        )

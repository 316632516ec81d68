"""Timeline of the stages of each batch, for figures, Chrome's trace viewer and torch's profiler."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch.autograd import profiler

__all__ = ["Interval", "Timeline"]

_KEPT = 10_000  # intervals: more than the last thousand steps


class Interval(NamedTuple):
    """One stage of one batch on one rank.

    Args:
        stage: Name of the stage.
        batch: Number of the batch.
        start: Start in seconds, on the clock that all processes of a machine share.
        end: End in seconds, on the host; work on a GPU may end later.
        rank: The rank.
    """

    stage: str
    batch: int
    start: float
    end: float
    rank: int = 0


class Timeline:
    """The intervals of one rank, for the last 10,000 stages.

    Args:
        rank: This rank.

    Example:
        >>> timeline = Timeline()
        >>> with timeline.mark("forward", 3):
        ...     pass
        >>> [(each.stage, each.batch) for each in timeline.intervals]
        [('forward', 3)]
    """

    def __init__(self, rank: int = 0) -> None:
        self.intervals: deque[Interval] = deque(maxlen=_KEPT)
        self.rank = rank

    def mark(self, stage: str, batch: int) -> AbstractContextManager[None]:
        """Measure a block; torch's profiler shows it as ``## stage batch ##``."""
        return _Mark(self, stage, batch)


class _Mark(AbstractContextManager[None]):
    """A measured block. torch's record_function takes 20 us, even without a profiler."""

    def __init__(self, timeline: Timeline, stage: str, batch: int) -> None:
        self._timeline = timeline
        self._stage = stage
        self._batch = batch
        self._record = (
            profiler.record_function(f"## {stage} {batch} ##")
            if profiler._is_profiler_enabled
            else None
        )

    def __enter__(self) -> None:
        self._start = time.monotonic()
        if self._record is not None:
            self._record.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._record is not None:
            self._record.__exit__(*error)

        interval = Interval(
            self._stage, self._batch, self._start, time.monotonic(), self._timeline.rank
        )
        self._timeline.intervals.append(interval)

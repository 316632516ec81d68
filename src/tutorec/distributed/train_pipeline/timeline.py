"""When each stage of each batch ran: measured, for a figure, for Chrome's trace viewer, for torch's profiler."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import record_function

__all__ = ["Interval", "Timeline"]

_KEPT = 10_000  # intervals: the last thousand steps and more


@dataclass(frozen=True)
class Interval:
    """One stage of one batch on one rank.

    Args:
        stage: Its name.
        batch: The batch's number.
        start: Seconds on the clock that all processes of a machine share.
        end: As ``start``. On a GPU the work may end later: this is the time of the host.
        rank: Where.
    """

    stage: str
    batch: int
    start: float
    end: float
    rank: int = 0


class Timeline:
    """The intervals of one rank, of the last 10,000 stages.

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

    @contextmanager
    def mark(self, stage: str, batch: int) -> Iterator[None]:
        """Measure a block; it stands in a profile as ``## stage batch ##``."""
        start = time.monotonic()
        try:
            with record_function(f"## {stage} {batch} ##"):
                yield
        finally:
            self.intervals.append(Interval(stage, batch, start, time.monotonic(), self.rank))

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write a file for chrome://tracing or Perfetto: a process for each rank, a row for each stage."""
        rows = {stage: row for row, stage in enumerate(dict.fromkeys(each.stage for each in self.intervals))}
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": self.rank, "tid": row, "args": {"name": stage}}
            for stage, row in rows.items()
        ]
        events += [
            {
                "name": f"{each.stage} {each.batch}",
                "cat": each.stage,
                "ph": "X",
                "pid": each.rank,
                "tid": rows[each.stage],
                "ts": each.start * 1e6,
                "dur": (each.end - each.start) * 1e6,
                "args": {"batch": each.batch},
            }
            for each in self.intervals
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}))

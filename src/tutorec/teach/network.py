"""A slower network than this machine's: messages arrive later, and each is recorded.

A rank *waits* for a message from when it calls wait until it has the message. Figures, tables and
captions count this time and no other.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from tutorec.awaitable import Awaitable
from tutorec.distributed import comm
from tutorec.distributed.core.qcomm import CommCodec
from tutorec.distributed.train_pipeline.engine import TrainPipeline
from tutorec.distributed.train_pipeline.timeline import Interval
from tutorec.teach.trace import clock

#: The exchanges of a training step of a sharded module, in their order.
EXCHANGES = ("input sizes", "input ids", "output rows", "output gradients")
# A pipeline fills in its first steps and drains in its last.
_FILLING = 2
_DRAINING = 3


@dataclass
class Message:
    """One exchange as a rank saw it; seconds on the clock that all processes of a machine share.

    Attributes:
        stage: What it carries, such as "input ids".
        number: How many of this stage this rank has sent before.
        sent: When it was issued.
        due: The earliest time at which it arrives.
        asked: When this rank began to wait for it; 0 before that.
        taken: When this rank had it; 0 before that.
    """

    stage: str
    number: int
    sent: float
    due: float
    asked: float = 0.0
    taken: float = 0.0


class _Late(Awaitable[torch.Tensor]):
    """A message that arrives at its earliest time, or later."""

    def __init__(self, arriving: Awaitable[torch.Tensor], message: Message) -> None:
        self._arriving = arriving
        self._message = message

    def _wait_impl(self) -> torch.Tensor:
        message = self._message
        message.asked = time.monotonic()
        arrived = self._arriving.wait()
        time.sleep(max(0.0, message.due - time.monotonic()))
        message.taken = time.monotonic()
        return arrived


@contextmanager
def slow_network(seconds: Mapping[str, float]) -> Iterator[list[Message]]:
    """Let messages of some stages arrive later than they do, and record them.

    The delay begins when a rank sends, and nobody computes meanwhile: a rank that waits later waits
    less. Results do not change. Call it on every rank.

    Args:
        seconds: Stage -> by how much its messages are delayed at least; 0 records them only. Other
            stages are not recorded.

    Yields:
        The messages so far.
    """
    messages: list[Message] = []
    count: Counter[str] = Counter()
    direct = comm.all_to_all

    def all_to_all(
        send: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        group: dist.ProcessGroup,
        stage: str,
        codec: CommCodec | None = None,
    ) -> Awaitable[torch.Tensor]:
        arriving = direct(send, send_counts, receive_counts, group, stage, codec)
        # What is encoded is sent by a second call, which is delayed.
        if codec is not None or stage not in seconds or len(send_counts) == 1:
            return arriving
        now = time.monotonic()
        messages.append(Message(stage, count[stage], now, now + seconds[stage]))
        count[stage] += 1
        return _Late(arriving, messages[-1])

    comm.all_to_all = all_to_all
    try:
        yield messages
    finally:
        comm.all_to_all = direct


@dataclass(frozen=True)
class RecordedSteps:
    """Training steps of one rank on a slow network.

    Times are those of the fastest two steps in a row of a full pipeline, since the slower ones also
    time other programs.

    Attributes:
        losses: What each step returned.
        spans: Start and end of each step, in seconds.
        messages: The exchanges of `EXCHANGES`.
        stages: The stages of a pipeline; empty without one.
        rank: The rank.
    """

    losses: list[float]
    spans: list[tuple[float, float]]
    messages: list[Message]
    stages: list[Interval]
    rank: int = 0

    def step_ms(self) -> float:
        """Milliseconds of a step."""
        start, end = self._fastest()
        return 1e3 * (end - start) / 2

    def waiting_ms(self) -> float:
        """Milliseconds of a step in which the rank waits for a message."""
        return 1e3 * sum(interval.end - interval.start for interval in self._waits()) / 2

    def window_ms(self, stage: str) -> float:
        """Milliseconds from sending a message of a stage until the rank asks for it, at least."""
        sent = [m for m in self.messages if m.stage == stage][_FILLING:-_DRAINING]
        return 1e3 * min(m.asked - m.sent for m in sent)

    def ahead(self, stage: str) -> int:
        """How many steps before the step of its batch a message of this stage is sent."""
        starts = [start for start, _ in self.spans]
        sent = [m for m in self.messages if m.stage == stage][_DRAINING:]
        return statistics.mode(m.number - bisect(starts, m.sent) + 1 for m in sent)

    def intervals(self) -> list[Interval]:
        """Two steps for ``draw.gantt``: stages, waits, and delayed messages on their way."""
        begin, end = self._fastest()
        travels = [
            Interval(f"{m.stage} on their way", m.number, m.sent, m.due, self.rank)
            for m in self.messages
            if m.due > m.sent
        ]

        return [
            interval._replace(start=max(interval.start, begin), end=min(interval.end, end))
            for interval in [*self.stages, *self._waits(), *travels]
            if interval.end > begin and interval.start < end
        ]

    def _fastest(self) -> tuple[float, float]:
        """Start and end of the fastest two steps in a row."""
        full = self.spans[_FILLING:-_DRAINING]
        pairs = [(first[0], second[1]) for first, second in pairwise(full)]
        return min(pairs, key=lambda pair: pair[1] - pair[0])

    def _waits(self) -> list[Interval]:
        """The waits of the fastest two steps."""
        begin, end = self._fastest()
        return [
            Interval("wait", m.number, m.asked, m.taken, self.rank)
            for m in self.messages
            if begin <= m.asked < end
        ]


def record_steps(
    step: Callable[[], Any],
    seconds: Mapping[str, float],
    pipeline: TrainPipeline[Any, Any] | None = None,
) -> RecordedSteps:
    """Train until there are no more batches, on a slow network. Call it on every rank.

    Args:
        step: Trains the next batch and returns its loss; raises StopIteration after the last one.
            At least seven batches are needed.
        seconds: Exchange -> by how much its messages are delayed; the others are not.
        pipeline: The pipeline that trains, whose stages are recorded, too.
    """
    losses: list[float] = []
    spans: list[tuple[float, float]] = []
    with slow_network(dict.fromkeys(EXCHANGES, 0.0) | dict(seconds)) as messages:
        while True:
            start = clock()
            try:
                loss = float(step())
            except StopIteration:
                break
            losses.append(loss)
            spans.append((start, clock()))

    stages = pipeline.timeline() if pipeline is not None else []
    rank = dist.get_rank() if comm.default_group() is not None else 0
    return RecordedSteps(losses, spans, messages, stages, rank)

"""A slower network than this machine's: messages arrive later, and each is recorded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tutorec.awaitable import Awaitable
from tutorec.distributed import comm
from tutorec.distributed.core.qcomm import CommCodec
from tutorec.distributed.train_pipeline.timeline import Interval

__all__ = ["Message", "in_flight", "slow_network", "waits"]


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

    @property
    def left(self) -> float:
        """Seconds that a rank still waited for a delayed message, counted from when it asked."""
        return max(0.0, self.due - self.asked)


class _Late(Awaitable[torch.Tensor]):
    """A message that arrives at the time when it is due, or later."""

    def __init__(self, arriving: Awaitable[torch.Tensor], message: Message) -> None:
        self._arriving, self._message = arriving, message

    def _wait_impl(self) -> torch.Tensor:
        message = self._message
        message.asked = time.monotonic()
        arrived = self._arriving.wait()
        time.sleep(max(0.0, message.due - time.monotonic()))
        message.taken = time.monotonic()
        return arrived


@contextmanager
def slow_network(
    seconds: Mapping[str, float], messages: list[Message] | None = None
) -> Iterator[list[Message]]:
    """Let messages of some stages arrive later than they do, and record them.

    The delay begins when a rank sends, and nobody computes meanwhile: a rank that waits later waits
    less. Results do not change. Call it on every rank.

    Args:
        seconds: Stage -> by how much its messages are delayed at least; 0 records them only. Other
            stages are not recorded.
        messages: A record to go on with; a new one by default.

    Yields:
        The messages so far.
    """
    messages = [] if messages is None else messages
    count = Counter(message.stage for message in messages)
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


def in_flight(messages: Sequence[Message], stage: str, rank: int = 0) -> list[Interval]:
    """When messages of a stage were under way, one for each batch: from sending until due."""
    return [
        Interval(f"{stage} in flight", m.number, m.sent, m.due, rank)
        for m in messages
        if m.stage == stage
    ]


def waits(messages: Sequence[Message], rank: int = 0) -> list[Interval]:
    """When a rank waited: ``wait`` for delayed messages, ``other wait`` for all others."""
    return [
        Interval("wait" if m.due > m.sent else "other wait", m.number, m.asked, m.taken, rank)
        for m in messages
        if m.taken
    ]

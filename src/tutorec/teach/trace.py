"""What a batch did, recorded while it did it: spans of time and bytes on every rank.

A `Trace` is a plain list of events, so that each rank can fill its own and return it to the
notebook, where they are merged. It records what happened and computes nothing: no cost formula is
imported here.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tutorec._text import TextTable
from tutorec.teach.prose import table


def clock() -> float:
    """Seconds on the clock that all processes share, read when this rank's GPU has finished.

    Example:
        >>> start = clock()
        >>> clock() >= start
        True
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic()


def fastest(
    call: Callable[[], object],
    *,
    repeat: int = 80,
    before: Callable[[], object] = lambda: None,
    timer: Callable[[], float] = clock,
) -> float:
    """Seconds of the fastest of some calls: on a busy machine the slower ones time other programs.

    Args:
        call: What is timed.
        repeat: How often.
        before: Called before each call and not timed, ``dist.barrier`` for example.
        timer: Its seconds are taken: ``time.process_time`` leaves out the waiting for other ranks.

    Example:
        >>> 0 < fastest(lambda: sum(range(1000))) < 60
        True
    """
    return min(timeit.repeat(call, before, timer, repeat, number=1))


@dataclass(frozen=True)
class Turn:
    """What the fastest of some calls took.

    Args:
        seconds: From its beginning to its end, waiting included.
        busy: Seconds that the processors worked for this process, on all its threads.
    """

    seconds: float
    busy: float


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 20,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Turn]:
    """Times calls in turn, so that what else the machine does meets all of them alike.

    The two numbers of a `Turn` are the smallest of all rounds, each by itself. Other programs make
    ``seconds`` longer; ``busy``, which leaves waiting out, they hardly change.

    Args:
        calls: Name -> what is timed.
        rounds: How often each is called.
        before: Called before each call and not timed, ``dist.barrier`` for example.

    Example:
        >>> took = take_turns(
        ...     {"sum": lambda: sum(range(1000)), "nap": lambda: time.sleep(0.01)}
        ... )
        >>> took["nap"].seconds > 0.01 > took["nap"].busy
        True
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    busy: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            before()
            start = clock()
            worked = time.process_time()
            call()
            seconds[name].append(clock() - start)
            busy[name].append(time.process_time() - worked)
    return {name: Turn(min(seconds[name]), min(busy[name])) for name in calls}


def turns_table(of_ranks: Sequence[Mapping[str, Turn]]) -> TextTable:
    """What calls took on several ranks, in milliseconds: the work of each, and the slowest's time.

    Args:
        of_ranks: What `take_turns` returned on each rank.

    Example:
        >>> turns_table([{"a": Turn(0.003, 0.001)}, {"a": Turn(0.004, 0.002)}])
           rank 0 works, ms  rank 1 works, ms  step, ms
        -  ----------------  ----------------  --------
        a                 1                 2         4
    """
    heads = ["", *(f"rank {rank} works, ms" for rank in range(len(of_ranks))), "step, ms"]
    rows = {}
    for name in of_ranks[0]:
        turns = [rank_turns[name] for rank_turns in of_ranks]
        slowest = max(turn.seconds for turn in turns)
        rows[name] = [*(1e3 * turn.busy for turn in turns), 1e3 * slowest]
    return table(rows, heads)


@dataclass(frozen=True)
class Event:
    """One thing that happened on one rank.

    Args:
        rank: Where it happened.
        stage: What the batch was doing ("input_dist", "lookup", "wait", ...).
        start: Seconds on the clock that all processes of a machine share.
        end: As `start`; equal to it for something without duration.
        bytes: Sent to `destination`.
        destination: The rank that the bytes were sent to, or None for a span of time.
    """

    rank: int
    stage: str
    start: float = 0.0
    end: float = 0.0
    bytes: int = 0
    destination: int | None = None


@dataclass
class Trace:
    """The events of one rank, or, after `merge`, of all ranks.

    Example:
        >>> trace = Trace(rank=0)
        >>> trace.sent("output_dist", to=1, count=512)
        >>> trace.bytes_between(world_size=2)
        [[0, 512], [0, 0]]
    """

    rank: int = 0
    events: list[Event] = field(default_factory=list)

    def sent(self, stage: str, to: int, count: int) -> None:
        """Record that `count` bytes left this rank for rank `to`."""
        now = time.monotonic()
        self.events.append(Event(self.rank, stage, now, now, count, to))

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Record how long a block took: `with trace.span("lookup"): ...`."""
        start = clock()
        try:
            yield
        finally:
            self.events.append(Event(self.rank, stage, start, clock()))

    @classmethod
    def merge(cls, traces: Iterable[Trace]) -> Trace:
        """One trace with the events of all, in order of time."""
        merged = [event for trace in traces for event in trace.events]
        return cls(rank=-1, events=sorted(merged, key=lambda event: event.start))

    @classmethod
    def fastest(cls, of_ranks: Sequence[Sequence[Trace]]) -> Trace:
        """The step whose last rank ended soonest, of the traces that each rank has of each step.

        Args:
            of_ranks: For each rank the traces of its steps, as ``Ranks.run`` returns them.
        """
        steps = [cls.merge(step) for step in zip(*of_ranks, strict=True)]
        return min(steps, key=lambda step: step.duration())

    def duration(self) -> float:
        """Seconds from the first event to the end of the last."""
        first = min(event.start for event in self.events)
        return max(event.end for event in self.events) - first

    def spans(self) -> list[Event]:
        """The events that have a duration."""
        return [event for event in self.events if event.end > event.start]

    def seconds(self, stage: str) -> list[float]:
        """Seconds spent in a stage, one entry per rank, in ascending order."""
        totals = {rank: 0.0 for rank in sorted({event.rank for event in self.events})}
        for event in self.spans():
            if event.stage == stage:
                totals[event.rank] += event.end - event.start
        return list(totals.values())

    def bytes_between(
        self, world_size: int, stages: Sequence[str] | None = None
    ) -> list[list[int]]:
        """Bytes sent from rank (row) to rank (column), over all stages or those named."""
        matrix = [[0] * world_size for _ in range(world_size)]
        for event in self.events:
            if event.destination is not None and (stages is None or event.stage in stages):
                matrix[event.rank][event.destination] += event.bytes
        return matrix

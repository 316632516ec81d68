"""What a batch did, recorded while it did it: spans of time, tensors and bytes on every rank.

A `Trace` is a plain list of events, so that each rank can fill its own and return it to the
notebook, where they are merged. It records what happened and computes nothing: no cost formula is
imported here. `lines_run` says which lines of the library a call went through, for those who want
to read along.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tutorec._text import TextTable
from tutorec.distributed.train_pipeline.timeline import Interval
from tutorec.teach.prose import table

__all__ = ["Event", "Trace", "Turn", "clock", "fastest", "lines_run", "take_turns", "turns_table"]


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
    before: Callable[[], object] | None = None,
    timer: Callable[[], float] | None = None,
) -> float:
    """Seconds of the fastest of some calls: on a busy machine the slower ones time other programs.

    Args:
        call: What is timed.
        repeat: How often.
        before: Called before each call and not timed, ``dist.barrier`` for example.
        timer: Its seconds are taken: ``time.process_time`` leaves out the waiting for other ranks.
            By default the clock of `Trace`.

    Example:
        >>> 0 < fastest(lambda: sum(range(1000))) < 60
        True
    """
    now = timer or clock

    durations = []
    for _ in range(repeat):
        if before is not None:
            before()
        start = now()
        call()
        durations.append(now() - start)
    return min(durations)


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
    before: Callable[[], object] | None = None,
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
            if before is not None:
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
        rows[name] = [1e3 * seconds for seconds in (*(turn.busy for turn in turns), slowest)]
    return table(rows, heads)


@dataclass(frozen=True)
class Event:
    """One thing that happened on one rank.

    Args:
        rank: Where it happened.
        stage: What the batch was doing ("input_dist", "lookup", "wait", ...).
        name: Of the tensor or message; empty for a span of time.
        shape: Of the tensor; empty for a span.
        bytes: In the tensor, or sent to `destination`.
        start: Seconds on the clock that all processes of a machine share.
        end: As `start`; equal to it for something without duration.
        destination: The rank that the bytes were sent to, or None when they stayed.
    """

    rank: int
    stage: str
    name: str = ""
    shape: tuple[int, ...] = ()
    bytes: int = 0
    start: float = 0.0
    end: float = 0.0
    destination: int | None = None


@dataclass
class Trace:
    """The events of one rank, or, after `merge`, of all ranks.

    Example:
        >>> import torch
        >>> trace = Trace(rank=0)
        >>> trace.mark("lookup", "pooled", torch.zeros(2, 64))
        >>> trace.sent("output_dist", to=1, count=512)
        >>> trace.events[0].shape, trace.bytes_between(world_size=2)
        ((2, 64), [[0, 512], [0, 0]])
    """

    rank: int = 0
    events: list[Event] = field(default_factory=list)

    def mark(self, stage: str, name: str, value: Any = None) -> None:
        """Record shape and bytes of a tensor, or of anything with `values()` such as a KJT."""
        tensor = (
            value
            if isinstance(value, torch.Tensor)
            else value.values()
            if hasattr(value, "values")
            else None
        )

        now = time.monotonic()
        shape = tuple(tensor.shape) if tensor is not None else ()
        nbytes = tensor.numel() * tensor.element_size() if tensor is not None else 0
        self.events.append(Event(self.rank, stage, name, shape, nbytes, now, now))

    def sent(self, stage: str, to: int, count: int, name: str = "") -> None:
        """Record that `count` bytes left this rank for rank `to`."""
        now = time.monotonic()
        self.events.append(Event(self.rank, stage, name, (), int(count), now, now, to))

    def count(self, traffic: Any) -> None:
        """Take over what `tutorec.distributed.traffic.count_traffic` counted on this rank."""
        now = time.monotonic()
        for (stage, source, destination), count in traffic.bytes.items():
            self.events.append(Event(source, stage, "", (), count, now, now, destination))

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Record how long a block took: `with trace.span("lookup"): ...`."""
        start = clock()
        try:
            yield
        finally:
            self.events.append(Event(self.rank, stage, start=start, end=clock()))

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

    @classmethod
    def of_pipeline(cls, intervals: Sequence[Interval]) -> Trace:
        """Stages of a pipeline, ``Trace.of_pipeline(pipeline.timeline())``, named by batch."""
        events = [
            Event(
                interval.rank,
                interval.stage,
                str(interval.batch),
                start=interval.start,
                end=interval.end,
            )
            for interval in intervals
        ]
        return cls(events[0].rank if events else 0, events)

    def ranks(self) -> list[int]:
        """The ranks that recorded something, ascending."""
        return sorted({event.rank for event in self.events})

    def stages(self) -> list[str]:
        """The stages in the order in which they first appear."""
        return list(dict.fromkeys(event.stage for event in self.events))

    def spans(self) -> list[Event]:
        """The events that have a duration."""
        return [event for event in self.events if event.end > event.start]

    def seconds(self, stage: str) -> list[float]:
        """Seconds spent in a stage, one entry per rank of `ranks()`."""
        totals = {rank: 0.0 for rank in self.ranks()}
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


def lines_run(call: Callable[[], object], folder: str | Path) -> dict[str, set[int]]:
    """Which lines of the files in a folder a call runs: path below the folder -> numbers of lines.

    Seen are lines that this thread runs, those of autograd functions among them; what an import
    runs is not a part of the call when the module has been imported before.

    Args:
        call: What is followed. It runs some times slower than by itself.
        folder: Only files in it are looked at.

    Returns:
        The files in the order in which the call came to them.

    Example:
        >>> from tutorec.distributed import traffic
        >>> def count():
        ...     return traffic.Traffic().total()
        >>> list(lines_run(count, Path(traffic.__file__).parent))
        ['traffic.py']
    """
    root = str(Path(folder).resolve()) + "/"
    lines: dict[str, set[int]] = {}

    def in_function(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines.setdefault(
                Path(frame.f_code.co_filename).as_posix().removeprefix(root), set()
            ).add(frame.f_lineno)
        return in_function

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        return in_function if Path(frame.f_code.co_filename).as_posix().startswith(root) else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines

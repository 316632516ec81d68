"""A row of a benchmark: one operation of several sides, compared first and then timed in turn.

Every benchmark declares its rows as `Row` and times them by `time_row`: results of all sides are
compared on the same input, then the sides are timed in interleaved rounds on fresh arguments. A row
of ours is timed with checks of ids and lengths and without them. `add_row` puts the measurements
into a report, of one process or of the slowest of several ranks, and judges the ratios.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.harness import (
    Bar,
    Comparison,
    Report,
    Sample,
    compare,
    interleave,
    time_each,
    time_single_calls,
)
from benchmarks.library import OURS
from tutorec._validation import validation

# Float32 sums in another order, two steps of them.
TOLERANCE = 1e-4
_WARMUP = 2
_COMPARED = 4  # calls of each side before anything is timed
TAIL = ", p99"

Clock = Literal["cpu", "wall"]
Bars = Mapping[str, Bar | None]


@dataclass(frozen=True)
class Row:
    """One operation of several sides.

    Args:
        name: Of the operation.
        calls: Side -> what is timed, which reads its result and returns it.
        inputs: (side, number of a round) -> fresh arguments, one for each call, the same for every
            side.
        states: Side -> tables after the calls, by name; they are compared, too.
        tensors: Tensors of a result, in an order that all sides share.
        most: The largest difference between two sides; None: they compute different things.
        checked: Whether ids and lengths are checked; None: ours with checks and without, the others
            without.
        single: Whether each call is timed by itself: the median, and the 99th percentile.
        extra: Title -> another measurement, taken in turn with the others.
    """

    name: str
    calls: Mapping[str, Callable[[Any], Any]]
    inputs: Callable[[str, int], Sequence[Any]]
    states: Mapping[str, Callable[[], Mapping[Any, Tensor]]] = field(default_factory=dict)
    tensors: Callable[[Any], list[Tensor]] | None = None
    most: float | None = TOLERANCE
    checked: bool | None = None
    single: bool = False
    extra: Mapping[str, Callable[[int], Sample]] = field(default_factory=dict)


@dataclass
class Timed:
    """Measurements of a row in one process.

    Args:
        distance: The largest difference between two sides, before anything was timed.
        sides: The two that differ most.
        samples: Title -> one sample for each round; empty where the sides differ too much.
    """

    distance: float = 0.0
    sides: tuple[str, str] = ("", "")
    samples: dict[str, list[Sample]] = field(default_factory=dict)


def time_row(row: Row, rounds: int, everywhere: Callable[[bool], bool] = bool) -> Timed:
    """Compare the sides of a row, then time them in turn.

    Args:
        row: The operation.
        rounds: Rounds that count.
        everywhere: Whether a flag is true on all ranks, each of which waits for the others.

    Returns:
        The samples; without them where results differ on some rank.
    """
    timed = _compare_sides(row)
    if not everywhere(row.most is None or timed.distance <= row.most):
        return timed

    measures = dict(row.extra)
    tails: dict[str, list[Sample]] = {}
    for side, call in row.calls.items():
        for checks in _ways_to_check(row, side):
            title = f"{row.name}: {side}"
            if checks and row.checked is None:
                title += " checked"
            measures[title] = partial(_measure, row, side, call, checks, everywhere, tails)

    timed.samples = interleave(measures, rounds, _WARMUP) | tails
    return timed


def _ways_to_check(row: Row, side: str) -> tuple[bool, ...]:
    if row.checked is not None:
        return (row.checked,)
    return (True, False) if side == OURS else (False,)


def _measure(
    row: Row,
    side: str,
    call: Callable[[Any], Any],
    checks: bool,
    everywhere: Callable[[bool], bool],
    tails: dict[str, list[Sample]],
    number: int,
) -> Sample:
    """One measurement of a side in a round."""
    arguments = row.inputs(side, number)
    with validation(checks):
        everywhere(True)  # all ranks begin together
        if not row.single:
            return time_each(call, arguments)
        middle, tail = time_single_calls(call, arguments)

    if number >= 0:
        suffix = " checked" if checks else ""
        tails.setdefault(f"{row.name}{TAIL}: {side}{suffix}", []).append(tail)
    return middle


def _compare_sides(row: Row) -> Timed:
    """How far the sides are apart after some calls: results, and tables."""
    if row.most is None:
        return Timed()

    tensors = row.tensors or flatten
    results: dict[str, list[Tensor]] = {}
    for side, call in row.calls.items():
        arguments = row.inputs(side, -1000)[:_COMPARED]
        results[side] = [tensor for argument in arguments for tensor in tensors(call(argument))]
        if side in row.states:
            state = row.states[side]()
            results[side] += [state[name] for name in sorted(state)]

    first, *others = results
    timed = Timed()
    for other in others:
        distance = distance_between(results[first], results[other])
        if distance > timed.distance:
            timed.distance = distance
            timed.sides = (first, other)
    return timed


def flatten(result: Any) -> list[Tensor]:
    """Tensors and numbers of a result of any form, in its own order."""
    if isinstance(result, Tensor):
        return [result.detach()]
    if isinstance(result, float):
        return [torch.tensor(result)]
    return [tensor for item in result for tensor in flatten(item)]


def distance_between(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """The largest difference of two lists of tensors; infinity where their shapes differ.

    Example:
        >>> distance_between([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.5])])
        0.5
    """
    if [tensor.shape for tensor in first] != [tensor.shape for tensor in second]:
        return float("inf")
    distances = [0.0]
    for tensor, other in zip(first, second, strict=True):
        if tensor.numel():
            difference = float((tensor.double() - other.double()).abs().max())
            distances.append(float("inf") if math.isnan(difference) else difference)
    return max(distances)


def add_row(
    report: Report,
    name: str,
    timed: Timed | Sequence[Timed],
    bars: Bars,
    clocks: Sequence[Clock] = ("cpu",),
    judged: Clock | None = None,
    judge_checked: bool = True,
    reference: str = OURS,
) -> None:
    """Add the measurements of a row, and the ratios of other sides to the reference.

    Args:
        report: What they are added to.
        name: Of the row.
        timed: Of the process, or of each rank, of which the slowest counts.
        bars: Other side -> what its time over the reference's should be; None: only shown.
        clocks: Times that are compared.
        judged: The one that is judged; None: all of them.
        judge_checked: Whether the bars are for ours with checks, too: with one sample the checks
            take a large share of the time.
        reference: The side that the others are divided by.

    Raises:
        ValueError: Results of the sides differed on some rank, so that nothing was timed.
    """
    ranks = [timed] if isinstance(timed, Timed) else list(timed)
    if not all(rank.samples for rank in ranks):
        worst = max(range(len(ranks)), key=lambda rank: ranks[rank].distance)
        where = f" on rank {worst}" if len(ranks) > 1 else ""
        sides = " and ".join(ranks[worst].sides)
        raise ValueError(
            f"{name}: {sides} differ by up to {ranks[worst].distance:.2g}{where}; nothing was timed"
        )

    report.samples |= slowest([rank.samples for rank in ranks])
    for side, bar in bars.items():
        for clock in clocks:
            clock_bar = bar if judged in (None, clock) else None
            report.comparisons += _ratios(
                report.samples, name, side, reference, clock, clock_bar, judge_checked
            )


def against(side: str | None, bar: float | None) -> dict[str, Bar | None]:
    """Bars of a row with one other side, which is the peer.

    Args:
        side: The peer; None where there is none.
        bar: What the peer's time over ours should be at least; None for what is only shown.
    """
    if side is None:
        return {}
    return {side: None if bar is None else Bar("at least", bar)}


def _ratios(
    samples: dict[str, list[Sample]],
    name: str,
    side: str,
    reference: str,
    clock: Clock,
    bar: Bar | None,
    judge_checked: bool,
) -> list[Comparison]:
    """A side against the reference without checks and with them, whichever were measured."""
    comparisons = []
    for divisor in (reference, f"{reference} checked"):
        if f"{name}: {divisor}" in samples:
            unjudged = divisor != reference and not judge_checked
            titles = (f"{name}: {side}", f"{name}: {divisor}")
            title = f"{name}: {side} / {divisor}"
            comparisons.append(compare(samples, *titles, clock, None if unjudged else bar, title))
    return comparisons


def slowest(ranks: Sequence[Mapping[str, list[Sample]]]) -> dict[str, list[Sample]]:
    """Of each title and round the slowest rank's seconds."""
    samples: dict[str, list[Sample]] = {}
    for title in ranks[0]:
        rounds = zip(*(rank[title] for rank in ranks), strict=True)
        samples[title] = [
            Sample(max(sample.cpu for sample in row), max(sample.wall for sample in row))
            for row in rounds
        ]
    return samples


@contextmanager
def threads(count: int = 1) -> Iterator[None]:
    """Run torch on so many threads, and on as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""How tutorec measures: interleaved variants, medians of paired ratios, bootstrap intervals.

Machines are shared and their speed drifts, so two things are compared only within a round, where
they ran moments apart. Each round gives one ratio; the median over rounds is reported, with the
interval that 95 % of resampled medians fall in. A bar is met when the median of at least 30 ratios
meets it and the interval lies on its right side, less 0.03.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tutorec._calibration import processor_name

ROUNDS_THAT_DECIDE = 30
_SLACK = 0.03
_RESAMPLES = 10_000
_PACKAGES = ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "tutorec", "numpy")

Verdict = Literal["met", "missed", "undecided", "no bar"]


@dataclass(frozen=True)
class Sample:
    """One measurement: wall seconds, and CPU seconds of the process, threads and children."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios, and the 95 % bootstrap interval of that median."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Bar:
    """What a ratio should be: ``Bar("at least", 1.9)`` or ``Bar("at most", 1.15)``.

    Attributes:
        direction: which side of the value is good.
        value: the ratio.
        rounds: how many rounds decide: 30 for a time, fewer for what hardly varies, as memory.
    """

    direction: Literal["at least", "at most"]
    value: float
    rounds: int = ROUNDS_THAT_DECIDE

    def judge(self, ratio: Ratio) -> Verdict:
        """Whether a ratio meets the bar; undecided with fewer rounds than decide.

        Example:
            >>> from benchmarks.harness import Bar, Ratio
            >>> Bar("at least", 1.5).judge(Ratio(median=1.6, low=1.48, high=1.7, rounds=30))
            'met'
            >>> Bar("at most", 1.5).judge(Ratio(median=1.6, low=1.48, high=1.7, rounds=30))
            'missed'
        """
        if ratio.rounds < self.rounds:
            return "undecided"
        if self.direction == "at least":
            met = ratio.median >= self.value and ratio.low > self.value - _SLACK
        else:
            met = ratio.median <= self.value and ratio.high < self.value + _SLACK
        return "met" if met else "missed"


@dataclass(frozen=True)
class Comparison:
    """How many times as much one variant takes as another.

    Attributes:
        title: what is divided by what.
        clock: what was measured: CPU seconds, wall seconds, bytes of memory, or seconds that a plan
            is estimated at.
        ratio: the median and its interval.
        bar: what the ratio should be.
        medians: of both sides, in the clock's unit; its ratio is not the median ratio.
        variants: names of both sides among a report's samples.
    """

    title: str
    clock: Literal["cpu", "wall", "memory", "plan"]
    ratio: Ratio
    bar: Bar | None = None
    medians: tuple[float, float] | None = None
    variants: tuple[str, str] | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether the bar is met."""
        return "no bar" if self.bar is None else self.bar.judge(self.ratio)

    def line(self, width: int) -> str:
        """The comparison as a line of a report whose titles have so many characters."""
        unit = _mebibytes if self.clock == "memory" else _seconds
        sides = " / ".join(map(unit, self.medians or ()))
        line = f"{self.title:<{width}}  {self.clock:<6} {sides:<25} {self.ratio!s:>20}"
        if self.bar is None:
            return line

        verdict = self.verdict
        if verdict == "undecided":
            verdict = f"undecided, {self.ratio.rounds} of {self.bar.rounds} rounds"
        return f"{line}   {self.bar.direction} {self.bar.value}: {verdict}"


@dataclass
class Report:
    """What a benchmark found; prints as a table, ``to_dict()`` is what ``--json`` writes.

    Attributes:
        name: the benchmark.
        settings: sizes and options that the numbers depend on.
        samples: variant -> one sample per round.
        comparisons: the ratios.
        context: versions, hardware and date, from :func:`machine`.
        notes: sentences that belong to the numbers.
    """

    name: str
    settings: dict[str, Any]
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    context: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def missed(self) -> bool:
        """Whether a bar was judged and missed."""
        return any(comparison.verdict == "missed" for comparison in self.comparisons)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; times in seconds."""
        comparisons = [
            {**asdict(comparison), "verdict": comparison.verdict} for comparison in self.comparisons
        ]
        samples = {
            name: [asdict(sample) for sample in samples] for name, samples in self.samples.items()
        }
        return {
            "benchmark": self.name,
            **self.context,
            "settings": self.settings,
            "comparisons": comparisons,
            "notes": self.notes,
            "samples": samples,
        }

    def __str__(self) -> str:
        hardware = self.context["hardware"]
        versions = [f"{name} {version}" for name, version in self.context["versions"].items()]
        settings = [f"{name}={value}" for name, value in self.settings.items()]
        processor = f"{hardware['cpu']}, {hardware['cores']} cores, load {hardware['load']}"
        lines = [f"bench {self.name}: {', '.join(versions)}; {processor}", ", ".join(settings)]

        compared = {name for c in self.comparisons for name in c.variants or ()}
        alone = [name for name in self.samples if name not in compared]
        width = max(map(len, [*alone, *(c.title for c in self.comparisons)]), default=0)

        for name in alone:
            cpu = _seconds(median_of(self.samples[name], "cpu"))
            wall = _seconds(median_of(self.samples[name], "wall"))
            rounds = len(self.samples[name])
            lines.append(f"{name:<{width}}  cpu {cpu}   wall {wall}   median of {rounds}")

        lines += [comparison.line(width) for comparison in self.comparisons]
        return "\n  ".join([*lines, *self.notes])


def median_of(samples: Sequence[Sample], clock: Literal["cpu", "wall"]) -> float:
    """Median seconds of some samples."""
    return float(np.median([getattr(sample, clock) for sample in samples]))


def _seconds(value: float) -> str:
    """Eleven characters: microseconds below a millisecond, milliseconds below a second."""
    if value < 1e-3:
        return f"{value * 1e6:8.2f} us"
    if value < 1:
        return f"{value * 1e3:8.2f} ms"
    return f"{value:8.2f} s "


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:7.1f} MiB"


def interleave(
    variants: Mapping[str, Callable[[int], Sample]], rounds: int, warmup: int = 1
) -> dict[str, list[Sample]]:
    """Measure every variant once a round, in an order drawn anew for every round.

    A fixed order would favour whoever follows a variant that leaves its data in the caches; so
    would turning it, because neighbours stay neighbours.

    Args:
        variants: name -> what measures it; it is given the number of the round, so that all
            variants of a round can use the same input. Warm-up rounds have negative numbers.
        rounds: rounds that count.
        warmup: rounds before them.

    Returns:
        name -> one sample for each round.

    Raises:
        ValueError: fewer than one round, or no variants.
    """
    if rounds < 1 or not variants:
        raise ValueError(f"rounds={rounds} and {len(variants)} variants: both must be at least 1")

    names = list(variants)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    rng = np.random.default_rng(0)

    for number in range(-warmup, rounds):
        for name in rng.permutation(names).tolist():
            sample = variants[name](number)
            if number >= 0:
                samples[name].append(sample)
    return samples


def time_call(call: Callable[[], object], repeat: int = 1) -> Sample:
    """CPU and wall seconds of one call, the mean over ``repeat`` calls in a row."""
    cpu = _cpu_seconds()
    wall = time.perf_counter()
    for _ in range(repeat):
        call()
    return Sample((_cpu_seconds() - cpu) / repeat, (time.perf_counter() - wall) / repeat)


def time_each(call: Callable[[Any], object], fresh: Sequence[Any]) -> Sample:
    """Mean CPU and wall seconds of a call over objects that were made before the clock started.

    Python's cyclic collector is off meanwhile: it would charge one variant for the garbage of
    another.

    Args:
        call: what is measured.
        fresh: one argument for each call; nothing has looked at any of them.

    Returns:
        Seconds of one call.
    """

    def call_all() -> None:
        for argument in fresh:
            call(argument)

    gc.disable()
    try:
        sample = time_call(call_all)
    finally:
        gc.enable()
    return Sample(sample.cpu / len(fresh), sample.wall / len(fresh))


def time_single_calls(call: Callable[[Any], object], fresh: Sequence[Any]) -> tuple[Sample, Sample]:
    """CPU and wall seconds of the median call and of the 99th percentile, each call timed alone.

    Args:
        call: what is measured.
        fresh: as of `time_each`.

    Returns:
        The median, and the percentile.
    """
    samples: list[Sample] = []
    gc.disable()
    try:
        for argument in fresh:
            wall = time.perf_counter()
            cpu = time.process_time()
            call(argument)
            samples.append(Sample(time.process_time() - cpu, time.perf_counter() - wall))
    finally:
        gc.enable()

    seconds = np.array([(sample.cpu, sample.wall) for sample in samples])
    middle, tail = np.percentile(seconds, [50, 99], axis=0).tolist()
    return Sample(*middle), Sample(*tail)


def time_command(command: Sequence[str], cwd: str | Path | None = None) -> Sample:
    """CPU and wall seconds of a command, from start to exit.

    Raises:
        RuntimeError: the command fails; the message ends with what it wrote to stderr.
    """
    cpu = _cpu_seconds()
    wall = time.perf_counter()
    process = subprocess.run(list(command), cwd=cwd, capture_output=True, text=True, check=False)
    sample = Sample(_cpu_seconds() - cpu, time.perf_counter() - wall)

    if process.returncode:
        error = process.stderr.strip()
        raise RuntimeError(f"the command ended with {process.returncode}:\n{error}")
    return sample


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> Ratio:
    """Median of the ratios of measurements from the same rounds, with its bootstrap interval.

    Args:
        numerator: one measurement per round.
        denominator: one measurement per round, of the same rounds.
        seed: seed of the resampling.

    Returns:
        The ratio; its interval holds the middle 95 % of the medians of resampled rounds.

    Raises:
        ValueError: the numbers of rounds differ, there are none, or a measurement is not positive.

    Example:
        >>> from benchmarks.harness import paired_ratio
        >>> print(paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]))
        2.00 [2.00, 2.00]
    """
    if len(numerator) != len(denominator) or not numerator:
        raise ValueError(
            f"{len(numerator)} and {len(denominator)} measurements: pairs are needed, at least one"
        )
    if min(*numerator, *denominator) <= 0:
        raise ValueError(
            "a measurement is not positive: time something longer, for example by more repeats"
        )

    ratios = np.asarray(numerator, dtype=np.float64) / np.asarray(denominator, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))


def compare(
    samples: Mapping[str, Sequence[Sample]],
    numerator: str,
    denominator: str,
    clock: Literal["cpu", "wall"] = "cpu",
    bar: Bar | None = None,
    title: str | None = None,
) -> Comparison:
    """How many times as much one variant takes as another.

    Args:
        samples: what :func:`interleave` measured.
        numerator: name of the one.
        denominator: name of the other.
        clock: "cpu" or "wall".
        bar: what the ratio should be.
        title: of the comparison; by default "numerator / denominator".
    """
    above = [getattr(sample, clock) for sample in samples[numerator]]
    below = [getattr(sample, clock) for sample in samples[denominator]]

    return Comparison(
        title=title or f"{numerator} / {denominator}",
        clock=clock,
        ratio=paired_ratio(above, below),
        bar=bar,
        medians=(float(np.median(above)), float(np.median(below))),
        variants=(numerator, denominator),
    )


def compare_memory(
    title: str, peaks: Sequence[float], against: Sequence[float], most: float | None
) -> Comparison:
    """How many times as many bytes as others the peaks of some runs are.

    Args:
        title: of the comparison.
        peaks: of each run.
        against: the bytes to compare with, of each run.
        most: what the ratio may be; None for what is only shown.

    Returns:
        The comparison.
    """
    return Comparison(
        title=title,
        clock="memory",
        ratio=paired_ratio(peaks, against),
        bar=None if most is None else Bar("at most", most, rounds=len(peaks)),
        medians=(sorted(peaks)[len(peaks) // 2], against[0]),
    )


def machine(peer: str | None = None) -> dict[str, Any]:
    """What numbers depend on: versions of Python and of packages, processor, cores, load, date."""
    versions = {"python": platform.python_version()}
    for package in (*_PACKAGES, *([peer] if peer else [])):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue

    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    hardware = {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "system": f"{sys.platform} {platform.machine()}",
        "load": load,
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "hardware": hardware,
    }

"""The planner's estimates beside measured steps, with this machine's speeds measured first.

Tables and 30 plans for them are drawn, every table cut in a drawn way and put on drawn ranks, so
that some plans are good and most are not. Two processes of one thread each train each plan in turn;
a measurement is that of the slower rank. Judged are the correlation of ranks (Spearman) between the
estimated and the measured time of a plan, because a planner needs to know which of two plans is
faster, and the factor between the two. Measured is the lowest tenth of the rounds, because other
programs of the machine only ever add to them. Both clocks are judged; wall time means something on
a machine that is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import (
    Bar,
    Comparison,
    Ratio,
    Report,
    Sample,
    interleave,
    machine,
    time_call,
)
from benchmarks.library import Sizes
from benchmarks.rows import slowest
from benchmarks.runner import Options
from benchmarks.sharded_rank import everywhere
from tutorec.distributed.calibration import (
    Cut,
    Plan,
    Step,
    TableSize,
    calibrate,
    draw_batch,
    estimated_ms,
    speeds_text,
)
from tutorec.distributed.planner.topology import Topology
from tutorec.spmd.pool import Ranks

NAME = "estimates"
# With 30 rounds the wall times of one half put the plans into another order than those of the other
# (rank correlation 0.7), so that no estimate could agree with both; with 120 it is 0.9.
ROUNDS = 120

_SIZES = Sizes(tables=10, rows=100_000)  # at most so many rows
_PLANS = 30
_WORLD = 2
_BATCHES = 4  # drawn once; rounds take turns
_RESAMPLES = 1000
_TIMEOUT = 1800.0

Floats = NDArray[np.float64]


def run(options: Options) -> Report:
    """Measure the machine, then drawn plans.

    Args:
        options: Rounds.

    Returns:
        Each plan's measurements, correlation and factor with their bars, the machine's numbers as a
        note.
    """
    sizes = options.fit(_SIZES)
    plan_count = 4 if options.tiny else _PLANS
    settings = {
        "world": _WORLD,
        "tables": sizes.tables,
        "plans": plan_count,
        "B of a rank": sizes.samples,
    }
    report = Report(NAME, settings, context=machine())
    topology = Topology.calibrated(calibrate(["cpu"]), _WORLD, "cpu")
    report.notes.append(f"{topology.source}: {speeds_text(topology)}")

    tables = draw_tables(sizes.tables, sizes.rows)
    plans = [draw_plan(tables, number) for number in range(plan_count)]
    with Ranks(_WORLD, backend="gloo", timeout=_TIMEOUT) as ranks:
        results = ranks.run(measure_plans, tables, plans, sizes.samples, options.rounds)
    estimates = [estimated_ms(tables, plan, sizes.samples, topology) for plan in plans]
    _add(report, estimates, slowest(results))
    return report


def measure_plans(
    tables: Sequence[TableSize],
    plans: Sequence[Plan],
    samples: int,
    rounds: int,
    rank: int,
    world_size: int,
) -> dict[str, list[Sample]]:
    """Time steps of each plan on this rank, in turn with the others; collective.

    Args:
        tables: The tables.
        plans: How they are cut.
        samples: B of each rank.
        rounds: Rounds that count.
        rank: This rank.
        world_size: W.

    Returns:
        Number of a plan -> one measurement for each round.
    """
    cpu = torch.device("cpu")
    batches = [draw_batch(tables, samples, 100 * rank + number, cpu) for number in range(_BATCHES)]

    def variant(plan: Plan) -> Callable[[int], Sample]:
        step = Step(tables, plan, samples, cpu)

        def sample(number: int) -> Sample:
            everywhere(True)  # all ranks begin together
            return time_call(lambda: step(batches[number % _BATCHES]))

        return sample

    variants = {str(number): variant(plan) for number, plan in enumerate(plans)}
    return interleave(variants, rounds, warmup=2)


def draw_tables(count: int, most_rows: int) -> list[TableSize]:
    """Tables of any size: rows, columns and ids of a bag are drawn, always the same ones.

    Example:
        >>> draw_tables(3, 2000) == draw_tables(4, 2000)[:3]
        True
    """
    rng = np.random.default_rng(0)
    tables = []
    for index in range(count):
        rows = int(10 ** rng.uniform(3, np.log10(most_rows)))
        columns = int(rng.choice([16, 32, 64, 128]))
        tables.append(TableSize(f"t{index}", rows, columns, int(rng.integers(1, 21))))
    return tables


def draw_plan(tables: Sequence[TableSize], number: int) -> Plan:
    """A plan for two ranks: each prefers some ways to cut, and one of the ranks.

    Example:
        >>> draw_plan(draw_tables(2, 2000), 0).keys() == {"t0", "t1"}
        True
    """
    rng = np.random.default_rng(1000 + number)
    types = ("table_wise", "row_wise", "column_wise", "data_parallel")
    preferences = rng.dirichlet([0.5] * len(types))
    preferred_rank = int(rng.integers(0, _WORLD))
    bias = rng.uniform(0.5, 1.0)

    plan: Plan = {}
    for table in tables:
        sharding = str(rng.choice(types, p=preferences))
        shards = {"table_wise": 1, "column_wise": 2}.get(sharding, 0)
        preferred = [rng.random() < bias for _ in range(shards)]
        ranks = [preferred_rank if chosen else 1 - preferred_rank for chosen in preferred]
        plan[table.name] = Cut(sharding, tuple(ranks))
    return plan


def rank_correlation(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> float:
    """Spearman's rank correlation of two lists without ties, between -1 and 1.

    Example:
        >>> round(rank_correlation([1.0, 2.0, 9.0], [5.0, 6.0, 7.0]), 6)
        1.0
    """
    ranks = [np.argsort(np.argsort(np.asarray(values))) for values in (first, second)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def mean_factor(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> float:
    """By how much two lists differ: the geometric mean of the larger over the smaller.

    Example:
        >>> round(mean_factor([1.0, 8.0], [4.0, 4.0]), 6)
        2.828427
    """
    return float(np.exp(np.abs(np.log(np.asarray(first) / np.asarray(second))).mean()))


# How estimates are judged against measured times.
_CRITERIA = (
    ("rank correlation of estimated and measured time", rank_correlation, Bar("at least", 0.8)),
    ("factor between estimated and measured time", mean_factor, Bar("at most", 1.5)),
)


def _add(report: Report, estimates: Sequence[float], samples: dict[str, list[Sample]]) -> None:
    """Add what the ranks measured, and judge the estimates."""
    for number, plan_samples in enumerate(samples.values()):
        title = f"plan {number:02}, estimated {estimates[number]:.1f} ms"
        report.samples[title] = plan_samples

    for clock in ("wall", "cpu"):
        seconds = [[getattr(s, clock) for s in plan] for plan in samples.values()]
        measured = 1e3 * np.array(seconds)
        for title, criterion, bar in _CRITERIA:
            ratio = _resampled(criterion, estimates, measured)
            title = f"{title}, {len(estimates)} plans"
            report.comparisons.append(Comparison(title, clock, ratio, bar))

        times = _lowest(measured)
        report.notes.append(
            f"{clock}: measured {times.min():.1f} to {times.max():.1f} ms, estimated "
            f"{min(estimates):.1f} to {max(estimates):.1f} ms; the plan with the least estimate "
            f"takes {times[np.argmin(estimates)]:.1f} ms"
        )


def _resampled(
    criterion: Callable[[Sequence[float], Floats], float],
    estimates: Sequence[float],
    measured: Floats,
) -> Ratio:
    """Error of the estimates against each plan's lowest tenth; the interval resamples rounds."""
    rounds = measured.shape[1]
    drawn = np.random.default_rng(0).integers(0, rounds, (_RESAMPLES, rounds))
    resampled = [criterion(estimates, _lowest(measured[:, sample])) for sample in drawn]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Ratio(criterion(estimates, _lowest(measured)), float(low), float(high), rounds)


def _lowest(measured: Floats) -> Floats:
    """The lowest tenth of each plan, ``[plans]``."""
    return np.percentile(measured, 10, axis=1)

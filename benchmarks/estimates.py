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
from benchmarks.runner import Options
from benchmarks.sharded_rank import everywhere, slowest
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

PLANS, TABLES, SAMPLES, WORLD = 30, 10, 256, 2
MOST_ROWS = 100_000
_BATCHES = 4  # drawn once; rounds take turns
_ORDER = Bar("at least", 0.8)
_FACTOR = Bar("at most", 1.5)
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
    report = Report(
        name=NAME,
        settings={
            "world": WORLD,
            "tables": TABLES,
            "plans": PLANS,
            "B of a rank": SAMPLES,
            "optimizer": "row-wise Adagrad",
            "clock": "slowest rank",
        },
        context=machine(),
    )
    topology = Topology.calibrated(calibrate(["cpu"]), WORLD, "cpu")
    report.notes.append(f"{topology.source}: {speeds_text(topology)}")
    tables = draw_tables(TABLES)
    plans = [draw_plan(tables, number) for number in range(PLANS)]
    with Ranks(WORLD, backend="gloo", timeout=_TIMEOUT) as ranks:
        measured = ranks.run(measure_plans, tables, plans, SAMPLES, options.rounds)
    _take(report, [estimated_ms(tables, plan, SAMPLES, topology) for plan in plans], measured)
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


def draw_tables(count: int) -> list[TableSize]:
    """Tables of any size: rows, columns and ids of a bag are drawn, always the same ones.

    Example:
        >>> draw_tables(3) == draw_tables(4)[:3]
        True
    """
    rng = np.random.default_rng(0)
    tables = []
    for index in range(count):
        rows = int(10 ** rng.uniform(3, np.log10(MOST_ROWS)))
        tables.append(
            TableSize(
                f"t{index}", rows, int(rng.choice([16, 32, 64, 128])), int(rng.integers(1, 21))
            )
        )
    return tables


def draw_plan(tables: Sequence[TableSize], number: int) -> Plan:
    """A plan for two ranks: each has its own liking for ways to cut, and for one of the ranks.

    Example:
        >>> draw_plan(draw_tables(2), 0).keys() == {"t0", "t1"}
        True
    """
    rng = np.random.default_rng(1000 + number)
    kinds = ("table_wise", "row_wise", "column_wise", "data_parallel")
    liking = rng.dirichlet([0.5] * len(kinds))
    favoured, bias = int(rng.integers(0, WORLD)), rng.uniform(0.5, 1.0)
    plan: Plan = {}
    for table in tables:
        kind = str(rng.choice(kinds, p=liking))
        pieces = {"table_wise": 1, "column_wise": 2}.get(kind, 0)
        ranks = tuple(favoured if rng.random() < bias else 1 - favoured for _ in range(pieces))
        plan[table.name] = Cut(kind, ranks)
    return plan


def rank_correlation(one: Sequence[float] | Floats, other: Sequence[float] | Floats) -> float:
    """Spearman's rank correlation of two lists without ties, between -1 and 1.

    Example:
        >>> round(rank_correlation([1.0, 2.0, 9.0], [5.0, 6.0, 7.0]), 6)
        1.0
    """
    places = [np.argsort(np.argsort(np.asarray(each))) for each in (one, other)]
    return float(np.corrcoef(places[0], places[1])[0, 1])


def mean_factor(one: Sequence[float] | Floats, other: Sequence[float] | Floats) -> float:
    """By how much two lists differ: the geometric mean of the larger over the smaller.

    Example:
        >>> round(mean_factor([1.0, 8.0], [4.0, 4.0]), 6)
        2.828427
    """
    return float(np.exp(np.abs(np.log(np.asarray(one) / np.asarray(other))).mean()))


def _take(
    report: Report, estimates: Sequence[float], of_ranks: Sequence[dict[str, list[Sample]]]
) -> None:
    """Add what the ranks measured, and judge the estimates."""
    samples = slowest(of_ranks).values()
    for number, (estimate, of_plan) in enumerate(zip(estimates, samples, strict=True)):
        report.samples[f"plan {number:02}, estimated {estimate:.1f} ms"] = of_plan
    for clock in ("wall", "cpu"):
        measured = 1e3 * np.array(
            [[getattr(s, clock) for s in of_plan] for of_plan in report.samples.values()]
        )
        for title, judged, bar in (
            ("rank correlation of estimated and measured time", rank_correlation, _ORDER),
            ("factor between estimated and measured time", mean_factor, _FACTOR),
        ):
            ratio = _judged(judged, estimates, measured)
            report.comparisons.append(
                Comparison(f"{title}, {len(estimates)} plans", clock, ratio, bar)
            )
        times = _lowest(measured)
        report.notes.append(
            f"{clock}: measured {times.min():.1f} to {times.max():.1f} ms, estimated "
            f"{min(estimates):.1f} to {max(estimates):.1f} ms; the plan with the least estimate "
            f"takes {times[np.argmin(estimates)]:.1f} ms"
        )


def _judged(
    judged: Callable[[Sequence[float], Floats], float], estimates: Sequence[float], measured: Floats
) -> Ratio:
    """Error of the estimates against each plan's lowest tenth; the interval resamples rounds."""
    rounds = measured.shape[1]
    drawn = np.random.default_rng(0).integers(0, rounds, (_RESAMPLES, rounds))
    resampled = [judged(estimates, _lowest(measured[:, each])) for each in drawn]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Ratio(judged(estimates, _lowest(measured)), float(low), float(high), rounds)


def _lowest(measured: Floats) -> Floats:
    """The lowest tenth of each plan, ``[plans]``."""
    return np.percentile(measured, 10, axis=1)

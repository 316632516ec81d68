"""The planner's estimates beside measured steps: rank correlation over drawn plans; the constants of this machine.

``plans`` draws tables and 30 plans for them, every table cut in a drawn way and put on drawn ranks, so that some plans
are good and most are not. Two processes of one thread each train each plan in turn; a measurement is that of the slower
rank. Judged is the correlation of ranks (Spearman) between the estimated and the measured time of a plan: a planner
needs to know which of two plans is faster. Measured is the lowest tenth of the rounds, because other programs of the
machine only ever add to them. Both clocks are judged; wall time means something on a machine that is idle.

``constants`` measures what `planner.constants` holds of a laptop, to be typed in there for another machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tutorec.bench.estimates_rank import Constants, Cut, DrawnTable, Plan, measure_constants, measure_plans
from tutorec.bench.harness import Bar, Comparison, Ratio, Report, Sample, machine
from tutorec.bench.peer import chosen
from tutorec.bench.runner import Options
from tutorec.distributed.plan import ShardingType
from tutorec.distributed.planner.cost import fixed_cost, piece_perf
from tutorec.distributed.planner.table_facts import TableFacts
from tutorec.distributed.planner.topology import Topology
from tutorec.spmd import Ranks

NAME = "estimates"
ROUNDS = 30
CASES = ("plans", "constants")

PLANS, TABLES, SAMPLES, WORLD = 30, 10, 256, 2
MOST_ROWS = 100_000
_BAR = 0.8
_RESAMPLES = 1000
_TIMEOUT = 1800.0

Floats = NDArray[np.float64]


def run(options: Options) -> Report:
    """Measure drawn plans, and the constants.

    Args:
        options: rounds, and which ``--cases``.

    Returns:
        Each plan's measurements, the correlation with its bar, the constants as notes.

    Raises:
        ValueError: an unknown case.
    """
    names = chosen(CASES, options.cases, "--cases")
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
        samples={},
        comparisons=[],
        context=machine(),
    )
    with Ranks(WORLD, backend="gloo", timeout=_TIMEOUT) as ranks:
        if "constants" in names:
            of_ranks = ranks.run(measure_constants, options.rounds)
            report.notes += _as_notes(of_ranks)
        if "plans" in names:
            tables = draw_tables(TABLES)
            plans = [draw_plan(tables, number) for number in range(PLANS)]
            of_plans = ranks.run(measure_plans, tables, plans, SAMPLES, options.rounds)
            _take(report, tables, plans, of_plans)
    return report


def draw_tables(count: int) -> list[DrawnTable]:
    """Tables of any size: rows, columns and ids of a bag are drawn, always the same ones.

    Example:
        >>> draw_tables(3) == draw_tables(4)[:3]
        True
    """
    rng = np.random.default_rng(0)
    found = []
    for index in range(count):
        rows = int(10 ** rng.uniform(3, np.log10(MOST_ROWS)))
        found.append(DrawnTable(f"t{index}", rows, int(rng.choice([16, 32, 64, 128])), int(rng.integers(1, 21))))
    return found


def draw_plan(tables: Sequence[DrawnTable], number: int) -> Plan:
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


def estimated_ms(tables: Sequence[DrawnTable], plan: Mapping[str, Cut], samples: int, topology: Topology) -> float:
    """The planner's milliseconds of a step under a plan: of the slowest rank, and of the exchanges.

    Args:
        tables: The tables.
        plan: How each is cut.
        samples: B of a rank.
        topology: The machines.

    Example:
        >>> [table] = draw_tables(1)
        >>> one, two = Cut("table_wise", (0,)), Cut("row_wise", ())
        >>> both = [estimated_ms([table], {"t0": cut}, 64, Topology.laptop(2)) for cut in (one, two)]
        >>> both[0] > both[1] > 0
        True
    """
    loads = np.zeros(topology.world_size)
    for table in tables:
        cut = plan[table.name]
        facts = TableFacts(
            "",
            table.name,
            table.rows,
            table.columns,
            features=(table.feature,),
            samples=(float(samples),),
            ids=(float(samples * table.pooling),),
        )
        pieces = cut.pieces(table, topology.world_size)
        sizes = np.array([[piece.rows, piece.columns] for piece in pieces])
        perf = piece_perf(facts, ShardingType(cut.kind), "fused", sizes, topology)
        np.add.at(loads, [piece.rank for piece in pieces], perf.sum(axis=1))
    used = {cut.kind for cut in plan.values()}
    return float(loads.max()) + sum(fixed_cost(topology, kind, pooled=True) for kind in used)


def rank_correlation(one: Sequence[float] | Floats, other: Sequence[float] | Floats) -> float:
    """Spearman's correlation of two lists without ties: 1 where they are in the same order, -1 in the opposite one.

    Example:
        >>> round(rank_correlation([1.0, 2.0, 9.0], [5.0, 6.0, 7.0]), 6)
        1.0
    """
    places = [np.argsort(np.argsort(np.asarray(each))) for each in (one, other)]
    return float(np.corrcoef(places[0], places[1])[0, 1])


def _take(
    report: Report, tables: Sequence[DrawnTable], plans: Sequence[Plan], found: Sequence[Sequence[list[Sample]]]
) -> None:
    """Add what the ranks measured, and judge the estimates."""
    topology = Topology.laptop(WORLD)
    estimates = [estimated_ms(tables, plan, SAMPLES, topology) for plan in plans]
    for number, estimate in enumerate(estimates):
        rounds = zip(*(of_rank[number] for of_rank in found), strict=True)
        report.samples[f"plan {number:02}, estimated {estimate:.1f} ms"] = [
            Sample(max(s.cpu for s in one), max(s.wall for s in one)) for one in rounds
        ]
    for clock in ("wall", "cpu"):
        measured = np.array([[getattr(s, clock) for s in of_plan] for of_plan in report.samples.values()])
        title = f"rank correlation of estimated and measured time, {len(plans)} plans"
        report.comparisons.append(Comparison(title, clock, _correlation(estimates, measured), Bar("at least", _BAR)))
        times = _lowest(measured) * 1e3
        report.notes.append(
            f"{clock}: measured {times.min():.1f} to {times.max():.1f} ms, estimated {min(estimates):.1f} to "
            f"{max(estimates):.1f} ms; the plan with the least estimate takes {times[np.argmin(estimates)]:.1f} ms"
        )


def _correlation(estimates: Sequence[float], measured: Floats) -> Ratio:
    """Of estimates with the lowest tenth of each plan ``[plans, rounds]``; the interval is of resampled rounds."""
    rounds = measured.shape[1]
    drawn = np.random.default_rng(0).integers(0, rounds, (_RESAMPLES, rounds))
    resampled = [rank_correlation(estimates, _lowest(measured[:, each])) for each in drawn]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Ratio(rank_correlation(estimates, _lowest(measured)), float(low), float(high), rounds)


def _lowest(measured: Floats) -> Floats:
    """The lowest tenth of each plan, ``[plans]``."""
    return np.percentile(measured, 10, axis=1)


def _as_notes(of_ranks: Sequence[Constants]) -> list[str]:
    """What `planner.constants` calls them; the mean of the ranks."""
    mean = Constants(*(sum(numbers) / len(numbers) for numbers in zip(*of_ranks, strict=True)))
    return [
        f"LAPTOP_ROW_BW = {mean.row_bandwidth * 1000 / 1024**3:.2f} GiB/s of rows and bags in a lookup",
        f"LAPTOP_BWD_MULTIPLIER = {mean.backward:.1f} times a lookup's for the bytes of an update",
        f"LAPTOP_ID_MS = {mean.id_ms * 1e6:.0f} ns for each id of an update besides",
        f"LAPTOP_WIRE_BW = {mean.wire_bandwidth * 1000 / 1024**3:.2f} GiB/s that a rank sends",
        f"LAPTOP_LATENCY_MS = {mean.latency_ms:.2f} ms for each exchange of one more sharding type",
    ]

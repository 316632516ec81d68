"""Sharded collections on W processes: forward, step, exchange of ids, memory; --vs adds a peer.

Both libraries run in the same processes on the same tables, plan and batches: the peer with its
fused kernel, except for data-parallel tables, of which it knows the dense one only, stepped by
``torch.optim.SGD``. Outputs and every piece of every table are compared before anything is timed.
One thread a rank; a measurement is that of the slowest rank.

CPU time is judged, of steps with row-wise Adagrad, and with SGD where tables are data-parallel: any
other dense optimizer of the peer's moves rows that are not in the batch. Other steps with SGD, in
which both libraries spend most of their time in the same kernel, are measured and not judged; nor
are row-wise and column-wise in a world of 1, where they cut nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import (
    Report,
    compare_memory,
    machine,
)
from benchmarks.memory import measurable
from benchmarks.peer import OURS, Sizes, chosen, chosen_world, judged_both, libraries
from benchmarks.runner import Options
from benchmarks.sharded_rank import Case, Found, agreed, measure, step_memory
from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.sharding.registry import POOLED_SHARDINGS
from tutorec.spmd.pool import Ranks

NAME = "sharded"
ROUNDS = 30
WORLDS = (1, 2, 4)

SIZES_OF_TABLES = Sizes()
MEMORY_SIZES = Sizes(rows=100_000)
_MEMORY_BAR, _MEMORY_RUNS = 1.10, 3
_INPUT_ROUNDS = 2
_TIMEOUT = 1800.0

# sharding type -> what peer / tutorec should be in a step; the others have no peer to speak of on
# one machine
_STEP_BARS = {"table_wise": 1.05, "row_wise": 1.15, "column_wise": 1.4, "data_parallel": 3.0}
_CUT_NOTHING_ALONE = ("row_wise", "column_wise")
_FORWARD_BAR, _ONE_SAMPLE_BAR, _EXCHANGE_BAR = 1.4, 1.6, 1.3


def _all_cases() -> dict[str, Case]:
    cases = [Case("exchange", "exchange", repeats=20)]
    for sharding in (member.value for member in ShardingType):
        cases.append(Case(f"forward-{sharding}", "forward", sharding, "sgd", repeats=8))
        cases.append(Case(f"step-{sharding}-sgd", "step", sharding, "sgd"))
        if sharding != "data_parallel":
            cases.append(Case(f"step-{sharding}", "step", sharding))
    cases.append(Case("step-1", "step", samples=1, repeats=30))
    return {case.name: case for case in cases}


_ALL = _all_cases()
CASES = (*_ALL, "memory")


def run(options: Options) -> Report:
    """Measure in a world of ``options.world`` ranks.

    Args:
        options: rounds, the peer, which ``--cases``, how many ranks.

    Returns:
        CPU and wall seconds of the slowest rank; with a peer the ratios with their bars.

    Raises:
        ValueError: the peer is not installed, an unknown case or world, or the libraries' results
            differ.
    """
    world = chosen_world(WORLDS, options.world)
    roots = [side.root for side in libraries(options.vs)]
    hosts = 2 if world == 4 else 1
    report = Report(
        name=NAME,
        settings={
            "world": world,
            "hosts": hosts,
            "tables": (
                f"{SIZES_OF_TABLES.tables} x {SIZES_OF_TABLES.rows} x {SIZES_OF_TABLES.columns}"
            ),
            "B of a rank": 256,
            "ids per bag": SIZES_OF_TABLES.pooling,
            "checks": "on and off" if world == 1 else "on",
            "clock": "slowest rank",
        },
        context=machine(options.vs),
    )
    names = chosen(CASES, options.cases, "--cases")
    with Ranks(world, hosts=hosts, backend="gloo", timeout=_TIMEOUT) as ranks:
        for case in _runnable([_ALL[name] for name in names if name in _ALL], world, report):
            results = ranks.run(measure, case, SIZES_OF_TABLES, roots, options.rounds, hosts=hosts)
            take_slowest(report, case, results, roots)
            if options.vs:
                # With one sample the checks are a large part.
                report.comparisons += judged_both(
                    report.samples,
                    case.name,
                    options.vs,
                    "cpu",
                    _bar(case, world),
                    unchecked_only=case.samples == 1,
                )
                report.comparisons += judged_both(
                    report.samples, case.name, options.vs, "wall", None
                )
    if "memory" in names:
        _run_memory(report, roots, world)
    return report


def _runnable(cases: Sequence[Case], world: int, report: Report) -> list[Case]:
    """Those that make sense in this world, of types that are built; what is left out is noted."""
    built = {kind.value for kind in POOLED_SHARDINGS}
    missing = sorted({case.sharding for case in cases} - built)
    if missing:
        report.notes.append(f"left out, not built: {', '.join(missing)}")
    kept = [case for case in cases if case.sharding in built]
    return [
        case
        for case in kept
        if world == 1 or case.samples > 1
        if world > 1 or case.kind != "exchange"
    ]


def take_slowest(
    report: Report, case: Case, results: Sequence[Found], roots: Sequence[str]
) -> None:
    """Add the slowest rank's measurements, and what was sent; refuse results that differ.

    Args:
        report: What they are added to.
        case: What was run.
        results: Of each rank.
        roots: Libraries; ours first.

    Raises:
        ValueError: the libraries' results differ, or ours had another number of rounds of input
            than are due.
    """
    report.samples |= agreed(results, f"{case.name}: {' and '.join(roots)} differ")
    traffic = results[0].traffic
    of_input = sum(count for stage, count in traffic.issues.items() if stage.startswith("input"))
    if len(results) > 1 and of_input != (0 if case.sharding == "data_parallel" else _INPUT_ROUNDS):
        raise ValueError(
            f"{case.name}: {of_input} rounds of input, {_INPUT_ROUNDS} are due: "
            f"{dict(traffic.issues)}"
        )
    stages = ", ".join(
        f"{stage} {count} x, {traffic.total(stage):,} bytes"
        for stage, count in sorted(traffic.issues.items())
    )
    report.notes.append(f"{case.name}: rank 0 sends {stages or 'nothing'}")


def _bar(case: Case, world: int) -> float | None:
    """What peer / tutorec should be in CPU time."""
    if case.kind == "exchange":
        return _EXCHANGE_BAR
    if case.samples == 1:
        return _ONE_SAMPLE_BAR
    if case.sharding not in _STEP_BARS or (world == 1 and case.sharding in _CUT_NOTHING_ALONE):
        return None
    if case.kind == "step" and case.optimizer == "sgd" and case.sharding != "data_parallel":
        return None
    return _FORWARD_BAR if case.kind == "forward" else _STEP_BARS[case.sharding]


def _run_memory(report: Report, roots: Sequence[str], world: int) -> None:
    """Peak of row-wise Adagrad steps over the weights of the rank, each in new processes."""
    if not measurable():
        report.notes.append("memory is measured on Linux only")
        return
    for root in roots:
        peaks: list[float] = []
        weights: list[float] = []
        for _ in range(_MEMORY_RUNS):
            with Ranks(world, backend="gloo", timeout=_TIMEOUT) as ranks:
                of_ranks = ranks.run(step_memory, root, MEMORY_SIZES)
            peak, held = max(of_ranks, key=lambda pair: pair[0] / pair[1])
            peaks.append(float(peak))
            weights.append(float(held))
        report.comparisons.append(
            compare_memory(
                f"memory: peak of a row-wise Adagrad step, {root} / weights of the rank",
                peaks,
                weights,
                _MEMORY_BAR if root == OURS else None,
            )
        )

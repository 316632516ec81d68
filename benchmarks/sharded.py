"""Sharded collections on W processes: forward, step, exchange of ids, memory; --vs adds a peer.

Both libraries run in the same processes on the same tables, plan and batches: the peer with its
fused kernel, except for data-parallel tables, of which it knows the dense one only, stepped by
``torch.optim.SGD``. Outputs and every shard of every table are compared before anything is timed.
One thread a rank; a measurement is that of the slowest rank.

CPU time is judged, of steps with row-wise Adagrad, and with SGD where tables are data-parallel: any
other dense optimizer of the peer's moves rows that are not in the batch. Other steps with SGD, in
which both libraries spend most of their time in the same kernel, are measured and not judged; nor
are row-wise and column-wise in a world of 1, where they cut nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import Report, compare_memory, machine
from benchmarks.library import OURS, Sizes, chosen, chosen_world, libraries
from benchmarks.memory import measurable
from benchmarks.rows import Bars, Clock, Timed, add_row, against
from benchmarks.runner import Options
from benchmarks.sharded_rank import Case, measure, step_memory
from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.traffic import Traffic
from tutorec.spmd.pool import Ranks

NAME = "sharded"
ROUNDS = 30
WORLDS = (1, 2, 4)

_TABLES = Sizes()
_MEMORY_TABLES = Sizes(rows=100_000)
_MEMORY_BAR = 1.10
_INPUT_ROUNDS = 2
_TIMEOUT = 1800.0

# sharding type -> what peer / tutorec should be in a step; the others have no peer to speak of on
# one machine
_STEP_BARS = {"table_wise": 1.05, "row_wise": 1.15, "column_wise": 1.4, "data_parallel": 3.0}
_CUT_NOTHING_ALONE = ("row_wise", "column_wise")
_FORWARD_BAR = 1.4
_ONE_SAMPLE_BAR = 1.6
_EXCHANGE_BAR = 1.3


def _all_cases() -> dict[str, Case]:
    cases = [Case("exchange", "exchange", calls=20)]

    for sharding in (member.value for member in ShardingType):
        cases.append(Case(f"forward-{sharding}", "forward", sharding, "sgd", calls=8))
        cases.append(Case(f"step-{sharding}-sgd", "step", sharding, "sgd"))
        if sharding != "data_parallel":
            cases.append(Case(f"step-{sharding}", "step", sharding))

    cases.append(Case("step-1", "step", samples=1, calls=30))
    return {case.name: case for case in cases}


_CASES = _all_cases()
CASES = (*_CASES, "memory")


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
    world_size = chosen_world(WORLDS, options.world)
    names = chosen(CASES, options.cases, "--cases")
    roots = [side.root for side in libraries(options.vs)]
    hosts = 2 if world_size == 4 else 1
    tables = options.fit(_TABLES)
    settings = {
        "world": world_size,
        "hosts": hosts,
        "tables": str(tables),
        "B of a rank": tables.samples,
        "ids per bag": tables.pooling,
        "checks": "on and off" if world_size == 1 else "on",
    }
    report = Report(NAME, settings, context=machine(options.vs))

    with Ranks(world_size, hosts=hosts, backend="gloo", timeout=_TIMEOUT) as ranks:
        for name in names:
            case = options.fit(_CASES[name]) if name in _CASES else None
            if case is None or not _makes_sense(case, world_size):
                continue
            results = ranks.run(measure, case, tables, roots, options.rounds, hosts=hosts)
            bars = against(options.vs, _bar(case, world_size))
            add_sharded(report, case, results, bars, ["cpu", "wall"])
    if "memory" in names:
        _run_memory(report, roots, world_size, options)
    return report


def _makes_sense(case: Case, world_size: int) -> bool:
    """One rank exchanges nothing; one sample is for a single rank."""
    return case.operation != "exchange" if world_size == 1 else case.samples != 1


def add_sharded(
    report: Report,
    case: Case,
    results: Sequence[tuple[Timed, Traffic]],
    bars: Bars,
    clocks: Sequence[Clock],
) -> None:
    """Add the slowest rank's measurements, and what was sent.

    Args:
        report: What they are added to.
        case: What was run.
        results: Of each rank.
        bars: As of `add_row`; the first clock is judged.
        clocks: Times that are compared.

    Raises:
        ValueError: the libraries' results differ, or ours had another number of rounds of input
            than it should.
    """
    timed = [rank_timed for rank_timed, _ in results]
    # With one sample the checks take a large share of the time.
    add_row(
        report, case.name, timed, bars, clocks, judged=clocks[0], judge_checked=case.samples != 1
    )
    _, traffic = results[0]

    issues = traffic.issues
    inputs = sum(count for stage, count in issues.items() if stage.startswith("input"))
    expected = 0 if case.sharding == "data_parallel" else _INPUT_ROUNDS
    if len(results) > 1 and inputs != expected:
        raise ValueError(f"{case.name}: {inputs} rounds of input, not {expected}: {dict(issues)}")

    stages = [
        f"{stage} {count} x, {traffic.total(stage):,} bytes"
        for stage, count in sorted(issues.items())
    ]
    report.notes.append(f"{case.name}: rank 0 sends {', '.join(stages) or 'nothing'}")


def _bar(case: Case, world_size: int) -> float | None:
    """What peer / tutorec should be in CPU time."""
    if case.operation == "exchange":
        return _EXCHANGE_BAR
    if case.samples == 1:
        return _ONE_SAMPLE_BAR
    if world_size == 1 and case.sharding in _CUT_NOTHING_ALONE:
        return None
    if case.operation == "forward":
        return _FORWARD_BAR if case.sharding in _STEP_BARS else None
    judged = case.optimizer == "rowwise_adagrad" or case.sharding == "data_parallel"
    return _STEP_BARS.get(case.sharding) if judged else None


def _run_memory(report: Report, roots: Sequence[str], world_size: int, options: Options) -> None:
    """Peak of row-wise Adagrad steps over the weights of the rank, each in new processes."""
    if not measurable():
        report.notes.append("memory is measured on Linux only")
        return

    sizes = options.fit(_MEMORY_TABLES)
    for root in roots:
        peaks: list[float] = []
        weights: list[float] = []
        for _ in range(options.memory_runs):
            with Ranks(world_size, backend="gloo", timeout=_TIMEOUT) as ranks:
                results = ranks.run(step_memory, root, sizes)
            peak, rank_weights = max(results, key=lambda pair: pair[0] / pair[1])
            peaks.append(float(peak))
            weights.append(float(rank_weights))

        title = f"memory: peak of a row-wise Adagrad step, {root} / weights of the rank"
        bar = _MEMORY_BAR if root == OURS else None
        report.comparisons.append(compare_memory(title, peaks, weights, bar))

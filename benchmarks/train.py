"""The training loop of a small DLRM on W processes, in examples per second; --vs adds a peer.

The model has the form of Criteo's data: 13 dense columns and 26 tables, one id a bag on average.
Both libraries run in the same processes with the same weights, plan and fresh batches: tables by
fused row-wise Adagrad, dense parts by torch's SGD (or Adam) under DistributedDataParallel, loss
read after every step, one thread a rank. Losses, logits, every piece of every table and the dense
weights are compared after two steps, before anything is timed.

Judged are CPU and wall time of the slowest rank, a step from the lists of ids to the weights'
update. A ratio of times is one of examples per second, since both see the same batches. ``dlrm``
takes each library's own DLRM; ``dlrm-one-interaction`` puts our inner products into both, so that
the rest of a step is compared. Wall time means something on a machine that is idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import Report, machine
from benchmarks.peer import chosen, chosen_world, judged_both, libraries
from benchmarks.runner import Options
from benchmarks.sharded_rank import Found, agreed
from benchmarks.train_rank import Shape, TrainCase, measure_training
from tutorec.spmd.pool import Ranks

NAME = "train"
ROUNDS = 30
WORLDS = (1, 2, 4)

SHAPE = Shape()
_BAR = 1.05
_TIMEOUT = 1800.0

_ALL = {
    case.name: case
    for case in (
        TrainCase("dlrm"),
        TrainCase("dlrm-one-interaction", own_interaction=False),
        TrainCase("dlrm-row_wise", sharding="row_wise"),
        TrainCase("dlrm-adam", dense="adam"),
    )
}
CASES = tuple(_ALL)
_JUDGED = ("dlrm", "dlrm-one-interaction")


def run(options: Options) -> Report:
    """Measure in a world of ``options.world`` ranks.

    Args:
        options: rounds, the peer, which ``--cases``, how many ranks.

    Returns:
        CPU and wall seconds of a step on the slowest rank, examples per second; with a peer the
        ratios with their bars.

    Raises:
        ValueError: the peer is not installed, an unknown case or world, or the libraries' results
            differ.
    """
    world = chosen_world(WORLDS, options.world)
    roots = [side.root for side in libraries(options.vs)]
    tables = SHAPE.tables
    report = Report(
        name=NAME,
        settings={
            "world": world,
            "tables": f"{tables.tables} x {tables.rows} x {tables.columns}",
            "B of a rank": SHAPE.samples,
            "ids per bag": tables.pooling,
            "dense columns": SHAPE.dense_columns,
            "layers": f"{list(SHAPE.dense_layers)}, {list(SHAPE.over_layers)}",
            "steps": SHAPE.steps,
            "checks": "on",
            "clock": "slowest rank",
        },
        context=machine(options.vs),
    )
    with Ranks(world, backend="gloo", timeout=_TIMEOUT) as ranks:
        for name in chosen(CASES, options.cases, "--cases"):
            case = _ALL[name]
            results = ranks.run(measure_training, case, SHAPE, roots, options.rounds)
            _take(report, case, results, roots, world)
            if options.vs:
                bar = _BAR if name in _JUDGED else None
                for clock in ("cpu", "wall"):
                    report.comparisons += judged_both(report.samples, name, options.vs, clock, bar)
    return report


def _take(
    report: Report, case: TrainCase, results: Sequence[Found], roots: Sequence[str], world: int
) -> None:
    """Add the slowest rank's measurements, and examples per second; refuse results that differ."""
    measured = agreed(results, f"{case.name}: {' and '.join(roots)} differ")
    report.samples |= measured
    examples = world * SHAPE.samples
    for variant, samples in measured.items():
        cpu, wall = (
            sorted(getattr(s, clock) for s in samples)[len(samples) // 2]
            for clock in ("cpu", "wall")
        )
        report.notes.append(
            f"{variant}: {examples / cpu:,.0f} examples per CPU second, {examples / wall:,.0f} "
            "per second (medians)"
        )

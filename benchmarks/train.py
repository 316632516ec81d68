"""The training loop of a small DLRM on W processes, in examples per second; --vs adds a peer.

The model has the form of Criteo's data: 13 dense columns and 26 tables, one id a bag on average.
Both libraries run in the same processes with the same weights, plan and fresh batches: tables by
fused row-wise Adagrad, dense layers by torch's SGD (or Adam) under DistributedDataParallel, loss
read after every step, one thread a rank. Losses, logits, every shard of every table and the dense
weights are compared after some steps, before anything is timed.

Judged are CPU and wall time of the slowest rank, a step from the lists of ids to the weights'
update. A ratio of times is one of examples per second, since both see the same batches. ``dlrm``
takes each library's own DLRM; ``dlrm-one-interaction`` puts our inner products into both, so that
the rest of a step is compared. Wall time means something on a machine that is idle.
"""

from __future__ import annotations

from benchmarks.harness import Report, machine, median_of
from benchmarks.library import chosen, chosen_world, libraries
from benchmarks.rows import add_row, against
from benchmarks.runner import Options
from benchmarks.train_rank import Shape, TrainCase, measure_training
from tutorec.spmd.pool import Ranks

NAME = "train"
ROUNDS = 30
WORLDS = (1, 2, 4)

_SHAPE = Shape()
_BAR = 1.05
_TIMEOUT = 1800.0
_ALL = (
    TrainCase("dlrm"),
    TrainCase("dlrm-one-interaction", own_interaction=False),
    TrainCase("dlrm-row_wise", sharding="row_wise"),
    TrainCase("dlrm-adam", dense="adam"),
)
_CASES = {case.name: case for case in _ALL}
CASES = tuple(_CASES)
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
    world_size = chosen_world(WORLDS, options.world)
    cases = chosen(CASES, options.cases, "--cases")
    roots = [side.root for side in libraries(options.vs)]
    shape = options.fit(_SHAPE)
    tables = shape.tables
    settings = {
        "world": world_size,
        "tables": str(tables),
        "B of a rank": tables.samples,
        "ids per bag": tables.pooling,
        "dense columns": shape.dense_columns,
        "steps": tables.calls,
    }
    report = Report(NAME, settings, context=machine(options.vs))

    with Ranks(world_size, backend="gloo", timeout=_TIMEOUT) as ranks:
        for name in cases:
            results = ranks.run(measure_training, _CASES[name], shape, roots, options.rounds)
            bars = against(options.vs, _BAR if name in _JUDGED else None)
            add_row(report, name, results, bars, ["cpu", "wall"])

    add_examples(report, world_size * tables.samples)
    return report


def add_examples(report: Report, examples: int) -> None:
    """Note the examples per second of every measurement, at so many in a step of all ranks."""
    for title, samples in report.samples.items():
        cpu = examples / median_of(samples, "cpu")
        wall = examples / median_of(samples, "wall")
        report.notes.append(
            f"{title}: {cpu:,.0f} examples per CPU second, {wall:,.0f} per second (medians)"
        )

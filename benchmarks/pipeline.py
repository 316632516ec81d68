"""Train pipelines beside the plain loop, with delays, a cache, memory, and pull request 2581.

The model is a small DLRM of Criteo's form: 26 tables of 20,000 rows and 32 columns, 256 samples a
rank, one thread a rank, tables by fused row-wise Adagrad. A measurement is that of the slowest
rank, a step from a batch that nothing has looked at to the weights' update, with the loss read
after every step; losses of the first steps are compared before anything is timed. CPU and wall time
are both judged; wall time means something on a machine that is idle.

The cases:

- ``loop``: ``TrainPipelineSparseDist`` beside the plain loop; with ``--vs`` beside the peer's.
- ``delay``: the share of 5 ms by which ids come later that a step does not wait for. The delay
  starts when a rank sends its ids and occupies nobody.
- ``prefetch``: tables in a file, 10 % of the rows in memory, the pages of the others dropped before
  each measurement: a pipeline that reads rows from the disk ahead beside one that does not.
- ``memory``: bytes at the highest point of a pipeline's steps beyond those of the plain loop, in
  new processes.
- ``document``: the tables, pipelines and conclusions of TorchRec's pull request 2581; see
  `pipeline_document`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

from benchmarks.harness import (
    Bar,
    Comparison,
    Ratio,
    Report,
    Sample,
    compare,
    compare_memory,
    machine,
    paired_ratio,
)
from benchmarks.memory import measurable
from benchmarks.peer import Sizes, chosen, chosen_world, libraries
from benchmarks.pipeline_document import run_document
from benchmarks.pipeline_rank import (
    PLAIN,
    Contender,
    measure_contenders,
    peak_memory,
)
from benchmarks.runner import Options
from benchmarks.sharded_rank import agreed
from benchmarks.train_rank import Shape
from tutorec.spmd.pool import Ranks

NAME = "pipeline"
ROUNDS = 30
WORLDS = (1, 2)
CASES = ("loop", "delay", "prefetch", "memory", "document")
SCALE = 0.1

SHAPE = Shape(Sizes(tables=26, rows=20_000, columns=32, pooling=1), samples=256)
CACHED_SHAPE = Shape(Sizes(tables=26, rows=100_000, columns=64, pooling=10), samples=32, steps=8)
MEMORY_SHAPE = Shape(
    Sizes(tables=26, rows=100, columns=4, pooling=20), samples=8192, dense_layers=(8,)
)
DELAY = 0.005
_SPARSE_DIST, _PREFETCH = "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist"
_OVER_PLAIN = {1: 0.98, 2: 1.03}  # by world
_OVER_PEER, _HIDDEN, _OVER_SPARSE_DIST = 1.05, 0.70, 1.2
_MEMORY_RUNS = 3
_TIMEOUT = 1800.0


def run(options: Options) -> Report:
    """Measure in a world of ``options.world`` ranks, 2 by default.

    Args:
        options: Rounds, the peer, which ``--cases``, how many ranks, how many times the document's
            rows.

    Returns:
        CPU and wall seconds of a step, ratios with their bars, the document's lines as notes.

    Raises:
        ValueError: The peer is not installed, an unknown case or world, or losses differ.
    """
    world, scale = chosen_world(WORLDS, options.world), options.scale or SCALE
    roots = [side.root for side in libraries(options.vs)]
    tables = SHAPE.tables
    settings = {
        "world": world,
        "tables": f"{tables.tables} x {tables.rows:,} x {tables.columns}",
        "B of a rank": SHAPE.samples,
        "steps": SHAPE.steps,
        "scale": scale,
        "checks": "on",
        "clock": "slowest rank",
    }
    report = Report(NAME, settings, context=machine(options.vs))
    cases: dict[str, Callable[[], None]] = {
        "loop": lambda: _loop(report, roots, world, options.rounds),
        "delay": lambda: _delay(report, world, options.rounds),
        "prefetch": lambda: _prefetch(report, world, options.rounds),
        "memory": lambda: _memory(report, world),
        "document": lambda: run_document(report, roots, world, options.rounds, scale),
    }
    for name in chosen(CASES, options.cases, "--cases"):
        cases[name]()
    return report


def _loop(report: Report, roots: Sequence[str], world: int, rounds: int) -> None:
    """A pipeline beside the plain loop, and both beside the peer's."""
    contenders = [Contender(pipeline, root) for root in roots for pipeline in (PLAIN, _SPARSE_DIST)]
    samples = _measure(contenders, SHAPE, world, rounds)
    report.samples |= samples
    examples = world * SHAPE.samples
    for name, of_one in samples.items():
        wall = sorted(sample.wall for sample in of_one)[len(of_one) // 2]
        report.notes.append(f"{name}: {examples / wall:,.0f} examples per second (median)")
    ours, plain = Contender(_SPARSE_DIST).name, Contender(PLAIN).name
    bars = {plain: Bar("at least", _OVER_PLAIN[world])}
    for root in roots[1:]:
        bars[Contender(_SPARSE_DIST, root).name] = Bar("at least", _OVER_PEER)
    for other, bar in bars.items():
        report.comparisons += [
            compare(samples, other, ours, clock, bar) for clock in ("wall", "cpu")
        ]


def _delay(report: Report, world: int, rounds: int) -> None:
    """How much of a delay of the exchange of ids a pipeline hides, beside the plain loop."""
    loops = PLAIN, _SPARSE_DIST
    samples = _measure(
        [Contender(each, delay=late) for each in loops for late in (0.0, DELAY)],
        SHAPE,
        world,
        rounds,
    )
    report.samples |= {f"delay: {name}": timings for name, timings in samples.items()}
    shares = _hidden_shares(samples)
    report.comparisons.append(
        Comparison(
            f"delay: share of {DELAY * 1e3:g} ms that {_SPARSE_DIST} hides",
            "wall",
            shares,
            Bar("at least", _HIDDEN),
        )
    )
    for loop in loops:
        late = compare(samples, Contender(loop, delay=DELAY).name, Contender(loop).name, "wall")
        assert late.medians is not None, "a comparison of samples has medians"
        cost = (late.medians[0] - late.medians[1]) * 1e3
        report.notes.append(
            f"ids {DELAY * 1e3:g} ms later: a step of the {loop} takes {cost:.2f} ms longer "
            "(medians)"
        )


def _hidden_shares(samples: dict[str, list[Sample]]) -> Ratio:
    """Of each round: the part of the delay by which the pipeline's step did not become longer."""

    def wall(loop: str, late: float) -> list[float]:
        return [sample.wall for sample in samples[Contender(loop, delay=late).name]]

    slower = [
        after - before
        for after, before in zip(wall(_SPARSE_DIST, DELAY), wall(_SPARSE_DIST, 0.0), strict=True)
    ]
    # A share can be negative, which a ratio cannot: 1 is added, and taken off the result.
    shifted = paired_ratio([max(1e-9, 2 * DELAY - more) for more in slower], [DELAY] * len(slower))
    return Ratio(shifted.median - 1, shifted.low - 1, shifted.high - 1, shifted.rounds)


def _prefetch(report: Report, world: int, rounds: int) -> None:
    """Rows read from the disk ahead, beside rows read when they are looked up."""
    if not measurable():
        report.notes.append("pages can be dropped on Linux only: nothing was read from the disk")
        return
    contenders = [Contender(_SPARSE_DIST), Contender(_PREFETCH)]
    with tempfile.TemporaryDirectory() as folder:
        samples = _measure(contenders, CACHED_SHAPE, world, rounds, folder)
    samples = {f"cache of 10 %: {name}": timings for name, timings in samples.items()}
    report.samples |= samples
    slow, fast = samples
    report.comparisons.append(
        compare(samples, slow, fast, "wall", Bar("at least", _OVER_SPARSE_DIST))
    )
    report.comparisons.append(compare(samples, slow, fast, "cpu"))


def _memory(report: Report, world: int) -> None:
    """The highest point of each loop, in new processes."""
    if not measurable():
        report.notes.append("memory is measured on Linux only")
        return
    peaks: dict[str, list[float]] = {PLAIN: [], _SPARSE_DIST: []}
    allowed = 1
    for _ in range(_MEMORY_RUNS):
        for pipeline, of_pipeline in peaks.items():
            with Ranks(world, backend="gloo", timeout=_TIMEOUT) as ranks:
                of_ranks = ranks.run(peak_memory, Contender(pipeline), MEMORY_SHAPE)
            of_pipeline.append(float(max(peak for peak, _ in of_ranks)))
            allowed = max(batch for _, batch in of_ranks)
    more = [max(1.0, after - before) for before, after in zip(*peaks.values(), strict=True)]
    report.comparisons.append(
        compare_memory(
            f"memory: peak of {_SPARSE_DIST} beyond the {PLAIN}'s / a batch and its ids",
            more,
            [float(allowed)] * len(more),
            1.0,
        )
    )
    for pipeline, of_pipeline in peaks.items():
        middle = sorted(of_pipeline)[len(of_pipeline) // 2] / 2**20
        report.notes.append(
            f"memory: {pipeline}: {middle:,.1f} MiB at the highest point (median of {_MEMORY_RUNS})"
        )


def _measure(
    contenders: Sequence[Contender],
    shape: Shape,
    world: int,
    rounds: int,
    folder: str | None = None,
) -> dict[str, list[Sample]]:
    """The slowest rank's measurements; refuses losses that differ."""
    with Ranks(world, backend="gloo", timeout=_TIMEOUT) as ranks:
        results = ranks.run(measure_contenders, contenders, shape, rounds, folder=folder)
    return agreed(results, f"losses of {', '.join(each.name for each in contenders)} differ")

"""Train pipelines beside the plain loop, with delays, a cache, memory, and TensorDict input.

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
- ``document``: the pipelines of TorchRec's pull request 2581, each with a TensorDict beside a
  KeyedJaggedTensor, with its lines as notes. The document's own tables are in the notebook
  ``document_5_tensordict``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import numpy as np

from benchmarks.harness import (
    Bar,
    Comparison,
    Ratio,
    Report,
    Sample,
    compare_memory,
    machine,
    paired_ratio,
)
from benchmarks.library import OURS, Sizes, chosen, chosen_world, libraries
from benchmarks.memory import measurable
from benchmarks.pipeline_rank import (
    PLAIN,
    Contender,
    measure_contenders,
    peak_memory,
)
from benchmarks.rows import Clock, Timed, add_row, against
from benchmarks.runner import Options
from benchmarks.train import add_examples
from benchmarks.train_rank import Shape
from tutorec.spmd.pool import Ranks

NAME = "pipeline"
ROUNDS = 30
WORLDS = (1, 2)

_SHAPE = Shape(Sizes(rows=20_000, columns=32, pooling=1, calls=10))
_CACHED_SHAPE = Shape(Sizes(rows=100_000, samples=32, calls=8))
_MEMORY_SHAPE = Shape(Sizes(rows=100, columns=4, pooling=20, samples=8192), dense_layers=(8,))
_DELAY = 0.005
_SPARSE_DIST = "TrainPipelineSparseDist"
_PREFETCH = "PrefetchTrainPipelineSparseDist"
# The pipelines of the pull request; it calls the last one TrainPipelinePrefetch.
_DOCUMENT_PIPELINES = ("TrainPipelineBase", _SPARSE_DIST, "TrainPipelineSemiSync", _PREFETCH)

# What plain loop / pipeline should be, by world.
_OVER_PLAIN = {1: 0.98, 2: 1.03}
_OVER_PEER = 1.05
_HIDDEN = Bar("at least", 0.70)
_OVER_SPARSE_DIST = 1.2
_TIMEOUT = 1800.0
_CLOCKS: tuple[Clock, ...] = ("wall", "cpu")


def run(options: Options) -> Report:
    """Measure in a world of ``options.world`` ranks, 2 by default.

    Args:
        options: Rounds, the peer, which ``--cases``, how many ranks.

    Returns:
        CPU and wall seconds of a step, ratios with their bars, the document's lines as notes.

    Raises:
        ValueError: The peer is not installed, an unknown case or world, or losses differ.
    """
    world_size = chosen_world(WORLDS, options.world)
    cases = chosen(CASES, options.cases, "--cases")
    libraries(options.vs)
    shape = options.fit(_SHAPE)
    settings = {
        "world": world_size,
        "tables": str(shape.tables),
        "B of a rank": shape.tables.samples,
        "steps": shape.tables.calls,
    }
    report = Report(NAME, settings, context=machine(options.vs))
    for name in cases:
        _CASES[name](report, options, world_size)
    return report


def _loop(report: Report, options: Options, world_size: int) -> None:
    """A pipeline beside the plain loop, and both beside the peer's."""
    shape = options.fit(_SHAPE)
    roots = [OURS, *([options.vs] if options.vs else [])]
    contenders = [Contender(pipeline, root) for root in roots for pipeline in (_SPARSE_DIST, PLAIN)]
    bars = against(Contender(PLAIN).name, _OVER_PLAIN[world_size])
    if options.vs:
        bars |= against(Contender(_SPARSE_DIST, options.vs).name, _OVER_PEER)

    results = _measure("loop", contenders, shape, options.rounds, world_size)
    add_row(report, "loop", results, bars, _CLOCKS, reference=contenders[0].name)
    add_examples(report, world_size * shape.tables.samples)


def _delay(report: Report, options: Options, world_size: int) -> None:
    """How much of a delay of the exchange of ids a pipeline hides, beside the plain loop."""
    loops = [PLAIN, _SPARSE_DIST]
    contenders = [Contender(loop, delay=delay) for loop in loops for delay in (0.0, _DELAY)]
    results = _measure("delay", contenders, options.fit(_SHAPE), options.rounds, world_size)
    add_row(report, "delay", results, {})
    samples = {way.name: report.samples[f"delay: {way.name}"] for way in contenders}
    title = f"delay: share of {_DELAY * 1e3:g} ms that {_SPARSE_DIST} hides"
    report.comparisons.append(Comparison(title, "wall", _hidden_share(samples), _HIDDEN))


def _hidden_share(samples: dict[str, list[Sample]]) -> Ratio:
    """Of each round: the share of the delay by which the pipeline's step did not become longer."""
    before = samples[Contender(_SPARSE_DIST).name]
    after = samples[Contender(_SPARSE_DIST, delay=_DELAY).name]
    slower = [late.wall - usual.wall for late, usual in zip(after, before, strict=True)]
    # A share can be negative, which a ratio cannot: 1 is added, and subtracted from the result.
    shifted = [max(1e-9, 2 * _DELAY - seconds) for seconds in slower]
    ratio = paired_ratio(shifted, [_DELAY] * len(slower))
    return Ratio(ratio.median - 1, ratio.low - 1, ratio.high - 1, ratio.rounds)


def _prefetch(report: Report, options: Options, world_size: int) -> None:
    """Rows read from the disk ahead, beside rows read when they are looked up."""
    if not measurable():
        report.notes.append("pages can be dropped on Linux only: nothing was read from the disk")
        return

    ahead = Contender(_PREFETCH)
    usual = Contender(_SPARSE_DIST)
    name = "cache of 10 %"
    shape = options.fit(_CACHED_SHAPE)
    with tempfile.TemporaryDirectory() as folder:
        results = _measure(name, [ahead, usual], shape, options.rounds, world_size, folder)
    bars = against(usual.name, _OVER_SPARSE_DIST)
    add_row(report, name, results, bars, _CLOCKS, "wall", reference=ahead.name)


def _memory(report: Report, options: Options, world_size: int) -> None:
    """The highest point of each loop, in new processes."""
    if not measurable():
        report.notes.append("memory is measured on Linux only")
        return

    shape = options.fit(_MEMORY_SHAPE)
    peaks: dict[str, list[float]] = {PLAIN: [], _SPARSE_DIST: []}
    allowed = 1
    for _ in range(options.memory_runs):
        for pipeline, pipeline_peaks in peaks.items():
            with Ranks(world_size, backend="gloo", timeout=_TIMEOUT) as ranks:
                results = ranks.run(peak_memory, Contender(pipeline), shape)
            pipeline_peaks.append(float(max(peak for peak, _ in results)))
            allowed = max(batch for _, batch in results)

    pairs = zip(peaks[PLAIN], peaks[_SPARSE_DIST], strict=True)
    more = [max(1.0, after - before) for before, after in pairs]
    title = f"memory: peak of {_SPARSE_DIST} beyond the {PLAIN}'s / a batch and its ids"
    report.comparisons.append(compare_memory(title, more, [float(allowed)] * len(more), 1.0))


def _document(report: Report, options: Options, world_size: int) -> None:
    """Each pipeline with a TensorDict beside a KeyedJaggedTensor."""
    if find_spec("tensordict") is None:
        report.notes.append("document: left out, tensordict is not installed")
        return

    for pipeline in _DOCUMENT_PIPELINES:
        jagged = Contender(pipeline)
        nested = Contender(pipeline, form="TD")
        name = f"document {pipeline}"
        shape = options.fit(_SHAPE)
        results = _measure(name, [jagged, nested], shape, options.rounds, world_size)
        bars = against(nested.name, None)
        add_row(report, name, results, bars, _CLOCKS, reference=jagged.name)
        for way in (nested, jagged):
            seconds = [sample.wall for sample in report.samples[f"{name}: {way.name}"]]
            milliseconds = float(np.percentile(seconds, 90)) * 1e3
            report.notes.append(
                f"{pipeline:<32} | Runtime (P90): {milliseconds:.3f} ms ({way.form})"
            )


def _measure(
    name: str,
    contenders: Sequence[Contender],
    shape: Shape,
    rounds: int,
    world_size: int,
    folder: str | None = None,
) -> list[Timed]:
    with Ranks(world_size, backend="gloo", timeout=_TIMEOUT) as ranks:
        return ranks.run(measure_contenders, name, contenders, shape, rounds, folder=folder)


_CASES: dict[str, Callable[[Report, Options, int], None]] = {
    "loop": _loop,
    "delay": _delay,
    "prefetch": _prefetch,
    "memory": _memory,
    "document": _document,
}
CASES = tuple(_CASES)

"""Cached tables beside tables in memory, and beside a file whose pages the system keeps by itself.

Tables in a file of which a share of the rows is in memory train on power-law ids, whose rows used
often lie anywhere. Judged is a training step of the embeddings (lookup and fused row-wise Adagrad;
no dense model) with 10 % of the rows in memory: at least 0.6 times as fast as with all rows in
memory. A measurement is the mean over so many steps that some of them move rows, after so many
batches that hits have settled.

Where the file does not fit in memory, the step is compared with one of the plain file, which
requests the pages of a batch together. There is no bar: which of the two is faster depends on the
popularity, on the size of a row and on the disk. No table here is that large: the pages of both
files are dropped before each measured step. The plain file then gets those pages back, unmeasured,
that are used most often, as many as hold the number of rows that the cache has in memory; a system
that chooses pages by itself does no better.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import cast

import torch
from torch import Tensor

from benchmarks.harness import (
    Bar,
    Comparison,
    Report,
    Sample,
    compare,
    interleave,
    machine,
    time_call,
)
from benchmarks.peer import chosen, on_one_thread
from benchmarks.runner import Options
from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec._kernels.pages import drop_pages
from tutorec._kernels.row_cache import CacheCounts
from tutorec._kernels.row_file import CacheAlgorithm, CacheSpec
from tutorec._kernels.table_specs import GroupSpec, TableSpec
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_build import build_table_batch
from tutorec._kernels.tbe_cached import CachedTableBatch
from tutorec.datasets.ids import power_law_ids
from tutorec.distributed.hit_rate import hit_rate

NAME = "cache"
ROUNDS = 30
SIZES = ("1", "5", "10", "20", "50")  # % of the rows

TABLES, ROWS, COLUMNS, POOLING, EXPONENT = 26, 100_000, 64, 10, 1.05
BATCH, FEW = 512, 32  # samples of a step; of one that reads from the disk
WARMUP, STEPS, FEW_STEPS = 300, 32, 4
_JUDGED = "10"
_OF_MEMORY = Bar("at least", 0.6)
_PAGE = 4096

_Batch = tuple[Tensor, Tensor]


def run(options: Options) -> Report:
    """Measure on one thread.

    Args:
        options: Rounds, and which ``--sizes``.

    Returns:
        Seconds of a step and their ratios; hit rates, rows a second and bytes moved as notes.

    Raises:
        ValueError: A size that there is not.
    """
    sizes = chosen(SIZES, options.sizes, "--sizes")
    settings = {
        "tables": f"{TABLES} x {ROWS:,} x {COLUMNS}",
        "B": BATCH,
        "ids per bag": POOLING,
        "exponent": EXPONENT,
        "steps a sample": STEPS,
        "threads": 1,
    }
    report = Report(NAME, settings, context=machine())
    with on_one_thread(), tempfile.TemporaryDirectory() as folder:
        in_memory = _build(None)
        for size in sizes:
            _beside_memory(report, in_memory, _spec(size, "lru", folder), options.rounds)
        if _JUDGED in sizes:
            _beside_memory(report, in_memory, _spec(_JUDGED, "lfu", folder), options.rounds)
        del in_memory
        if _JUDGED in sizes:
            _beside_file(report, folder, options.rounds)
    return report


def _spec(size: str, algorithm: CacheAlgorithm, folder: str) -> CacheSpec:
    return CacheSpec((ROWS * int(size) // 100,) * TABLES, algorithm, folder)


def _build(cache: CacheSpec | None) -> TableBatch:
    torch.manual_seed(0)
    tables = tuple(TableSpec(f"t{table}", ROWS, COLUMNS) for table in range(TABLES))
    rule = OptimizerSpec("rowwise_adagrad", 0.01)
    return build_table_batch(
        GroupSpec(tables, tuple(range(TABLES))),
        optimizer=rule,
        device=torch.device("cpu"),
        cache=cache,
    )


def _beside_memory(report: Report, in_memory: TableBatch, spec: CacheSpec, rounds: int) -> None:
    """A cache of one size beside tables in memory."""
    cached = cast(CachedTableBatch, _build(spec))
    name = f"{spec.rows[0] * 100 // ROWS} % of the rows, {spec.algorithm}"
    for number in range(WARMUP):
        _step(cached, _draw(-1 - number, BATCH))
    counted = replace(cached.counts)
    variants: dict[str, Callable[[int], Sample]] = {
        "all rows in memory": lambda number: _steps(in_memory, number),
        name: lambda number: _steps(cached, number),
    }
    samples = interleave(variants, rounds)
    judged = name == f"{_JUDGED} % of the rows, lru"
    for clock in ("cpu", "wall"):
        bar = _OF_MEMORY if judged and clock == "cpu" else None
        report.comparisons.append(
            compare(samples, "all rows in memory", name, clock=clock, bar=bar)
        )
    report.samples |= {
        f"{one} (beside {name})" if one != name else one: timings
        for one, timings in samples.items()
    }
    report.notes.append(_counted(name, spec, counted, cached.counts, report.comparisons[-1]))


def _counted(
    name: str, spec: CacheSpec, before: CacheCounts, after: CacheCounts, wall: Comparison
) -> str:
    """What a cache did in between, as a sentence."""
    counts = CacheCounts(
        after.lookups - before.lookups, after.read - before.read, after.written - before.written
    )
    ids = BATCH * TABLES * POOLING
    steps, row = counts.lookups / ids, 4 * (COLUMNS + 1)
    predicted = hit_rate(_law(), spec.rows[0], spec.algorithm, ids=BATCH * POOLING)
    assert wall.medians is not None, "a comparison of samples has medians"
    return (
        f"{name}: hit rate {counts.hit_rate:.3f} (predicted {predicted:.3f}), "
        f"{ids / wall.medians[1] / 1e6:.1f} million ids a second; "
        f"a step reads {counts.read / steps * row / 1e6:.1f} MB of the file and writes "
        f"{counts.written / steps * row / 1e6:.1f} MB"
    )


def _steps(tables: TableBatch, number: int) -> Sample:
    batches = iter([_draw(number * STEPS + step, BATCH) for step in range(STEPS)])
    return time_call(lambda: _step(tables, next(batches)), STEPS)


def _step(tables: TableBatch, batch: _Batch) -> None:
    """One training step, whose result is read."""
    pooled = tables(*batch)
    pooled.backward(torch.ones_like(pooled))


def _draw(number: int, samples: int) -> _Batch:
    """Ids of a batch, cut out of the drawn ones at a random place, and their offsets."""
    ids = samples * TABLES * POOLING
    draw = torch.Generator().manual_seed(number + 2**40)
    start = int(torch.randint(_drawn().numel() - ids, (), generator=draw))
    return _drawn()[start : start + ids], torch.arange(0, ids + 1, POOLING)


@lru_cache(maxsize=1)
def _drawn() -> Tensor:
    """As many ids as 64 batches have."""
    draw = torch.Generator().manual_seed(0)
    return scattered(ROWS)[power_law_ids(64 * BATCH * TABLES * POOLING, ROWS, EXPONENT, draw)]


@lru_cache(maxsize=1)
def scattered(rows: int) -> Tensor:
    """The row of each rank of popularity ``[R]``: in a file, neighbours are not used alike."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(1))


def _beside_file(report: Report, folder: str, rounds: int) -> None:
    """A cache beside the plain file: with both in memory, and with the pages of neither."""
    spec = _spec(_JUDGED, "lru", folder)
    cached, plain = _build(spec), _build(CacheSpec(folder=folder))
    name, file = f"{_JUDGED} % of the rows", "plain file"
    for number in range(WARMUP):
        _step(cached, _draw(-1 - number, BATCH))
    warm = f"{file}, all pages in memory", f"{name}, all pages in memory"
    samples = interleave(
        {
            warm[0]: lambda number: _steps(plain, number),
            warm[1]: lambda number: _steps(cached, number),
        },
        rounds,
    )
    report.comparisons.append(compare(samples, *warm))
    report.samples |= samples
    if not Path("/proc/self/maps").exists():
        report.notes.append("pages can be dropped on Linux only: nothing was read from the disk")
        return

    def cold(tables: TableBatch, number: int) -> Sample:
        steps = [cold_step(tables, FEW_STEPS * number + step) for step in range(FEW_STEPS)]
        return Sample(mean(sample.cpu for sample in steps), mean(sample.wall for sample in steps))

    def cold_step(tables: TableBatch, number: int) -> Sample:
        batch = _draw(number, FEW)
        drop_pages(folder)
        for weights, (state,) in zip(tables._tables, tables._states, strict=True):
            state.sum()
            if tables is plain:
                # Written, so that they are in memory as pages are which training uses often.
                numbers = weights.detach().view(-1)
                places = _most_used_pages(spec.rows[0]) * (_PAGE // 4)
                numbers.index_copy_(0, places, numbers.index_select(0, places))
        return time_call(lambda: _step(tables, batch))

    names = f"{file}, {_JUDGED} % of the pages in memory", f"{name} in memory, no pages"
    samples = interleave(
        {
            names[0]: lambda number: cold(plain, number),
            names[1]: lambda number: cold(cached, number),
        },
        rounds,
        3,
    )
    report.comparisons.append(compare(samples, *names, clock="wall"))
    report.samples |= samples


def _law() -> Tensor:
    """How often each rank of popularity is drawn ``[R]``, times a constant."""
    return torch.arange(1, ROWS + 1, dtype=torch.float64) ** -EXPONENT


@lru_cache(maxsize=1)
def _most_used_pages(rows: int) -> Tensor:
    """Of a table's pages those that are used most often, as many as hold so many rows."""
    a_page = _PAGE // (4 * COLUMNS)
    weights = torch.zeros(ROWS, dtype=torch.float64).index_copy_(0, scattered(ROWS), _law())
    by_page = weights[: ROWS // a_page * a_page].view(-1, a_page).sum(1)
    return by_page.topk(rows // a_page).indices

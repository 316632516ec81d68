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
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.harness import Bar, Report, Sample, compare, interleave, machine, time_call
from benchmarks.library import RATE, Sizes, chosen
from benchmarks.rows import Row, add_row, threads, time_row
from benchmarks.runner import Options
from tutorec._kernels.caches.cached_tables import CachedTableBatch
from tutorec._kernels.caches.row_cache import CacheAlgorithm, CacheCounts, CacheSpec
from tutorec._kernels.caches.row_file import drop_pages
from tutorec._kernels.specs import GroupSpec, OptimizerSpec, TableSpec
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_build import build_table_batch
from tutorec.datasets.ids import power_law_ids
from tutorec.distributed.hit_rate import hit_rate

NAME = "cache"
ROUNDS = 30
SIZES = ("1", "5", "10", "20", "50")  # % of the rows

_SIZES = Sizes(rows=100_000, samples=512, calls=32)
_COLD = replace(_SIZES, samples=32, calls=4)  # steps that read from the disk
_EXPONENT = 1.05
_WARMUP = 300
_JUDGED = "10"
_OF_MEMORY = Bar("at least", 0.6)
_PAGE = 4096
_IN_MEMORY = "all rows in memory"

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
    shares = chosen(SIZES, options.sizes, "--sizes")
    sizes = options.fit(_SIZES)
    settings = {
        "tables": str(sizes),
        "B": sizes.samples,
        "ids per bag": sizes.pooling,
        "exponent": _EXPONENT,
        "steps a sample": sizes.calls,
        "threads": 1,
    }
    report = Report(NAME, settings, context=machine())
    with threads(), tempfile.TemporaryDirectory() as folder:
        in_memory = _build(sizes, None)
        caches = [_spec(sizes, share, "lru", folder) for share in shares]
        if _JUDGED in shares:
            caches.append(_spec(sizes, _JUDGED, "lfu", folder))
        for cache in caches:
            _run_beside_memory(report, in_memory, cache, sizes, options.rounds)
        del in_memory
        if _JUDGED in shares:
            _run_beside_file(report, folder, sizes, options.fit(_COLD), options.rounds)
    return report


def _spec(sizes: Sizes, share: str, algorithm: CacheAlgorithm, folder: str) -> CacheSpec:
    return CacheSpec((sizes.rows * int(share) // 100,) * sizes.tables, algorithm, folder)


def _build(sizes: Sizes, cache: CacheSpec | None) -> TableBatch:
    torch.manual_seed(0)
    tables = tuple(TableSpec(key, sizes.rows, sizes.columns) for key in sizes.keys())
    return build_table_batch(
        GroupSpec(tables, tuple(range(sizes.tables))),
        optimizer=OptimizerSpec("rowwise_adagrad", RATE),
        device=torch.device("cpu"),
        cache=cache,
    )


def _warm(sizes: Sizes, cache: CacheSpec) -> CachedTableBatch:
    """Tables behind a cache whose hits have settled."""
    tables = cast(CachedTableBatch, _build(sizes, cache))
    for number in range(_WARMUP):
        _step(tables, _draw(sizes, -1 - number))
    return tables


def _step(tables: TableBatch, batch: _Batch) -> None:
    """One training step, whose result is read."""
    pooled = tables(*batch)
    pooled.backward(torch.ones_like(pooled))


def _steps_row(name: str, tables: dict[str, TableBatch], sizes: Sizes) -> Row:
    """Training steps of several tables on the same batches."""

    def call_of(side: str) -> Callable[[Any], None]:
        return lambda batch: _step(tables[side], batch)

    def inputs(_: str, number: int) -> list[_Batch]:
        return [_draw(sizes, number * sizes.calls + step) for step in range(sizes.calls)]

    return Row(name, {side: call_of(side) for side in tables}, inputs, most=None, checked=True)


def _run_beside_memory(
    report: Report, in_memory: TableBatch, cache: CacheSpec, sizes: Sizes, rounds: int
) -> None:
    """A cache of one size beside tables in memory."""
    cached = _warm(sizes, cache)
    before = replace(cached.counts)
    share = cache.rows[0] * 100 // sizes.rows
    name = f"{share} % of the rows, {cache.algorithm}"
    row = _steps_row(name, {"cached": cached, _IN_MEMORY: in_memory}, sizes)
    timed = time_row(row, rounds)

    judged = str(share) == _JUDGED and cache.algorithm == "lru"
    bars = {_IN_MEMORY: _OF_MEMORY if judged else None}
    add_row(report, name, timed, bars, ["cpu", "wall"], "cpu", reference="cached")
    wall = report.comparisons[-1].medians
    assert wall is not None, "a comparison of samples has medians"
    report.notes.append(f"{name}: {_counted(sizes, cache, before, cached.counts, wall[1])}")


def _counted(
    sizes: Sizes, cache: CacheSpec, before: CacheCounts, after: CacheCounts, seconds: float
) -> str:
    """The work of a cache between two counts, as a sentence; seconds are those of a step."""
    lookups = after.lookups - before.lookups
    read = after.read - before.read
    written = after.written - before.written
    counts = CacheCounts(lookups, read, written)

    bag_ids = sizes.samples * sizes.pooling
    ids = bag_ids * sizes.tables
    steps = lookups / ids
    row_bytes = 4 * (sizes.columns + 1)
    predicted = hit_rate(_law(sizes.rows), cache.rows[0], cache.algorithm, ids=bag_ids)
    return (
        f"hit rate {counts.hit_rate:.3f} (predicted {predicted:.3f}), "
        f"{ids / seconds / 1e6:.1f} million ids a second; "
        f"a step reads {read / steps * row_bytes / 1e6:.1f} MB of the file and writes "
        f"{written / steps * row_bytes / 1e6:.1f} MB"
    )


def _draw(sizes: Sizes, number: int) -> _Batch:
    """Ids of a batch, a random range of the drawn ones, and their offsets."""
    ids = sizes.samples * sizes.tables * sizes.pooling
    drawn = _drawn(sizes.rows, 64 * ids)
    draw = torch.Generator().manual_seed(number + 2**40)
    start = int(torch.randint(drawn.numel() - ids, (), generator=draw))
    return drawn[start : start + ids], torch.arange(0, ids + 1, sizes.pooling)


@lru_cache(maxsize=2)
def _drawn(rows: int, count: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return scattered(rows)[power_law_ids(count, rows, _EXPONENT, draw)]


@lru_cache(maxsize=1)
def scattered(rows: int) -> Tensor:
    """The row of each rank of popularity ``[R]``: in a file, neighbours are not used alike."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(1))


def _run_beside_file(
    report: Report, folder: str, sizes: Sizes, cold_sizes: Sizes, rounds: int
) -> None:
    """A cache beside the plain file: with both in memory, and with the pages of neither."""
    cache = _spec(sizes, _JUDGED, "lru", folder)
    tables = {"cached": _warm(sizes, cache), "plain": _build(sizes, CacheSpec(folder=folder))}
    name = f"{_JUDGED} % of the rows, all pages in memory"
    timed = time_row(_steps_row(name, tables, sizes), rounds)
    add_row(report, name, timed, {"plain": None}, reference="cached")
    if not Path("/proc/self/maps").exists():
        report.notes.append("pages can be dropped on Linux only: nothing was read from the disk")
        return

    pages = _most_used_pages(sizes, cache.rows[0]) * (_PAGE // 4)

    def cold_step(side: str, number: int) -> Sample:
        batch = _draw(cold_sizes, number)
        drop_pages(folder)
        for weights, (state,) in zip(tables[side]._tables, tables[side]._states, strict=True):
            state.sum()
            if side == "plain":
                # Written, so that they are in memory as pages are which training uses often.
                numbers = weights.detach().view(-1)
                numbers.index_copy_(0, pages, numbers.index_select(0, pages))
        return time_call(lambda: _step(tables[side], batch))

    def measure_of(side: str) -> Callable[[int], Sample]:
        def measure(number: int) -> Sample:
            first = cold_sizes.calls * number
            steps = [cold_step(side, first + step) for step in range(cold_sizes.calls)]
            return Sample(mean(step.cpu for step in steps), mean(step.wall for step in steps))

        return measure

    titles = {
        "plain": f"plain file, {_JUDGED} % of the pages in memory",
        "cached": f"{_JUDGED} % of the rows in memory, no pages",
    }
    samples = interleave({title: measure_of(side) for side, title in titles.items()}, rounds, 3)
    report.comparisons.append(compare(samples, *titles.values(), clock="wall"))
    report.samples |= samples


def _law(rows: int) -> Tensor:
    """How often each rank of popularity is drawn ``[R]``, times a constant."""
    return torch.arange(1, rows + 1, dtype=torch.float64) ** -_EXPONENT


def _most_used_pages(sizes: Sizes, rows: int) -> Tensor:
    """Of a table's pages those that are used most often, as many as hold so many rows."""
    page_rows = _PAGE // (4 * sizes.columns)
    weights = torch.zeros(sizes.rows, dtype=torch.float64)
    weights.index_copy_(0, scattered(sizes.rows), _law(sizes.rows))
    pages = weights[: sizes.rows // page_rows * page_rows].view(-1, page_rows).sum(1)
    return pages.topk(rows // page_rows).indices

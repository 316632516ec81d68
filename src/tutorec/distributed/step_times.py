"""Training steps of embedding tables, timed side by side: in memory, behind a cache, in a file."""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tutorec._check import require_int
from tutorec._kernels.caches.row_cache import CacheCounts
from tutorec._kernels.caches.row_file import blocks_read, drop_pages
from tutorec._text import TextTable, number_text
from tutorec.datasets.ids import power_law_ids
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = [
    "StepSample",
    "StepTime",
    "StepTimes",
    "StepWorkload",
    "measure_steps",
    "measure_workload",
]

_MS_DIGITS = 3
_BLOCK = 512  # bytes of what the system calls a block
_FLOAT = 4  # bytes


@dataclass(frozen=True)
class StepSample:
    """One way in one round, the mean of its steps.

    Args:
        wall: Seconds of a step.
        cpu: Seconds of all processors in a step.
        whole: Wall seconds of a step, with what came before it.
        counts: What the caches did in all steps of the round; None without a cache.
        steps: How many there were.
        pages: Pages that a step read from the disk.
    """

    wall: float
    cpu: float
    whole: float
    counts: CacheCounts | None
    steps: int
    pages: float


@dataclass(frozen=True)
class StepTime:
    """What a step takes.

    Args:
        ms: Median of the rounds, milliseconds of wall time.
        ratio: Median over the rounds of the time against that of the first way in the same round.
        hit_rate: Of the caches, from 0 to 1; None without a cache.
        reads: Rows that a step reads from the file because they have no slot; None without a cache.
        pages: Pages that a step reads from the disk, the median of the rounds.
        whole_ms: As ``ms``, with what was to be done before the step; None if that was nothing.
    """

    ms: float
    ratio: float
    hit_rate: float | None
    reads: float | None
    pages: float
    whole_ms: float | None


class StepTimes(Mapping[str, StepTime]):
    """Name -> times of a way to keep tables; prints as a table, in a notebook as HTML.

    Args:
        rounds: Name -> one sample for each round.
        note: A line below the table; empty: none.
        has_before: Whether something was done before each step.
    """

    def __init__(
        self, rounds: Mapping[str, list[StepSample]], note: str = "", has_before: bool = False
    ) -> None:
        self.rounds = dict(rounds)
        self.note = note

        first = next(iter(self.rounds.values()))
        self._times = {
            name: _step_time(samples, first, has_before) for name, samples in self.rounds.items()
        }

    def __getitem__(self, name: str) -> StepTime:
        return self._times[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._times)

    def __len__(self) -> int:
        return len(self._times)

    def __repr__(self) -> str:
        return "\n".join(filter(None, [repr(self._table()), self.note]))

    def _repr_html_(self) -> str:
        return self._table().html() + (f"<p>{escape(self.note)}</p>" if self.note else "")

    def _table(self) -> TextTable:
        columns: dict[str, list[str]] = {
            "ms a step": [number_text(step_time.ms, _MS_DIGITS) for step_time in self.values()],
            "ratio": [f"{step_time.ratio:.2f}" for step_time in self.values()],
        }

        if any(step_time.whole_ms is not None for step_time in self.values()):
            columns["ms in all"] = [
                number_text(step_time.whole_ms or 0.0, _MS_DIGITS) for step_time in self.values()
            ]
        if any(step_time.hit_rate is not None for step_time in self.values()):
            columns["hit rate"] = [
                "" if step_time.hit_rate is None else f"{100 * step_time.hit_rate:.1f} %"
                for step_time in self.values()
            ]
            columns["rows read"] = [
                "" if step_time.reads is None else f"{step_time.reads:,.0f}"
                for step_time in self.values()
            ]
        if any(step_time.pages for step_time in self.values()):
            columns["pages from disk"] = [f"{step_time.pages:,.0f}" for step_time in self.values()]

        rows = [*zip(self, *columns.values(), strict=True)]
        return TextTable(["table", *columns], rows, right=range(1, 1 + len(columns)))


def _step_time(samples: list[StepSample], of_first: list[StepSample], has_before: bool) -> StepTime:
    counts = [sample.counts for sample in samples if sample.counts is not None]
    lookups = sum(count.lookups for count in counts)
    read = sum(count.read for count in counts)

    return StepTime(
        ms=1e3 * median(sample.wall for sample in samples),
        ratio=median(own.wall / first.wall for own, first in zip(samples, of_first, strict=True)),
        hit_rate=1 - read / lookups if lookups else None,
        reads=read / sum(sample.steps for sample in samples) if counts else None,
        pages=median(sample.pages for sample in samples),
        whole_ms=1e3 * median(sample.whole for sample in samples) if has_before else None,
    )


@dataclass(frozen=True)
class StepWorkload:
    """What is trained, and how often.

    Args:
        ids: Ids of each feature in a batch.
        exponent: Of the power law that they follow; see `power_law_ids`. Popular rows are anywhere
            in a table.
        ids_per_bag: How many ids each bag has.
        rounds: So many rounds are counted, after one that is not.
        steps: Steps of each way in a round.
        settle: So many steps come first, so that caches are filled with popular rows. The first of
            them uses every row once.

    Raises:
        ValueError: A number is out of range, or the ids do not fill the bags.
    """

    ids: int
    exponent: float = 1.05
    ids_per_bag: int = 4
    rounds: int = 8
    steps: int = 10
    settle: int = 96

    def __post_init__(self) -> None:
        require_int("StepWorkload: ids_per_bag", self.ids_per_bag, 1)
        require_int("StepWorkload: ids", self.ids, self.ids_per_bag)
        require_int("StepWorkload: rounds", self.rounds, 1)
        require_int("StepWorkload: steps", self.steps, 1)
        require_int("StepWorkload: settle", self.settle, 0)
        if self.ids % self.ids_per_bag:
            raise ValueError(
                f"ids={self.ids} of a feature do not fill bags of {self.ids_per_bag}: choose a "
                "multiple"
            )


def measure_steps(
    ways: Mapping[str, Any],
    *,
    ids: int,
    exponent: float = 1.05,
    rounds: int = 8,
    cold: str | None = None,
    page_memory: Mapping[str, int] | None = None,
    before: Callable[[], object] | None = None,
    ahead: Collection[str] = (),
) -> StepTimes:
    """Time training steps of the same tables, kept in different ways.

    A step is a lookup of one batch, and a backward that updates the rows. Batches are new in each
    round and the same for all ways, which take turns in a random order of each round. So a
    machine that becomes slower makes all of them slower, and a ratio compares steps that ran
    moments apart. Each way makes 96 steps first, and ten in a round, or one with ``cold``; see
    `measure_workload` for other numbers.

    Args:
        ways: Name -> a sharded or unsharded collection of pooled tables on the CPU, all with the
            same tables. Ratios are against the first.
        ids: Ids of each feature in a batch, in bags of four.
        exponent: Of the power law that ids follow.
        rounds: How many rounds are counted.
        cold: A folder of tables in files, whose pages are dropped from memory before each step.
        page_memory: Name -> bytes of its pages that a table without a cache has in memory all the
            same: those of the state, then those of the rows that are used most. So a cache and a
            file can be compared that take the same memory. With ``cold`` only.
        before: Is called before each step, like what a model computes outside its tables.
        ahead: Names of ways that read the rows of the batch from the disk while ``before`` runs.

    Returns:
        Name -> times of a way, which print as a table.

    Raises:
        ValueError: There are no ways, their tables differ, a number is out of range, a name is not
            that of a way, one that should read ahead cannot, or ``cold`` is not a folder.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> config = EmbeddingBagConfig(1000, 4, "item", feature_names=["item"])
        >>> narrow = EmbeddingBagCollection([config])
        >>> config = EmbeddingBagConfig(1000, 64, "item", feature_names=["item"])
        >>> wide = EmbeddingBagCollection([config])
        >>> measure_steps({"narrow": narrow, "wide": wide}, ids=64, rounds=2)
        table   ms a step  ratio
        ------  ---------  -----
        narrow      ...   1.00
        wide        ...
        >>> measure_steps({"one": narrow}, ids=64, rounds=2)["one"].ratio
        1.0
    """
    steps = 1 if cold else StepWorkload.steps
    workload = StepWorkload(ids, exponent, rounds=rounds, steps=steps)
    return measure_workload(
        ways, workload, cold=cold, page_memory=page_memory, before=before, ahead=ahead
    )


def measure_workload(
    ways: Mapping[str, Any],
    workload: StepWorkload,
    *,
    cold: str | None = None,
    page_memory: Mapping[str, int] | None = None,
    before: Callable[[], object] | None = None,
    ahead: Collection[str] = (),
) -> StepTimes:
    """Time training steps as `measure_steps` does, with a workload of your own.

    Args:
        ways: Name -> collection.
        workload: What is trained, and how often.
        cold: A folder whose pages are dropped from memory before each step.
        page_memory: Name -> bytes of its pages that a table without a cache has in memory.
        before: Is called before each step.
        ahead: Names of ways that read the rows of the batch while ``before`` runs.

    Raises:
        ValueError: There are no ways, their tables differ, a name is not that of a way, one that
            should read ahead cannot, or ``cold`` is not a folder.
    """
    page_memory = page_memory or {}
    for name in (*page_memory, *ahead):
        if name not in ways:
            raise ValueError(f"{name!r} is not one of the ways {[*ways]}")
    for name in ahead:
        if not hasattr(ways[name], "prefetch"):
            raise ValueError(
                f"{name!r} cannot read rows ahead: shard it with the kernel 'fused_uvm_caching'"
            )
    if cold and not Path(cold).is_dir():
        raise ValueError(f"cold={cold!r} is not a folder: pass the one in which the tables are")

    batches = _Batches(ways, workload)
    steps = workload.steps

    for number in range(workload.settle):
        batch = batches.draw(number) if number else batches.every_row()
        for way in {id(way): way for way in ways.values()}.values():
            _step(way, batch)

    names = [*ways]
    order = random.Random(0)
    rounds_of_way: dict[str, list[StepSample]] = {name: [] for name in names}
    for round_number in range(-1, workload.rounds):
        first = workload.settle + steps * (1 + round_number)
        round_batches = [batches.draw(number) for number in range(first, first + steps)]
        order.shuffle(names)
        for name in names:
            pages: list[tuple[Tensor, Tensor]] = []
            if cold and name in page_memory:
                pages = batches.most_used_pages(ways[name], page_memory[name])
            sample = _measured(ways[name], round_batches, cold, pages, before, name in ahead)
            if round_number >= 0:
                rounds_of_way[name].append(sample)

    read = any(sample.pages for samples in rounds_of_way.values() for sample in samples)
    note = ""
    if cold and not read:
        note = f"not read from a disk: {cold} is in memory, or the system keeps its pages there"
    return StepTimes(rounds_of_way, note, has_before=before is not None)


def _measured(
    way: Any,
    batches: list[KeyedJaggedTensor],
    cold: str | None,
    pages: list[tuple[Tensor, Tensor]],
    before: Callable[[], object] | None,
    reads_ahead: bool,
) -> StepSample:
    """The steps of one way in one round."""
    counts_before = _counts(way)
    wall = 0.0
    cpu = 0.0
    total = 0.0
    blocks = 0
    for batch in batches:
        if cold:
            drop_pages(cold)
            for numbers, positions in pages:
                # Written, so that they are in memory like pages that training uses often.
                numbers.index_copy_(0, positions, numbers.index_select(0, positions))

        total_start = time.perf_counter()
        if reads_ahead:
            way.prefetch(way.input_dist(way.create_context(), batch).wait().wait())
        if before is not None:
            before()

        blocks_before = blocks_read()
        cpu_start = time.process_time()
        start = time.perf_counter()
        _step(way, batch)
        end = time.perf_counter()
        cpu += time.process_time() - cpu_start
        blocks += blocks_read() - blocks_before
        wall += end - start
        total += end - total_start

    number = len(batches)
    counts = _counts(way)
    return StepSample(
        wall=wall / number,
        cpu=cpu / number,
        whole=total / number,
        counts=None if counts is None or counts_before is None else counts.since(counts_before),
        steps=number,
        pages=blocks * _BLOCK / mmap.PAGESIZE / number,
    )


def _step(way: Any, batch: KeyedJaggedTensor) -> None:
    """One training step, whose result is read."""
    pooled = way(batch).values()
    pooled.backward(torch.ones_like(pooled))


def _counts(way: Any) -> CacheCounts | None:
    """What the caches of a way have done so far; None if it has none."""
    counts: list[CacheCounts] = way.cache_counts() if hasattr(way, "cache_counts") else []
    if not counts:
        return None
    return CacheCounts(
        sum(count.lookups for count in counts),
        sum(count.read for count in counts),
        sum(count.written for count in counts),
    )


class _Batches:
    """The batches of a measurement, each a function of its number.

    Args:
        ways: The collections, whose tables have to agree.
        workload: What is drawn.
    """

    def __init__(self, ways: Mapping[str, Any], workload: StepWorkload) -> None:
        if not ways:
            raise ValueError("pass at least one way to keep the tables, as {name: collection}")

        tables = {name: self._rows_of_features(way) for name, way in ways.items()}
        first, *others = tables
        for other in others:
            if tables[other] != tables[first]:
                raise ValueError(
                    f"{other!r} has features with rows {tables[other]}, and "
                    f"{first!r} {tables[first]}: measure the same tables"
                )

        self._rows = tables[first]
        self._workload = workload
        bags = len(self._rows) * workload.ids // workload.ids_per_bag
        self._lengths = torch.full((bags,), workload.ids_per_bag)
        # Number of rows of a table -> its rows in the order of popularity ``[rows]``.
        self._row_of_rank = {
            rows: torch.randperm(rows, generator=torch.Generator().manual_seed(1))
            for rows in {*self._rows.values()}
        }

    @staticmethod
    def _rows_of_features(way: Any) -> dict[str, int]:
        return {
            feature: table.num_embeddings
            for table in way.embedding_bag_configs()
            for feature in table.feature_names
        }

    def every_row(self) -> KeyedJaggedTensor:
        """One bag of each feature, with all rows of its table."""
        ids = torch.cat([torch.arange(rows) for rows in self._rows.values()])
        return KeyedJaggedTensor([*self._rows], ids, lengths=torch.tensor([*self._rows.values()]))

    def draw(self, number: int) -> KeyedJaggedTensor:
        """The batch of this number."""
        source = torch.Generator().manual_seed(number)
        ids = self._workload.ids
        drawn = [
            self._row_of_rank[rows][power_law_ids(ids, rows, self._workload.exponent, source)]
            for rows in self._rows.values()
        ]
        return KeyedJaggedTensor([*self._rows], torch.cat(drawn), lengths=self._lengths)

    def most_used_pages(self, way: Any, memory: int) -> list[tuple[Tensor, Tensor]]:
        """Pages of a way's tables that take so many bytes: (numbers of a tensor, one a page).

        Row-wise state comes first, since a page of it has the state of a thousand rows.
        """
        most_used: list[tuple[Tensor, Tensor]] = []
        tables = way.embedding_bag_configs()
        states = [[*table_states.values()] for table_states in way.fused_optimizer.state.values()]

        for parameter, table_states, table in zip(way.parameters(), states, tables, strict=True):
            left = memory // len(tables)
            for numbers in sorted([parameter, *table_states], key=lambda one: one.dim()):
                if not numbers.dim():
                    continue
                numbers = numbers.detach()
                pages = self._pages_by_use(numbers, table.num_embeddings)
                pages = pages[: left // mmap.PAGESIZE]
                left -= len(pages) * mmap.PAGESIZE
                most_used.append((numbers.reshape(-1), pages * (mmap.PAGESIZE // _FLOAT)))
        return most_used

    def _pages_by_use(self, numbers: Tensor, rows: int) -> Tensor:
        """Pages of the numbers of a table's rows, those that are used most first."""
        law = torch.arange(1, rows + 1, dtype=torch.float64) ** -self._workload.exponent
        uses = torch.zeros(rows, dtype=torch.float64).index_copy_(0, self._row_of_rank[rows], law)

        row_bytes = _FLOAT * numbers.numel() // rows
        first_page = torch.arange(rows) * row_bytes // mmap.PAGESIZE
        uses_per_page = torch.zeros(int(first_page[-1]) + 1, dtype=torch.float64)
        return uses_per_page.index_add_(0, first_page, uses).argsort(descending=True)

"""Steps timed side by side: what is counted, who is compared, and what the table says."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutorec._kernels.caches.row_cache import CacheCounts
from tutorec._kernels.caches.row_file import zeros_in_file
from tutorec.distributed import step_times
from tutorec.distributed.cache import CacheParams
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.distributed.step_times import (
    StepSample,
    StepTimes,
    StepWorkload,
    measure_steps,
    measure_workload,
)
from tutorec.distributed.types import ShardingEnv
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.spmd import device

ROWS = 4096
linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are dropped on Linux only")


def build(kernel: str, folder: Path | None = None, load_factor: float | None = None) -> Any:
    config = EmbeddingBagConfig(ROWS, 64, "item", feature_names=["item", "clicked"])
    ebc = EmbeddingBagCollection([config], device=torch.device("meta"))
    kernels = {"item": table_wise(0, compute_kernel=kernel)}
    plan = construct_module_sharding_plan(ebc, kernels, local_size=1, world_size=1)
    if folder is not None:
        plan["item"].cache_params = CacheParams(load_factor=load_factor, folder=str(folder))
    sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_row_wise_adagrad"})
    return sharder.shard(ebc, plan, ShardingEnv.from_local(1, 0), device())


def sample(wall: float, counts: CacheCounts | None = None, pages: float = 0.0) -> StepSample:
    return StepSample(wall, wall, 2 * wall, counts, steps=10, pages=pages)


def test_a_ratio_is_the_median_over_the_rounds_and_not_that_of_the_medians() -> None:
    times = StepTimes(
        {
            "memory": [sample(wall) for wall in (1.0, 2.0, 4.0)],
            "file": [sample(wall) for wall in (3.0, 2.0, 8.0)],
        }
    )
    assert times["file"].ms == 3000.0 and times["memory"].ms == 2000.0
    assert times["memory"].ratio == 1.0
    assert times["file"].ratio == 2.0
    assert times["file"].whole_ms is None and times["file"].hit_rate is None


def test_numbers_are_printed_with_their_units_and_empty_columns_are_not() -> None:
    counts = CacheCounts(lookups=1000, read=250)
    times = StepTimes(
        {
            "memory": [sample(0.00123456)],
            "cache": [sample(0.0123456, counts, pages=1234.0)],
        },
        note="a note",
        has_before=True,
    )
    lines = repr(times).splitlines()
    assert lines[0].split("  ")[0] == "table"
    assert "ms a step" in lines[0] and "pages from disk" in lines[0]
    assert lines[2].split() == ["memory", "1.23", "1.00", "2.47", "0"]
    assert lines[3].split() == ["cache", "12.3", "10.00", "24.7", "75.0", "%", "25", "1,234"]
    assert lines[4] == "a note"
    assert "<table>" in times._repr_html_() and times._repr_html_().endswith("<p>a note</p>")
    assert repr(StepTimes({"memory": [sample(1.0)]})).splitlines()[0].split() == [
        *["table", "ms", "a", "step", "ratio"]
    ]


def test_a_cache_counts_its_hits_and_a_table_in_memory_has_none(tmp_path: Path) -> None:
    ways = {
        "memory": build("fused"),
        "all in slots": build("fused_uvm_caching", tmp_path, 1.0),
        "few in slots": build("fused_uvm_caching", tmp_path, 0.01),
        "file": build("fused_uvm", tmp_path),
    }
    times = measure_workload(ways, StepWorkload(ids=128, rounds=2, steps=2, settle=3))
    assert [*times] == [*ways] and len(times) == 4
    assert times["memory"].hit_rate is None and times["file"].reads is None
    # The first batch of those that settle uses every row once.
    assert (times["all in slots"].hit_rate, times["all in slots"].reads) == (1.0, 0.0)
    reads = times["few in slots"].reads
    assert reads is not None and 0 < reads < 2 * 128
    assert times["few in slots"].hit_rate == 1 - reads / (2 * 128)
    assert all(one.ms > 0 and one.ratio > 0 for one in times.values())
    assert all(len(samples) == 2 for samples in times.rounds.values())


class Recorded(nn.Module):
    """A collection that remembers the ids that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.config = EmbeddingBagConfig(100, 4, "item", feature_names=["item"])
        self.collection = EmbeddingBagCollection([self.config])

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return [self.config]

    def forward(self, batch: Any) -> Any:
        self.seen.append(batch.values())
        return self.collection(batch)


def test_all_ways_train_on_the_same_batches_which_are_new_in_each_round() -> None:
    ways = {name: Recorded() for name in ("one", "other")}
    measure_workload(ways, StepWorkload(ids=40, rounds=3, steps=2, settle=2))
    one, other = (way.seen for way in ways.values())
    assert all(map(torch.equal, one, other))
    assert len(one) == 2 + 2 * (1 + 3)  # one round is not counted
    assert one[0].sort().values.tolist() == [*range(100)]
    assert len({tuple(ids.tolist()) for ids in one}) == len(one)
    assert [len(ids) for ids in one[1:]] == [40] * 9


def test_a_way_that_has_two_names_settles_once() -> None:
    way = Recorded()
    measure_workload({"one": way, "other": way}, StepWorkload(ids=40, rounds=1, steps=1, settle=5))
    assert len(way.seen) == 5 + 2 * 2


def test_what_comes_before_a_step_is_called_and_counted_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    way = build("fused_uvm_caching", tmp_path, 0.1)
    monkeypatch.setattr(way, "prefetch", lambda moved: calls.append("prefetch"))
    times = measure_workload(
        {"late": way, "early": way},
        StepWorkload(ids=128, rounds=2, steps=1, settle=1),
        before=lambda: calls.append("before"),
        ahead=["early"],
    )
    assert sorted(calls) == ["before"] * 6 + ["prefetch"] * 3
    assert all(
        calls[number + 1] == "before" for number, call in enumerate(calls) if call == "prefetch"
    )
    for one in times.values():
        assert one.whole_ms is not None and one.whole_ms >= one.ms
    assert "ms in all" in repr(times)


@linux
def test_pages_are_dropped_before_each_step_and_some_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[str] = []
    restored: list[int] = []
    measured = step_times._measured

    def note_pages(way: Any, batches: Any, cold: Any, pages: Any, *others: Any) -> StepSample:
        restored.append(sum(len(places) for _, places in pages))
        return measured(way, batches, cold, pages, *others)

    monkeypatch.setattr(step_times, "drop_pages", dropped.append)
    monkeypatch.setattr(step_times, "_measured", note_pages)
    ways = {
        "file": build("fused_uvm", tmp_path),
        "cache": build("fused_uvm_caching", tmp_path, 0.1),
    }
    folder = str(tmp_path)
    times = measure_steps(ways, ids=128, rounds=2, cold=folder, page_memory={"file": 20 * 4096})
    assert dropped == [folder] * 2 * 3
    assert sorted(restored) == [0] * 3 + [20] * 3
    if not any(one.pages for one in times.values()):  # nothing was dropped really
        assert times.note.startswith(f"not read from a disk: {folder}")
        assert repr(times).endswith(times.note)


def test_restored_pages_are_those_of_popular_rows_and_keep_their_numbers(tmp_path: Path) -> None:
    way = build("fused_uvm", tmp_path)
    batches = step_times._Batches({"file": way}, StepWorkload(128))
    [(state, of_state), (weights, of_weights)] = batches.most_used_pages(way, 20 * 4096)
    assert (len(of_state), len(of_weights)) == (4, 16)  # 4,096 rows of 4 bytes take 4 pages
    most_popular = int(batches._row_of_rank[ROWS][0])
    assert most_popular * 64 // 1024 == int(of_weights[0]) // 1024
    assert weights.numel() == ROWS * 64 and state.numel() == ROWS


@linux
def test_dropped_pages_are_read_again_and_hold_what_was_written(tmp_path: Path) -> None:
    from tutorec._kernels.caches.row_file import drop_pages

    numbers = zeros_in_file(100_000, folder=str(tmp_path))
    numbers.fill_(3.0)
    assert drop_pages(str(tmp_path))
    assert torch.equal(numbers, torch.full_like(numbers, 3.0))


@linux
def test_dropping_pages_leaves_what_only_this_process_has_changed(tmp_path: Path) -> None:
    """A library that was loaded from below the folder keeps its data."""
    from tutorec._kernels.caches.row_file import drop_pages

    path = tmp_path / "library.so"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file:
        private = mmap.mmap(file.fileno(), 8192, access=mmap.ACCESS_COPY)
    private[0] = 7
    assert drop_pages(str(tmp_path))
    assert private[0] == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ways": {}}, "at least one way"),
        ({"ids": 30}, "ids=30 of a feature do not fill bags of 4"),
        ({"rounds": 0}, "rounds"),
        ({"ahead": ["cache"]}, r"'cache' is not one of the ways \['memory'\]"),
        ({"page_memory": {"file": 8}}, "'file' is not one of the ways"),
        ({"ahead": ["memory"]}, "'memory' cannot read rows ahead.*fused_uvm_caching"),
        ({"cold": "/no/such/folder"}, "cold='/no/such/folder' is not a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"ways": {"memory": Recorded()}, "ids": 40} | change
    with pytest.raises(ValueError, match=message):
        measure_steps(**arguments)


def test_ways_with_other_tables_are_refused() -> None:
    larger = Recorded()
    larger.config = EmbeddingBagConfig(200, 4, "item", feature_names=["item"])
    with pytest.raises(ValueError, match=r"'other'.*rows \{'item': 200\}"):
        measure_steps({"one": Recorded(), "other": larger}, ids=40)


def test_the_order_of_ways_is_drawn_anew_for_each_round() -> None:
    ways = {name: Recorded() for name in "abcd"}
    order: list[str] = []
    for name, way in ways.items():
        way.register_forward_hook(lambda *_, name=name: order.append(name))
    measure_workload(ways, StepWorkload(ids=40, rounds=5, steps=1, settle=0))
    turns = [tuple(order[first : first + 4]) for first in range(0, len(order), 4)]
    assert len(turns) == 6 and all(sorted(turn) == [*"abcd"] for turn in turns)
    assert len({*turns}) > 2

"""Tables that grow: which id has which row after every batch, against the policy written out with
dicts.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tutorec.distributed.checkpoint import load_checkpoint, save_checkpoint
from tutorec.errors import CheckpointError
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.frequency import FrequencySketch
from tutorec.modules.growing import GrowingManagedCollisionModule
from tutorec.modules.mc_base import ManagedCollisionModule
from tutorec.modules.mc_evictions import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHEvictionPolicy,
)
from tutorec.modules.mc_modules import ManagedCollisionCollection
from tutorec.sparse.hashing import mix_bits, unmix_bits
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

POLICIES: dict[str, type[MCHEvictionPolicy]] = {
    "lru": LRU_EvictionPolicy,
    "lfu": LFU_EvictionPolicy,
    "distance": DistanceLFU_EvictionPolicy,
}


class Oracle:
    """Which id has which row: the policy of the module, id by id."""

    def __init__(
        self, max_rows: int, policy: str, interval: int, admit_after: int, buckets: int
    ) -> None:
        self.policy, self.interval, self.admit_after, self.buckets = (
            policy,
            interval,
            admit_after,
            buckets,
        )
        self.per = max_rows // buckets
        self.rows: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.appeared = Counter[int]()  # of ids while they had no row
        self.waiting: dict[int, tuple[int, int]] = {}
        self.used = [0] * buckets
        self.iteration = 0

    def train(self, ids: Sequence[int]) -> tuple[list[int], set[int]]:
        """Rows of a batch, and the rows that have got an id."""
        self.iteration += 1
        new = [id for id in ids if id not in self.rows]
        for id in ids:
            if id in self.rows:
                self.counts[id], self.last[id] = self.counts[id] + 1, self.iteration
        self.appeared.update(new)
        given: set[int] = set()
        for id in self.by_count(
            {id: self.appeared[id] for id in new if self.appeared[id] >= self.admit_after}
        ):
            bucket = mixed(id) % self.buckets
            if self.used[bucket] < self.per - 1:
                given.add(self.give(id, bucket * self.per + self.used[bucket], self.appeared[id]))
                self.used[bucket] += 1
            else:
                self.waiting[id] = self.appeared[id], self.iteration
        if self.iteration % self.interval == 0:
            for bucket in range(self.buckets):
                given |= self.compete(bucket)
            self.waiting.clear()
        return self.look_up(ids), given

    def compete(self, bucket: int) -> set[int]:
        held = sorted(
            (id for id in self.rows if mixed(id) % self.buckets == bucket),
            key=lambda id: self.rows[id],
        )
        waiting = {
            id: count
            for id, (count, _) in self.waiting.items()
            if mixed(id) % self.buckets == bucket
        }
        if not waiting:
            return set()
        facts = {id: (self.counts[id], self.last[id]) for id in held} | {
            id: self.waiting[id] for id in waiting
        }
        ranked = sorted([*held, *self.by_count(waiting)], key=lambda id: -self.score(*facts[id]))
        leaving = [id for id in ranked[self.per - 1 :] if id in self.rows]
        coming = [id for id in ranked[: self.per - 1] if id not in self.rows]
        return {
            self.give(new, self.rows.pop(old), waiting[new])
            for old, new in zip(leaving, coming, strict=True)
        }

    def score(self, count: int, last: int) -> float:
        age = self.iteration + 1 - last
        return {"lru": -age, "lfu": count, "distance": count / age}[self.policy]

    def give(self, id: int, row: int, count: int) -> int:
        self.rows[id], self.counts[id], self.last[id] = row, count, self.iteration
        return row

    def look_up(self, ids: Sequence[int]) -> list[int]:
        return [self.rows.get(id, (mixed(id) % self.buckets + 1) * self.per - 1) for id in ids]

    def by_count(self, counts: dict[int, int]) -> list[int]:
        return sorted(counts, key=lambda id: (-counts[id], mixed(id)))


@cache
def mixed(id: int) -> int:
    return int(mix_bits(torch.tensor(id)))


def stream(batches: int, size: int, ids: int, seed: int = 0) -> Iterator[Tensor]:
    """Skewed batches of ids of 64 bits, whose popular ids change slowly."""
    numbers = torch.Generator().manual_seed(seed)
    names = torch.randint(-(2**63), 2**63 - 1, (ids + batches,), generator=numbers)
    for batch in range(batches):
        draws = torch.rand(size, generator=numbers)
        yield names[(ids**draws - 1).long() + batch]


def train(module: ManagedCollisionModule, ids: Tensor) -> Tensor:
    return module({"t": JaggedTensor(ids, lengths=torch.tensor([len(ids)]))})["t"].values()


@pytest.fixture(params=["numpy", "torch"])
def _each_index(request: pytest.FixtureRequest) -> Iterator[None]:
    """The index of the CPU, and that of devices."""
    if request.param == "numpy":
        yield
        return
    with patch("tutorec.modules.mc_index.has_index", return_value=False):
        yield


@pytest.mark.usefixtures("_each_index")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("max_rows", "interval", "admit_after", "buckets"),
    [(2000, 1, 1, 1), (64, 1, 1, 1), (64, 5, 3, 1), (64, 2, 2, 8), (1024, 1, 2, 4)],
)
def test_rows_are_those_of_the_policy(
    policy: str, max_rows: int, interval: int, admit_after: int, buckets: int
) -> None:
    oracle = Oracle(max_rows, policy, interval, admit_after, buckets)
    growing = GrowingManagedCollisionModule(
        max_rows, None, POLICIES[policy](), interval, admit_after, buckets, sketch_width=1 << 14
    )
    for ids in stream(batches=40, size=60, ids=500):
        rows, given = oracle.train(ids.tolist())
        assert train(growing, ids).tolist() == rows
        reset = growing.evict()
        assert (set() if reset is None else set(reset.tolist())) == given
        assert int(growing.open_slots()) == max_rows - buckets - len(oracle.rows)
    growing.eval()
    state = {name: value.clone() for name, value in growing.state_dict().items()}
    for ids in stream(batches=3, size=60, ids=500, seed=1):
        assert train(growing, ids).tolist() == oracle.look_up(ids.tolist())
    assert all(torch.equal(value, state[name]) for name, value in growing.state_dict().items())
    assert growing.evict() is None


class Called(GrowingManagedCollisionModule):
    """Of another class, so that a collection calls it instead of looking all tables up at once."""


@pytest.mark.parametrize("buckets", [1, 4])
def test_tables_looked_up_at_once_equal_modules_that_are_called(buckets: int) -> None:
    sizes = {"a": 64, "b": 256, "c": 1024}
    tables = [
        EmbeddingBagConfig(rows, 4, name, feature_names=[name]) for name, rows in sizes.items()
    ]
    together, called = (
        ManagedCollisionCollection(
            {
                one.name: kind(one.num_embeddings, None, None, 2, admit_after, buckets, 1 << 10)
                for admit_after, one in enumerate(tables, 1)
            },
            tables,
        )
        for kind in (GrowingManagedCollisionModule, Called)
    )
    for number, ids in enumerate(stream(batches=30, size=200, ids=600)):
        if number == 15:
            together = copy.deepcopy(together)
        together.train(number % 3 != 1)
        called.train(number % 3 != 1)
        together._managed_collision_modules["b"].train(number % 4 != 1)
        called._managed_collision_modules["b"].train(number % 4 != 1)
        counts = [[200, 0, 0], [0, 50, 150], [70, 60, 70]][number % 3]
        batch = KeyedJaggedTensor([*sizes], ids, lengths=torch.tensor(counts))
        assert torch.equal(together(batch).values(), called(batch).values())
        for one, other in zip(together.evict().values(), called.evict().values(), strict=True):
            assert (None if one is None else one.tolist()) == (
                None if other is None else other.tolist()
            )
    assert together._remapper._joint_lookup is not None and called._remapper._joint_lookup is None
    assert str(together.report()) == str(called.report())
    assert all(
        torch.equal(value, called.state_dict()[key]) for key, value in together.state_dict().items()
    )


@pytest.mark.usefixtures("_each_index")
def test_a_growing_table_evicts_nothing_before_the_cap() -> None:
    growing = GrowingManagedCollisionModule(5000)
    first = torch.arange(4999)
    rows = [train(growing, ids) for ids in first.split(100)]  # the index doubles six times
    torch.testing.assert_close(torch.cat(rows).sort().values, first)
    torch.testing.assert_close(train(growing, first), torch.cat(rows))
    assert int(growing.open_slots()) == 0


@pytest.mark.usefixtures("_each_index")
def test_state_goes_to_another_module_and_to_shards() -> None:
    whole = GrowingManagedCollisionModule(256, admit_after=2, buckets=4)
    batches = [*stream(batches=20, size=50, ids=300)]
    for ids in batches[:15]:
        train(whole, ids)
    other = GrowingManagedCollisionModule(256, admit_after=2, buckets=4)
    other.load_state_dict(whole.state_dict())
    assert int(other.open_slots()) == int(whole.open_slots())
    shards = [
        whole.shard(first, first + 128, [0, 128, 256], torch.device("cpu")) for first in (0, 128)
    ]
    for shard in shards:  # counts of ids without a row are not part of the state
        shard._sketch = copy.deepcopy(whole._sketch)
    copied = copy.deepcopy(whole)
    for ids in batches[15:]:
        expected = train(whole, ids)
        torch.testing.assert_close(train(copied, ids), expected)
        owner = (mix_bits(ids) & 3) // 2
        for rank, shard in enumerate(shards):
            assert shard.buckets() == 4
            assert shard.output_size() == 128
            mine = owner == rank
            assert train(shard, ids[mine]).tolist() == expected[mine].tolist()


def test_shards_of_a_mapping_on_meta_have_no_ids_yet() -> None:
    whole = GrowingManagedCollisionModule(256, torch.device("meta"), buckets=4)
    shard = whole.shard(0, 128, [0, 128, 256], torch.device("cpu"))
    ids = torch.arange(300)
    ids = ids[(mix_bits(ids) & 3) < 2]
    train(shard, ids)
    assert int(shard.open_slots()) == max(0, 126 - len(ids))


@pytest.mark.parametrize("buckets", [1, 4])
def test_state_of_other_buckets_is_refused(buckets: int) -> None:
    growing = GrowingManagedCollisionModule(64, buckets=2)
    train(growing, torch.arange(20))
    other = GrowingManagedCollisionModule(64, buckets=buckets)
    with pytest.raises(
        ValueError, match=f"rows of other buckets than the {buckets} of this mapping"
    ):
        other.load_state_dict(growing.state_dict())


@pytest.mark.parametrize("max_rows", [32, 128])
def test_state_of_another_cap_is_refused_with_both(max_rows: int, tmp_path: Path) -> None:
    growing, other = GrowingManagedCollisionModule(64), GrowingManagedCollisionModule(max_rows)
    train(growing, torch.arange(20))
    with pytest.raises(RuntimeError, match=rf"size mismatch for _row_ids.*\[64\].*\[{max_rows}\]"):
        other.load_state_dict(growing.state_dict())
    save_checkpoint(tmp_path / "saved", growing)
    with pytest.raises(
        CheckpointError, match=rf"_row_ids' is \[{max_rows}\] here and \[64\] in the checkpoint"
    ):
        load_checkpoint(tmp_path / "saved", other)


@pytest.mark.parametrize(("max_rows", "buckets"), [(100, 8), (96, 3), (8, 8)])
def test_buckets_that_do_not_divide_the_rows_are_refused(max_rows: int, buckets: int) -> None:
    with pytest.raises(ValueError, match=rf"buckets={buckets} of a table of max_rows={max_rows}"):
        GrowingManagedCollisionModule(max_rows, buckets=buckets)


def test_more_appearances_than_the_sketch_counts_are_refused() -> None:
    GrowingManagedCollisionModule(100, admit_after=32_767)
    with pytest.raises(ValueError, match=r"admit_after=32768.*32,767"):
        GrowingManagedCollisionModule(100, admit_after=32_768)


def test_a_shard_of_a_part_of_a_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows 0 to 16.*32 rows"):
        GrowingManagedCollisionModule(64, buckets=2).rebuild_with_output_id_range(
            (0, 16), [0, 16, 32, 48, 64]
        )


def test_mixed_bits_are_a_permutation_without_a_pattern() -> None:
    ids = torch.cat([torch.arange(1 << 14) << shift for shift in (0, 8, 20, 32, 49)])
    assert torch.equal(unmix_bits(mix_bits(ids)), ids)
    for block in ids.view(5, -1):
        for bits in (mix_bits(block) & 63, (mix_bits(block) >> 58) & 63):
            counts = bits.bincount(minlength=64).float()
            # chi-square of 63 degrees, p = 2e-6
            assert float((counts - 256).square().sum() / 256) < 130


def test_a_sketch_is_never_too_low_and_seldom_too_high() -> None:
    sketch, counts = FrequencySketch(1 << 12), Counter[int]()
    high = total = 0
    for ids in stream(batches=30, size=60, ids=400):
        different, times = ids.unique(return_counts=True)
        counts.update(ids.tolist())
        estimates = sketch.add(different, times)
        exact = torch.tensor([counts[id] for id in different.tolist()])
        assert bool((estimates >= exact).all())
        high, total = high + int((estimates > exact).sum()), total + len(different)
    assert high <= total // 100


def test_a_sketch_forgets_by_halves() -> None:
    sketch, id = FrequencySketch(16), torch.tensor([5])
    assert [int(sketch.add(id, torch.tensor([4]))) for _ in range(5)] == [4, 8, 12, 16, 12]
    with pytest.raises(ValueError, match=r"power of two.* got 12"):
        FrequencySketch(12)

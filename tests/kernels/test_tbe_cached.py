"""Cached tables: whatever is in memory, weights, state and results are those of an uncached table, bit for bit."""

import errno
from unittest.mock import patch

import pytest
import torch
from kernels.implementations import implementation, needs_fbgemm
from torch import Tensor

from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec._kernels.row_cache import RowCache
from tutorec._kernels.row_file import CacheSpec, zeros_in_file
from tutorec._kernels.tbe import GroupSpec, PoolingKind, TableBatch, TableSpec, build_table_batch
from tutorec._kernels.tbe_cached import CachedTableBatch

CPU = torch.device("cpu")
TABLES = (TableSpec("user", 50, 8), TableSpec("item", 40, 8), TableSpec("shop", 7, 12))
RULES = [
    OptimizerSpec("sgd", 0.25),
    OptimizerSpec("rowwise_adagrad", 0.25, eps=0.1),
    OptimizerSpec("adagrad", 0.25, eps=0.1),
    OptimizerSpec("adam", 0.25, eps=0.1, weight_decay=0.5),
    OptimizerSpec("partial_rowwise_adam", 0.25, eps=0.1),
]
Batch = tuple[Tensor, Tensor, Tensor | None]

backends = pytest.mark.parametrize("name", ["torch", pytest.param("fbgemm", marks=needs_fbgemm)])


def batch(seed: int, weighted: bool, pooling: PoolingKind, longest: int = 5) -> Batch:
    """Ids of the features user, item, user again and (of bags) shop, with repeated ids and empty bags.

    Every second batch is one sample of at most one id a feature, whose rows fit where those of six do not.
    """
    samples, longest = (6, longest) if seed % 2 else (1, 2)
    draw = torch.Generator().manual_seed(seed)
    rows = [50, 40, 50] if pooling == "none" else [50, 40, 50, 7]
    lengths = torch.randint(0, longest, (len(rows) * samples,), generator=draw)
    counts = lengths.view(len(rows), samples).sum(1).tolist()
    # Squares of uniform numbers: some rows come often.
    ids = [(torch.rand(number, generator=draw) ** 2 * size).long() for number, size in zip(counts, rows, strict=True)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.cat(ids)
    return values, offsets, torch.rand(values.numel(), generator=draw) if weighted else None


def group(pooling: PoolingKind = "sum", weighted: bool = False) -> GroupSpec:
    if pooling == "none":
        return GroupSpec(TABLES[:2], (0, 1, 0), pooling, weighted)
    return GroupSpec(TABLES, (0, 1, 0, 2), pooling, weighted)


def pair(
    spec: GroupSpec, rule: OptimizerSpec, rows: int, algorithm: str = "lru"
) -> tuple[TableBatch, CachedTableBatch]:
    """The same tables, in memory and in a file."""
    first = [torch.randn(table.rows, table.columns) for table in spec.tables]
    cache = CacheSpec((rows,) * len(spec.tables), algorithm)
    plain = build_table_batch(spec, optimizer=rule, device=CPU, weights=first)
    cached = build_table_batch(spec, optimizer=rule, device=CPU, weights=first, cache=cache)
    assert isinstance(cached, CachedTableBatch)
    return plain, cached


def assert_same(plain: TableBatch, cached: CachedTableBatch) -> None:
    cached.flush()
    for one, other in zip(plain.table_weights(), cached.table_weights(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(plain.optimizer_state(), cached.optimizer_state(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def step(tables: TableBatch, given: Batch) -> Tensor:
    pooled = tables(*given)
    (pooled * torch.linspace(-1, 1, pooled.shape[1])).sum().backward()
    return pooled.detach()


@backends
@pytest.mark.parametrize("algorithm", ["lru", "lfu"])
@pytest.mark.parametrize("rows", [1, 3, 15, 100])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_training_equals_that_of_tables_in_memory(name, algorithm, rows, rule):
    with implementation(name):
        plain, cached = pair(group(), rule, rows, algorithm)
        for seed in range(12):
            given = batch(seed, weighted=False, pooling="sum")
            assert torch.equal(step(plain, given), step(cached, given))
            with torch.no_grad():
                other = batch(100 + seed, weighted=False, pooling="sum")
                assert torch.equal(plain(*other), cached(*other))
        assert_same(plain, cached)
        assert rows > 40 or cached.counts.written > 0  # rows have left and come back


@backends
@pytest.mark.parametrize(
    ("pooling", "weighted"), [("mean", False), ("sum", True), ("mean", True), ("sqrtn", False), ("none", False)]
)
@pytest.mark.parametrize("rows", [3, 20])
def test_every_pooling_equals(name, pooling, weighted, rows):
    with implementation(name):
        plain, cached = pair(group(pooling, weighted), RULES[1], rows)
        for seed in range(8):
            values, offsets, weights = batch(seed, weighted, pooling)
            results = []
            for tables in (plain, cached):
                own = None if weights is None else weights.clone().requires_grad_()
                results.append((step(tables, (values, offsets, own)), None if own is None else own.grad))
            assert torch.equal(results[0][0], results[1][0])
            assert weights is None or torch.equal(results[0][1], results[1][1])
        assert_same(plain, cached)


@backends
@pytest.mark.parametrize("rows", [1, 12, 30])
@pytest.mark.parametrize("last_first", [False, True])
def test_lookups_may_wait_for_their_backwards(name, rows, last_first):
    with implementation(name):
        plain, cached = pair(group(), RULES[1], rows)
        for seed in range(0, 24, 4):
            given = [batch(seed + turn, False, "sum", longest=2 + 2 * turn) for turn in range(4)]
            for tables in (plain, cached):
                pooled = [tables(*one) for one in given]
                for one in reversed(pooled) if last_first else pooled:
                    (one * torch.linspace(-1, 1, one.shape[1])).sum().backward()
        assert_same(plain, cached)


def test_a_lookup_without_backward_lets_its_rows_go():
    plain, cached = pair(group(), RULES[1], 20)
    for seed in range(10):
        cached(*batch(seed, False, "sum"))
    assert not cached._cache._held
    given = batch(99, False, "sum")
    assert torch.equal(step(plain, given), step(cached, given))
    assert_same(plain, cached)


@backends
@pytest.mark.parametrize("rows", [1, 12, 30])
def test_prefetching_changes_no_bit(name, rows):
    with implementation(name):
        plain, cached = pair(group(), RULES[1], rows)
        batches = [batch(seed, False, "sum") for seed in range(30)]
        coming = None
        for given, after in zip(batches, [*batches[1:], batches[0]], strict=True):
            pooled = cached(*given)
            coming = cached.prefetch(*after[:2])  # while this batch waits for its backward
            (pooled * torch.linspace(-1, 1, pooled.shape[1])).sum().backward()
            assert torch.equal(step(plain, given), pooled.detach())
        assert coming is not None
        coming.result()
        assert_same(plain, cached)


def test_a_prefetched_batch_reads_nothing_more():
    _, cached = pair(group(), RULES[0], 50)
    given = batch(0, False, "sum")
    cached.prefetch(*given[:2]).result()
    read = cached.counts.read
    assert read > 0 and cached.counts.lookups == 0
    cached(*given)
    assert cached.counts.read == read and cached.counts.lookups == given[0].numel()


def test_what_is_loaded_is_seen_and_the_rest_stays():
    plain, cached = pair(group(), RULES[1], 20)
    for seed in range(3):
        given = batch(seed, False, "sum")
        step(plain, given), step(cached, given)
    cached.flush()
    new = [torch.randn(table.rows, table.columns) for table in TABLES]
    for tables in (plain, cached):
        tables.load_table_weights(new)
        tables.load_optimizer_state(
            [{name: state + 1 for name, state in one.items()} for one in tables.optimizer_state()]
        )
    given = batch(3, False, "sum")
    assert torch.equal(step(plain, given), step(cached, given))
    assert_same(plain, cached)


def test_a_table_in_a_file_without_slots_trains_there():
    first = [torch.randn(table.rows, table.columns) for table in TABLES]
    plain = build_table_batch(group(), optimizer=RULES[1], device=CPU, weights=first)
    mapped = build_table_batch(group(), optimizer=RULES[1], device=CPU, weights=first, cache=CacheSpec())
    for seed in range(4):
        given = batch(seed, False, "sum")
        assert torch.equal(step(plain, given), step(mapped, given))
    assert all(
        torch.equal(one, other) for one, other in zip(plain.table_weights(), mapped.table_weights(), strict=True)
    )


@pytest.mark.parametrize("algorithm", ["lru", "lfu"])
def test_rows_leave_in_the_order_of_the_algorithm(algorithm):
    cache = RowCache([10], [3], algorithm)
    for ids in ([1, 1, 1], [2, 2], [3], [2], [1], [4]):
        for _ in cache.place(torch.tensor(ids)):
            pass
    in_memory = {row for row in range(10) if cache.find(torch.tensor([row])) >= 0}
    assert in_memory == ({1, 2, 4} if algorithm == "lfu" else {2, 1, 4})
    for _ in cache.place(torch.tensor([5])):
        pass
    in_memory = {row for row in range(10) if cache.find(torch.tensor([row])) >= 0}
    assert in_memory == ({1, 2, 5} if algorithm == "lfu" else {1, 4, 5})


def test_dense_gradients_are_refused():
    with pytest.raises(
        ValueError, match=r"tables \['user', 'item', 'shop'\] cannot lie in a file with dense gradients"
    ):
        build_table_batch(group(), optimizer=None, device=CPU, cache=CacheSpec((5, 5, 5)))


def test_a_missing_folder_and_a_full_disk_are_named(tmp_path):
    with pytest.raises(OSError, match=r"tables 'item' need 40 bytes in a folder that does not exist"):
        zeros_in_file(10, str(tmp_path / "nowhere"), "tables 'item'")
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        patch("os.posix_fallocate", side_effect=full),
        pytest.raises(OSError, match=r"need 40 bytes in a folder whose disk has"),
    ):
        zeros_in_file(10, str(tmp_path), "tables 'item'")
    assert not list(tmp_path.iterdir())

"""Cached tables: whatever is in memory, weights, state and results are those of an uncached table,
bit for bit.
"""

import errno
import faulthandler
import mmap
import os
import signal
import sys
from dataclasses import replace
from itertools import count, product
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernels.implementations import copy_numbers, implementation, needs_fbgemm
from pairwise import pairwise_cover
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tutorec._kernels.caches import cached_tables, row_file
from tutorec._kernels.caches.cached_tables import CachedTableBatch
from tutorec._kernels.caches.row_cache import CacheSpec
from tutorec._kernels.caches.row_file import ask_for_pages, zeros_in_file
from tutorec._kernels.specs import GroupSpec, OptimizerSpec, PoolingKind, TableSpec
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_build import build_table_batch

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
    """Ids of the features user, item, user again and (of bags) shop, with repeated ids and empty
    bags.

    Every second batch is one sample of at most one id a feature, whose rows fit where those of six
    do not.
    """
    samples, longest = (6, longest) if seed % 2 else (1, 2)
    draw = torch.Generator().manual_seed(seed)
    rows = [50, 40, 50] if pooling == "none" else [50, 40, 50, 7]
    lengths = torch.randint(0, longest, (len(rows) * samples,), generator=draw)
    counts = lengths.view(len(rows), samples).sum(1).tolist()
    # Squares of uniform numbers: some rows come often.
    ids = [
        (torch.rand(number, generator=draw) ** 2 * size).long()
        for number, size in zip(counts, rows, strict=True)
    ]
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
    cached._cache._admitted = 1  # every batch moves rows
    return plain, cached


def assert_same(plain: TableBatch, cached: TableBatch) -> None:
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


def trainings() -> list[Any]:
    """Each two values of two parameters meet by default; `pytest -m full` runs the product."""
    matrix = (["torch", "fbgemm"], ["lru", "lfu"], [1, 3, 15, 100], range(len(RULES)))
    cover = pairwise_cover(matrix)
    cases = []
    for case in product(*matrix):
        name, algorithm, rows, rule = case
        marks = [needs_fbgemm] if name == "fbgemm" else []
        marks += [] if case in cover else [pytest.mark.full]
        words = f"{name}-{algorithm}-{rows}-{RULES[rule].kind}"
        cases.append(pytest.param(name, algorithm, rows, RULES[rule], marks=marks, id=words))
    return cases


@pytest.mark.parametrize(("name", "algorithm", "rows", "rule"), trainings())
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
    ("pooling", "weighted"),
    [("mean", False), ("sum", True), ("mean", True), ("sqrtn", False), ("none", False)],
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
                results.append(
                    (step(tables, (values, offsets, own)), None if own is None else own.grad)
                )
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
    assert not cached._cache._pinned
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


@backends
def test_asking_for_pages_changes_no_bit(name):
    read = count(1)
    with (
        implementation(name),
        patch("tutorec._kernels.caches.cached_tables.blocks_read", side_effect=lambda: next(read)),
    ):
        plain, cached = pair(group(), RULES[2], 5)
        with patch.object(cached_tables, "ask_for_pages", wraps=ask_for_pages) as asked:
            for seed in range(6):
                given = batch(seed, False, "sum")
                assert torch.equal(step(plain, given), step(cached, given))
            assert asked.called
        assert_same(plain, cached)


def test_pages_are_asked_for_only_while_the_thread_reads_from_the_disk():
    _, cached = pair(group(), RULES[0], 5)
    asked = []
    with (
        patch("tutorec._kernels.caches.cached_tables.blocks_read", side_effect=[8, 8, 16, 16]),
        patch.object(cached_tables, "ask_for_pages", side_effect=lambda *_: asked.append(seed)),
        torch.no_grad(),
    ):
        for seed in range(4):
            cached(*batch(2 * seed + 1, False, "sum"))
    assert {*asked} == {0, 2}


def test_a_batch_that_was_read_ahead_is_not_asked_for_again_by_its_lookup():
    _, cached = pair(group(), RULES[0], 1)
    given = batch(1, False, "sum")
    read = count(1)  # more each time: the thread has read from the disk
    with (
        patch("tutorec._kernels.caches.cached_tables.blocks_read", side_effect=lambda: next(read)),
        torch.no_grad(),
    ):
        coming = cached.prefetch(*given[:2])
        assert coming is not None
        coming.result()
        with patch.object(cached._cache, "missing", return_value=()) as missing:
            cached(*given)
            assert not missing.called
            cached(*given)  # its rows may have left memory by now
            assert missing.called


def read_ahead_in_a_fork(cached: CachedTableBatch, given: Batch, write_end: int) -> None:
    """What the parent began to read is not waited for, and reading ahead has a thread."""
    cached._wait_until_read(given[0])
    cached.prefetch(*given[:2]).result(60)
    os.write(write_end, b"read")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # has threads, and forks
def test_a_fork_reads_ahead_on_a_thread_of_its_own():
    _, cached = pair(group(), RULES[0], 5)
    given, go = batch(1, False, "sum"), Event()
    cached.prefetch(*given[:2]).result()
    cached._readings[cached._reader.submit(Thread(target=go.wait).run)] = given[0]
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(120)
            read_ahead_in_a_fork(cached, given, write_end)
        finally:
            os._exit(0)
    go.set()
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b"read"


def _same_in_a_fork(plain: TableBatch, stored: TableBatch, given: list[Batch], forks: int) -> bool:
    """Whether a fork, and forks of it, read and train tables in a file as those in memory."""
    child = os.fork()
    if child == 0:
        same = False
        try:
            signal.alarm(120)
            with torch.no_grad():
                same = torch.equal(plain(*given[0]), stored(*given[0]))
            for one in given:
                same &= torch.equal(step(plain, one), step(stored, one))
            assert_same(plain, stored)
            stored.table_weights()[1].fill_(7.0)
            stored.optimizer_state()[1]["momentum1"].fill_(7.0)
            if forks > 1:
                plain.table_weights()[1].fill_(7.0)
                plain.optimizer_state()[1]["momentum1"].fill_(7.0)
                same &= _same_in_a_fork(plain, stored, given, forks - 1)
        finally:
            os._exit(0 if same else 1)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a fork rows of its own")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # has threads, and forks
@backends
@pytest.mark.parametrize("rows", [None, 5, 1500])
@pytest.mark.parametrize("rule", RULES[1:3], ids=lambda rule: rule.kind)
def test_a_fork_trains_rows_of_its_own(name, rows, rule):
    spec = GroupSpec((TableSpec("user", 3000, 8), TableSpec("item", 2000, 12)), (0, 1))
    ids = torch.arange(600) * 7 % 2000
    offsets = torch.arange(601)
    given: list[Batch] = [((ids * more) % 2000, offsets, None) for more in (1, 3, 11)]
    with implementation(name):
        if rows is None:
            first = [torch.randn(table.rows, table.columns) for table in spec.tables]
            plain, stored = (
                build_table_batch(spec, optimizer=rule, device=CPU, weights=first, cache=cache)
                for cache in (None, CacheSpec())
            )
        else:
            plain, stored = pair(spec, rule, rows)
        for one in given:
            step(plain, one)
            step(stored, one)
        assert _same_in_a_fork(plain, stored, given, forks=2)
        assert_same(plain, stored)
        for one in given:
            assert torch.equal(step(plain, one), step(stored, one))
        assert_same(plain, stored)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a fork rows of its own")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_without_memory_for_its_rows_reads_them_and_never_writes_its_parents(capfd):
    stored = build_table_batch(
        GroupSpec((TableSpec("user", 3000, 8),), (0,)),
        optimizer=RULES[0],
        device=CPU,
        cache=CacheSpec(),
    )
    before = stored.table_weights()[0].clone()
    given: Batch = (torch.tensor([3]), torch.tensor([0, 1]), None)
    map_memory = row_file._map_memory()

    def no_memory(address: int, length: int, protection: int, flags: int, *place: int) -> int:
        private = flags & mmap.MAP_PRIVATE
        return -1 if private else map_memory(address, length, protection, flags, *place)

    with patch.object(row_file, "_map_memory", return_value=no_memory):
        child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as nothing:
            faulthandler.enable(nothing)  # what pytest prints of a signal is not wanted
            with torch.no_grad():
                os.write(2, b"read" if torch.equal(stored(*given)[0], before[3]) else b"other")
            step(stored, given)
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert torch.equal(stored.table_weights()[0], before)
    told = capfd.readouterr().err
    assert "tables ['user'] are in a file, and this forked process has no memory for rows" in told
    assert told.endswith("read")


def test_prefetching_moves_and_counts_nothing():
    _, cached = pair(group(), RULES[0], 50)
    given = batch(1, False, "sum")
    step(cached, given)
    before, places = replace(cached.counts), cached._cache._place_of.clone()
    cached.prefetch(*batch(3, False, "sum")[:2]).result()
    assert cached.counts == before and torch.equal(cached._cache._place_of, places)


@backends
def test_places_that_int32_cannot_number_are_int64(name):
    with (
        implementation(name),
        patch("tutorec._kernels.caches.cached_tables._INT32_ROWS", 50 + 40 + 7 + 3 * 5),
    ):
        plain, cached = pair(group(), RULES[1], 5)
        operator = cached._operators[0]
        for seed in range(1, 7, 2):
            values, offsets, _ = batch(seed, False, "sum")
            given = values.int(), offsets.int(), None
            with patch.object(operator, "_lookup", wraps=operator._lookup) as looked_up:
                assert torch.equal(step(plain, given), step(cached, given))
            assert [one.dtype for one in looked_up.call_args.args[:2]] == [torch.int64] * 2
        assert_same(plain, cached)


def trained(rule: OptimizerSpec = RULES[2]) -> tuple[TableBatch, CachedTableBatch]:
    """The same tables after three batches; changed rows are in slots, and the file has not got
    them.
    """
    plain, cached = pair(group(), rule, 20)
    for seed in range(1, 7, 2):
        given = batch(seed, False, "sum")
        step(plain, given), step(cached, given)
    assert any(cached._cache._changed(table).any() for table in range(len(TABLES)))
    return plain, cached


@pytest.mark.parametrize("what", ["weights", "state", "both"])
def test_what_is_loaded_is_seen_and_the_rest_stays(what):
    plain, cached = trained()
    new = [torch.randn(table.rows, table.columns) for table in TABLES]
    state = [{name: one + 1 for name, one in own.items()} for own in plain.optimizer_state()]
    for tables in (plain, cached):
        if what != "state":
            copy_numbers(tables.table_weights(), new)
        if what != "weights":
            copy_numbers(tables.optimizer_state(), state)
    given = batch(7, False, "sum")
    assert torch.equal(step(plain, given), step(cached, given))
    assert_same(plain, cached)


def test_what_is_asked_for_is_up_to_date():
    plain, cached = trained()
    for one, other in zip(plain.table_weights(), cached.table_weights(), strict=True):
        assert torch.equal(one, other)
    for asked in ("optimizer_state", "table_states"):
        plain, cached = trained()
        of_plain, of_cached = (tree_leaves(getattr(tables, asked)()) for tables in (plain, cached))
        assert len(of_plain) == len(of_cached) > 0
        assert all(torch.equal(one, other) for one, other in zip(of_plain, of_cached, strict=True))


@backends
def test_rows_written_into_tensors_from_before_are_seen_and_others_stay_trained(name):
    with implementation(name):
        plain, cached = pair(group(), RULES[2], 20)
        held = [
            (tables.table_weights()[0], tables.table_states()[0][0]) for tables in (plain, cached)
        ]
        given = batch(1, False, "sum")
        step(plain, given), step(cached, given)
        one, other = given[0][:2].tolist()
        # in slots, and changed there
        assert cached._cache.find(torch.tensor([one, other])).min() >= TABLES[0].rows
        for weights, states in held:
            weights[one] = 5.0
            states[other] = 0.5
        assert torch.equal(step(plain, given), step(cached, given))
        assert_same(plain, cached)


@pytest.mark.parametrize(
    "written",
    [Tensor.neg, lambda row: row * 2, lambda row: row.flip(0)],
    ids=["negated", "doubled", "reversed"],
)
def test_rows_written_with_related_numbers_are_seen(written):
    plain, cached = trained()
    given = batch(1, False, "sum")
    for tables in (plain, cached):
        for values in tables.table_weights():
            values.copy_(torch.stack([written(row) for row in values]))
    with torch.no_grad():
        assert torch.equal(plain(*given), cached(*given))
    assert torch.equal(step(plain, given), step(cached, given))
    assert_same(plain, cached)


def test_rows_written_while_a_lookup_waits_are_updated_by_its_backward():
    # autograd refuses fbgemm's backward, of cached and of other tables
    with implementation("torch"):
        plain, cached = trained()
        given = batch(1, False, "sum")
        for tables in (plain, cached):
            weights = tables.table_weights()[0]
            step(tables, given)
            pooled = tables(*given)
            weights[int(given[0][0])] = 5.0
            (pooled * torch.linspace(-1, 1, pooled.shape[1])).sum().backward()
        assert_same(plain, cached)


def test_a_table_in_a_file_without_slots_trains_there():
    first = [torch.randn(table.rows, table.columns) for table in TABLES]
    plain = build_table_batch(group(), optimizer=RULES[1], device=CPU, weights=first)
    mapped = build_table_batch(
        group(), optimizer=RULES[1], device=CPU, weights=first, cache=CacheSpec()
    )
    for seed in range(4):
        given = batch(seed, False, "sum")
        assert torch.equal(step(plain, given), step(mapped, given))
    assert all(
        torch.equal(one, other)
        for one, other in zip(plain.table_weights(), mapped.table_weights(), strict=True)
    )


@pytest.mark.parametrize(
    ("rule", "where", "message"),
    [
        (None, CPU, r"with dense gradients: give them a fused optimizer"),
        (
            RULES[0],
            torch.device("meta"),
            r"on meta: put them on the CPU, or give them the compute kernel 'fused'",
        ),
    ],
)
def test_what_cannot_be_stored_in_a_file_is_refused(rule, where, message):
    tables = r"tables \['user', 'item', 'shop'\] cannot be stored in slower memory "
    with pytest.raises(ValueError, match=tables + message):
        build_table_batch(group(), optimizer=rule, device=where, cache=CacheSpec((5, 5, 5)))


def test_a_missing_folder_and_a_full_disk_are_named(tmp_path):
    with pytest.raises(OSError, match=r"'item'.*40 bytes.* not exist"):
        zeros_in_file(10, folder=str(tmp_path / "nowhere"), what="tables 'item'")
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        patch("os.posix_fallocate", side_effect=full),
        pytest.raises(OSError, match=r"40 bytes.* whose disk has"),
    ):
        zeros_in_file(10, folder=str(tmp_path), what="tables 'item'")
    assert not list(tmp_path.iterdir())

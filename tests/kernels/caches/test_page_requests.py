"""Tables in a file without a cache: the pages of a batch are requested together where it pays."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import PAGESIZE
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tutorec._kernels.caches.row_cache import CacheSpec
from tutorec._kernels.caches.row_file import ask_for_pages
from tutorec._kernels.specs import GroupSpec, OptimizerSpec, TableSpec
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_build import build_table_batch

CPU = torch.device("cpu")
GROUP = GroupSpec((TableSpec("user", 500, 64), TableSpec("item", 400, 64)), (0, 1, 0))
# two samples of the features user, item and user again
IDS = torch.tensor([7, 450, 7, 399, 7, 2, 30])
OFFSETS = torch.tensor([0, 1, 2, 4, 5, 6, 7])


def in_file(cache: CacheSpec | None = CacheSpec()) -> TableBatch:  # noqa: B008
    torch.manual_seed(0)
    rule = OptimizerSpec("rowwise_adagrad", 0.25, eps=0.1)
    return build_table_batch(GROUP, optimizer=rule, device=CPU, cache=cache)


def step(tables: TableBatch) -> Tensor:
    pooled = tables(IDS, OFFSETS)
    pooled.backward(torch.ones_like(pooled))
    return pooled.detach()


@contextmanager
def requested(blocks: list[int]) -> Iterator[list[tuple[int, list[int]]]]:
    """What is asked for (where a tensor begins, rows) while the thread reads so many blocks."""
    asked: list[tuple[int, list[int]]] = []

    def ask(part: Tensor, rows: Tensor) -> None:
        asked.append((part.data_ptr(), rows.tolist()))
        ask_for_pages(part, rows)

    with (
        patch("tutorec._kernels.caches.row_file.blocks_read", side_effect=blocks),
        patch("tutorec._kernels.caches.row_file.ask_for_pages", side_effect=ask),
    ):
        yield asked


def test_the_rows_of_each_table_are_requested_of_weights_and_states() -> None:
    tables = in_file()
    with requested([0, 8, 8, 16]) as asked:
        step(tables)  # reads 8 blocks
        assert asked == []
        step(tables)
    rows_of_tables = ([2, 7, 30, 450], [7, 399])
    expected = [
        (tensor.data_ptr(), rows)
        for weights, states, rows in zip(
            tables.table_weights(), tables.table_states(), rows_of_tables, strict=True
        )
        for tensor in (weights, *states)
    ]
    assert asked == expected


def test_the_system_is_asked_for_every_page_of_a_batch_in_one_call_a_tensor() -> None:
    tables = in_file()
    calls: list[set[int]] = []

    def advise(ranges: Tensor) -> bool:
        calls.append({address // PAGESIZE for address, _ in ranges.tolist()})
        return True

    with (
        requested([0, 8, 8, 16]),
        patch("tutorec._kernels.caches.row_file._advise_all", side_effect=advise),
    ):
        step(tables)
        step(tables)
    assert len(calls) == 4
    user, item = tables.table_weights()
    for pages, weights, rows in ((calls[0], user, [2, 7, 30, 450]), (calls[2], item, [7, 399])):
        row_bytes = 4 * weights.stride(0)
        begins = [weights.data_ptr() + row * row_bytes for row in rows]
        assert pages == {
            page
            for begin in begins
            for page in range(begin // PAGESIZE, (begin + 255) // PAGESIZE + 1)
        }


def test_a_table_whose_pages_are_in_memory_requests_nothing() -> None:
    tables = in_file()
    # Between the lookups the thread reads a log: 100 blocks each time.
    with requested([100, 100, 200, 200, 300, 300]) as asked:
        for _ in range(3):
            step(tables)
    assert asked == []


def test_requests_end_with_the_first_lookup_that_reads_nothing() -> None:
    tables = in_file()
    with requested([0, 8, 8, 8, 8, 8, 8, 8]) as asked:
        step(tables)  # reads 8 blocks
        step(tables)  # requests its pages, which are in memory
        assert len(asked) == 4  # weights and states of two tables
        step(tables)
        step(tables)
        assert len(asked) == 4


@pytest.mark.parametrize("blocks", [range(0, 1000, 8), [0] * 1000])
def test_requests_change_no_bit(blocks: range | list[int]) -> None:
    stored, in_memory = in_file(), in_file(None)
    with requested([*blocks]):
        for _ in range(3):
            assert torch.equal(step(stored), step(in_memory))
    for one, other in zip(stored.table_weights(), in_memory.table_weights(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(stored.table_states(), in_memory.table_states(), strict=True):
        assert all(map(torch.equal, one, other))


def test_an_empty_batch_is_looked_up() -> None:
    tables = in_file()
    none = torch.zeros(0, dtype=torch.int64)
    with requested([*range(8, 100, 8)]):
        for samples in (2, 2, 0):
            assert tables(none, torch.zeros(3 * samples + 1, dtype=torch.int64)).shape[0] == samples


def test_bad_input_is_refused_by_the_lookup() -> None:
    tables = in_file()
    with requested([*range(8, 100, 8)]):
        step(tables)
        with pytest.raises(ValueError, match="5 offsets do not fit 3 features"):
            tables(IDS, OFFSETS[:5])
        with pytest.raises(ValueError, match="ids of tables"):
            tables(IDS.float(), OFFSETS)


def test_a_copy_requests_rows_of_its_own() -> None:
    tables = in_file()
    copied = copy.deepcopy(tables)
    with requested([0, 8, 8, 16]) as asked:
        step(copied)
        step(copied)
    own = [tensor.data_ptr() for tensor in copied.table_weights()]
    assert [begin for begin, _ in asked][::2] == own
    assert own != [tensor.data_ptr() for tensor in tables.table_weights()]

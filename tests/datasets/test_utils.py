from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutorec.datasets.utils import Batch, rank_slices, step_slices
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


@given(rows=st.integers(0, 200), batch_size=st.integers(1, 20), world_size=st.integers(1, 5), drop_last=st.booleans())
def test_step_slices_deal_every_row_once(rows: int, batch_size: int, world_size: int, drop_last: bool) -> None:
    full = rows // (batch_size * world_size)
    if rows < world_size or (drop_last and not full):
        with pytest.raises(ValueError, match=f"{rows} rows are not enough"):
            step_slices(rows, batch_size, world_size, drop_last)
        return
    steps = step_slices(rows, batch_size, world_size, drop_last)
    dealt = [row for step in steps for start, stop in step for row in range(start, stop)]
    assert dealt == list(range(full * batch_size * world_size if drop_last else rows))
    sizes = [[stop - start for start, stop in step] for step in steps]
    assert all(len(step) == world_size and min(step) >= 1 and max(step) - min(step) <= 1 for step in sizes)
    assert all(size == batch_size for step in sizes[:-1] for size in step)


def test_step_slices_give_fewer_rows_than_ranks_to_the_last_full_step() -> None:
    assert step_slices(rows=9, batch_size=2, world_size=4) == [[(0, 3), (3, 5), (5, 7), (7, 9)]]


def test_rank_slices_with_a_rank_outside_the_world_names_both() -> None:
    with pytest.raises(ValueError, match=r"rank=2 is not a rank of world_size=2: ranks are 0\.\.1"):
        rank_slices(10, 1, rank=2, world_size=2)


@pytest.mark.parametrize(("batch_size", "world_size"), [(0, 1), (1, 0), (-4, 2)])
def test_step_slices_with_a_size_below_one_raise(batch_size: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size={batch_size} and world_size={world_size}"):
        step_slices(10, batch_size, world_size)


def _batch() -> Batch:
    kjt = KeyedJaggedTensor(keys=["item"], values=torch.tensor([7, 1, 7]), lengths=torch.tensor([2, 1]))
    return Batch(torch.ones(2, 3), kjt, torch.tensor([1.0, 0.0]))


def test_batch_to_meta_moves_every_part() -> None:
    moved = _batch().to(torch.device("meta"))
    parts = (moved.dense_features, moved.sparse_features.values(), moved.labels)
    assert {part.device.type for part in parts} == {"meta"}


def test_batch_to_keeps_values() -> None:
    moved = _batch().to(torch.device("cpu"), non_blocking=True)
    assert moved.sparse_features.values().tolist() == [7, 1, 7]
    assert moved.sparse_features.keys() == ["item"]
    torch.testing.assert_close(moved.dense_features, torch.ones(2, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: memory cannot be page-locked")
def test_batch_pin_memory_pins_every_part() -> None:
    pinned = _batch().pin_memory()
    assert (
        pinned.dense_features.is_pinned() and pinned.sparse_features.values().is_pinned() and pinned.labels.is_pinned()
    )

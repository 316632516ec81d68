from __future__ import annotations

from operator import length_hint
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutorec.datasets.utils import Batch, RowBatches, rank_slices, step_slices
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device


@given(
    rows=st.integers(0, 200),
    batch_size=st.integers(1, 20),
    world_size=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_step_slices_deal_every_row_once(
    rows: int, batch_size: int, world_size: int, drop_last: bool
) -> None:
    full = rows // (batch_size * world_size)
    if rows < world_size or (drop_last and not full):
        with pytest.raises(ValueError, match=f"{rows} rows are not enough"):
            step_slices(rows, batch_size, world_size, drop_last)
        return
    steps = step_slices(rows, batch_size, world_size, drop_last)
    dealt = [row for step in steps for start, stop in step for row in range(start, stop)]
    assert dealt == list(range(full * batch_size * world_size if drop_last else rows))
    sizes = [[stop - start for start, stop in step] for step in steps]
    assert all(
        len(step) == world_size and min(step) >= 1 and max(step) - min(step) <= 1 for step in sizes
    )
    assert all(size == batch_size for step in sizes[:-1] for size in step)


def test_step_slices_give_fewer_rows_than_ranks_to_the_last_full_step() -> None:
    assert step_slices(rows=9, batch_size=2, world_size=4) == [[(0, 3), (3, 5), (5, 7), (7, 9)]]


def test_rank_slices_with_a_rank_outside_the_world_names_both() -> None:
    with pytest.raises(ValueError, match=r"world_size=2: rank=2.*0 to 1"):
        rank_slices(10, 1, rank=2, world_size=2)


@pytest.mark.parametrize(
    ("batch_size", "world_size", "wrong"),
    [(0, 1, "batch_size=0"), (1, 0, "world_size=0"), (-4, 2, "batch_size=-4")],
)
def test_step_slices_with_a_size_below_one_raise(
    batch_size: int, world_size: int, wrong: str
) -> None:
    with pytest.raises(ValueError, match=f"{wrong} must be a whole number, at least 1"):
        step_slices(10, batch_size, world_size)


def _batch() -> Batch:
    kjt = KeyedJaggedTensor(
        keys=["item"], values=torch.tensor([7, 1, 7]), lengths=torch.tensor([2, 1])
    )
    return Batch(torch.ones(2, 3), kjt, torch.tensor([1.0, 0.0]))


def test_batch_to_meta_moves_every_part() -> None:
    moved = _batch().to(torch.device("meta"))
    parts = (moved.dense_features, moved.sparse_features.values(), moved.labels)
    assert {part.device.type for part in parts} == {"meta"}


def test_batch_to_keeps_values() -> None:
    moved = _batch().to(device(), non_blocking=True)
    assert moved.sparse_features.device() == device()
    assert moved.sparse_features.values().tolist() == [7, 1, 7]
    assert moved.sparse_features.keys() == ["item"]
    assert torch.equal(moved.dense_features.cpu(), torch.ones(2, 3))


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: memory cannot be page-locked"
)
def test_batch_pin_memory_pins_every_part() -> None:
    pinned = _batch().pin_memory()
    assert (
        pinned.dense_features.is_pinned()
        and pinned.sparse_features.values().is_pinned()
        and pinned.labels.is_pinned()
    )


def _spans(
    rows: int, batch_size: int, rank: int, world_size: int, **options: Any
) -> tuple[list[Any], RowBatches]:
    """What a rank reads, and its batches, which stand at their end."""
    read: Any = lambda first, stop: (first, stop)  # noqa: E731
    batches = RowBatches(read, rows, batch_size, rank, world_size, **options)
    return list(batches), batches


@given(
    rows=st.integers(8, 60),
    each=st.integers(1, 5),
    worlds=st.sampled_from([(1, 2), (2, 1), (2, 4), (4, 1), (2, 2)]),
    epochs=st.integers(1, 3),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_a_run_that_goes_on_in_another_world_takes_the_steps_of_one_that_never_stopped(
    rows: int, each: int, worlds: tuple[int, int], epochs: int, drop_last: bool, data: st.DataObject
) -> None:
    first, second = worlds
    together = 4 * each
    if drop_last and rows < together:
        return
    options = {"epochs": epochs, "drop_last": drop_last}
    of_first = [
        RowBatches(lambda a, b: (a, b), rows, together // first, rank, first, **options)  # pyright: ignore
        for rank in range(first)
    ]
    whole = _spans(rows, together // second, 0, second, **options)[0]
    steps = data.draw(st.integers(0, len(whole)))
    for batches in of_first:
        for _ in range(min(steps, len(_spans(rows, together // first, 0, first, **options)[0]))):
            next(batches)
    assert len({batches.position for batches in of_first}) == 1
    start = of_first[0].position
    for rank in range(second):
        whole, _ = _spans(rows, together // second, rank, second, **options)
        found, batches = _spans(rows, together // second, rank, second, start=start, **options)
        full = [span for span in whole if span[1] - span[0] == together // second]
        # the rows after the last full step may be dealt out otherwise where ranks are more or fewer
        assert [span for span in found if span in full] == [
            s for s in whole[len(whole) - len(found) :] if s in full
        ]
        assert batches.position == epochs * rows


@given(
    rows=st.integers(4, 60),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    steps=st.integers(0, 100),
)
def test_no_row_is_lost_or_taken_twice_where_batches_are_of_another_size(
    rows: int, sizes: tuple[int, int], steps: int
) -> None:
    before: list[tuple[int, int]] = []
    batches = RowBatches(lambda a, b: before.append((a, b)), rows, sizes[0], epochs=2)  # pyright: ignore
    for _ in range(steps):
        next(batches, None)
    after, _ = _spans(rows, sizes[1], 0, 1, epochs=2, start=batches.position)
    taken = [row for start, stop in before + after for row in range(start, stop)]
    assert taken == 2 * list(range(rows))


def test_a_position_outside_of_the_epochs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 epoch\(s\).*10 rows: start=21.*0 to 20"):
        RowBatches(lambda a, b: (a, b), 10, 4, epochs=2, start=21)  # pyright: ignore


def test_changed_batches_have_the_position_and_the_number_of_steps_of_what_is_left() -> None:
    batches: Any = RowBatches(lambda a, b: (a, b), 10, 4, epochs=2)  # pyright: ignore
    next(batches)
    changed = batches.map(lambda span: span[1])
    assert (changed.position, length_hint(changed), list(changed)) == (4, 5, [8, 10, 4, 8, 10])
    assert (batches.position, changed.position, length_hint(changed)) == (4, 20, 0)

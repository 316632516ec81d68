from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tutorec.datasets.criteo import DEFAULT_CAT_NAMES, InMemoryBinaryCriteoIterDataPipe
from tutorec.datasets.utils import Batch, step_slices

Paths = list[list[str]]


def _files(folder: Path, rows: tuple[int, ...], dtype: Any = np.int32) -> Paths:
    """Files whose dense, sparse and label values tell the number of their row over all files."""
    paths: Paths = [[], [], []]
    start = 0
    for day, count in enumerate(rows):
        row = np.arange(start, start + count)
        start += count
        arrays = (
            np.tile(row[:, None], (1, 13)).astype(np.float32),
            (row[:, None] * 100 + np.arange(26)).astype(dtype),
            row[:, None].astype(np.int32),
        )
        for part, array in zip(paths, arrays, strict=True):
            part.append(str(folder / f"{day}_{len(part)}_{array.shape[1]}.npy"))
            np.save(part[-1], array)
    return paths


def _pipe(
    paths: Paths,
    stage: str = "train",
    batch_size: int = 3,
    rank: int = 0,
    world: int = 1,
    **options: Any,
):
    return InMemoryBinaryCriteoIterDataPipe(stage, *paths, batch_size, rank, world, **options)


def _rows(batch: Batch) -> list[int]:
    """The rows of a batch, which its three parts agree on."""
    rows = batch.labels.tolist()
    kjt = batch.sparse_features
    assert batch.dense_features.tolist() == [[float(row)] * 13 for row in rows]
    assert kjt.keys() == DEFAULT_CAT_NAMES and kjt.stride() == len(rows)
    assert kjt.lengths().tolist() == [1] * (26 * len(rows)) and kjt.offsets().tolist() == list(
        range(26 * len(rows) + 1)
    )
    assert kjt.values().tolist() == [row * 100 + column for column in range(26) for row in rows]
    return rows


@pytest.mark.parametrize("mmap_mode", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("counts", "world"), [((20,), 1), ((5, 1, 14), 2), ((7, 12), 3), ((9, 10), 2)]
)
def test_ranks_take_the_rows_step_by_step(
    tmp_path: Path, counts: tuple[int, ...], world: int, drop_last: bool, mmap_mode: bool
) -> None:
    paths = _files(tmp_path, counts)
    pipes = [
        _pipe(paths, rank=r, world=world, drop_last=drop_last, mmap_mode=mmap_mode)
        for r in range(world)
    ]
    steps = step_slices(sum(counts), 3, world, drop_last)
    assert [len(pipe) for pipe in pipes] == [len(steps)] * world
    for _ in range(2):
        read = [[_rows(batch) for batch in pipe] for pipe in pipes]
        assert [list(step) for step in zip(*read, strict=True)] == [
            [list(range(*rows)) for rows in step] for step in steps
        ]


def test_the_first_file_is_cut_in_two_for_validation_and_test(tmp_path: Path) -> None:
    paths = _files(tmp_path, (5, 2))
    rows = {
        stage: list(chain(*map(_rows, _pipe(paths, stage)))) for stage in ("train", "val", "test")
    }
    assert rows == {"train": [0, 1, 2, 3, 4, 5, 6], "val": [0, 1, 2, 5, 6], "test": [3, 4, 5, 6]}


@pytest.mark.parametrize("options", [{}, {"mmap_mode": True}, {"shuffle_training_set": True}])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_are_divided_by_the_rows_of_their_column(
    tmp_path: Path, dtype: Any, options: dict[str, Any]
) -> None:
    hashes = [*range(7, 32), 1 << 40]
    for batch in _pipe(_files(tmp_path, (9,), dtype), hashes=hashes, **options):
        ids = batch.sparse_features.values()
        expected = [(row * 100 + c) % hashes[c] for c in range(26) for row in batch.labels.tolist()]
        assert ids.tolist() == expected and ids.dtype == (
            torch.int32 if dtype == np.int32 else torch.int64
        )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_shuffled_training_set_is_numpys_permutation_and_every_rank_has_as_many_batches(
    tmp_path: Path, world: int
) -> None:
    paths = _files(tmp_path, (12, 1, 6))
    options = {"shuffle_training_set": True, "shuffle_training_set_random_seed": 4}
    pipes = [_pipe(paths, rank=rank, world=world, **options) for rank in range(world)]
    assert len({len(list(pipe)) for pipe in pipes}) == 1
    place = np.random.RandomState(4).permutation(19)
    assert [row for pipe in pipes for batch in pipe for row in _rows(batch)] == np.argsort(
        place
    ).tolist()
    assert _rows(next(iter(_pipe(paths, "val", **options)))) == [0, 1, 2]


def test_shuffled_batches_hold_their_own_rows_in_another_order_each_pass(tmp_path: Path) -> None:
    pipe = _pipe(_files(tmp_path, (40,)), batch_size=20, shuffle_batches=True)
    first, second = ([_rows(batch) for batch in pipe] for _ in range(2))
    assert first[0] == np.random.RandomState(0).permutation(20).tolist() and first != second
    assert [sorted(rows) for rows in second] == [list(range(20)), list(range(20, 40))]


def test_numpys_own_generator_is_left_alone(tmp_path: Path) -> None:
    np.random.seed(1)
    expected = np.random.RandomState(1).random()
    list(_pipe(_files(tmp_path, (9,)), shuffle_batches=True, shuffle_training_set=True))
    assert np.random.random() == expected


@pytest.mark.parametrize("mmap_mode", [False, True])
def test_a_batch_that_is_changed_leaves_the_data_as_it_is(tmp_path: Path, mmap_mode: bool) -> None:
    pipe = _pipe(_files(tmp_path, (4,)), mmap_mode=mmap_mode)
    for batch in pipe:
        for part in (batch.dense_features, batch.sparse_features.values(), batch.labels):
            part.add_(1)
    assert [_rows(batch) for batch in pipe] == [[0, 1, 2], [3]]


def test_workers_of_a_loader_give_the_batches_of_one_process_in_order(tmp_path: Path) -> None:
    loader = DataLoader(_pipe(_files(tmp_path, (10,))), batch_size=None, num_workers=2)
    assert [_rows(batch) for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert len(loader) == 4


def test_files_come_through_a_path_manager(tmp_path: Path) -> None:
    paths = _files(tmp_path, (4,))
    opened: list[str] = []

    def remember(path: str, mode: str) -> Any:
        opened.append(path)
        return open(path, mode)

    assert len(_pipe(paths, path_manager_key=SimpleNamespace(open=remember))) == 2
    assert opened == [part[0] for part in paths]


@pytest.mark.parametrize("mmap_mode", [False, True])
@pytest.mark.parametrize("kept", [0, 100, 200])
def test_a_damaged_file_is_named(tmp_path: Path, kept: int, mmap_mode: bool) -> None:
    paths = _files(tmp_path, (4,))
    sparse = Path(paths[1][0])
    sparse.write_bytes(sparse.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"{sparse.name}: cut short, or not an array of numpy"):
        _pipe(paths, mmap_mode=mmap_mode)


def test_a_file_that_becomes_shorter_or_another_one_is_named(tmp_path: Path) -> None:
    # in a process of its own, which a mapped file would end
    paths = _files(tmp_path, (4000,))
    code = """
import os, sys
from tutorec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

paths = [[path] for path in sys.argv[1:]]
pipe = InMemoryBinaryCriteoIterDataPipe("train", *paths, 2000, 0, 1, mmap_mode=True)
batches = iter(pipe)
next(batches)
os.truncate(paths[1][0], 1000)
os.replace(paths[2][0], paths[2][0] + ".old")
os.link(paths[0][0], paths[2][0])
for at in (1, 2):
    try:
        [pipe.dense_arrs, pipe.sparse_arrs, pipe.labels_arrs][at][0][2000:4000].sum()
    except ValueError as error:
        print(error)
try:
    next(batches)
except ValueError as error:
    print(error)
"""
    command = [sys.executable, "-c", code, *(part[0] for part in paths)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].endswith("_26.npy: the file ends before row 3999: write it again")
    assert lines[1].endswith("_1.npy: the file was replaced: make the data set again")
    assert lines[2] == lines[0]


def test_a_pipe_over_files_on_the_disk_can_be_pickled_and_reads_no_file_whole(
    tmp_path: Path,
) -> None:
    pipe = _pipe(_files(tmp_path, (4000,)), "test", mmap_mode=True)
    pickled = pickle.dumps(pipe)
    assert len(pickled) < 4000 * 26
    assert _rows(next(iter(pickle.loads(pickled)))) == [2000, 2001, 2002]


def test_files_of_several_types_are_shuffled_without_a_change_of_ids(tmp_path: Path) -> None:
    paths = _files(tmp_path, (2, 2))
    np.save(paths[1][0], np.ones((2, 26), np.int8))
    np.save(paths[1][1], np.full((2, 26), 2**40))
    (batch,) = _pipe(paths, batch_size=4, shuffle_training_set=True)
    assert batch.sparse_features.values().unique().tolist() == [1, 2**40]


def test_a_remainder_that_the_ids_cannot_hold_is_refused(tmp_path: Path) -> None:
    paths = _files(tmp_path, (4,))
    np.save(paths[1][0], np.full((4, 26), -5, np.int8))
    for mmap_mode in (False, True):
        with pytest.raises(ValueError, match=r"-5.*int8 cannot"):
            list(_pipe(paths, hashes=[200] * 26, mmap_mode=mmap_mode))


@pytest.mark.parametrize("mmap_mode", [False, True])
@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        (
            1,
            np.ones((4, 26), np.float32),
            "the array is float32, and must hold integers up to int64",
        ),
        (1, np.ones((4, 26), np.uint64), "the array is uint64, and must hold integers up to int64"),
        (1, np.ones((4, 20), np.int64), r"the array is \[4, 20\], and must be \[R, 26\]"),
        (2, np.ones((4, 2), np.int64), r"the array is \[4, 2\], and must be \[R, 1\]"),
        (0, np.ones(4, np.float32), r"the array is \[4\], and must be \[R, 13\]"),
    ],
)
def test_arrays_of_another_form_are_refused(
    tmp_path: Path, part: int, array: Any, message: str, mmap_mode: bool
) -> None:
    paths = _files(tmp_path, (4,))
    np.save(paths[part][0], array)
    with pytest.raises(ValueError, match=message):
        _pipe(paths, mmap_mode=mmap_mode)


def _cut(paths: Paths) -> Paths:
    np.save(paths[2][1], np.zeros((1, 1), np.int32))
    return paths


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda paths: paths, {"stage": "validation"}, "stage='validation'"),
        (
            lambda paths: paths,
            {"rank": 2, "world": 2},
            "world_size=2: rank=2 must be a whole number, 0 to 1",
        ),
        (
            lambda paths: paths,
            {"world": 8, "batch_size": 1},
            "7 rows are not enough for one step of 8",
        ),
        (
            lambda paths: [paths[0][:1], *paths[1:]],
            {},
            r"\[1, 2, 2\] files of dense, sparse, labels",
        ),
        (lambda paths: [[], [], []], {}, r"\[0, 0, 0\] files"),
        (_cut, {}, r"have \[4, 4, 1\] rows"),
    ],
)
def test_files_and_numbers_that_do_not_fit_are_refused(
    tmp_path: Path, change: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _pipe(change(_files(tmp_path, (3, 4))), **options)

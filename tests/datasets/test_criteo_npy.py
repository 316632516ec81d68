from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest

from tutorec.datasets.criteo import (
    BinaryCriteoUtils,
    CriteoIterDataPipe,
    criteo_kaggle,
    criteo_terabyte,
)
from tutorec.datasets.scripts import (
    contiguous_preproc_criteo,
    npy_preproc_criteo,
    shuffle_preproc_criteo,
)
from tutorec.datasets.test_utils.criteo_test_utils import CriteoTest
from tutorec.datasets.utils import rand_split_train_val

PARTS = ("dense", "sparse", "labels")


def _write_text(path: Path, rows: int, labelled: bool = True, seed: int = 0) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        numbers = [
            str(n) if rng.random() < 0.8 else "" for n in rng.integers(-3, 2_000_000_000, 13)
        ]
        ids = [f"{n:08x}" if rng.random() < 0.8 else "" for n in rng.integers(0, 1 << 32, 26)]
        lines.append([str(rng.integers(0, 2))] * labelled + numbers + ids)
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    return lines


def _outputs(folder: Path, name: str = "out") -> list[str]:
    return [str(folder / f"{name}_{part}.npy") for part in PARTS]


@pytest.mark.parametrize(
    ("name", "dataset_name", "labelled"),
    [
        ("day_0", "criteo_1tb", True),
        ("test_day.txt", "criteo_kaggle", True),
        ("test.txt", "criteo_kaggle", False),
    ],
)
def test_arrays_of_a_text_file_hold_its_numbers(
    tmp_path: Path, name: str, dataset_name: str, labelled: bool
) -> None:
    lines = _write_text(tmp_path / name, 50, labelled)
    BinaryCriteoUtils.tsv_to_npys(
        str(tmp_path / name), *_outputs(tmp_path), dataset_name=dataset_name
    )
    dense, sparse, labels = (np.load(path) for path in _outputs(tmp_path))
    ints = np.array(
        [[int(field or "0") for field in line[-39:-26]] for line in lines], dtype=np.int32
    )
    expected = np.log(ints - (ints.min() - 2), dtype=np.float32)
    assert np.array_equal(dense, expected) and dense.dtype == np.float32
    assert sparse.tolist() == [[int(field or "0", 16) for field in line[-26:]] for line in lines]
    assert labels.tolist() == [[int(line[0]) if labelled else -1] for line in lines]
    assert (sparse.dtype, labels.dtype) == (np.int64, np.int32)


def test_a_damaged_line_leaves_no_file_and_the_old_ones_as_they_were(tmp_path: Path) -> None:
    lines = _write_text(tmp_path / "day_0", 20)
    lines[7][3] = str(1 << 31)
    (tmp_path / "day_0").write_text("".join("\t".join(line) + "\n" for line in lines))
    dense, sparse, labels = _outputs(tmp_path)
    Path(dense).write_text("old")
    with pytest.raises(ValueError, match="lines 1 to 20 is 2147483648"):
        BinaryCriteoUtils.tsv_to_npys(str(tmp_path / "day_0"), dense, sparse, labels)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day_0", "out_dense.npy"]
    assert Path(dense).read_text() == "old"


@pytest.mark.parametrize(
    ("text", "dataset_name", "message"),
    [
        ("", "criteo_1tb", "the file is empty"),
        ("1\n", "criteo", "dataset_name='criteo'"),
        ("1\t2\n", "criteo_1tb", "2 f"),
    ],
)
def test_what_is_no_criteo_file_is_refused(
    tmp_path: Path, text: str, dataset_name: str, message: str
) -> None:
    (tmp_path / "day_0").write_text(text)
    with pytest.raises(ValueError, match=message):
        BinaryCriteoUtils.tsv_to_npys(
            str(tmp_path / "day_0"), *_outputs(tmp_path), dataset_name=dataset_name
        )


def test_a_path_manager_gets_whole_files(tmp_path: Path) -> None:
    def opened(path: str, mode: str) -> IO[bytes]:
        return open(tmp_path / path.removeprefix("store://"), mode)

    store = SimpleNamespace(open=opened)
    _write_text(tmp_path / "day_0", 5)
    outputs = [f"store://{part}.npy" for part in PARTS]
    BinaryCriteoUtils.tsv_to_npys(str(tmp_path / "day_0"), *outputs, path_manager_key=store)
    assert BinaryCriteoUtils.get_shape_from_npy("store://sparse.npy", store) == (5, 26)
    ids = BinaryCriteoUtils.load_npy_range("store://sparse.npy", 1, 3, store)
    assert np.array_equal(ids, np.load(tmp_path / "sparse.npy")[1:4])


@pytest.mark.parametrize("mmap_mode", [False, True])
def test_a_range_of_rows_is_read(tmp_path: Path, mmap_mode: bool) -> None:
    array = np.arange(40, dtype=np.int32).reshape(10, 4)
    path = str(tmp_path / "a.npy")
    np.save(path, array)
    assert BinaryCriteoUtils.get_shape_from_npy(path) == (10, 4)
    for start, count in [(0, 10), (3, 4), (9, 1), (3, 0)]:
        rows = BinaryCriteoUtils.load_npy_range(path, start, count, mmap_mode=mmap_mode)
        assert np.array_equal(rows, array[start : start + count]) and rows.dtype == np.int32
    for start, count in [(-1, 2), (8, 3), (10, 0)]:
        with pytest.raises(ValueError, match="use rows 0 to 9"):
            BinaryCriteoUtils.load_npy_range(path, start, count, mmap_mode=mmap_mode)


def test_a_file_that_was_cut_or_has_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.ones((10, 4)))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="ends before row 9"):
        BinaryCriteoUtils.load_npy_range(str(path), 5, 5)
    for array in (np.ones(3), np.asfortranarray(np.ones((3, 2)))):
        np.save(path, array)
        with pytest.raises(ValueError, match=r"two dimensions.*row by row"):
            BinaryCriteoUtils.load_npy_range(str(path), 0, 1)


def test_files_that_are_no_arrays_are_named(tmp_path: Path) -> None:
    path = str(tmp_path / "a.npy")
    for text in (b"", b"not an array", b"\x93NUMPY\x01\x00\x03\x00{[\n"):
        Path(path).write_bytes(text)
        for read in (
            lambda: BinaryCriteoUtils.get_shape_from_npy(path),
            lambda: BinaryCriteoUtils.load_npy_range(path, 0, 1),
            lambda: BinaryCriteoUtils.sparse_to_contiguous([path], str(tmp_path)),
        ):
            with pytest.raises(ValueError, match=r"a\.npy: cut short"):
                read()


@pytest.mark.parametrize("mmap_mode", [False, True])
def test_python_objects_in_a_file_are_not_unpickled(tmp_path: Path, mmap_mode: bool) -> None:
    path = str(tmp_path / "a.npy")
    np.save(path, np.array([["x", "y"]], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects instead of numbers"):
        BinaryCriteoUtils.load_npy_range(path, 0, 1, mmap_mode=mmap_mode)


def test_ranges_of_files_cover_all_rows_in_rank_order() -> None:
    lengths = [5, 3, 9]
    ranges = [
        BinaryCriteoUtils.get_file_row_ranges_and_remainder(lengths, rank, 3) for rank in range(3)
    ]
    assert ranges == [({0: (0, 4), 1: (0, 0)}, 2), ({1: (1, 2), 2: (0, 3)}, 2), ({2: (4, 8)}, 2)]
    part = BinaryCriteoUtils.get_file_row_ranges_and_remainder(
        lengths, 1, 2, start_row=4, last_row=8
    )
    assert part == ({1: (2, 2), 2: (0, 0)}, 1)


@pytest.mark.parametrize("threshold", [0, 1, 3])
def test_contiguous_ids_count_from_two_in_the_order_of_first_use(
    tmp_path: Path, threshold: int
) -> None:
    rng = np.random.default_rng(0)
    days = [rng.integers(0, 9, (rows, 26)) * 12_345_678 for rows in (12, 7)]
    files = [str(tmp_path / f"day_{day}_sparse.npy") for day in range(2)]
    for file, ids in zip(files, days, strict=True):
        np.save(file, ids)
    (tmp_path / "out").mkdir()
    BinaryCriteoUtils.sparse_to_contiguous(files, str(tmp_path / "out"), threshold)
    written = np.concatenate(
        [np.load(tmp_path / "out" / f"day_{day}_sparse_contig_freq.npy") for day in range(2)]
    )
    for column, ids in enumerate(np.concatenate(days).T.tolist()):
        counts, numbers = Counter(ids), {}
        for i in ids:
            if i not in numbers:
                numbers[i] = (
                    1 if counts[i] < threshold else 2 + sum(n > 1 for n in numbers.values())
                )
        assert written[:, column].tolist() == [numbers[i] for i in ids]


def test_contiguous_ids_of_few_bits_do_not_wrap(tmp_path: Path) -> None:
    ids = np.arange(-128, 128).astype(np.int8)[:, None]
    np.save(tmp_path / "day_0_sparse.npy", ids)
    files = [str(tmp_path / "day_0_sparse.npy")]
    BinaryCriteoUtils.sparse_to_contiguous(files, str(tmp_path), 0, columns=1)
    written = np.load(tmp_path / "day_0_sparse_contig_freq.npy")
    assert written[:, 0].tolist() == list(range(2, 258))


@pytest.mark.parametrize("dtype", [np.uint64, np.float32, np.bool_])
def test_ids_that_are_no_integers_of_int64_are_refused(tmp_path: Path, dtype: Any) -> None:
    _days(tmp_path, (6, 4))
    path = tmp_path / "day_0_sparse.npy"
    np.save(path, np.ones((6, 26), dtype))
    message = (
        f"day_0_sparse.npy: the array is {np.dtype(dtype)}, and must hold integers up to int64"
    )
    folder = str(tmp_path)
    with pytest.raises(ValueError, match=message):
        BinaryCriteoUtils.sparse_to_contiguous([str(path)], folder)
    with pytest.raises(ValueError, match=message):
        BinaryCriteoUtils.shuffle(folder, folder, folder, {0: 6}, days=2)


def test_arrays_that_become_shorter_while_they_are_shuffled_are_refused(tmp_path: Path) -> None:
    # in a process of its own, which a mapped file would end
    _days(tmp_path, (6000, 4))
    code = """
import os, sys
from tutorec.datasets import criteo

gather = criteo.gather_rows

def cut_and_gather(files, *arguments):
    os.truncate(sys.argv[1] + "/day_0_sparse.npy", 1000)
    return gather(files, *arguments)

criteo.gather_rows = cut_and_gather
try:
    criteo.BinaryCriteoUtils.shuffle(*[sys.argv[1]] * 3, {0: 6000}, days=2)
except ValueError as error:
    print(error)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "day_0_sparse.npy: the file ends before row 5999" in ran.stdout


def test_an_array_on_a_full_disk_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    _write_text(tmp_path / "day_0", 5)
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match=r"388 bytes.*dense"):
        BinaryCriteoUtils.tsv_to_npys(str(tmp_path / "day_0"), *_outputs(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day_0"]


def _days(
    folder: Path, rows: tuple[int, ...], highest: int = 1 << 30
) -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(1)
    arrays: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
    for day, count in enumerate(rows):
        made = (
            rng.random((count, 13), np.float32),
            rng.integers(0, highest, (count, 26)),
            rng.integers(0, 2, (count, 1)),
        )
        for part, array in zip(PARTS, made, strict=True):
            arrays[part].append(array)
            np.save(folder / f"day_{day}_{part}.npy", array)
    return arrays


def test_shuffled_days_hold_the_rows_in_numpys_order_and_ids_exactly(tmp_path: Path) -> None:
    arrays = _days(tmp_path, (6, 9, 4))
    for name in ("out", "full"):
        (tmp_path / name).mkdir()
    folder, out, full = (str(tmp_path / name) for name in ("", "out", "full"))
    with pytest.warns(UserWarning, match=r"full\.npy: float32.*\d+") as seen:
        BinaryCriteoUtils.shuffle(folder, folder, out, {0: 6, 1: 9}, full, days=3, random_seed=5)
    assert len(seen) == 1
    expected = np.arange(15)
    np.random.RandomState(5).shuffle(expected)
    for part in PARTS:
        written = np.concatenate(
            [np.load(tmp_path / "out" / f"day_{day}_{part}.npy") for day in range(2)]
        )
        assert np.array_equal(written, np.concatenate(arrays[part][:2])[expected])
        assert written.dtype == (np.float32 if part == "dense" else np.int32)
        assert np.array_equal(np.load(tmp_path / "out" / f"day_2_{part}.npy"), arrays[part][2])
    rows = np.concatenate([np.concatenate(arrays[part][:2]) for part in PARTS], axis=1)
    assert np.array_equal(np.load(tmp_path / "full" / "full.npy"), rows.astype(np.float32))


def test_a_shuffle_refuses_other_numbers_of_rows_and_ids_beyond_32_bits(tmp_path: Path) -> None:
    _days(tmp_path, (6, 4), highest=1 << 40)
    folder = str(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"day_0_dense.npy.*\[6, 13\].*\[7, 13\]"):
        BinaryCriteoUtils.shuffle(folder, folder, f"{folder}/out", {0: 7}, days=2)
    with pytest.raises(ValueError, match="run sparse_to_contiguous first"):
        BinaryCriteoUtils.shuffle(folder, folder, f"{folder}/out", {0: 6}, days=2)


def test_the_three_scripts_prepare_24_days(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("text", "arrays", "ids", "shuffled")]
    for folder in folders:
        folder.mkdir()
    text, arrays, ids, shuffled = map(str, folders)
    for day in range(24):
        _write_text(folders[0] / f"day_{day}", 2 + day, seed=day)
    npy_preproc_criteo.main(["--input_dir", text, "--output_dir", arrays])
    contiguous_preproc_criteo.main(["--input_dir", arrays, "--output_dir", ids])
    for path in folders[2].iterdir():
        shutil.move(path, str(path).replace("_contig_freq", ""))
    shuffle_preproc_criteo.main(
        [
            "--input_dir_labels_and_dense",
            arrays,
            "--input_dir_sparse",
            ids,
            "--output_dir_shuffled",
            shuffled,
        ]
    )
    assert f"{sum(range(2, 25))} rows shuffled" in capsys.readouterr().out
    assert len(list(folders[3].iterdir())) == 24 * 3
    shapes = [
        BinaryCriteoUtils.get_shape_from_npy(f"{shuffled}/day_{day}_sparse.npy")
        for day in range(24)
    ]
    assert shapes == [(2 + day, 26) for day in range(24)]


def test_the_kaggle_script_prepares_both_files(tmp_path: Path) -> None:
    _write_text(tmp_path / "train.txt", 5)
    _write_text(tmp_path / "test.txt", 3, labelled=False)
    npy_preproc_criteo.main(
        [
            "--input_dir",
            str(tmp_path),
            "--output_dir",
            str(tmp_path),
            "--dataset_name",
            "criteo_kaggle",
        ]
    )
    assert [len(np.load(tmp_path / f"{name}_labels.npy")) for name in ("train", "test")] == [5, 3]


class TestLines(CriteoTest):
    """Written against TorchRec's class, as the tests of projects are."""

    def test_lines_of_a_training_file(self) -> None:
        with (
            self._create_dataset_tsv(num_rows=7) as one,
            self._create_dataset_tsv(num_rows=5) as other,
        ):
            rows = list(criteo_terabyte([one, other]))
            train, val = rand_split_train_val(criteo_kaggle(one), 0.5)
            assert sorted(map(str, [*train, *val])) == sorted(map(str, rows[:7]))
            assert next(iter(CriteoIterDataPipe([one], row_mapper=None)))[0] == str(
                rows[0]["label"]
            )
        assert len(rows) == 12
        for row in rows:
            self._validate_sample(row)

    def test_lines_of_a_file_without_labels(self) -> None:
        with self._create_dataset_tsv(train=False, filename="test.txt") as path:
            for row in criteo_kaggle(path):
                self._validate_sample(row, train=False)
            with pytest.raises(AssertionError, match="the columns are"):
                self._validate_sample(row)

    def test_a_value_out_of_range_fails(self) -> None:
        with self._create_dataset_tsv(num_rows=1) as path:
            row = next(iter(criteo_kaggle(path)))
        for name, value in (("label", 2), ("int_3", 101), ("cat_25", "100000000")):
            with pytest.raises(AssertionError, match=f"{name} is {value}"):
                self._validate_sample({**row, name: value})

    def test_arrays_of_several_names(self) -> None:
        labels = np.zeros((3, 1), np.int32)
        with self._create_dataset_npys(
            3, filenames=["day_0", "day_1"], generate_sparse=False, labels=labels
        ) as paths:
            names = [Path(path).name for path in paths]
            assert names == [
                "day_0_dense.npy",
                "day_0_labels.npy",
                "day_1_dense.npy",
                "day_1_labels.npy",
            ]
            assert np.load(paths[0]).shape == (3, 13) and np.array_equal(np.load(paths[3]), labels)


def test_a_line_with_another_number_of_fields_is_refused(tmp_path: Path) -> None:
    (tmp_path / "day_0").write_text("0\t1\n")
    with pytest.raises(ValueError, match="40 fields, or 39 without a label, not 2"):
        list(criteo_terabyte([str(tmp_path / "day_0")]))


def test_the_readers_need_no_iopath() -> None:
    assert "iopath" not in sys.modules

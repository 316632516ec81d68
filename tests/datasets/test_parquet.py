from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tutorec.datasets.parquet import ParquetDataset
from tutorec.datasets.utils import Batch, step_slices

pa = pytest.importorskip(
    "pyarrow", reason="pyarrow is not installed: pip install 'tutorec[parquet]'"
)
pq = pytest.importorskip("pyarrow.parquet")


def _bag(row: int) -> list[int]:
    return list(range(10 * row, 10 * row + row % 3))


def _write(folder: Path, rows: tuple[int, ...] = (23, 0, 14), group: int = 5) -> list[Path]:
    """Files whose columns tell the number of their row over all files."""
    paths, start = [], 0
    for day, count in enumerate(rows):
        numbers = range(start, start + count)
        start += count
        columns = {
            "clicked": pa.array(
                [None if row == 4 else _bag(row) for row in numbers], pa.list_(pa.int64())
            ),
            "user": pa.array([None if row % 7 == 6 else row for row in numbers], pa.int32()),
            "price": pa.array([row / 2 for row in numbers], pa.float64()),
            "hour": pa.array([row % 24 for row in numbers], pa.int16()),
            "click": pa.array([row % 2 == 1 for row in numbers], pa.bool_()),
            "row": pa.array(list(numbers), pa.int64()),
        }
        paths.append(folder / f"day_{day}.parquet")
        pq.write_table(pa.table(columns), paths[-1], row_group_size=group)
    return paths


def _data(paths: list[Path], batch_size: int = 4, **options: Any) -> ParquetDataset:
    return ParquetDataset(
        paths, batch_size, ["clicked", "user"], ["price", "hour", "row"], "click", **options
    )


def _rows(batch: Batch) -> list[int]:
    """The rows of a batch, which all its parts agree on."""
    rows = [int(row) for row in batch.dense_features[:, 2].tolist()]
    assert batch.dense_features.tolist() == [[row / 2, row % 24, row] for row in rows]
    assert batch.labels.tolist() == [row % 2 for row in rows]
    assert (batch.dense_features.dtype, batch.labels.dtype) == (torch.float32, torch.float32)
    kjt = batch.sparse_features
    assert kjt.keys() == ["clicked", "user"] and kjt.stride() == len(rows)
    clicked, user = kjt["clicked"], kjt["user"]
    assert clicked.lengths().tolist() == [0 if row == 4 else row % 3 for row in rows]
    assert clicked.values().tolist() == [i for row in rows if row != 4 for i in _bag(row)]
    assert user.lengths().tolist() == [int(row % 7 != 6) for row in rows]
    assert user.values().tolist() == [row for row in rows if row % 7 != 6]
    assert kjt.values().dtype == torch.int64 and kjt.lengths().dtype == torch.int32
    return rows


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_take_every_row_once_in_as_many_batches(tmp_path: Path, world: int) -> None:
    paths = _write(tmp_path)
    ranks = [_data(paths, rank=rank, world_size=world) for rank in range(world)]
    read = [[_rows(batch) for batch in data] for data in ranks]
    assert [row for batches in read for rows in batches for row in rows] == list(range(37))
    steps = step_slices(37, 4, world)
    assert [[len(rows) for rows in batches] for batches in zip(*read, strict=True)] == [
        [stop - start for start, stop in step] for step in steps
    ]
    assert [len(data) for data in ranks] == [len(steps)] * world


def test_a_seed_shuffles_row_groups_in_another_way_in_each_pass(tmp_path: Path) -> None:
    data, same = (_data(_write(tmp_path), seed=3) for _ in range(2))
    first, second = ([row for batch in data for row in _rows(batch)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(37)) and first != second != list(range(37))
    starts = [0, 5, 10, 15, 20, 23, 28, 33, 37]
    groups = {start: list(range(start, stop)) for start, stop in pairwise(starts)}
    assert [row for start in first if start in groups for row in groups[start]] == first
    same.set_epoch(1)
    assert [row for batch in same for row in _rows(batch)] == second


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("taken", [0, 1, 4, 5])
def test_a_state_goes_on_with_the_batches_of_the_run_that_it_was_made_in(
    tmp_path: Path, workers: int, taken: int
) -> None:
    paths = _write(tmp_path)
    for rank in range(2):
        whole = _data(paths, rank=rank, world_size=2, seed=1)
        expected = [
            _rows(batch) for batch in DataLoader(whole, batch_size=None, num_workers=workers)
        ]
        assert len(expected) == 5
        state = _data(paths, rank=1 - rank, world_size=2, seed=1).state_dict(taken, workers)
        resumed = _data(paths, rank=rank, world_size=2, seed=1)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        if taken == 5:  # the next pass
            whole.set_epoch(1)
            expected += [
                _rows(batch) for batch in DataLoader(whole, batch_size=None, num_workers=workers)
            ]
        loader = DataLoader(resumed, batch_size=None, num_workers=workers)
        assert len(loader) == len(expected) - taken
        assert [_rows(batch) for batch in loader] == expected[taken:]


def _in_order(data: ParquetDataset, rank: int, workers: int) -> list[list[int]]:
    """The rows of a rank's batches as a DataLoader gives them out: of each worker in turn."""
    plan = data._batches_of_workers(rank, workers)
    turns = [
        batch
        for turn in range(len(plan[0]))
        for worker in plan
        for batch in worker[turn : turn + 1]
    ]
    return [[row for start, stop in batch for row in range(start, stop)] for batch in turns]


@given(
    rows=st.integers(4, 60),
    stops=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(0, 9)),
        min_size=1,
    ),
)
def test_a_run_that_is_stopped_and_goes_on_in_other_worlds_takes_every_row_once(
    rows: int, stops: list[tuple[int, int, int, int]]
) -> None:
    data = ParquetDataset.__new__(ParquetDataset)  # positions need no file
    data._groups, data._rows, data.seed, data.world_size, data.batch_size = [], rows, None, 1, 1
    data.set_epoch(0)
    taken: list[int] = []
    for world, batch_size, workers, steps in stops:
        before = data.state_dict(0)
        data.world_size, data.batch_size = world, batch_size
        data.load_state_dict(before)
        if data._epoch:  # there was not a row for each rank of this world
            break
        expected = [_in_order(data, rank, workers) for rank in range(world)]
        assert len({len(batches) for batches in expected}) == 1
        taken += [row for batches in expected for batch in batches[:steps] for row in batch]
        data.load_state_dict(data.state_dict(steps, workers))
        if data._epoch:
            assert rows - len(taken) < world
            break
        assert [_in_order(data, rank, workers) for rank in range(world)] == [
            batches[steps:] for batches in expected
        ]
        left = [row for start, stop in data._left for row in range(start, stop)]
        assert sorted(taken + left) == list(range(rows))


def test_an_object_knows_where_it_stands_and_starts_again_from_there(tmp_path: Path) -> None:
    paths = _write(tmp_path)
    data, resumed = _data(paths), _data(paths)
    batches = iter(data)
    first = [_rows(batch) for batch in islice(batches, 3)]
    state = data.state_dict()
    assert (
        state
        == data.state_dict(3)
        == {"epoch": 0, "left": [[12, 37]], "rows": 37, "row_groups": 9, "seed": None}
    )
    resumed.load_state_dict(state)
    for _ in range(2):  # one more look does not lose the position
        assert _rows(next(iter(resumed))) == list(range(12, 16))
    assert len(resumed) == 7 and sum(map(len, first)) == 12
    assert [_rows(batch) for batch in resumed] == [_rows(batch) for batch in batches]
    assert data.state_dict() == resumed.state_dict() == {**state, "epoch": 1, "left": [[0, 37]]}
    assert len(resumed) == 10


def test_a_state_with_less_than_a_row_for_each_rank_is_that_of_the_next_pass(
    tmp_path: Path,
) -> None:
    paths = _write(tmp_path)
    one = _data(paths, batch_size=36)
    state = one.state_dict(1)
    assert state["left"] == [[36, 37]]
    two = _data(paths, world_size=2)
    two.load_state_dict(state)
    assert two.state_dict()["epoch"] == 1 and len(two) == 5


def test_a_state_of_other_data_is_refused(tmp_path: Path) -> None:
    paths = _write(tmp_path)
    state = _data(paths, seed=1).state_dict()
    for other in (
        _data(paths, seed=2),
        _data(paths[:1], seed=1),
        _data(_write(tmp_path, group=6), seed=1),
    ):
        with pytest.raises(ValueError, match=r"'rows': 37, 'row_groups': 9, 'seed': 1.*use"):
            other.load_state_dict(state)


def test_each_row_group_is_decoded_once_and_by_few_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = ParquetDataset._decoded

    def remember(self: ParquetDataset, path: Path, group: int, count: int) -> Any:
        decoded.append(group)
        return decode(self, path, group, count)

    monkeypatch.setattr(ParquetDataset, "_decoded", remember)
    paths = _write(tmp_path, rows=(40,), group=10)
    for rank, groups in ((0, [0, 1]), (1, [2, 3])):
        decoded.clear()
        assert len(list(_data(paths, batch_size=3, rank=rank, world_size=2))) == 7
        assert decoded == groups


def test_ids_alone_keep_32_bits_and_large_lists_are_read(tmp_path: Path) -> None:
    ids = pa.array([[1], [2, 3], []], pa.large_list(pa.int32()))
    pq.write_table(
        pa.table({"a": ids, "b": pa.array([[], [4], [5]], pa.list_(pa.int32()))}),
        tmp_path / "a.parquet",
    )
    (batch,) = ParquetDataset(str(tmp_path / "a.parquet"), 4, ["b", "a"])
    assert batch.sparse_features.values().tolist() == [4, 5, 1, 2, 3]
    assert batch.sparse_features.values().dtype == torch.int32
    assert batch.dense_features.shape == (3, 0) and batch.labels.tolist() == [0, 0, 0]


def test_a_batch_can_be_changed_and_the_data_set_pickled(tmp_path: Path) -> None:
    data = pickle.loads(pickle.dumps(_data(_write(tmp_path))))
    for batch in data:
        for part in (batch.dense_features, batch.sparse_features.values(), batch.labels):
            part.add_(1)
    assert sum(len(_rows(batch)) for batch in data) == 37


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparse": ["nothing"]}, r"day_0.parquet: no column 'nothing'; there are \['clicked'"),
        (
            {"sparse": ["price"]},
            "column 'price' holds double, and it must hold integers or lists of them",
        ),
        (
            {"sparse": ["clicked"], "dense": ["clicked"]},
            "holds list<element: int64>, and it must hold numbers",
        ),
        ({"sparse": []}, "give a list of at least one column"),
        ({"sparse": "clicked"}, r"\['clicked'\]"),
        ({"rank": 2, "world_size": 2}, "world_size=2: rank=2 must be a whole number, 0 to 1"),
        ({"world_size": 38}, "37 rows are not enough for one step of 38"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_columns_and_numbers_that_cannot_be_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ParquetDataset(_write(tmp_path), 4, **{"sparse": ["clicked"], **change})


@pytest.mark.parametrize("name", ["ids", "number"])
def test_a_null_where_a_number_is_needed_is_named(tmp_path: Path, name: str) -> None:
    table = pa.table(
        {"ids": [[1], [2, None], [3]], "number": [1.0, None, 2.0], "good": [[1], [2], [3]]}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    data = ParquetDataset(
        tmp_path / "a.parquet",
        1,
        ["good" if name == "number" else "ids"],
        [name] * (name == "number"),
    )
    with pytest.raises(
        ValueError, match=rf"a.parquet, row group 1, column '{name}': 1 of [12] values are null"
    ):
        list(data)


@pytest.mark.parametrize("cut", [slice(0, 100), slice(1, None), slice(0, 0)])
def test_a_damaged_file_is_named(tmp_path: Path, cut: slice) -> None:
    path = _write(tmp_path)[0]
    path.write_bytes(path.read_bytes()[cut])
    with pytest.raises(ValueError, match=r"day_0\.parquet: damaged"):
        list(_data([path]))
    with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
        _data([tmp_path / "none.parquet"])


def test_a_file_that_was_replaced_is_named(tmp_path: Path) -> None:
    data = _data(_write(tmp_path))
    _write(tmp_path, group=6)
    with pytest.raises(ValueError, match=r"group 0.*6 rows.*5"):
        list(data)


def test_ids_that_became_another_type_in_a_replaced_file_are_not_cut_to_integers(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"item": [1, 2]}), path)
    data = ParquetDataset(path, 2, ["item"])
    pq.write_table(pa.table({"item": [1.5, 2.5]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet: column 'item' holds double"):
        list(data)


@pytest.mark.parametrize("kind", ["one id", "lists"])
def test_an_id_above_int64_is_named_with_its_row(tmp_path: Path, kind: str) -> None:
    ids = [2**63 - 1, 5, None, 2**63]
    column = pa.array(ids, pa.uint64())
    if kind == "lists":
        rows = [[], [2**63 - 1, 5], None, [7, 2**63]]
        column = pa.array(rows, pa.list_(pa.uint64()))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"item": column}).slice(0, 3), path)
    (batch,) = ParquetDataset(path, 4, ["item"])
    assert batch.sparse_features.values().tolist() == [2**63 - 1, 5]
    assert batch.sparse_features.values().dtype == torch.int64
    pq.write_table(pa.table({"item": column}), path)
    with pytest.raises(
        ValueError,
        match=r"a\.parquet.*group 0, column 'item': row 3.*id 9223372036854775808",
    ):
        list(ParquetDataset(path, 4, ["item"]))


def test_a_number_that_float32_cannot_hold_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"item": [1, 2], "price": [float("inf"), 1e300]}), path)
    with pytest.raises(ValueError, match=r"column 'price': row 1.*1e\+300.*float32"):
        list(ParquetDataset(path, 2, ["item"], ["price"]))


@pytest.mark.parametrize("number", [2**24 + 1, 2**31 - 1, 2**53 + 1, 2**63 - 1, -(2**24) - 1])
def test_a_whole_number_that_float32_rounds_is_warned_of_once(tmp_path: Path, number: int) -> None:
    path = tmp_path / "a.parquet"
    columns = {"item": [1, 2, 3], "time": [2**24, number, number]}
    pq.write_table(pa.table(columns), path, row_group_size=2)
    with pytest.warns(UserWarning, match=rf"column 'time': row 1 holds {number}, which") as seen:
        list(ParquetDataset(path, 3, ["item"], ["time"], "time"))
    assert len(seen) == 1


def _flipped(path: Path, at: int, bit: int) -> Path:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    other = path.with_name("flipped.parquet")
    other.write_bytes(data)
    return other


def test_a_page_that_does_not_fit_its_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"item": list(range(500))}),
        path,
        write_page_checksum=True,
        use_dictionary=False,
        compression="none",
    )
    (good,) = ParquetDataset(path, 500, ["item"])
    assert good.sparse_features.values().tolist() == list(range(500))
    at = path.read_bytes().index((77).to_bytes(8, "little"))
    with pytest.raises(ValueError, match=r"flipped\.parquet: damaged.*CRC"):
        list(ParquetDataset(_flipped(path, at, 3), 500, ["item"]))


def test_every_flipped_bit_of_the_footer_is_a_value_error_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"item": [1, 2], "price": [1.0, 2.0]}), path)
    size = path.stat().st_size
    footer = int.from_bytes(path.read_bytes()[-8:-4], "little")
    errors = []
    for at in range(size - 8 - footer, size, 3):
        other = _flipped(path, at, at % 8)
        try:
            list(ParquetDataset(other, 2, ["item"], ["price"]))
        except ValueError as error:
            errors.append(str(error))
    named = [error for error in errors if "flipped.parquet" in error]
    assert errors and [error for error in errors if "rows are not enough" not in error] == named


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(tmp_path: Path) -> None:
    # in a process of its own, which a mapped file would end
    code = """
import os, sys
import pyarrow as pa, pyarrow.parquet as pq
from tutorec.datasets.parquet import ParquetDataset

path = sys.argv[1]
pq.write_table(pa.table({"item": range(100_000)}), path, compression="none", use_dictionary=False)
read = pq.ParquetFile.read_row_group

def cut_and_read(self, *args, **options):
    os.truncate(path, 4096)
    return read(self, *args, **options)

pq.ParquetFile.read_row_group = cut_and_read
try:
    next(iter(ParquetDataset(path, 1000, ["item"])))
except ValueError as error:
    print(error)
"""
    path = str(tmp_path / "a.parquet")
    command = [sys.executable, "-c", code, path]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "a.parquet: damaged, or not a Parquet file" in ran.stdout


def test_a_name_that_two_columns_have_is_refused(tmp_path: Path) -> None:
    twice = pa.table([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "b", "a"])
    pq.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: 2 columns are named 'a'"):
        ParquetDataset(tmp_path / "a.parquet", 1, ["a"])
    (batch,) = ParquetDataset(tmp_path / "a.parquet", 1, ["b"])
    assert batch.sparse_features.values().tolist() == [2]


def test_a_pattern_stands_for_its_files_in_order(tmp_path: Path) -> None:
    files = _write(tmp_path)
    by_pattern = ParquetDataset(f"{tmp_path}/*.parquet", 4, ["user"])
    expected = [batch.sparse_features.values() for batch in ParquetDataset(files, 4, ["user"])]
    found = [batch.sparse_features.values() for batch in by_pattern]
    assert len(found) == len(expected) == 10
    assert all(map(torch.equal, found, expected))
    assert len(ParquetDataset([files[0], f"{tmp_path}/**/*.parquet"], 4, ["user"])) > 10


def test_a_pattern_without_files_and_a_folder_are_named(tmp_path: Path) -> None:
    _write(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no.*pattern '.*none_\*\.parquet'"):
        ParquetDataset(tmp_path / "none_*.parquet", 4, ["user"])
    with pytest.raises(ValueError, match="is a folder: give its files") as refused:
        ParquetDataset(tmp_path, 4, ["user"])
    pattern = ast.literal_eval(str(refused.value).split("give its files, ")[1])
    assert len(ParquetDataset(pattern, 4, ["user"])) == 10
    with pytest.raises(ValueError, match="paths is empty"):
        ParquetDataset([], 4, ["user"])


def test_without_pyarrow_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install 'tutorec\[parquet\]'"):
        ParquetDataset(tmp_path / "a.parquet", 1, ["a"])

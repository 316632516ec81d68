from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tutorec.datasets.utils import (
    PATH_MANAGER_KEY,
    Limit,
    LoadFiles,
    ReadLinesFromCSV,
    rand_split_train_val,
    safe_cast,
)


class _Store:
    """A path manager: files in memory."""

    def __init__(self, **files: str) -> None:
        self.files = files
        self.modes: list[str] = []

    def open(self, path: str, mode: str) -> io.StringIO:
        self.modes.append(mode)
        return io.StringIO(self.files[path])


def test_lines_of_several_files_are_read_in_order_and_files_are_closed(tmp_path: Path) -> None:
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for path in paths:
        path.write_text(f"name\n{path.stem};1\n{path.stem};2\n")
    opened = []

    def remembered(pairs: LoadFiles):
        for pair in pairs:
            opened.append(pair[1])
            yield pair

    lines = ReadLinesFromCSV(
        remembered(LoadFiles(map(str, paths), mode="t")), skip_first_line=True, delimiter=";"
    )
    assert list(lines) == [["a", "1"], ["a", "2"], ["b", "1"], ["b", "2"]]
    assert [file.closed for file in opened] == [True, True]


@pytest.mark.parametrize(("mode", "expected"), [("b", "rb"), ("t", "rt"), ("rb", "rb"), ("r", "r")])
def test_a_path_manager_of_the_caller_opens_the_files(mode: str, expected: str) -> None:
    store = _Store(day_0="x\n")
    assert [
        (path, file.read()) for path, file in LoadFiles(["day_0"], mode, path_manager_key=store)
    ] == [("day_0", "x\n")]
    assert store.modes == [expected]


def test_a_name_is_looked_up_in_iopath_where_the_program_has_imported_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    managers = {PATH_MANAGER_KEY: _Store(day_0="x\n")}
    iopath = SimpleNamespace(PathManagerFactory=lambda: managers)
    monkeypatch.setitem(sys.modules, "iopath.common.file_io", iopath)
    assert list(ReadLinesFromCSV(LoadFiles(["day_0"], "r"))) == [["x"]]


def test_load_files_knows_a_length_that_it_was_given() -> None:
    assert len(LoadFiles(["a", "b"], length=2)) == 2
    with pytest.raises(TypeError, match="length="):
        len(LoadFiles(["a"]))
    with pytest.raises(ValueError, match="mode='w'"):
        LoadFiles([], mode="w")


def test_limit_ends_before_the_samples_do() -> None:
    assert list(Limit(range(10), 3)) == [0, 1, 2]
    assert list(Limit(range(2), 3)) == [0, 1]
    assert list(LoadFiles([]).limit(3)) == []


def test_safe_cast_answers_the_default_for_a_bad_value_only() -> None:
    assert [safe_cast(text, int, -1) for text in ("7", "", "x")] == [7, -1, -1]


def test_splits_are_disjoint_complete_and_the_same_in_every_pass() -> None:
    split = rand_split_train_val(range(1000), 0.7, 3)
    train, val = (list(part) for part in split)
    assert sorted(train + val) == list(range(1000))
    assert [train, val] == [list(part) for part in split]


def test_a_random_split_is_that_of_pythons_generator() -> None:
    # random.Random(0).random(): 0.84, 0.76, 0.42, 0.26, 0.51
    assert list(rand_split_train_val("abcde", 0.6)[0]) == ["c", "d", "e"]
    assert list(rand_split_train_val("abcde", 0.5, random_seed=0)[1]) == ["a", "b", "e"]


@pytest.mark.parametrize("share", [0.0, 1.0, 7.0])
def test_a_split_without_two_parts_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=f"train_perc={share}"):
        rand_split_train_val([], share)

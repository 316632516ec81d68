"""A file is whole or not there, whatever ends the writing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tutorec._whole_file import whole_file


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("old")
    with pytest.raises(KeyError), whole_file(path) as draft:
        draft.write_text("new")
        raise KeyError("half way")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["note.txt"]


def test_the_file_is_replaced_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("old")
    with whole_file(path) as draft:
        draft.write_text("new")
        assert (draft.name, path.read_text()) == ("note.txt", "old")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["note.txt"]


def test_the_draft_is_on_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("fsync"), sync(handle)))
    monkeypatch.setattr(
        Path, "replace", lambda self, target: (done.append("replace"), replace(self, target))[1]
    )
    with whole_file(tmp_path / "note.txt") as draft:
        draft.write_text("new")
    assert done == ["fsync", "replace"]


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    with whole_file(path) as one, whole_file(path) as two:
        one.write_text("one")
        two.write_text("two")
    assert path.read_text() == "one"

"""A checkpoint that is replaced while it is read, by two savers, or among other files: one save or
a clear error.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tutorec.distributed.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    read_info,
    read_state_dict,
    save_checkpoint,
)
from tutorec.distributed.checkpoint import reading as reading_module
from tutorec.distributed.checkpoint.folder import Folder
from tutorec.distributed.checkpoint.manifest import MANIFEST, read_manifest, remove_checkpoint
from tutorec.distributed.checkpoint.reading import CheckpointFiles
from tutorec.errors import CheckpointError


def layer_of(number: float) -> nn.Linear:
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(number)
    return layer


def save(path: Path, step: int) -> None:
    save_checkpoint(path, layer_of(step), step=step)


def steps_of(model: nn.Module) -> set[float]:
    return {
        float(number) for parameter in model.parameters() for number in parameter.detach().unique()
    }


def loaded(path: Path) -> tuple[int | None, set[float]]:
    model = layer_of(-1)
    return load_checkpoint(path, model).step, steps_of(model)


def read(path: Path) -> tuple[int | None, set[float]]:
    numbers = steps_of_dict(read_state_dict(path)["model"])
    return int(min(numbers)), numbers


def saved_elsewhere(path: Path, step: int) -> Path:
    other = path.parent / f"other-{step}"
    save(other, step)
    return other


def replace_by(path: Path, other: Path) -> None:
    """What a save of another run does: new files, the manifest in one step, the old files go."""
    old = [file for file in path.iterdir() if file.name not in (MANIFEST, ".metadata")]
    for file in other.iterdir():
        if file.name != MANIFEST:
            shutil.copy(file, path / file.name)
    shutil.copy(other / MANIFEST, path / "manifest.draft")
    os.replace(path / "manifest.draft", path / MANIFEST)
    for file in old:
        file.unlink()


def before_calls(
    times: int, function: Callable[..., Any], action: Callable[[], None]
) -> Callable[..., Any]:
    """The function, with an action before each of its first calls."""
    left = times

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            action()
        return function(*args, **kwargs)

    return run


@pytest.mark.parametrize("use", [loaded, read])
def test_a_checkpoint_replaced_before_its_files_are_open_is_read_anew(tmp_path, monkeypatch, use):
    path = tmp_path / "model"
    other = saved_elsewhere(path, 2)
    save(path, 1)
    # The manifest has been read, and the index is next.
    check = before_calls(1, CheckpointFiles.check, lambda: replace_by(path, other))
    monkeypatch.setattr(CheckpointFiles, "check", check)
    assert use(path) == (2, {2.0})


@pytest.mark.parametrize("use", [loaded, read])
def test_a_checkpoint_replaced_when_its_files_are_open_is_the_one_that_was_found(
    tmp_path, monkeypatch, use
):
    path = tmp_path / "model"
    other = saved_elsewhere(path, 2)
    save(path, 1)
    read_blocks = before_calls(1, CheckpointFiles.read, lambda: replace_by(path, other))
    monkeypatch.setattr(CheckpointFiles, "read", read_blocks)
    assert use(path) == (1, {1.0})
    assert use(path) == (2, {2.0})


@pytest.mark.parametrize("use", [loaded, read])
def test_where_files_do_not_stay_open_a_checkpoint_replaced_last_is_read_anew(
    tmp_path, monkeypatch, use
):
    """As on an object store: numbers of the first save may already be in the model."""
    monkeypatch.setattr(reading_module, "_MOST_OPEN_FILES", 0)
    path = tmp_path / "model"
    other = saved_elsewhere(path, 2)
    save(path, 1)
    read_blocks = before_calls(1, CheckpointFiles.read, lambda: replace_by(path, other))
    monkeypatch.setattr(CheckpointFiles, "read", read_blocks)
    assert use(path) == (2, {2.0})


@pytest.mark.parametrize("use", [loaded, read, read_info])
def test_a_checkpoint_replaced_at_every_attempt_is_an_error_and_the_model_stays(
    tmp_path, monkeypatch, use
):
    path = tmp_path / "model"
    number = 1
    save(path, number)

    def replace() -> None:
        nonlocal number
        number += 1
        replace_by(path, saved_elsewhere(path, number))

    model = layer_of(-1)
    monkeypatch.setattr(CheckpointFiles, "check", before_calls(100, CheckpointFiles.check, replace))
    with pytest.raises(CheckpointError, match="each of 5 attempts"):
        load_checkpoint(path, model) if use is loaded else use(path)
    assert steps_of(model) == {-1.0}


def load_while_rank_1_replaces(path: str, other: str, rank: int) -> tuple[int | None, set[float]]:
    check = CheckpointFiles.check
    if rank == 1:
        CheckpointFiles.check = before_calls(1, check, lambda: replace_by(Path(path), Path(other)))
    try:
        return loaded(Path(path))
    finally:
        CheckpointFiles.check = check


def test_ranks_load_one_save_where_it_is_replaced_between_them(ranks, tmp_path):
    path = tmp_path / "model"
    save(path, 1)
    other = saved_elsewhere(path, 2)
    assert ranks(2).run(load_while_rank_1_replaces, str(path), str(other)) == [(2, {2.0})] * 2


def test_the_latest_is_found_while_it_is_replaced(tmp_path, monkeypatch):
    path = tmp_path / "run" / "model"
    other = saved_elsewhere(tmp_path / "x", 2)
    save(path, 1)
    check = before_calls(1, reading_module.check_sizes, lambda: replace_by(path, other))
    monkeypatch.setattr(reading_module, "check_sizes", check)
    assert latest_checkpoint(path.parent) == path


def test_the_latest_is_found_while_older_ones_are_removed_and_new_ones_come(tmp_path, monkeypatch):
    def go_on() -> None:
        save(tmp_path / "b", 2)
        remove_checkpoint(Folder.from_path(tmp_path / "a"))

    save(tmp_path / "a", 1)
    monkeypatch.setattr(
        reading_module, "_complete_step", before_calls(1, reading_module._complete_step, go_on)
    )
    assert latest_checkpoint(tmp_path) == tmp_path / "b"


def test_a_second_saver_on_the_same_path_is_an_error(tmp_path):
    path = tmp_path / "model"
    save(path, 1)
    with Folder.from_path(path).locked():
        with pytest.raises(CheckpointError, match=r"save into.*model"):
            save(path, 2)
        assert loaded(path) == (1, {1.0})
    save(path, 2)
    assert loaded(path) == (2, {2.0})


def test_a_save_whose_files_another_run_removes_is_an_error_and_the_old_one_stays(
    tmp_path, monkeypatch
):
    path = tmp_path / "model"
    save(path, 1)
    sizes = Folder.sizes

    def without_new(folder: Folder) -> dict[str, int | None]:
        found = sizes(folder)
        listed = read_manifest(folder).files
        return {
            name: size for name, size in found.items() if name in listed or ".distcp" not in name
        }

    monkeypatch.setattr(Folder, "sizes", without_new)
    with pytest.raises(CheckpointError, match=r"missing:.*another run"):
        save(path, 2)
    monkeypatch.undo()
    assert loaded(path) == (1, {1.0})


def test_other_files_and_checkpoints_in_the_folder_stay(tmp_path):
    path = tmp_path / "run7"
    save(path, 1)
    (path / "notes.txt").write_text("notes")
    (path / "other.distcp").write_text("of another program")
    (path / "figures").mkdir()
    (path / "link").symlink_to(tmp_path)

    save(path / "step_100", 100)
    for step in (2, 3):
        save(path, step)
    assert (loaded(path), loaded(path / "step_100")) == ((3, {3.0}), (100, {100.0}))
    assert (path / "notes.txt").read_text() == "notes"
    names = {file.name for file in path.iterdir()}
    assert {"notes.txt", "other.distcp", "figures", "link", "step_100"} < names
    assert len(names) == 9, f"and the files of one save: {names}"

    remove_checkpoint(Folder.from_path(path))
    assert {file.name for file in path.iterdir()} == {
        "notes.txt",
        "other.distcp",
        "figures",
        "link",
        "step_100",
    }


def test_torch_reads_a_checkpoint_that_was_replaced(tmp_path):
    for step in (1, 2):
        save(tmp_path / "model", step)
    dcp_to_torch_save(tmp_path / "model", tmp_path / "file")
    assert steps_of_dict(torch.load(tmp_path / "file")["model"]) == {2.0}


def steps_of_dict(tensors: dict[str, torch.Tensor]) -> set[float]:
    return {float(number) for tensor in tensors.values() for number in tensor.unique()}


def test_checkpoints_whose_files_are_missing_or_cut_are_passed_over(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path / str(step), step)
    next((tmp_path / "3").glob("*.distcp")).unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "2"

    data = next((tmp_path / "2").glob("*.distcp"))
    os.truncate(data, data.stat().st_size - 1)
    assert latest_checkpoint(tmp_path) == tmp_path / "1"

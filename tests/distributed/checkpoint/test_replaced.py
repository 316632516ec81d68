"""A checkpoint that is replaced while it is read, or by two savers, or among other files: one save
or a clear error.
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
from tutorec.distributed.checkpoint import loading as loading_module
from tutorec.distributed.checkpoint import manifest as manifest_module
from tutorec.distributed.checkpoint import reading as reading_module
from tutorec.distributed.checkpoint.folder import Folder, folder_of
from tutorec.distributed.checkpoint.manifest import MANIFEST, TRIES, remove_checkpoint
from tutorec.distributed.checkpoint.stored import SavedFiles
from tutorec.errors import CheckpointError


def layer_of(number: float) -> nn.Linear:
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(number)
    return layer


def save(path: Path, step: int) -> None:
    save_checkpoint(path, layer_of(step), step=step)


def stored_as(path: Path, step: int) -> Path:
    """A checkpoint of this step elsewhere."""
    other = path.parent / f"stored-{step}"
    save(other, step)
    return other


def replace_by(path: Path, other: Path) -> None:
    """What a save of another run does: new files, the manifest in one step, the old files go."""
    old = [file for file in path.iterdir() if file.name != MANIFEST]
    for file in other.iterdir():
        if file.name not in (MANIFEST, ".metadata"):
            shutil.copy(file, path / file.name)
    shutil.copy(other / MANIFEST, path / "manifest.draft")
    os.replace(path / "manifest.draft", path / MANIFEST)
    shutil.copy(other / ".metadata", path / ".metadata")
    for file in old:
        if file.name != ".metadata":
            file.unlink()


def steps_of(model: nn.Module) -> set[float]:
    return {
        float(number) for parameter in model.parameters() for number in parameter.detach().unique()
    }


def loaded(path: Path) -> tuple[int | None, set[float]]:
    model = layer_of(-1)
    return load_checkpoint(path, model).step, steps_of(model)


def read(path: Path) -> tuple[int | None, set[float]]:
    tensors = read_state_dict(path)["model"].values()
    numbers = {float(number) for tensor in tensors for number in tensor.unique()}
    return (int(min(numbers)), numbers)


def after(
    times: int, function: Callable[..., Any], action: Callable[[], None]
) -> Callable[..., Any]:
    """The function, with an action behind each of its first calls."""
    left = times

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        found = function(*args, **kwargs)
        if left:
            left -= 1
            action()
        return found

    return run


@pytest.mark.parametrize("use", [loaded, read])
def test_what_is_replaced_before_its_files_are_open_is_read_anew(tmp_path, monkeypatch, use):
    path = tmp_path / "model"
    other = stored_as(path, 2)
    save(path, 1)
    module = loading_module if use is loaded else manifest_module
    monkeypatch.setattr(
        module, "read_manifest", after(1, module.read_manifest, lambda: replace_by(path, other))
    )
    assert use(path) == (2, {2.0})


@pytest.mark.parametrize("use", [loaded, read])
def test_what_is_replaced_when_its_files_are_open_is_the_save_that_was_found(
    tmp_path, monkeypatch, use
):
    path = tmp_path / "model"
    other = stored_as(path, 2)
    save(path, 1)
    monkeypatch.setattr(
        SavedFiles, "check", after_opening(SavedFiles.check, lambda: replace_by(path, other))
    )
    assert use(path) == (1, {1.0})
    assert use(path) == (2, {2.0})


def after_opening(check: Callable[..., None], action: Callable[[], None]) -> Callable[..., None]:
    """Replace when a data file is going to be checked: the account has been read, and all files are
    open.
    """
    done = False

    def run(files: SavedFiles, name: str) -> None:
        nonlocal done
        if name.endswith(".distcp") and not done:
            done = True
            action()
        check(files, name)

    return run


@pytest.mark.parametrize("use", [loaded, read, read_info])
def test_what_is_replaced_again_and_again_is_said(tmp_path, monkeypatch, use):
    path, number = tmp_path / "model", 1
    save(path, 1)

    def replace() -> None:
        nonlocal number
        number += 1
        replace_by(path, stored_as(path, number))

    module = loading_module if use is loaded else manifest_module
    original = module.read_manifest
    monkeypatch.setattr(module, "read_manifest", after(TRIES, original, replace))
    if use is not loaded:
        monkeypatch.setattr(
            manifest_module, "is_replaced", lambda folder, known: original(folder) != known
        )
    with pytest.raises(
        CheckpointError, match=rf"model was replaced {TRIES} times while it was read: load again"
    ):
        use(path)


def load_while_rank_1_replaces(path: str, other: str, rank: int) -> tuple[int | None, set[float]]:
    original = loading_module.read_manifest
    if rank == 1:
        loading_module.read_manifest = after(
            1, original, lambda: replace_by(Path(path), Path(other))
        )
    try:
        return loaded(Path(path))
    finally:
        loading_module.read_manifest = original


def test_ranks_load_one_save_where_it_is_replaced_between_them(ranks, tmp_path):
    path = tmp_path / "model"
    save(path, 1)
    other = stored_as(path, 2)
    assert ranks(2).run(load_while_rank_1_replaces, str(path), str(other)) == [(2, {2.0})] * 2


def test_the_latest_is_found_while_it_is_replaced(tmp_path, monkeypatch):
    path = tmp_path / "run" / "model"
    other = stored_as(tmp_path / "x", 2)
    save(path, 1)
    monkeypatch.setattr(
        manifest_module,
        "read_manifest",
        after(1, manifest_module.read_manifest, lambda: replace_by(path, other)),
    )
    assert latest_checkpoint(path.parent) == path


def test_the_latest_is_found_while_older_ones_are_removed_and_new_ones_come(tmp_path, monkeypatch):
    def go_on() -> None:
        save(tmp_path / "b", 2)
        remove_checkpoint(folder_of(tmp_path / "a"))

    save(tmp_path / "a", 1)
    monkeypatch.setattr(reading_module, "subfolders", after(1, reading_module.subfolders, go_on))
    assert latest_checkpoint(tmp_path) == tmp_path / "b"


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
    found = {each.name for each in path.iterdir()}
    assert {"notes.txt", "other.distcp", "figures", "link", "step_100"} < found
    assert len(found) == 9, f"and the files of one save: {found}"
    remove_checkpoint(folder_of(path))
    assert {each.name for each in path.iterdir()} == {
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


def test_a_second_saver_on_the_same_path_is_told(tmp_path):
    path = tmp_path / "model"
    save(path, 1)
    with folder_of(path).locked():
        with pytest.raises(
            CheckpointError, match=r"another save into .*model is under way: .* give each its own"
        ):
            save(path, 2)
        assert loaded(path) == (1, {1.0})
    save(path, 2)
    assert loaded(path) == (2, {2.0})


def test_a_save_whose_files_another_run_removes_is_told_and_the_old_one_stays(
    tmp_path, monkeypatch
):
    """Where there are no locks: on an object store, or on some network file systems."""
    path = tmp_path / "model"
    save(path, 1)
    sizes = Folder.sizes

    def without_new(folder: Folder) -> dict[str, int | None]:
        found = sizes(folder)
        if len([name for name in found if name.endswith(".distcp")]) > 1:
            known = manifest_module.read_manifest(folder).files
            found = {
                name: size for name, size in found.items() if name in known or ".distcp" not in name
            }
        return found

    monkeypatch.setattr(Folder, "sizes", without_new)
    with pytest.raises(
        CheckpointError, match=r"is missing: .*another run saves to the same path, or the ranks see"
    ):
        save(path, 2)
    monkeypatch.undo()
    assert loaded(path) == (1, {1.0})


def test_checkpoints_whose_files_are_missing_or_cut_are_passed_over(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path / str(step), step)
    next((tmp_path / "3").glob("*.distcp")).unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "2"
    data = next((tmp_path / "2").glob("*.distcp"))
    os.truncate(data, data.stat().st_size - 1)
    assert latest_checkpoint(tmp_path) == tmp_path / "1"


def test_a_checkpoint_of_version_1_is_read_replaced_and_removed(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(Path(__file__).parent / "version_1", path)
    info = read_info(path)
    assert (info.version, info.step, info.position, info.world_size) == (1, 1, {"batch": 3}, 2)
    stored = read_state_dict(path)
    tensors = [
        *stored["model"].values(),
        *(t for s in stored["optimizer"]["state"].values() for t in s.values()),
    ]
    assert len(tensors) == 6 and all(bool((tensor == 1).all()) for tensor in tensors)
    assert latest_checkpoint(tmp_path) == path
    save(path, 2)
    assert loaded(path) == (2, {2.0})
    assert len(list(path.iterdir())) == 4
    shutil.rmtree(path)
    shutil.copytree(Path(__file__).parent / "version_1", path)
    remove_checkpoint(folder_of(path))
    assert not path.exists()

"""A checkpoint that is replaced, among other files, and checkpoints that are not complete."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tutorec.distributed.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from tutorec.distributed.checkpoint.folder import Folder
from tutorec.distributed.checkpoint.manifest import remove_checkpoint


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

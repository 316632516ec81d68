"""Ranks that do not save or load the same, or do not come at all: every rank is told which, and
nobody waits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.checkpoint.test_faults import in_a_process_of_its_own
from torch import nn

from tutorec.distributed.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from tutorec.distributed.checkpoint.folder import Folder
from tutorec.distributed.checkpoint.manifest import StoredTensor
from tutorec.distributed.checkpoint.saving import _merge_blocks
from tutorec.errors import AgreementError, CheckpointError
from tutorec.optim.keyed import KeyedOptimizerWrapper


def dense_of_two(
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
) -> tuple[nn.Module, KeyedOptimizerWrapper]:
    """A dense model with an optimizer that has made a step."""
    torch.manual_seed(1)
    layer = nn.Linear(2, 1)
    optimizer = KeyedOptimizerWrapper(
        dict(layer.named_parameters()), lambda params: optimizer_class(params, lr=0.1)
    )
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return layer, optimizer


def apart(folder: str, doing: str, case: str, rank: int) -> str:
    """Rank 1 does something else than rank 0; the message of each rank."""
    optimizer_class = torch.optim.SGD if case == "another optimizer" and rank else torch.optim.Adam
    model, optimizer = dense_of_two(optimizer_class)
    options: dict[str, Any] = {}
    arguments: list[Any] = [folder, model, optimizer]
    if rank:
        if case == "no optimizer":
            arguments[2] = None
        elif case == "no state":
            options["optimizer_state"] = False
        elif case == "no model":
            arguments[1] = None
        elif case == "no path":
            arguments[0] = None
        elif case == "a path that cannot be":
            arguments[0] = folder + "\0"
        elif case == "another path":
            arguments[0] = folder + "x"
    try:
        (save_checkpoint if doing == "save" else load_checkpoint)(*arguments, **options)
    except (AgreementError, CheckpointError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "went through"


APART = {
    "no optimizer": (
        AgreementError,
        "the optimizer of 'weight' is missing on rank 1 and Adam on rank 0",
    ),
    "another optimizer": (
        AgreementError,
        "the optimizer of 'weight' is SGD on rank 1 and Adam on rank 0",
    ),
    "no state": (AgreementError, "optimizer_state is False on rank 1 and True on rank 0"),
    "no model": (
        CheckpointError,
        "rank 1: TypeError: a checkpoint is of a torch.nn.Module, got a NoneType",
    ),
    "no path": (
        CheckpointError,
        "rank 1: TypeError: the path of a checkpoint is text or a pathlib.Path, got None",
    ),
    "a path that cannot be": (
        CheckpointError,
        "rank 1: '{}\\x00' cannot be a path (embedded null byte)",
    ),
    "another path": (AgreementError, "path is {}x on rank 1 and {} on rank 0"),
}


@pytest.mark.parametrize("doing", ["save", "load"])
@pytest.mark.parametrize("case", APART)
def test_a_rank_that_does_something_else_is_named_on_every_rank(ranks, tmp_path, doing, case):
    if (doing, case) == ("save", "no state"):
        pytest.skip("optimizer_state is an argument of load_checkpoint")
    path = tmp_path / "model"
    if doing == "load":
        assert ranks(2).run(apart, str(path), "save", "nothing") == ["went through"] * 2
    error, said = APART[case]
    if (doing, case) == ("load", "another optimizer"):
        error, said = (
            CheckpointError,
            "failed on rank 1: 'weight' was trained by Adam, and here SGD would go on",
        )
    if (doing, case) == ("load", "another path"):
        error, said = (
            CheckpointError,
            "rank 1: {}x is not a complete checkpoint: manifest.json is missing",
        )
    said = said.replace("{}", str(path))
    zero, one = ranks(2).run(apart, str(path), doing, case)
    assert zero.startswith(f"{error.__name__}: ") or case == "another path", zero
    assert said in zero, zero
    assert said in one or (
        one.startswith("TypeError: ") and one.removeprefix("TypeError: ") in said
    ), one
    assert path.exists() is (doing == "load")


def test_what_one_rank_alone_knows_is_never_written():
    """A name without numbers would be a checkpoint that nobody can load."""
    path = ("optimizer", "state", "weight", "step")
    index = {".".join(path): StoredTensor(path, torch.float32, (), ())}
    with pytest.raises(CheckpointError, match=r"'optimizer.state.weight.step'.*1 numbers"):
        _merge_blocks([(index, {})])


@pytest.mark.parametrize("call", [save_checkpoint, load_checkpoint])
@pytest.mark.parametrize(
    ("path", "error"),
    [(None, TypeError), (3, TypeError), (b"x", TypeError), ("a\0b", CheckpointError)],
)
def test_what_is_no_path_is_refused(call, path, error):
    with pytest.raises(
        error, match=r"the path of a checkpoint is text|cannot be a path \(embedded null byte\)"
    ):
        call(path, nn.Linear(2, 1))


def test_a_folder_that_may_not_be_looked_into_is_passed_over(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "model", nn.Linear(2, 1), step=1)
    (tmp_path / "locked").mkdir()
    read = Folder.read

    def refused(folder: Folder, name: str) -> bytes:
        if folder.path.endswith("locked"):
            raise PermissionError(13, "Permission denied", folder.path)
        return read(folder, name)

    monkeypatch.setattr(Folder, "read", refused)
    assert latest_checkpoint(tmp_path) == tmp_path / "model"


def test_a_rank_that_ends_during_a_save_is_an_error_of_the_others(tmp_path):
    (message,) = in_a_process_of_its_own(f"kill_in_an_exchange({str(tmp_path)!r})")
    start = f"saving the checkpoint {tmp_path / 'model'} failed in an exchange with the other ranks"
    assert message.startswith(start), message
    assert message.endswith("start the ranks again and load it")

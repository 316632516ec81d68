"""Numbered checkpoints of a run: which are kept, which is found, and saves that training does not
wait for.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.checkpoint_cases import dense_of, held, sharded, train
from torch import nn

from tutorec.distributed.checkpoint import (
    CheckpointManager,
    load_checkpoint,
    read_info,
    read_state_dict,
)
from tutorec.distributed.checkpoint import manager as manager_module
from tutorec.distributed.checkpoint.folder import Folder
from tutorec.distributed.checkpoint.manifest import MANIFEST, remove_checkpoint
from tutorec.errors import CheckpointError

KINDS = ("sgd", "rowwise")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def layer_of(number: float) -> nn.Linear:
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(number)
    return layer


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_checkpoints_are_kept_and_the_latest_is_loaded(tmp_path, asynchronous):
    folder = tmp_path / "run"
    with CheckpointManager(folder, keep=2, asynchronous=asynchronous) as manager:
        assert manager.load(layer_of(0)) is None and manager.latest() is None
        for step in (5, 10, 100, 100):
            manager.save(layer_of(step), step=step, position={"batch": step}, extra=[step])
    assert names_in(folder) == ["step-10", "step-100"] and manager.steps() == [10, 100]
    assert manager.latest() == folder / "step-100"
    layer = layer_of(0)
    info = CheckpointManager(str(folder)).load(layer)
    assert info is not None and (info.step, info.position, info.extra) == (
        100,
        {"batch": 100},
        [100],
    )
    assert bool((layer.weight == 100).all())


def test_all_are_kept_where_that_is_asked_for(tmp_path):
    manager = CheckpointManager(tmp_path, keep=None)
    for step in range(5):
        manager.save(layer_of(step), step=step)
    assert manager.steps() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="keep=0: give 1 or more"):
        CheckpointManager(tmp_path, keep=0)


def test_only_what_saves_have_written_is_removed(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(layer_of(1), step=1)
    (tmp_path / "step-1" / "notes.txt").write_text("notes")
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "thesis.tex").write_text("thesis")
    (tmp_path / "step-08").mkdir()
    (tmp_path / "best").mkdir()
    os.mkfifo(tmp_path / "step-9")
    left = Folder.from_path(tmp_path / "step-3")  # of a save that was killed
    left.make()
    left.create("__0_0123abcd_0.distcp").close()
    manager.save(layer_of(2), step=2)
    assert names_in(tmp_path) == ["best", "step-08", "step-1", "step-2", "step-7", "step-9"]
    assert names_in(tmp_path / "step-1") == ["notes.txt"] and names_in(tmp_path / "step-7") == [
        "thesis.tex"
    ]
    assert manager.latest() == tmp_path / "step-2"


def test_a_step_before_the_latest_is_refused(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(layer_of(9), step=9)
    with pytest.raises(CheckpointError, match=r"step 9.*step 3:"):
        manager.save(layer_of(3), step=3)
    next((tmp_path / "step-9").glob("*.distcp")).unlink()
    manager.save(layer_of(3), step=3)
    assert manager.latest() == tmp_path / "step-3", "what is not whole does not count"


def test_a_checkpoint_that_the_run_removes_before_it_is_loaded_is_no_trouble(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(layer_of(1), step=1)
    load = manager_module.load_checkpoint

    def load_late(path: Any, *rest: Any, **words: Any) -> Any:
        monkeypatch.setattr(manager_module, "load_checkpoint", load)
        CheckpointManager(tmp_path, keep=1).save(layer_of(2), step=2)
        assert not Path(path).exists()
        return load(path, *rest, **words)

    monkeypatch.setattr(manager_module, "load_checkpoint", load_late)
    layer = layer_of(0)
    info = manager.load(layer)
    assert info is not None and info.step == 2 and bool((layer.weight == 2).all())


# --- two runs that save into one folder


@pytest.fixture(params=["a disk", "an object store"])
def shared(request, tmp_path) -> str:
    """The folder of two runs, with and without locks."""
    if request.param == "a disk":
        return str(tmp_path)

    import fsspec

    fsspec.filesystem("memory").store.clear()
    return "memory://runs/shared"


def save_while_another_saves(folder: str, other_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save step 10; another run saves when all files but the manifest have been written."""
    replace = Folder.replace
    saved: list[int] = []

    def replace_after_the_other(here: Folder, name: str, content: bytes) -> None:
        if name == MANIFEST and not saved:
            saved.append(other_step)
            CheckpointManager(folder).save(layer_of(2), step=other_step)
        replace(here, name, content)

    monkeypatch.setattr(Folder, "replace", replace_after_the_other)
    CheckpointManager(folder).save(layer_of(1), step=10)


def test_a_save_loses_nothing_to_another_run_that_removes_what_was_interrupted(shared, monkeypatch):
    save_while_another_saves(shared, 20, monkeypatch)
    assert CheckpointManager(shared).steps() == [10, 20]
    layer = layer_of(0)
    assert load_checkpoint(f"{shared}/step-10", layer).step == 10
    assert bool((layer.weight == 1).all())


def test_of_two_saves_of_one_step_one_is_an_error_or_the_last_stays(shared, monkeypatch):
    if shared.startswith("memory:"):
        save_while_another_saves(shared, 10, monkeypatch)
        layer = layer_of(0)
        assert load_checkpoint(f"{shared}/step-10", layer).step == 10
        assert bool((layer.weight == 1).all())
    else:
        with pytest.raises(CheckpointError, match=r"save into.*step-10"):
            save_while_another_saves(shared, 10, monkeypatch)


def test_a_folder_of_a_save_under_way_stays(shared, monkeypatch):
    """Its files have no manifest yet, and are complete when the other run has looked."""
    sizes = Folder.sizes
    CheckpointManager(shared).save(layer_of(1), step=10)

    def before_its_manifest(folder: Folder) -> dict[str, int | None]:
        listed = sizes(folder)
        caller = inspect.stack(context=0)[1].function
        if folder.path.endswith("step-10") and caller == "_remove_old":
            listed.pop(MANIFEST)
        return listed

    monkeypatch.setattr(Folder, "sizes", before_its_manifest)
    CheckpointManager(shared).save(layer_of(2), step=20)
    assert CheckpointManager(shared).steps() == [10, 20]


def test_an_interrupted_save_without_locks_is_removed_when_it_is_a_day_old(memory, monkeypatch):
    import fsspec

    fs = fsspec.filesystem("memory")
    manager = CheckpointManager(memory("f"))
    manager.save(layer_of(1), step=1)
    fs.rm_file(f"/runs/f/step-1/{MANIFEST}")
    left = fs.ls("/runs/f/step-1", detail=False)
    manager.save(layer_of(2), step=2)
    assert fs.ls("/runs/f/step-1", detail=False) == left

    real_time = time.time
    monkeypatch.setattr(time, "time", lambda: real_time() + 25 * 3600)
    manager.save(layer_of(3), step=3)
    assert not [name for name in fs.find("/runs/f/step-1") if name.endswith(".distcp")]
    assert manager.steps() == [2, 3]


def test_a_checkpoint_without_locks_is_replaced_and_removed_whole(memory):
    import fsspec

    fs = fsspec.filesystem("memory")
    manager = CheckpointManager(memory("g"), keep=1)
    for number in (1, 2):
        manager.save(layer_of(number), step=1)
    assert len(fs.find("/runs/g")) == 4
    manager.save(layer_of(3), step=2)
    assert {name.split("/")[-2] for name in fs.find("/runs/g")} == {"step-2"}


class Gate:
    """Holds writers back until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self._create = Folder.create

    def __enter__(self) -> Gate:
        def create(folder: Folder, name: str) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.opened.wait(100), "the gate stayed shut"
            return self._create(folder, name)

        Folder.create = create
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.set()
        Folder.create = self._create


def train_beside_a_save(folder: str, rank: int) -> tuple[bool, bool, Any, Any]:
    """Save, and train on before a byte is written; what a straight run ends with, and this one."""
    straight, optimizer = sharded(1, KINDS)
    train(straight, optimizer, rank, range(4))
    expected = held(straight), dense_of(straight, optimizer)
    model, optimizer = sharded(1, KINDS)
    with CheckpointManager(folder, asynchronous=True) as manager, Gate() as gate:
        train(model, optimizer, rank, range(2))
        manager.save(model, optimizer, step=2)
        assert gate.reached.wait(100), "the thread writes"
        train(model, optimizer, rank, range(2, 4))
        early = manager.latest() is None
        gate.opened.set()
        manager.wait()
    found = held(model), dense_of(model, optimizer)
    again, optimizer = sharded(2, KINDS)
    info = load_checkpoint(Path(folder) / "step-2", again, optimizer)
    train(again, optimizer, rank, range(2, 4))
    return early, same(found, expected), info.step, dense_of(again, optimizer), expected[1]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            same(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def test_training_goes_on_during_a_save_and_the_checkpoint_is_of_its_beginning(ranks, tmp_path):
    for early, unchanged, step, resumed, expected in ranks(2).run(
        train_beside_a_save, str(tmp_path)
    ):
        assert early and unchanged and step == 2
        for name, value in expected.items():
            torch.testing.assert_close(resumed[name], value)


def train_while_many_saves_are_written(folder: str, rank: int) -> bool:
    straight, optimizer = sharded(0, KINDS)
    train(straight, optimizer, rank, range(12))
    expected = held(straight), dense_of(straight, optimizer)
    model, optimizer = sharded(0, KINDS)
    with CheckpointManager(folder, keep=2, asynchronous=True) as manager:
        for step in range(12):
            train(model, optimizer, rank, [step])
            manager.save(model, optimizer, step=step)
    return same((held(model), dense_of(model, optimizer)), expected)


def test_collectives_of_saves_and_of_training_do_not_meet(ranks, tmp_path):
    assert ranks(2).run(train_while_many_saves_are_written, str(tmp_path)) == [True, True]
    assert names_in(tmp_path) == ["step-10", "step-11"]


def fail_in_the_background(folder: str, use: str, rank: int) -> list[str]:
    """Rank 1 cannot write once; what each rank is told, and what is there afterwards."""
    create, found = Folder.create, []

    def full(folder: Folder, name: str) -> Any:
        raise OSError(28, "No space left on device")

    model, _ = sharded(0, ("sgd",))
    manager = CheckpointManager(folder, asynchronous=True)
    manager.save(model, step=1)
    manager.wait()
    if rank == 1:
        Folder.create = full
    try:
        manager.save(model, step=2)
        {"wait": manager.wait, "close": manager.close, "load": lambda: manager.load(model)}.get(
            use, lambda: manager.save(model, step=3)
        )()
    except CheckpointError as error:
        found.append(str(error))
    finally:
        Folder.create = create
    if use != "close":
        manager.save(model, step=4)
    manager.close()
    return [*found, *map(str, manager.steps())]


@pytest.mark.parametrize("use", ["save", "wait", "load", "close"])
def test_an_error_of_the_background_is_raised_on_every_rank_by_the_next_call(ranks, tmp_path, use):
    for said, *steps in ranks(2).run(fail_in_the_background, str(tmp_path), use):
        start = (
            f"saving the checkpoint {tmp_path / 'step-2'} in the background failed on rank 1: "
            "OSError: [Errno 28] No"
        )
        assert said.startswith(start), said
        assert steps == (["1"] if use == "close" else ["1", "4"])
    assert names_in(tmp_path) == [f"step-{step}" for step in steps]


SCRIPT = """
import torch
from tutorec.distributed.checkpoint import CheckpointManager
from tutorec.distributed.checkpoint.folder import Folder
manager = CheckpointManager({folder!r}, asynchronous=True)
if {fails}:
    def full(folder, name): raise OSError(28, "No space left on device")
    Folder.create = full
manager.save(torch.nn.Linear(1000, 1000), step=3)
print("training ends")
"""


def run_script(folder: Path, fails: bool) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(folder=str(folder), fails=fails)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_script_that_ends_waits_for_the_save_under_way(tmp_path):
    done = run_script(tmp_path, False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "training ends\n", "")
    assert read_info(tmp_path / "step-3").step == 3


@pytest.mark.slow
def test_a_script_that_ends_says_that_the_save_under_way_has_failed(tmp_path):
    done = run_script(tmp_path, True)
    assert done.stdout == "training ends\n"
    assert (
        f"saving the checkpoint {tmp_path / 'step-3'} in the background failed: OSError: [Errno 28]"
        in done.stderr
    )
    assert names_in(tmp_path) == []


FORKED = """
import os
import torch
from tutorec.distributed.checkpoint import CheckpointManager
from tutorec.distributed.checkpoint.folder import Folder
manager = CheckpointManager({folder!r}, asynchronous=True)
read_end, write_end = os.pipe()
create = Folder.create
def create_later(folder, name):
    os.read(read_end, 1)
    return create(folder, name)
Folder.create = create_later
manager.save(torch.nn.Linear(2, 2), step=2)
child = os.fork()
if child == 0:
    raise SystemExit(3)
_, status = os.waitpid(child, 0)
os.write(write_end, bytes(100))
manager.close()
print(os.waitstatus_to_exitcode(status), manager.steps())
"""


@needs_fork
def test_a_fork_ends_without_the_save_of_the_other_process(tmp_path):
    code = FORKED.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "3 [2]\n")


def test_an_error_in_training_is_raised_with_that_of_the_save_as_a_note(tmp_path, monkeypatch):
    def full(folder: Folder, name: str) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Folder, "create", full)
    with (
        pytest.raises(ZeroDivisionError) as raised,
        CheckpointManager(tmp_path, asynchronous=True) as manager,
    ):
        manager.save(layer_of(1), step=1)
        raise ZeroDivisionError
    assert ["No space left" in note for note in raised.value.__notes__] == [True]


# --- storage other than a disk


@pytest.fixture
def memory() -> Callable[[str], str]:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.store.clear()
    return lambda name: f"memory://runs/{name}"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_keeps_its_checkpoints_in_memory(memory, asynchronous):
    url = memory("a")
    with CheckpointManager(url, keep=2, asynchronous=asynchronous) as manager:
        for step in (1, 2, 3):
            manager.save(layer_of(step), step=step)
        manager.save(layer_of(4), step=3)
    assert manager.latest() == "memory://runs/a/step-3" and manager.steps() == [2, 3]
    layer = layer_of(0)
    assert load_checkpoint("memory://runs/a/step-3", layer).step == 3 and bool(
        (layer.weight == 4).all()
    )
    assert bool((read_state_dict("memory://runs/a/step-2")["model"]["weight"] == 2).all())
    remove_checkpoint(Folder.from_path("memory://runs/a/step-2"))
    assert manager.steps() == [3]


def test_what_is_damaged_in_memory_is_refused(memory):
    import fsspec

    manager = CheckpointManager(memory("b"))
    manager.save(layer_of(1), step=1)
    fs = fsspec.filesystem("memory")
    (data,) = (name for name in fs.ls("/runs/b/step-1", detail=False) if name.endswith(".distcp"))
    content = bytearray(fs.cat_file(data))
    content[len(content) // 2] ^= 1
    fs.pipe_file(data, bytes(content))
    with pytest.raises(CheckpointError, match=r"step-1/__0_.*damaged.*CRC-32"):
        manager.load(layer_of(0))
    fs.rm_file(data)
    assert manager.latest() is None
    fs.rm_file(f"/runs/b/step-1/{MANIFEST}")
    with pytest.raises(
        CheckpointError,
        match=r"memory://.*step-1.*not.*manifest.json.*missing",
    ):
        read_info("memory://runs/b/step-1")


def test_a_file_url_is_a_disk(tmp_path):
    manager = CheckpointManager(f"file://{tmp_path}/run", keep=1)
    for step in (1, 2):
        manager.save(layer_of(step), step=step)
    assert names_in(tmp_path / "run") == ["step-2"]
    assert manager.latest() == f"file://{tmp_path}/run/step-2"
    assert (
        load_checkpoint(manager.latest(), layer_of(0)).step
        == read_info(tmp_path / "run" / "step-2").step
        == 2
    )


def test_a_url_that_nothing_installed_reads_is_refused_with_what_to_install():
    with pytest.raises(CheckpointError, match=r"'nothing://x' cannot.*\(Protocol not"):
        CheckpointManager("nothing://x")


def save_in_memory_of_each(url: str, rank: int) -> str:
    model, _ = sharded(1, ("sgd",))
    try:
        CheckpointManager(url).save(model, step=1)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_memory_is_of_one_process_and_ranks_are_told(ranks):
    for said in ranks(2).run(save_in_memory_of_each, "memory://runs/c"):
        assert (
            "is missing: load another one; this save has just written it: another run saves to the "
            "same path, or"
        ) in said

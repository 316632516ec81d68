"""Faults in real processes: whatever happens during a save, one whole checkpoint can be loaded
afterwards.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.cases import shard
from distributed.checkpoint_kills import fill, tables, whole_step

from tutorec.distributed.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    read_state_dict,
    save_checkpoint,
)
from tutorec.distributed.checkpoint.manifest import MANIFEST
from tutorec.errors import CheckpointError


def in_a_process_of_its_own(call: str) -> Any:
    """What a function of `checkpoint_kills` found; it forks, and wants no threads around it."""
    code = (
        "import json; from distributed import checkpoint_kills; "
        f"print(json.dumps(checkpoint_kills.{call}))"
    )
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    # A process that is forked from one that has used a GPU has none.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_kill_at_every_step_of_a_replacement_leaves_the_old_one_or_the_new_one(tmp_path):
    found = in_a_process_of_its_own(f"kills_at_every_step({str(tmp_path)!r})")
    steps = found["steps"]
    assert len(steps) > 6
    assert found["under_way"] > 4, "kills hit saves that were under way"
    assert steps[0] == 1, "the first one had not begun"
    assert steps[-1] == len(steps) + 1, "the last one was not killed"
    assert found["left"] == ["model"], "what was left over is removed"


def test_training_in_a_file_that_is_killed_goes_on_from_its_checkpoint_as_if_it_had_not(tmp_path):
    found = in_a_process_of_its_own(f"training_kills({str(tmp_path)!r})")
    assert found == {"ended": False, "step": 3, "left": [], "tensors": 6, "same": True}


def save_with_little_room(path: str, full: int, room: int, kernel: str, rank: int) -> str:
    """One rank's files may have ``room`` bytes, as on a disk that is full then."""
    model = shard(tables(), "exact_row_wise_adagrad", kernel, kind="row_wise")
    fill(model, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        save_checkpoint(path, model, step=2)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "saved"


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize(
    ("room", "kernel"),
    [
        (0, "fused"),
        (3000, "fused"),
        (300_000, "fused"),
        pytest.param(
            3000,
            "fused_uvm_caching",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="tables in files are on the CPU"
            ),
        ),
    ],
)
def test_a_full_disk_is_told_on_every_rank_with_the_rank_that_met_it_and_the_old_one_stays(
    ranks, tmp_path, full, room, kernel
):
    path = tmp_path / "model"
    ranks(2).run(save_once_of_two, str(path))
    for message in ranks(2).run(save_with_little_room, str(path), full, room, kernel):
        assert message.startswith(
            f"saving the checkpoint {path} failed on rank {full}: OSError: [Errno 27] File too"
        )
    assert whole_step(path, 1) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def save_once_of_two(path: str) -> None:
    model = shard(tables(), "exact_row_wise_adagrad", kind="row_wise")
    fill(model, 1)
    save_checkpoint(path, model, step=1)


def load_into_ones(path: str) -> str:
    model = shard(tables(40), "exact_row_wise_adagrad", kind="column_wise")
    fill(model, 7)
    try:
        load_checkpoint(path, model)
    except CheckpointError as error:
        untouched = {float(n) for p in model.parameters() for n in p.detach().unique()} <= {7.0}
        untouched &= all(
            bool((t == 7).all()) for s in model.fused_optimizer.state.values() for t in s.values()
        )
        return str(error) if untouched else f"the model has changed: {error}"
    return "loaded"


def file_like(path: Path, pattern: str) -> Path:
    """The one file of a checkpoint that is called so, with any eight digits."""
    (found,) = path.glob(pattern)
    return found


def truncated(path: Path) -> str:
    file = file_like(path, "__1_*.distcp")
    size = file.stat().st_size
    os.truncate(file, size - 1)
    return rf"{file.name} has {size - 1:,} bytes and should have {size:,}: load another checkpoint"


def flipped(pattern: str, path: Path) -> str:
    file = file_like(path, pattern)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(bytes(content))
    if file.name == MANIFEST:
        return "manifest.json is damaged"
    return f"{file.name} is damaged: its CRC-32 is {zlib.crc32(content):08x} and should be "


def missing(pattern: str, path: Path) -> str:
    file = file_like(path, pattern)
    file.unlink()
    return (
        "manifest.json is missing"
        if file.name == MANIFEST
        else f"{file.name} of the checkpoint cannot be read"
    )


def other_version(path: Path) -> str:
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"version": 4}))
    return "manifest.json is of format version 4, and this tutorec reads version 3"


def other_content(path: Path) -> str:
    """Valid JSON, but not what was written."""
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"step": 999}))
    return "manifest.json is damaged: its CRC-32 is "


def other_program(path: Path) -> str:
    (path / MANIFEST).write_text('{"name": "web app"}')
    return "manifest.json is not the manifest of a tutorec checkpoint"


def half_written(path: Path) -> str:
    (path / MANIFEST).unlink()
    (path / ".metadata").unlink()
    file_like(path, "*.index").unlink()
    return f"manifest.json is missing (found: {sorted(each.name for each in path.iterdir())})"


def not_there(path: Path) -> str:
    shutil.rmtree(path)
    return "manifest.json is missing (found: nothing)"


KINDS_OF_FILES = ("__0_*.distcp", "*.index", MANIFEST)
DAMAGES: dict[str, Any] = {
    "truncated": truncated,
    **{f"flipped {name}": lambda path, n=name: flipped(n, path) for name in KINDS_OF_FILES},
    **{f"missing {name}": lambda path, n=name: missing(n, path) for name in KINDS_OF_FILES},
    "other version": other_version,
    "other content": other_content,
    "other program": other_program,
    "half written": half_written,
    "not there": not_there,
}


@pytest.fixture(scope="module")
def sound(ranks, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "model"
    ranks(2).run(small_of_two, str(path))
    return path


def small_of_two(path: str) -> None:
    model = shard(tables(40), "exact_row_wise_adagrad", kind="row_wise")
    fill(model, 1)
    save_checkpoint(path, model, step=1)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_refused_by_name_on_every_rank_and_the_model_stays(
    ranks, sound, tmp_path, damage
):
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    assert ranks(2).run(load_into_ones, str(path)) == ["loaded"] * 2
    expected = DAMAGES[damage](path)
    messages = ranks(2).run(load_into_ones, str(path))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"loading the checkpoint {path} failed on rank"), messages[0]
    assert expected in messages[0]
    # What is in a file is looked at when it is read; that it is there with all its bytes, before.
    passed_over = damage not in ("flipped __0_*.distcp", "flipped *.index")
    assert latest_checkpoint(tmp_path) == (None if passed_over else path)
    with pytest.raises(
        CheckpointError, match=r"load another|with the tutorec|another program|latest_checkpoint"
    ):
        read_state_dict(path)

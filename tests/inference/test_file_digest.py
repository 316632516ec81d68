"""Files of served models: whole or not there, and every flipped bit in them is found."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from inference.served_models import dlrm, inputs
from torch import nn

from tutorec.inference.export import export_model, load_exported, save_exported
from tutorec.inference.file_digest import check_digest
from tutorec.inference.scripting import load_scripted, save_scripted, script_model


@cache
def program() -> torch.export.ExportedProgram:
    return export_model(dlrm("quantized"), inputs(4))


@cache
def scripted() -> torch.jit.ScriptModule:
    return script_model(nn.Sequential(nn.Linear(3, 2), nn.Sigmoid()).eval())


KINDS = {
    "model.pt": (lambda path: save_scripted(scripted(), path), load_scripted),
    "model.pt2": (lambda path: save_exported(program(), path), load_exported),
}
kinds = pytest.mark.parametrize("name", KINDS)


@kinds
def test_the_file_ends_in_the_digest_of_what_is_before(name: str, tmp_path: Path) -> None:
    save, _ = KINDS[name]
    save(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert data[-79:] == b"tutorec sha256 " + hashlib.sha256(data[:-79]).hexdigest().encode()
    assert zipfile.ZipFile(tmp_path / name).comment == data[-79:]
    assert [path.name for path in tmp_path.iterdir()] == [name]


@kinds
def test_every_kind_of_damage_is_found(name: str, tmp_path: Path) -> None:
    save, load = KINDS[name]
    save(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    load(tmp_path / name)
    # The first header, data, the central directory and its end, the comment's length, its label,
    # its digits.
    places = [
        0,
        12,
        30,
        len(data) // 3,
        len(data) // 2,
        *range(len(data) - 200, len(data) - 79, 11),
    ]
    for place in [
        *places,
        len(data) - 81,
        len(data) - 80,
        len(data) - 79,
        len(data) - 40,
        len(data) - 1,
    ]:
        flipped = bytearray(data)
        flipped[place] ^= 1
        (tmp_path / name).write_bytes(flipped)
        with pytest.raises(
            ValueError, match=rf"{name}' is damaged, cut or not a model: it does not end"
        ):
            load(tmp_path / name)
    for other in (data[:-1], data[:-79], data[: len(data) // 2], data[:40], b"", data + b"\n"):
        (tmp_path / name).write_bytes(other)
        with pytest.raises(ValueError, match="is damaged, cut or not a model"):
            load(tmp_path / name)


@pytest.mark.slow
def test_torch_reads_the_files_and_writes_files_that_are_read(tmp_path: Path) -> None:
    save_scripted(scripted(), tmp_path / "ours.pt")
    torch.jit.save(scripted(), str(tmp_path / "torchs.pt"))
    x = torch.ones(2, 3)
    loaded = torch.jit.load(str(tmp_path / "ours.pt")), load_scripted(tmp_path / "torchs.pt")
    assert all(torch.equal(model(x), scripted()(x)) for model in loaded)
    save_exported(program(), tmp_path / "ours.pt2")
    torch.export.save(program(), str(tmp_path / "torchs.pt2"))
    programs = torch.export.load(str(tmp_path / "ours.pt2")), load_exported(tmp_path / "torchs.pt2")
    expected = program().module()(*inputs(3))
    assert all(torch.equal(one.module()(*inputs(3)), expected) for one in programs)
    check_digest(tmp_path / "torchs.pt")


@kinds
def test_a_save_that_fails_leaves_the_old_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, load = KINDS[name]
    save(tmp_path / name)
    before = (tmp_path / name).read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]
    load(tmp_path / name)
    with pytest.raises(
        FileNotFoundError, match=rf"there is no folder .*nowhere' to write '{name}' to"
    ):
        save(tmp_path / "nowhere" / name)


class Runs:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["TUTOREC_TEST_FOLDER"],)


def rewritten(source: Path, target: Path, changes: dict[str, bytes | None]) -> Path:
    """A copy of an archive with other records, by the ends of their names; new ones go beside the
    first record.
    """
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        root = old.namelist()[0].partition("/")[0]
        left = dict(changes)
        for entry in old.namelist():
            name = entry.removeprefix(f"{root}/")
            new.writestr(entry, left.pop(name, None) or old.read(entry))
        for name, data in left.items():
            new.writestr(f"{root}/{name}", data or b"")
    return target


def pickled_weight(archive: Path) -> dict[str, bytes | None]:
    """A weight that is said to be pickled."""
    entry = {"path_name": "weight_0", "is_param": True, "use_pickle": True, "tensor_meta": None}
    return {
        "data/weights/model_weights_config.json": json.dumps({"config": {"x": entry}}).encode(),
        "data/weights/weight_0": pickle.dumps(Runs()),
    }


def opaque_constant(archive: Path) -> dict[str, bytes | None]:
    """A constant that is a pickle by the name of its record."""
    entry = {
        "path_name": "opaque_obj_0",
        "is_param": False,
        "use_pickle": True,
        "tensor_meta": None,
    }
    config = json.dumps({"config": {"x": entry}}).encode()
    return {
        "data/constants/model_constants_config.json": config,
        "data/constants/opaque_obj_0": pickle.dumps(Runs()),
    }


@pytest.mark.parametrize(
    ("changes", "record"),
    [
        (pickled_weight, "data/weights/model_weights_config.json: x"),
        (opaque_constant, "data/constants/model_constants_config.json: x"),
        (
            lambda _: {"data/sample_inputs/model.pt": pickle.dumps(Runs(), protocol=2)},
            "data/sample_inputs/model.pt",
        ),
        (
            lambda _: {"data/weights/model.pt": pickle.dumps(Runs(), protocol=2)},
            "data/weights/model.pt",
        ),
        (lambda _: {"data/aotinductor/model/x.so": b"library"}, "data/aotinductor/model/x.so"),
    ],
)
def test_an_archive_with_pickles_or_libraries_is_refused(
    changes: Any, record: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUTOREC_TEST_FOLDER", str(tmp_path / "was_run"))
    torch.export.save(program(), str(tmp_path / "good.pt2"))
    bad = rewritten(tmp_path / "good.pt2", tmp_path / "bad.pt2", changes(tmp_path / "good.pt2"))
    with pytest.raises(
        ValueError, match=rf"bad\.pt2' holds \['{record}.*unpickles or loads as a library"
    ):
        load_exported(bad)
    assert not (tmp_path / "was_run").exists()

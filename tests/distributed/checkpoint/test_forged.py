"""Checkpoints from somebody else: nothing in them is executed, nothing outside is read, and what is
wrong is said.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tutorec.distributed.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    read_info,
    read_state_dict,
    save_checkpoint,
)
from tutorec.distributed.checkpoint.manifest import FORMAT, MANIFEST
from tutorec.errors import CheckpointError

READERS: dict[str, Callable[[Path], Any]] = {
    "read_info": read_info,
    "read_state_dict": read_state_dict,
    "load_checkpoint": lambda path: load_checkpoint(path, nn.Linear(2, 1)),
}


@pytest.fixture
def path(tmp_path) -> Path:
    save_checkpoint(tmp_path / "run" / "model", nn.Linear(2, 1), step=1)
    return tmp_path / "run" / "model"


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and give it the CRC-32 that it should have, which anybody can."""
    document = json.loads((path / MANIFEST).read_text())
    content = {
        key: value for key, value in document.items() if key not in ("format", "version", "crc32")
    }
    change(content)
    crc32 = f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
    version = document["version"]
    (path / MANIFEST).write_text(
        json.dumps({"format": FORMAT, "version": version, "crc32": crc32, **content})
    )


def index_of(path: Path) -> Path:
    return path / json.loads((path / MANIFEST).read_text())["index"]


def write_listed(file: Path, content: bytes) -> None:
    """Write a file of a checkpoint and enter it into the manifest."""
    file.write_bytes(content)
    facts = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    rewrite(file.parent, lambda manifest: manifest["files"].update({file.name: facts}))


def outcomes(path: Path) -> list[str]:
    """What each reader says; anything but a CheckpointError is raised."""
    results = []
    for name, read in READERS.items():
        try:
            read(path)
        except CheckpointError as error:
            results.append(str(error))
        else:
            results.append(f"{name} went through")

    assert latest_checkpoint(path.parent) in (None, path)
    return results


class Runs:
    """Executes when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


CALLS: dict[str, Callable[[Path], Runs]] = {
    "os.mkdir": lambda mark: Runs(os.mkdir, str(mark)),
    "builtins.eval": lambda mark: Runs(eval, f"__import__('os').mkdir({str(mark)!r})"),
    "torch.load": lambda mark: Runs(torch.load, str(mark)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_block_that_calls_a_function_is_refused_and_nothing_is_called(path, tmp_path, call):
    mark = tmp_path / "mark"
    (data,) = path.glob("*.distcp")
    content = io.BytesIO()
    torch.save(CALLS[call](mark), content)
    block = {"file": data.name, "start": 0, "bytes": len(content.getvalue())}
    write_listed(data, content.getvalue())
    change_index(path, with_blocks(**block))
    for said in outcomes(path)[1:]:
        assert "Weights only load failed" in said, said
    assert not mark.exists()


def test_the_metadata_of_torch_is_not_read(path, tmp_path):
    (path / ".metadata").write_bytes(pickle.dumps(CALLS["os.mkdir"](tmp_path / "mark")))
    assert all("went through" in said for said in outcomes(path))
    assert not (tmp_path / "mark").exists()


def change_index(path: Path, change: Callable[[Any], Any]) -> None:
    """Change an index, and give it the size and CRC-32 that it should have."""
    file = index_of(path)
    index = json.loads(file.read_text())
    change(index)
    write_listed(file, json.dumps(index).encode())


def with_shape(*shape: Any) -> Callable[[Any], None]:
    return lambda index: index["model.weight"].update(shape=shape)


def with_blocks(**values: Any) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        for tensor in index.values():
            for block in tensor["blocks"]:
                for number, key in enumerate(("offsets", "sizes", "file", "start", "bytes")):
                    block[number] = values.get(key, block[number])

    return change


def with_path(path: Any) -> Callable[[Any], None]:
    return lambda index: index["model.weight"].update(path=path)


INDEXES: dict[str, Callable[[Any], Any]] = {
    "no blocks": lambda index: index["model.weight"].update(blocks=[]),
    "text as shape": with_shape("x", "y"),
    "ten terabytes": with_shape(10**13),
    "a block of ten terabytes": lambda index: index["model.weight"].update(
        shape=[10**13], blocks=[[[0], [10**13], index["model.weight"]["blocks"][0][2], 0, 100]]
    ),
    "negative shape": with_shape(-1, 2),
    "another shape": with_shape(2, 2),
    "an unknown dtype": lambda index: index["model.weight"].update(dtype="float31"),
    "a function as dtype": lambda index: index["model.weight"].update(dtype="load"),
    "a block in no file": with_blocks(file="__9_0.distcp"),
    "a block outside": with_blocks(file="../../../etc/passwd"),
    "a block behind the end": with_blocks(start=10**6),
    "a block of no length": with_blocks(bytes=0),
    "a block that ends before it begins": with_blocks(start=-1),
    "one key": with_path(["model"]),
    "no keys": with_path(None),
    "another first key": with_path(["models", "weight"]),
    "no tensors": lambda index: index.clear(),
}


@pytest.mark.parametrize("index", INDEXES)
def test_an_index_that_no_save_writes_is_refused(path, index):
    change_index(path, INDEXES[index])
    # A checkpoint without tensors can be read, and is of another model.
    said = outcomes(path)[2 if index in ("no tensors", "one key") else 1 :]
    assert not any("went through" in text for text in said), said


@pytest.mark.parametrize("content", [b"", b"\x80", b"[" * 100_000, b"3", b'{"a": [1]}', b"\0" * 50])
def test_an_index_that_is_something_else_is_refused(path, content):
    write_listed(index_of(path), content)
    for said in outcomes(path):
        assert "has an invalid format" in said, said


def moved_out(name: Callable[[Path], str]) -> Callable[[Path], None]:
    """The data lies outside of the checkpoint, and the manifest leads there."""

    def change(path: Path) -> None:
        data = next(path.glob("__0_*"))
        data.rename(path.parents[1] / data.name)
        leading = name(path.parents[1] / data.name)
        rewrite(
            path,
            lambda content: content["files"].update({leading: content["files"].pop(data.name)}),
        )
        change_index(path, with_blocks(file=leading))

    return change


def unlisted(path: Path) -> None:
    data = next(path.glob("__0_*"))
    rewrite(path, lambda content: content["files"].pop(data.name))


def linked(path: Path) -> None:
    data = next(path.glob("__0_*"))
    data.rename(path.parents[1] / data.name)
    data.symlink_to(path.parents[1] / data.name)


def fifo(path: Path) -> None:
    data = next(path.glob("__0_*"))
    data.unlink()
    os.mkfifo(data)


def index_fifo(path: Path) -> None:
    file = index_of(path)
    file.unlink()
    os.mkfifo(file)


def device(path: Path) -> None:
    data = next(path.glob("__0_*"))
    data.unlink()
    data.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    data = next(path.glob("__0_*"))
    data.unlink()
    data.mkdir()


LEADING_OUT: dict[str, tuple[Callable[[Path], None], str]] = {
    "a relative name": (moved_out(lambda file: f"../../{file.name}"), "is not a plain file name"),
    "an absolute name": (moved_out(str), "is not a plain file name"),
    "a name that is not listed": (unlisted, "which the manifest does not list"),
    "a link": (linked, "is a link; a checkpoint has regular files only"),
    "a FIFO": (fifo, "is not a regular file"),
    "a FIFO for the index": (index_fifo, "is not a regular file"),
    "a link to a device": (device, "is a link; a checkpoint has regular files only"),
    "a folder": (folder, "is not a regular file"),
    "the index outside": (
        lambda path: rewrite(path, lambda content: content.update(index="../../x")),
        "is not among the files of the manifest",
    ),
    "a device by name": (
        lambda path: rewrite(
            path, lambda content: content["files"].update({"/dev/zero": {"bytes": 1, "crc32": "0"}})
        ),
        "is not a plain file name",
    ),
}


@pytest.mark.parametrize("name", LEADING_OUT)
def test_names_stay_in_the_folder_and_are_of_regular_files(path, name):
    change, message = LEADING_OUT[name]
    change(path)
    for said in outcomes(path)[1:]:
        assert message in said, said


def test_a_manifest_that_is_a_fifo_or_a_link_is_refused_and_passed_over(path):
    (path / MANIFEST).rename(path.parents[1] / "other")
    (path / MANIFEST).symlink_to(path.parents[1] / "other")
    assert all("is a link" in said for said in outcomes(path))
    (path / MANIFEST).unlink()
    os.mkfifo(path / MANIFEST)
    assert all("is not a regular file" in said for said in outcomes(path))
    assert latest_checkpoint(path.parent) is None


CONTENTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another key": lambda content: content.update(colour="red"),
    "no files": lambda content: content.pop("files"),
    "files as a list": lambda content: content.update(files=[1]),
    "facts as a number": lambda content: content.update(files={"x": 3}),
    "facts with another key": lambda content: content["files"].update(
        x={"bytes": 1, "crc32": "0", "owner": 1}
    ),
    "size as text": lambda content: content["files"].update(x={"bytes": "1", "crc32": "0"}),
    "CRC-32 as a number": lambda content: content["files"].update(x={"bytes": 1, "crc32": 0}),
    "step as text": lambda content: content.update(step="9"),
    "step as a list": lambda content: content.update(step=[1]),
    "world_size as text": lambda content: content.update(world_size="x"),
    "index as a list": lambda content: content.update(index=[1]),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_a_manifest_with_other_content_is_refused_and_stops_no_search(path, content):
    save_checkpoint(path.parent / "other", nn.Linear(2, 1), step=0)
    rewrite(path, CONTENTS[content])
    for name, read in READERS.items():
        with pytest.raises(
            CheckpointError, match=r"manifest.json has an invalid format \(\w+: .*\): load another"
        ):
            read(path)
        assert name
    assert latest_checkpoint(path.parent) == path.parent / "other"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "{" * 200_000,
        '{"a":' * 100_000,
        "9" * 10_000,
        "\xff",
        "",
        "null",
        "[1]",
        '"text"',
        '{"format": {}}',
    ],
    ids=range(10),
)
def test_a_manifest_that_is_other_text_is_refused_and_stops_no_search(path, text):
    save_checkpoint(path.parent / "other", nn.Linear(2, 1), step=0)
    (path / MANIFEST).write_bytes(text.encode("latin-1"))
    for read in READERS.values():
        with pytest.raises(CheckpointError, match=r"is damaged|is not the manifest"):
            read(path)
    assert latest_checkpoint(path.parent) == path.parent / "other"

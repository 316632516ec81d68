"""The folder that a checkpoint is: whole or not there, and checked before anything of it is believed.

    <path>/.metadata         where which block lies, by torch.distributed.checkpoint
    <path>/__0_0.distcp ...  the blocks that rank 0 wrote, ...
    <path>/manifest.json     size and CRC-32 of all of these, step, data position, plan

It is written under ``<path>.partial-...`` beside it and gets its name when it is complete and on the disk. A checkpoint
that stood there before is called ``<path>.previous`` for the moment between two renames; who loads looks there, too.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tutorec.errors import CheckpointError

FORMAT = "tutorec checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
_PARTIAL, _PREVIOUS = ".partial-", ".previous"
_DIGIT, _DIGITS = "[0-9a-f]", 8
_READ_BYTES = 4 * 2**20


@dataclass(frozen=True)
class FileFacts:
    """What a file must be: its size in bytes and its CRC-32 as eight hexadecimal digits."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Args:
        world_size: W of those who saved it.
        step: As it was given, or None.
        position: As it was given: where the data stands.
        extra: As it was given.
        plan: The sharding plan's JSON document, or None.
        files: Name -> what it must be.
        slices: Name of a state of rows -> columns of each slice.
        optimizers: Parameter -> ``{"kind": its class, "options": {"lr": ...}, "numbers": {...}}`` of its optimizer.
        torch_version: That wrote it.
    """

    world_size: int
    step: int | None
    position: Any
    extra: Any
    plan: Any
    files: Mapping[str, FileFacts]
    slices: Mapping[str, list[int]]
    optimizers: Mapping[str, Mapping[str, Any]]
    torch_version: str = str(torch.__version__)

    def to_text(self) -> str:
        """As a JSON document that carries the CRC-32 of its own content."""
        content = asdict(self)
        return json.dumps(
            {"format": FORMAT, "version": VERSION, "crc32": _digest(content), **content}, indent=1, allow_nan=False
        )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked against its own CRC-32.

    Raises:
        CheckpointError: There is none, it is damaged, or of a later version.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = sorted(each.name for each in folder.iterdir())[:4] if folder.is_dir() else "no folder"
        raise CheckpointError(
            f"{folder} is no whole checkpoint: {MANIFEST} is missing (found: {found}); it is written last, so that a "
            "save that was interrupted has none: load another one, latest_checkpoint() finds them"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): load another checkpoint") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}): load another checkpoint") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no manifest of a {FORMAT}: it is another program's file")
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of format version {document.get('version')!r}, and this tutorec reads version {VERSION}: "
            "load it with the tutorec that wrote it, or a later one"
        )
    content = {key: value for key, value in document.items() if key not in ("format", "version", "crc32")}
    if document.get("crc32") != _digest(content):
        raise CheckpointError(
            f"{path} is damaged: its CRC-32 is {_digest(content)} and should be {document.get('crc32')}; "
            "load another checkpoint"
        )
    return Manifest(**{**content, "files": {name: FileFacts(**facts) for name, facts in content["files"].items()}})


def check_file(folder: Path, name: str, facts: FileFacts) -> None:
    """Compare a file with what the manifest says of it.

    Raises:
        CheckpointError: It is missing, cut off or changed.
    """
    path = folder / name
    try:
        size = path.stat().st_size
        found = crc32_of(path) if size == facts.bytes else None
    except OSError as error:
        raise CheckpointError(f"{path} of the checkpoint cannot be read ({error}): load another one") from None
    if size != facts.bytes:
        raise CheckpointError(f"{path} has {size:,} bytes and should have {facts.bytes:,}: load another checkpoint")
    if found != facts.crc32:
        raise CheckpointError(
            f"{path} is damaged: its CRC-32 is {found} and should be {facts.crc32}, over {size:,} bytes; "
            "load another checkpoint"
        )


def crc32_of(path: Path) -> str:
    """Of a file, read block by block."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            found = zlib.crc32(block, found)
    return f"{found:08x}"


def start_partial(target: Path) -> Path:
    """An empty folder beside the target; what interrupted saves of the same target have left is removed first.

    Raises:
        CheckpointError: The target is a file, a folder that is no checkpoint, or has a name that another's save uses.
    """
    previous = target.with_name(target.name + _PREVIOUS)
    if previous.exists() and not _is_ours(previous):
        raise CheckpointError(
            f"{previous} is in the way and no checkpoint: the one that a save of {target.name!r} replaces is called so "
            "for a moment; move it away, or save under another name"
        )
    if target.name.endswith(_PREVIOUS) or _PARTIAL in target.name:
        raise CheckpointError(
            f"{target} has a name that saving another checkpoint uses and removes: save under one that does not end in "
            f"{_PREVIOUS!r} and has no {_PARTIAL!r} in it"
        )
    finish_interrupted(target)
    if target.exists() and not (target / MANIFEST).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            f"{target} is there and is no checkpoint ({MANIFEST} is missing): save under another path, or remove it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(_escaped(target.name) + _PARTIAL + _DIGIT * _DIGITS):
        if _is_ours(left):
            shutil.rmtree(left, ignore_errors=True)
    partial = target.with_name(target.name + _PARTIAL + uuid.uuid4().hex[:_DIGITS])
    partial.mkdir()
    return partial


def complete(partial: Path, target: Path, manifest: Manifest) -> None:
    """Write the manifest, bring everything to the disk, and give the folder its name."""
    with (partial / MANIFEST).open("x", encoding="utf-8") as file:
        file.write(manifest.to_text())
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    previous = target.with_name(target.name + _PREVIOUS)
    if target.exists():
        target.rename(previous)
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def remove_partial(partial: Path) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(partial, ignore_errors=True)


def finish_interrupted(target: Path) -> None:
    """Undo a replacement that was interrupted between its two renames, or end one that was interrupted after them."""
    previous = target.with_name(target.name + _PREVIOUS)
    if previous.is_dir() and _is_ours(previous):
        if target.exists():
            shutil.rmtree(previous, ignore_errors=True)
        else:
            previous.rename(target)


def whole_folder(path: Path) -> Path:
    """Where the checkpoint called ``path`` lies now; nothing is changed."""
    try:
        previous = path.with_name(path.name + _PREVIOUS)
        return previous if not path.exists() and (previous / MANIFEST).is_file() else path
    except (OSError, ValueError):
        # A name that cannot be, or no permission: who opens the manifest is told.
        return path


def checkpoints_in(folder: Path) -> list[Path]:
    """The paths of all whole checkpoints in a folder, in no order."""
    names = {each.name.removesuffix(_PREVIOUS) for each in folder.iterdir() if _PARTIAL not in each.name}
    return [folder / name for name in names if _has_manifest(whole_folder(folder / name))]


def _has_manifest(folder: Path) -> bool:
    try:
        return (folder / MANIFEST).is_file()
    except OSError:
        # No permission to look: somebody else's.
        return False


def target_of(path: str | os.PathLike[str]) -> Path:
    """The folder that is meant, links followed.

    Raises:
        CheckpointError: No system has such a path.
        TypeError: It is none.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise TypeError(f"the path of a checkpoint is text or a pathlib.Path, got {path!r}")
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:
        raise CheckpointError(f"{os.fspath(path)!r} cannot be a path ({error}): name a folder") from None


def checked_target(path: str | os.PathLike[str]) -> tuple[Path, Exception | None]:
    """`target_of`, with what is wrong as a value: a rank that raised at once would let the others wait."""
    try:
        return target_of(path), None
    except (CheckpointError, TypeError) as error:
        return Path(repr(path)), error


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds files of a checkpoint and no others; one whose removal was interrupted may hold some."""
    names = (MANIFEST, ".metadata", ".metadata.tmp")
    return folder.is_dir() and all(each.name in names or each.suffix == ".distcp" for each in folder.iterdir())


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk; systems that cannot are left to their own order."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _digest(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"

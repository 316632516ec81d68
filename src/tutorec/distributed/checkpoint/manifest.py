"""The manifest of a checkpoint: it marks a complete checkpoint and lists its files.

::

    <path>/manifest.json               step, data position, plan; name, size, CRC-32 of each file
    <path>/3fa9c1d2.metadata           index of the blocks, by torch.distributed.checkpoint
    <path>/__0_3fa9c1d2_0.distcp ...   the blocks that rank 0 wrote, ...
    <path>/.metadata                   a copy of 3fa9c1d2.metadata, for torch's own readers

A save writes files under unique names and then replaces the manifest atomically. An interrupted
save leaves the old checkpoint. A reader that has opened the files of one manifest sees that one
save, regardless of later saves. Other files in the folder are neither read nor removed.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from tutorec.distributed.checkpoint.folder import Folder
from tutorec.errors import CheckpointError

FORMAT = "tutorec checkpoint"
# Version 1: files of every save have the same names, in a folder that is renamed. Still readable.
VERSION = 2
MANIFEST = "manifest.json"
METADATA = ".metadata"
# How often a load restarts because a save has replaced the checkpoint.
TRIES = 5
# Without a lock, a save that has not ended a file for so many seconds is taken for interrupted.
_INTERRUPTED_AFTER = 24 * 3600
# A file name that cannot leave its folder, on any system.
_PLAIN = re.compile(r"[\w.-]*[\w-][\w.-]*", re.ASCII)
# Files of one save, and drafts of small files.
_OURS = re.compile(
    r"__\d+_[0-9a-f]{8}_\d+\.distcp|[0-9a-f]{8}\.metadata(\.[0-9a-f]{8})?|(manifest\.json|\.metadata)\.[0-9a-f]{8}"
)
T = TypeVar("T")


@dataclass(frozen=True)
class FileFacts:
    """The expected size of a file in bytes and its CRC-32 in eight hexadecimal digits."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Args:
        world_size: W at the time of saving.
        step: As passed to the save, or None.
        position: Position in the data, as passed to the save.
        extra: As passed to the save.
        plan: The sharding plan's JSON document, or None.
        files: Name -> expected size and CRC-32.
        slices: Name of a per-row state -> columns of each column shard.
        optimizers: Parameter -> ``{"kind": its class, "rule": its rule, "options": {"lr": ...},
            "numbers": {...}}`` of its optimizer; without a rule in earlier checkpoints.
        metadata: Name of torch's metadata file.
        torch_version: The torch version that wrote it.
        version: Version of the format.
    """

    world_size: int
    step: int | None
    position: Any
    extra: Any
    plan: Any
    files: Mapping[str, FileFacts]
    slices: Mapping[str, list[int]]
    optimizers: Mapping[str, Mapping[str, Any]]
    metadata: str = METADATA
    torch_version: str = str(torch.__version__)
    version: int = VERSION

    def to_text(self) -> str:
        """The manifest as a JSON document, with the CRC-32 of its content."""
        content = asdict(self)
        content.pop("version")
        return json.dumps(
            {"format": FORMAT, "version": self.version, "crc32": _digest(content), **content},
            indent=1,
            allow_nan=False,
        )

    @property
    def digest(self) -> str:
        """A digest that is equal for the same save only."""
        return _digest(asdict(self))


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a checkpoint, checked against its own CRC-32.

    Raises:
        CheckpointError: It is missing, damaged, of a later version, or malformed.
    """
    path = folder.file(MANIFEST)
    with named_errors(path, "cannot be read"):
        try:
            content = folder.read(MANIFEST)
        except FileNotFoundError:
            raise CheckpointError(_not_whole(folder)) from None
    with named_errors(path, "is damaged"):
        document = json.loads(content.decode("utf-8"))
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a {FORMAT}, but another program's")
    version = document.get("version")
    if version not in (1, VERSION):
        raise CheckpointError(
            f"{path} is of format version {version!r}, and this tutorec reads versions 1 to "
            f"{VERSION}: load it with the tutorec that wrote it, or a later one"
        )
    content = {
        key: value for key, value in document.items() if key not in ("format", "version", "crc32")
    }
    with named_errors(path):
        digest = _digest(content)
    if document.get("crc32") != digest:
        raise CheckpointError(
            f"{path} is damaged: its CRC-32 is {digest} and should be "
            f"{document.get('crc32')!r:.20}; load another checkpoint"
        )
    with named_errors(path):
        files = {name: FileFacts(**facts) for name, facts in content["files"].items()}
        manifest = Manifest(**{**content, "files": files, "version": version})
        _check_form(manifest)
    return manifest


def _not_whole(folder: Folder) -> str:
    try:
        contents = sorted(folder.sizes())[:4] or "nothing"
    except Exception as error:
        contents = error
    return (
        f"{folder} is not a complete checkpoint: {MANIFEST} is missing (found: {contents}); it is "
        "written last, so an interrupted save has none: load another one, latest_checkpoint() "
        "finds them"
    )


@contextmanager
def named_errors(
    path: object, problem: str = "has an invalid format"
) -> Generator[None, None, None]:
    """Turn every error of reading or parsing a file into a CheckpointError that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # object stores raise their own errors
        raise CheckpointError(
            f"{path} {problem} ({type(error).__name__}: {error!s:.200}): load another checkpoint"
        ) from error


def _check_form(manifest: Manifest) -> None:
    """Refuse values of a wrong type, and names that leave the folder.

    Raises:
        CheckpointError: A name is not plain.
        TypeError: A value is of another type.
    """

    def must(fits: bool, what: str) -> None:
        if not fits:
            raise TypeError(f"{what} has a wrong type")

    for name, facts in manifest.files.items():
        if _PLAIN.fullmatch(name) is None:
            raise CheckpointError(
                f"{name!r:.200} is not a plain file name: load another checkpoint"
            )
        must(
            type(facts.bytes) is int and isinstance(facts.crc32, str), f"size or CRC-32 of {name!r}"
        )
    if manifest.metadata not in manifest.files:
        raise CheckpointError(
            f"{manifest.metadata!r:.200} is not among the files of the manifest: load another "
            "checkpoint"
        )
    must(type(manifest.world_size) is int, "world_size")
    must(manifest.step is None or (type(manifest.step) is int and manifest.step >= 0), "step")
    for name, widths in manifest.slices.items():
        must(
            isinstance(widths, list) and all(type(each) is int and each > 0 for each in widths),
            f"slices of {name!r}",
        )
    for name, facts in manifest.optimizers.items():
        kinds = {"kind": str, "options": dict, "numbers": dict}
        must(
            all(isinstance(facts[part], kind) for part, kind in kinds.items())
            and isinstance(facts.get("rule", ""), str),
            f"the optimizer of {name!r}",
        )


def check_sizes(folder: Folder, manifest: Manifest) -> None:
    """Compare the sizes of all files with the manifest, without reading the files.

    Raises:
        CheckpointError: A file is missing, is not a regular file, or has another size.
    """
    sizes = folder.sizes()
    for name, facts in manifest.files.items():
        if sizes.get(name) is None:
            what = "is not a regular file" if name in sizes else "is missing"
            raise CheckpointError(f"{folder.file(name)} of the checkpoint {what}: load another one")
        if sizes[name] != facts.bytes:
            raise CheckpointError(size_problem(folder.file(name), sizes[name] or 0, facts))


def size_problem(path: str, size: int, facts: FileFacts) -> str:
    """The message about a file of the wrong size."""
    return f"{path} has {size:,} bytes and should have {facts.bytes:,}: load another checkpoint"


def is_replaced(folder: Folder, manifest: Manifest) -> bool:
    """Whether another save has replaced this manifest."""
    try:
        return read_manifest(folder).digest != manifest.digest
    except CheckpointError:
        return False


def of_one_save(folder: Folder, use: Callable[[Manifest], T]) -> T:
    """Call ``use`` with a manifest; if a save replaces it meanwhile, retry with the new one.

    Raises:
        CheckpointError: ``use`` raises it, or the checkpoint was replaced on every attempt.
    """
    for _ in range(TRIES):
        manifest = read_manifest(folder)
        try:
            return use(manifest)
        except CheckpointError:
            if not is_replaced(folder, manifest):
                raise
    raise CheckpointError(replaced_too_often(folder))


def replaced_too_often(folder: Folder) -> str:
    """The error of a reader whose checkpoint was replaced on every attempt."""
    return (
        f"{folder} was replaced {TRIES} times while it was read: load again; a CheckpointManager, "
        "which gives every save a folder of its own, does not replace what is read"
    )


def leftover_names(folder: Folder, used: Mapping[str, Any] | None = None) -> list[str]:
    """Names of unused regular files that replaced or interrupted saves have written."""
    return [
        name
        for name, size in folder.sizes().items()
        if size is not None and _OURS.fullmatch(name) and name not in (used or {})
    ]


def remove_leftovers(
    folder: Folder, is_locked: bool, used: Mapping[str, Any] | None = None
) -> None:
    """Remove the files of replaced and interrupted saves.

    Without a lock they may be those of a save that is under way and will list them. They then stay
    until the newest of them is a day old; all of them where the storage does not report ages.

    Args:
        folder: Folder of the checkpoint.
        is_locked: Whether this process holds its lock.
        used: Names of files to keep.
    """
    names = leftover_names(folder, used)
    if not is_locked:
        try:
            ended = [folder.modified(name) for name in names]
        except FileNotFoundError:  # another process removes them
            return
        if 0 in ended or time.time() - max(ended, default=0) < _INTERRUPTED_AFTER:
            return
    folder.remove(names)


def remove_checkpoint(folder: Folder) -> None:
    """Remove the files of a checkpoint, and of interrupted saves in its folder; other files stay.

    Raises:
        CheckpointError: Another process is saving into it.
    """
    with folder.locked() as is_locked:
        if folder.sizes().get(MANIFEST) is not None:
            folder.remove([METADATA, MANIFEST, *read_manifest(folder).files])
        remove_leftovers(folder, is_locked)
        folder.remove_if_empty()


def remove_interrupted(folder: Folder) -> None:
    """Remove the files of an interrupted save, unless it has become complete meanwhile.

    Raises:
        CheckpointError: Another process is saving into it.
    """
    with folder.locked() as is_locked:
        # Listed under the lock: the caller's list may be older than the manifest.
        if MANIFEST not in folder.sizes():
            remove_leftovers(folder, is_locked)
            folder.remove_if_empty()


def _digest(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"

"""The files of a checkpoint: the manifest, which marks a complete one, and the index of blocks.

::

    <path>/manifest.json               step, data position, plan; name, size, CRC-32 of each file
    <path>/3fa9c1d2.index              the blocks of each tensor, as JSON
    <path>/__0_3fa9c1d2_0.distcp ...   the blocks that rank 0 wrote, ...
    <path>/.metadata                   the index for the readers of torch.distributed.checkpoint

A save writes files under unique names and then replaces the manifest atomically. An interrupted
save leaves the old checkpoint. Only `.metadata` is a pickle; it is written and never read here.
Other files in the folder are neither read nor removed.

Files that no manifest lists are those of a save that was interrupted, or of one that is under way
in another process. A save locks its folder, and who has the lock removes them. Where there are no
locks, they are removed when they are a day old.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tutorec.distributed.checkpoint.folder import Folder
from tutorec.errors import CheckpointError

FORMAT = "tutorec checkpoint"
VERSION = 3
MANIFEST = "manifest.json"
METADATA = ".metadata"
_DAY = 24 * 3600
# A file name that cannot leave its folder, on any system.
_PLAIN_NAME = re.compile(r"[\w.-]*[\w-][\w.-]*", re.ASCII)
# Files of a save other than manifest and metadata, and drafts of small files.
_SAVED_NAME = re.compile(
    r"__\d+_[0-9a-f]{8}_\d+\.distcp|[0-9a-f]{8}\.index"
    r"|(manifest\.json|\.metadata|[0-9a-f]{8}\.index)\.[0-9a-f]{8}"
)


@dataclass(frozen=True)
class FileRecord:
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
        index: Name of the file that lists the blocks.
        optimizers: Parameter -> ``{"class": ..., "rule": ..., "options": {"lr": ...}, "numbers":
            {...}}`` of its optimizer.
    """

    world_size: int
    step: int | None
    position: Any
    extra: Any
    plan: Any
    files: Mapping[str, FileRecord]
    index: str
    optimizers: Mapping[str, Mapping[str, Any]]

    def to_text(self) -> str:
        """The manifest as a JSON document, with the CRC-32 of its content."""
        header = {"format": FORMAT, "version": VERSION, "crc32": self.crc32}
        return json.dumps({**header, **asdict(self)}, indent=1, allow_nan=False)

    @property
    def crc32(self) -> str:
        """The CRC-32 of its content, which differs from save to save."""
        return _crc32(asdict(self))


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a checkpoint, checked against its own CRC-32.

    Raises:
        CheckpointError: It is missing, damaged, of another version, or malformed.
    """
    path = folder.file(MANIFEST)
    with file_errors(path, "cannot be read"):
        try:
            text = folder.read(MANIFEST)
        except FileNotFoundError:
            raise CheckpointError(_missing_manifest(folder)) from None

    with file_errors(path, "is damaged"):
        document = json.loads(text.decode("utf-8"))
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a {FORMAT}, but another program's")

    version = document.get("version")
    if version != VERSION:
        raise CheckpointError(
            f"{path} is of format version {version!r}, and this tutorec reads version {VERSION}: "
            "load it with the tutorec that wrote it"
        )

    with file_errors(path):
        del document["format"], document["version"]
        stored_crc32 = document.pop("crc32")
        crc32 = _crc32(document)
        if stored_crc32 != crc32:
            raise CheckpointError(
                f"{path} is damaged: its CRC-32 is {crc32} and should be {stored_crc32!r:.20}; "
                "load another checkpoint"
            )

        for name, record in document["files"].items():
            document["files"][name] = FileRecord(**record)
        manifest = Manifest(**document)
        _check_types(manifest)
    return manifest


def _missing_manifest(folder: Folder) -> str:
    names = sorted(folder.sizes())[:4] or "nothing"
    return (
        f"{folder} is not a complete checkpoint: {MANIFEST} is missing (found: {names}); it is "
        "written last, so an interrupted save has none: load another one, latest_checkpoint() "
        "finds them"
    )


@contextmanager
def file_errors(
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


def _check_types(manifest: Manifest) -> None:
    """Refuse names that leave the folder, and values of a wrong type that no reader would notice.

    Raises:
        CheckpointError: A name is not plain, or the index is not among the files.
        TypeError: A value is of another type.
    """
    for name, record in manifest.files.items():
        if _PLAIN_NAME.fullmatch(name) is None:
            raise CheckpointError(
                f"{name!r:.200} is not a plain file name: load another checkpoint"
            )
        if type(record.bytes) is not int or not isinstance(record.crc32, str):
            raise TypeError(f"{record!r:.200} of {name!r} has values of a wrong type")

    if manifest.index not in manifest.files:
        raise CheckpointError(
            f"{manifest.index!r:.200} is not among the files of the manifest: load another "
            "checkpoint"
        )

    step = manifest.step
    world_size = manifest.world_size
    if type(world_size) is not int or not (step is None or type(step) is int):
        raise TypeError(f"step {step!r:.50} or world_size {world_size!r:.50} is not an integer")


def check_sizes(folder: Folder, manifest: Manifest) -> None:
    """Compare the sizes of all files with the manifest, without reading the files.

    Raises:
        CheckpointError: A file is missing, is not a regular file, or has another size.
    """
    sizes = folder.sizes()
    for name, record in manifest.files.items():
        size = sizes.get(name)
        if size is None:
            problem = "is not a regular file" if name in sizes else "is missing"
            raise CheckpointError(
                f"{folder.file(name)} of the checkpoint {problem}: load another one"
            )
        check_size(folder.file(name), size, record)


def check_size(path: str, size: int, record: FileRecord) -> None:
    """Compare the size of a file with the manifest.

    Raises:
        CheckpointError: It has another size.
    """
    if size != record.bytes:
        raise CheckpointError(
            f"{path} has {size:,} bytes and should have {record.bytes:,}: load another checkpoint"
        )


def unlisted_files(folder: Folder) -> list[str]:
    """Names of files of saves that the manifest does not list.

    Raises:
        CheckpointError: The manifest is damaged.
    """
    sizes = folder.sizes()
    listed = read_manifest(folder).files if MANIFEST in sizes else {}
    names: list[str] = []
    for name, size in sizes.items():
        if size is not None and _SAVED_NAME.fullmatch(name) and name not in listed:
            names.append(name)
    return names


def remove_unlisted(folder: Folder, is_locked: bool) -> None:
    """Remove the files of interrupted saves; without the lock, if the newest is a day old.

    Args:
        folder: Folder of a checkpoint.
        is_locked: Whether this process has locked it.

    Raises:
        CheckpointError: The manifest is damaged.
    """
    names = unlisted_files(folder)
    if is_locked or min(map(folder.age, names), default=0) > _DAY:
        folder.remove(names)


def remove_interrupted(folder: Folder) -> None:
    """Remove the files of interrupted saves, unless another process is saving, and an empty folder.

    Raises:
        CheckpointError: The manifest is damaged.
    """
    with suppress(BlockingIOError), folder.locked() as is_locked:
        remove_unlisted(folder, is_locked)
        folder.remove_if_empty()


def remove_checkpoint(folder: Folder) -> None:
    """Remove the files of a checkpoint, the manifest first, unless another process is saving.

    Other files in its folder stay.

    Raises:
        CheckpointError: The manifest is damaged.
    """
    with suppress(BlockingIOError), folder.locked():
        folder.remove([MANIFEST, METADATA, *read_manifest(folder).files])
    remove_interrupted(folder)


def _crc32(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


class Block(NamedTuple):
    """A block of a tensor: its offsets and sizes in the tensor, and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    bytes: int


@dataclass
class StoredTensor:
    """A tensor of a checkpoint.

    Args:
        path: Keys that lead to it in the nested state dict, e.g. ``("model", "over.weight")``.
        dtype: Its dtype.
        shape: Shape of the whole tensor.
        widths: For a state with one number per row, the columns of each column shard; else empty.
        blocks: Its blocks, which do not overlap.
    """

    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    widths: tuple[int, ...]
    blocks: list[Block] = field(default_factory=list)

    @property
    def stored_numbers(self) -> int:
        """How many of its numbers the blocks hold."""
        return sum(math.prod(block.sizes) for block in self.blocks)


# Name -> tensor; the name is the path, joined by dots.
Index: TypeAlias = dict[str, StoredTensor]


def index_to_text(index: Index) -> str:
    """The index as a JSON document."""
    records: dict[str, Any] = {}
    for name, tensor in index.items():
        records[name] = {**vars(tensor), "dtype": str(tensor.dtype).removeprefix("torch.")}
    return json.dumps(records)


def parse_index(content: bytes, manifest: Manifest) -> Index:
    """Parse an index; every block must be in a file that the manifest lists.

    Args:
        content: Content of the file.
        manifest: Manifest of the same save.

    Raises:
        CheckpointError: A block is outside of the files.
        Exception: It is malformed; see `file_errors`.
    """
    index: Index = {}
    for name, record in json.loads(content).items():
        blocks: list[Block] = []
        for offsets, sizes, file, start, length in record["blocks"]:
            blocks.append(Block(_sizes(offsets), _sizes(sizes), file, *_sizes((start, length))))

        dtype = getattr(torch, record["dtype"])
        path = tuple(record["path"])
        if not isinstance(dtype, torch.dtype) or path[0] not in ("model", "optimizer"):
            raise CheckpointError(f"{name!r} has dtype {dtype} and path {path}")
        tensor = StoredTensor(
            path, dtype, _sizes(record["shape"]), _sizes(record["widths"]), blocks
        )
        _check_blocks(name, tensor, manifest)
        index[name] = tensor
    return index


def _check_blocks(name: str, tensor: StoredTensor, manifest: Manifest) -> None:
    """Check that the blocks are in the files, and have as many numbers as the tensor.

    Raises:
        CheckpointError: They are not, or have not.
    """
    for block in tensor.blocks:
        if block.file not in manifest.files:
            raise CheckpointError(
                f"a block is in {block.file!r:.200}, which the manifest does not list"
            )

        is_in_file = block.start + block.bytes <= manifest.files[block.file].bytes
        has_numbers = math.prod(block.sizes) * tensor.dtype.itemsize <= block.bytes
        has_dimensions = len(block.offsets) == len(block.sizes) == len(tensor.shape)
        if not (is_in_file and has_numbers and has_dimensions):
            raise CheckpointError(f"a block of {name!r} is not possible: {block!r:.200}")

    numbers = math.prod(tensor.shape)
    if tensor.stored_numbers != numbers:
        raise CheckpointError(
            f"{name!r} has {numbers:,} numbers, and its blocks have {tensor.stored_numbers:,}"
        )


def _sizes(numbers: Any) -> torch.Size:
    size = torch.Size(numbers)
    if min(size, default=0) < 0:
        raise ValueError(f"{list(size)} has a negative number")
    return size


def torch_metadata(index: Mapping[str, StoredTensor]) -> Metadata:
    """The index as torch.distributed.checkpoint's metadata."""
    metadata = Metadata({}, planner_data={}, storage_data={})
    for name, tensor in index.items():
        chunks: list[ChunkStorageMetadata] = []
        for block in tensor.blocks:
            offsets = torch.Size(block.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(block.sizes)))
            location = _StorageInfo(block.file, block.start, block.bytes)
            metadata.storage_data[MetadataIndex(name, offsets)] = location  # pyright: ignore[reportOptionalSubscript]

        properties = TensorProperties(dtype=tensor.dtype)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            properties, torch.Size(tensor.shape), chunks
        )
        metadata.planner_data[name] = tensor.path  # pyright: ignore[reportOptionalSubscript]

    # What torch writes itself; torch 2.8 has no version.
    metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    return metadata

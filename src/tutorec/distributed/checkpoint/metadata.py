"""Read torch's ``.metadata`` of a checkpoint from an untrusted source.

It is a pickle, and a pickle may call any function. This unpickler accepts only the classes of
torch.distributed.checkpoint, `torch.Size` and dtypes. Each class is replaced by an empty one that
is created for this read. The result is checked and converted to torch's own metadata.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tutorec.distributed.checkpoint.manifest import Manifest
from tutorec.errors import CheckpointError

_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    # The attribute of classes in which their module is stored.
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}


class _Record:
    """A pickled object: its arguments and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """An unpickler of records, sizes and dtypes only."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        # Created for each read: a pickle can modify the classes that it names.
        self._made: dict[str, Any] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return an empty class for an accepted one.

        Raises:
            CheckpointError: The class is not accepted.
        """
        if global_name in _RECORDS.get(module_name, ()):
            return self._made.setdefault(global_name, type(global_name, (_Record,), {}))
        if (module_name, global_name) == ("torch", "Size"):
            return tuple
        value = getattr(torch, global_name, None) if module_name == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise CheckpointError(
            f"it names {module_name}.{global_name}"[:200]
            + ", which no checkpoint has: it was not written by tutorec or "
            "torch.distributed.checkpoint and may be meant to run code"
        )


def parse_metadata(content: bytes, manifest: Manifest) -> Metadata:
    """Parse the metadata; every block must be in a file that the manifest lists.

    Args:
        content: Content of the file, whose size and CRC-32 have been checked.
        manifest: Manifest of the same save.

    Raises:
        CheckpointError: It is malformed.
        Exception: It is malformed; see `named_errors`.
    """
    root = _state(_Reader(content).load(), "Metadata")
    tensors: dict[str, Any] = {
        _text(name): _tensor(record) for name, record in root["state_dict_metadata"].items()
    }
    stored = {}
    for key, record in root["storage_data"].items():
        index = _state(key, "MetadataIndex")
        stored[MetadataIndex(_text(index["fqn"]), _sizes(index["offset"]))] = _storage(
            record, manifest
        )
    paths = {_text(name): tuple(map(_text, path)) for name, path in root["planner_data"].items()}
    total, known = 0, set[tuple[str, int]]()
    for name, tensor in tensors.items():
        if len(paths[name]) not in (2, 4):
            raise CheckpointError(f"{name!r} has a path of {len(paths[name])} keys, not 2 or 4")
        total += math.prod(tensor.size) * tensor.properties.dtype.itemsize
        for chunk in tensor.chunks:
            # a block without a file is a KeyError
            place = stored[MetadataIndex(name, chunk.offsets)]
            if (place.relative_path, place.offset) in known:  # zeros are written once
                total -= math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
            known.add((place.relative_path, place.offset))
    room = sum(facts.bytes for facts in manifest.files.values())
    if total > room:
        raise CheckpointError(f"its tensors have {total:,} bytes, and all its files {room:,}")
    return Metadata(tensors, planner_data=paths, storage_data=stored)


def _tensor(record: Any) -> TensorStorageMetadata:
    fields = _state(record, "TensorStorageMetadata")
    dtype = _state(fields["properties"], "TensorProperties")[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a dtype is a {type(dtype).__name__}")
    chunks = [_state(each, "ChunkStorageMetadata") for each in fields["chunks"]]
    size = _sizes(fields["size"])
    blocks = [
        ChunkStorageMetadata(_sizes(each["offsets"]), _sizes(each["sizes"])) for each in chunks
    ]
    if any(len(each.offsets) != len(size) or len(each.sizes) != len(size) for each in blocks):
        raise TypeError(f"a block of a tensor of {len(size)} dimensions has another number of them")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, blocks)


def _storage(record: Any, manifest: Manifest) -> _StorageInfo:
    fields: Mapping[str, Any] = _state(record, "_StorageInfo")
    name, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if name not in manifest.files:
        raise CheckpointError(f"a block is in {name!r:.200}, which the manifest does not list")
    if fields.keys() - {"relative_path", "offset", "length"}:
        raise TypeError(f"a block of {name!r} is stored in a way that tutorec does not use")
    first, size = _sizes((offset, length))
    if first + size > manifest.files[name].bytes:
        raise CheckpointError(f"a block ends behind the end of {name!r}")
    return _StorageInfo(name, first, size)


def _state(record: Any, kind: str) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise TypeError(f"a {kind} has another type")
    return record.state


def _sizes(value: Any) -> torch.Size:
    if not isinstance(value, tuple) or not all(
        type(each) is int and 0 <= each < 2**63 for each in value
    ):
        raise TypeError(f"sizes or offsets, a {type(value).__name__}, are not whole numbers from 0")
    return torch.Size(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name is a {type(value).__name__}, not text")
    return value

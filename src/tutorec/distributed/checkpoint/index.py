"""The index of a checkpoint: its tensors and where in its files their blocks are.

The index is JSON, so that reading it executes nothing. For the readers of
torch.distributed.checkpoint it is also written as their `.metadata`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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

from tutorec.distributed.checkpoint.manifest import Manifest
from tutorec.errors import CheckpointError


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

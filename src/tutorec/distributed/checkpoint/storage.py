"""Writing of blocks with torch.distributed.checkpoint's writer, file format and ``.metadata``.

torch's own driver uses its own collectives, and reports failed ranks in a dictionary inside an
exception. Here its parts are called one by one, and `ranks` does all communication.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from tutorec._kernels.older_torch import forget_written_block, keep_writer_silent
from tutorec._kernels.unwritten import is_all_zero
from tutorec.distributed.checkpoint.entries import Block, Entry, stored_blocks
from tutorec.distributed.checkpoint.folder import Folder
from tutorec.distributed.checkpoint.manifest import FileFacts
from tutorec.errors import CheckpointError

# What torch itself writes into its metadata; torch 2.8 numbers them not, and newer ones read None.
_DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)


@dataclass(frozen=True)
class Written:
    """The files and blocks that one rank has written.

    Args:
        items: Its blocks as torch's write items.
        results: File and offset of each block.
        files: Name -> size and CRC-32.
        paths: Name of each tensor -> its keys in the nested state dict.
    """

    items: list[WriteItem]
    results: list[WriteResult]
    files: dict[str, FileFacts]
    paths: dict[str, tuple[str, ...]]


def write_blocks(folder: Folder, save: str, blocks: BlockSaver) -> Written:
    """Write this rank's blocks to one file, one block in memory at a time, and flush it.

    Args:
        folder: Folder of the checkpoint.
        save: The id of the save, which is part of its file names.
        blocks: The blocks of this rank.

    Raises:
        OSError: The disk is full, or the folder cannot be written to.
    """
    files = _NewFiles(folder)
    writer: Any = FileSystemWriter(".", thread_count=1, sync_files=folder.is_local)
    writer.fs = files
    plan = SavePlan(blocks.items, storage_data=_StoragePrefix(f"__{blocks.rank}_{save}_"))
    keep_writer_silent()
    results: list[WriteResult] = writer.write_data(plan, blocks).value() if plan.items else []
    by_index = {result.index: result for result in results}
    results += [
        replace(by_index[blocks.zeros[key]], index=item.index) for item, key in blocks.repeated
    ]
    return Written(
        [*plan.items, *(item for item, _ in blocks.repeated)], results, files.facts, blocks.paths
    )


def write_metadata(
    folder: Folder, save: str, written: Sequence[Written]
) -> tuple[dict[str, FileFacts], bytes]:
    """Write torch's metadata of all ranks' blocks, on one rank.

    Args:
        folder: Folder of the checkpoint.
        save: The id of the save.
        written: What every rank has written.

    Returns:
        Size and CRC-32 of every file of the checkpoint, and the metadata.

    Raises:
        CheckpointError: The ranks' blocks do not cover a tensor.
        OSError: The disk is full, or the folder cannot be written to.
    """
    _, metadata = create_default_global_save_plan([SavePlan(each.items) for each in written])
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), f"{name}: only tensors are stored"
        count, whole = (
            sum(math.prod(chunk.sizes) for chunk in tensor.chunks),
            math.prod(tensor.size),
        )
        if count != whole:
            raise CheckpointError(
                f"{name!r} has {whole:,} numbers, and the ranks have written {count:,} of them: "
                "every rank saves the same model, with the same optimizers"
            )
    lost = sorted(
        {name for each in written for name in each.paths} - metadata.state_dict_metadata.keys()
    )
    if lost:
        raise CheckpointError(
            f"{lost[0]!r} and {len(lost) - 1} more exist on some ranks, and no rank has written "
            "their values: every rank saves the same model, with the same optimizers"
        )
    metadata.planner_data = {name: path for each in written for name, path in each.paths.items()}
    metadata.storage_data = {
        result.index: result.storage_data for each in written for result in each.results
    }
    metadata.version = _DCP_VERSION
    content = pickle.dumps(metadata)
    name = f"{save}.metadata"
    folder.replace(name, content)
    facts = {name: FileFacts(len(content), f"{zlib.crc32(content):08x}")}
    return facts | {name: fact for each in written for name, fact in each.files.items()}, content


class BlockSaver:
    """The blocks of this rank, in place of a planner: torch's writer asks it for values only.

    Of blocks of zeros that have one shape and dtype the first is written, and the others are stored
    where that is: the rows of a table that no id has yet take no space.

    Args:
        entries: The tensors of the checkpoint.
        rank: This rank.
        world_size: W.
        copy: Copy the blocks now, so that the model may change before they are written.
    """

    def __init__(
        self, entries: Sequence[Entry], rank: int, world_size: int, copy: bool = False
    ) -> None:
        self.rank: int = rank
        self.paths: dict[str, tuple[str, ...]] = {entry.name: entry.path for entry in entries}
        self.slices: dict[str, list[int]] = {
            entry.name: list(entry.widths) for entry in entries if entry.widths
        }
        self._blocks: dict[MetadataIndex, Block] = {}
        self.items: list[WriteItem] = []
        self.zeros: dict[object, MetadataIndex] = {}
        self.repeated: list[tuple[WriteItem, object]] = []
        for entry in entries:
            for block in stored_blocks(entry, rank, world_size):
                self._add(entry, block, copy)

    def _add(self, entry: Entry, block: Block, copy: bool) -> None:
        index = MetadataIndex(entry.name, block.offsets)
        chunk = ChunkStorageMetadata(torch.Size(block.offsets), block.tensor.shape)
        properties = TensorProperties(dtype=block.tensor.dtype)
        data = TensorWriteData(chunk, properties, torch.Size(entry.shape))
        item = WriteItem(index, WriteItemType.SHARD, tensor_data=data)
        if is_all_zero(block.tensor):
            key = (block.tensor.shape, block.tensor.dtype)
            if self.zeros.setdefault(key, index) is not index:
                self.repeated.append((item, key))
                return
        if copy:
            values = block.tensor.detach().to("cpu", copy=True).contiguous()
            block = Block(block.offsets, values)
        self._blocks[index] = block
        self.items.append(item)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The values of a block, when it is written."""
        forget_written_block()
        return self._blocks[write_item.index].tensor.detach().cpu().contiguous()


@dataclass
class _NewFiles(FileSystem):
    """A file system for torch's writer, by plain names; records size and CRC-32 of each file."""

    folder: Folder
    facts: dict[str, FileFacts] = field(default_factory=dict)

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a file; errors in writing are raised when it is closed."""
        with self.folder.create(str(path)) as file:
            stream = _CheckedStream(file)
            yield cast(io.IOBase, stream)
        if stream.problem is not None:
            raise stream.problem
        self.facts[str(path)] = FileFacts(stream.size, f"{stream.crc32:08x}")


class _CheckedStream:
    """A sequential file. Errors are kept, since inside torch's serializer they could abort."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size, self.crc32 = 0, 0
        self.problem: Exception | None = None

    def write(self, data: Any) -> int:
        """Write bytes."""
        view = memoryview(data).cast("B")
        self._attempt(self._file.write, view)
        self.size += view.nbytes
        self.crc32 = zlib.crc32(view, self.crc32)
        return view.nbytes

    def tell(self) -> int:
        """Bytes written."""
        return self.size

    def flush(self) -> None:
        """Flush the buffer."""
        self._attempt(self._file.flush)

    def fileno(self) -> int:
        """The file descriptor, for fsync."""
        self.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Do nothing: the caller that opened the file closes it."""
        self.flush()

    def _attempt(self, act: Callable[..., Any], *arguments: Any) -> None:
        if self.problem is None:
            try:
                act(*arguments)
            except Exception as error:  # object stores raise their own errors
                self.problem = error

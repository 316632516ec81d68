"""The blocks on disk, by torch.distributed.checkpoint: its files, its ``.metadata``, its writer and reader.

torch drives these parts with collectives of its own and reports a failing rank by an exception that holds a dictionary;
here they are driven one by one, so that what happens between ranks is the business of `ranks`.
"""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from tutorec.distributed.checkpoint.entries import Block, Entry, Wanted, stored_blocks
from tutorec.distributed.checkpoint.folder import FileFacts
from tutorec.errors import CheckpointError

METADATA = ".metadata"


@dataclass(frozen=True)
class Written:
    """What one rank has written.

    Args:
        items: Its blocks, as torch plans them.
        results: Where each lies.
        files: Name -> size and CRC-32.
        paths: Name of each tensor -> its keys in the nested state dict.
    """

    items: list[WriteItem]
    results: list[WriteResult]
    files: dict[str, FileFacts]
    paths: dict[str, tuple[str, ...]]


def write_blocks(folder: Path, entries: Sequence[Entry], rank: int, world_size: int) -> Written:
    """Write this rank's blocks into one file, one block in memory at a time, and bring it to the disk.

    Args:
        folder: Of the checkpoint.
        entries: What it is made of.
        rank: This rank.
        world_size: W.

    Raises:
        OSError: The disk is full, or the folder cannot be written to.
    """
    files = _CheckedFiles()
    writer = FileSystemWriter(folder, thread_count=1, sync_files=True)
    writer.fs = files
    planner = _BlockSaver(entries, rank, world_size)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = writer.prepare_global_plan([*[SavePlan([])] * rank, plan])[rank]
    results = cast(list[WriteResult], writer.write_data(plan, planner).value()) if plan.items else []
    paths = {entry.name: entry.path for entry in entries}
    return Written(plan.items, results, files.facts, paths)


def write_metadata(folder: Path, written: Sequence[Written]) -> dict[str, FileFacts]:
    """Write ``.metadata``, by one rank for all.

    Args:
        folder: Of the checkpoint.
        written: What every rank has written.

    Returns:
        Size and CRC-32 of every file of the checkpoint.

    Raises:
        CheckpointError: The ranks' blocks do not make up a tensor.
        OSError: The disk is full, or the folder cannot be written to.
    """
    _, metadata = create_default_global_save_plan([SavePlan(each.items) for each in written])
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), f"{name}: only tensors are stored"
        found, whole = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), math.prod(tensor.size)
        if found != whole:
            raise CheckpointError(
                f"{name!r} has {whole:,} numbers, and the ranks have brought {found:,} of them: every rank saves the "
                "same model, with the same optimizers"
            )
    lost = sorted({name for each in written for name in each.paths} - metadata.state_dict_metadata.keys())
    if lost:
        raise CheckpointError(
            f"{lost[0]!r} and {len(lost) - 1} more are known to some ranks, and none has brought their numbers: every "
            "rank saves the same model, with the same optimizers"
        )
    metadata.planner_data = {name: path for each in written for name, path in each.paths.items()}
    files = _CheckedFiles()
    writer = FileSystemWriter(folder, sync_files=True)
    writer.fs = files
    writer.finish(metadata, [each.results for each in written])
    facts = {name.removesuffix(".tmp"): fact for name, fact in files.facts.items()}
    return facts | {name: fact for each in written for name, fact in each.files.items()}


def read_metadata(folder: Path) -> Metadata:
    """What is stored and where, as torch keeps account of it.

    Raises:
        CheckpointError: It is not there, or of another torch.
    """
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise CheckpointError(
            f"{folder / METADATA} cannot be read by torch {torch.__version__} ({type(error).__name__}: {error})"
        ) from error


def read_blocks(folder: Path, metadata: Metadata, wanted: Mapping[str, Sequence[Wanted]]) -> None:
    """Fill targets from the stored blocks, one block in memory at a time.

    Args:
        folder: Of the checkpoint, its files checked.
        metadata: Its account.
        wanted: Name of a stored tensor -> what of it goes where.

    Raises:
        CheckpointError: The blocks do not cover a rectangle.
    """
    planner = plan_reading(metadata, wanted)
    with torch.no_grad():
        for wishes in wanted.values():
            for wish in wishes:
                if wish.share is not None:
                    wish.target.zero_()
        reader = FileSystemReader(folder)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(planner.plan, planner).wait()


def plan_reading(metadata: Metadata, wanted: Mapping[str, Sequence[Wanted]]) -> BlockLoader:
    """Which part of which block goes where; nothing is read or written.

    Args:
        metadata: The checkpoint's account.
        wanted: Name of a stored tensor -> what of it goes where.

    Raises:
        CheckpointError: The blocks do not cover a rectangle.
    """
    items: list[ReadItem] = []
    for name, wishes in wanted.items():
        stored = cast(TensorStorageMetadata, metadata.state_dict_metadata[name])
        chunks = [ChunkStorageMetadata(torch.Size(w.offsets), w.target.shape) for w in wishes]
        found = create_read_items_for_chunk_list(name, stored, chunks)
        covered, needed = sum(math.prod(item.lengths) for item in found), sum(w.target.numel() for w in wishes)
        if covered != needed:
            raise CheckpointError(f"{name!r}: {needed:,} numbers are wanted here, and {covered:,} of them are stored")
        items += found
    return BlockLoader(wanted, LoadPlan(items))


class _BlockSaver(SavePlanner):
    """Hands torch's writer the blocks of this rank."""

    def __init__(self, entries: Sequence[Entry], rank: int, world_size: int) -> None:
        self._blocks: dict[MetadataIndex, Block] = {}
        self._items: list[WriteItem] = []
        for entry in entries:
            for block in stored_blocks(entry, rank, world_size):
                self._add(entry, block)

    def _add(self, entry: Entry, block: Block) -> None:
        index = MetadataIndex(entry.name, block.offsets)
        chunk = ChunkStorageMetadata(torch.Size(block.offsets), block.tensor.shape)
        properties = TensorProperties(dtype=block.tensor.dtype)
        data = TensorWriteData(chunk, properties, torch.Size(entry.shape))
        self._blocks[index] = block
        self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Nothing: it is made for one save."""

    def create_local_plan(self) -> SavePlan:
        """This rank's blocks."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As torch does it: the ranks' blocks one after the other."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """A block's numbers, when it is its turn."""
        return self._blocks[write_item.index].tensor.detach().cpu().contiguous()


class BlockLoader(LoadPlanner):
    """Tells torch's reader where blocks go.

    Args:
        wanted: Name of a stored tensor -> what of it goes where.
        plan: The parts of blocks to read; the index in the target names the wish.
    """

    def __init__(self, wanted: Mapping[str, Sequence[Wanted]], plan: LoadPlan) -> None:
        self.plan: LoadPlan = plan
        self._wanted = wanted

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Nothing: it is made for one load."""

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads."""
        return self.plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never: only tensors are stored."""
        raise CheckpointError(f"{read_item.storage_index.fqn!r} is stored as an object, and only tensors are read")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where the reader copies to: the target itself, or a scratch of which a share is added to it."""
        target, share = self._target(read_item)
        return target if share is None else torch.empty_like(target)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Add the share of a scratch."""
        target, share = self._target(read_item)
        if share is not None:
            target.add_(tensor, alpha=share)

    def _target(self, item: ReadItem) -> tuple[torch.Tensor, float | None]:
        wish = self._wanted[item.dest_index.fqn][cast(int, item.dest_index.index)]
        target = wish.target.detach()
        for dimension, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dimension, start, length)
        return target, wish.share


@dataclass
class _CheckedFiles(FileSystem):
    """torch's files, with size and CRC-32 of what is written taken on the way."""

    facts: dict[str, FileFacts] = field(default_factory=dict)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file; what went wrong in writing is raised when it is closed."""
        with Path(path).open(mode) as file:
            stream = _CheckedStream(file)
            yield cast(io.IOBase, stream)
        if stream.problem is not None:
            raise stream.problem
        self.facts[Path(path).name] = FileFacts(stream.size, f"{stream.crc32:08x}")


class _CheckedStream:
    """A file that is written front to back. An error is kept: inside torch's serializer it could end the process."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size, self.crc32 = 0, 0
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes."""
        view = memoryview(data).cast("B")
        if self.problem is None:
            try:
                self._file.write(view)
            except OSError as error:
                self.problem = error
        self.size += view.nbytes
        self.crc32 = zlib.crc32(view, self.crc32)
        return view.nbytes

    def tell(self) -> int:
        """Bytes written."""
        return self.size

    def flush(self) -> None:
        """Hand everything to the system."""
        if self.problem is None:
            try:
                self._file.flush()
            except OSError as error:
                self.problem = error

    def fileno(self) -> int:
        """The file's number, by which it is brought to the disk."""
        self.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Nothing: who opened the file closes it."""
        self.flush()

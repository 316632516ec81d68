"""Reading of the blocks of one save with torch.distributed.checkpoint's reader."""

from __future__ import annotations

import io
import math
import os
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tutorec._kernels.unwritten import copy_written_rows
from tutorec._loaded import value_problem, values_decide
from tutorec.distributed.checkpoint.entries import Wanted
from tutorec.distributed.checkpoint.folder import Folder
from tutorec.distributed.checkpoint.manifest import Manifest, named_errors, size_problem
from tutorec.distributed.checkpoint.metadata import parse_metadata
from tutorec.errors import CheckpointError

_READ_BYTES = 4 * 2**20
_UNREADABLE = "of the checkpoint cannot be read"
# Maximum number of files kept open; further files are opened when they are read.
_MOST_OPEN = 200


class SavedFiles(FileSystem):
    """The files of one save, by plain names, for torch's reader.

    Each file is opened once and kept open: the checked file is the one that is read, even if a
    later save has removed it.

    Args:
        folder: Folder of the checkpoint.
        manifest: Manifest of the save.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder: Folder = folder
        self._manifest = manifest
        self._held: dict[str, IO[bytes]] = {}

    def __enter__(self) -> SavedFiles:
        """Return the files; none is open yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files that are open."""
        for file in self._held.values():
            file.close()

    def hold(self, names: Iterable[str]) -> None:
        """Open files, up to the limit of open files.

        Raises:
            CheckpointError: A file is missing or not readable.
        """
        for name in names:
            if name not in self._held and len(self._held) < _MOST_OPEN:
                self._held[name] = self._open(name)

    def check(self, name: str) -> None:
        """Compare a file with the manifest's size and CRC-32.

        Raises:
            CheckpointError: The file is missing, truncated or changed.
        """
        facts, path = self._manifest.files[name], self.folder.file(name)
        with self.create_stream(name, "rb") as file, named_errors(path, _UNREADABLE):
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if size != facts.bytes:
                raise CheckpointError(size_problem(path, size, facts))
            crc = 0
            while block := cast(bytes, file.read(_READ_BYTES)):
                crc = zlib.crc32(block, crc)
        if f"{crc:08x}" != facts.crc32:
            raise CheckpointError(
                f"{path} is damaged: its CRC-32 is {crc:08x} and should be "
                f"{facts.crc32:.8}, over {size:,} bytes; load another checkpoint"
            )

    def metadata(self) -> Metadata:
        """Read and check torch's metadata of the blocks.

        Raises:
            CheckpointError: It is missing, damaged or malformed.
        """
        name = self._manifest.metadata
        self.hold([name])
        self.check(name)
        path = self.folder.file(name)
        with self.create_stream(name, "rb") as file, named_errors(path):
            try:
                return parse_metadata(cast(bytes, file.read()), self._manifest)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{path} has an invalid format ({error}): load another checkpoint"
                ) from None

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """A file from its beginning; a file that is not kept open is opened temporarily."""
        name = str(path)
        file = self._held.get(name)
        if file is not None:
            file.seek(0)
            yield cast(io.IOBase, file)
            return
        with self._open(name) as file:
            yield cast(io.IOBase, file)

    def _open(self, name: str) -> IO[bytes]:
        with named_errors(self.folder.file(name), _UNREADABLE):
            return self.folder.open(name)


def read_blocks(
    files: SavedFiles, metadata: Metadata, wanted: Mapping[str, Sequence[Wanted]]
) -> None:
    """Fill targets from the stored blocks, one block in memory at a time.

    Args:
        files: Files of the checkpoint, checked.
        metadata: Its metadata.
        wanted: Name of a stored tensor -> the rectangles to read and their targets.

    Raises:
        CheckpointError: The blocks do not cover a rectangle, or are malformed.
    """
    planner = plan_reading(metadata, wanted)
    with torch.no_grad(), named_errors(files.folder):
        for wishes in wanted.values():
            for wish in wishes:
                if wish.share is not None:
                    wish.target.zero_()
        _read(files, metadata, planner)


def check_conversions(
    files: SavedFiles, metadata: Metadata, wanted: Mapping[str, Sequence[Wanted]]
) -> None:
    """Read the numbers that may be out of the range of their targets, and write nothing.

    Args:
        files: Files of the checkpoint, checked.
        metadata: Its metadata.
        wanted: As in `read_blocks`.

    Raises:
        CheckpointError: A number does not fit.
    """
    dtypes = {
        name: cast(TensorStorageMetadata, metadata.state_dict_metadata[name]).properties.dtype
        for name in wanted
    }
    in_doubt = {
        name: wishes
        for name, wishes in wanted.items()
        if any(values_decide(wish.target.dtype, dtypes[name]) for wish in wishes)
    }
    if in_doubt:
        with torch.no_grad(), named_errors(files.folder):
            checker = BlockChecker(in_doubt, plan_reading(metadata, in_doubt).plan, dtypes)
            _read(files, metadata, checker)


def _read(files: SavedFiles, metadata: Metadata, planner: BlockLoader) -> None:
    """Read the blocks of a plan."""
    reader: Any = FileSystemReader(".")
    reader.fs = files
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.plan, planner).wait()


def plan_reading(metadata: Metadata, wanted: Mapping[str, Sequence[Wanted]]) -> BlockLoader:
    """Plan which part of which block to copy to which target, without reading.

    Args:
        metadata: The checkpoint's metadata.
        wanted: Name of a stored tensor -> the rectangles to read and their targets.

    Raises:
        CheckpointError: The blocks do not cover a rectangle.
    """
    items: list[ReadItem] = []
    for name, wishes in wanted.items():
        stored = cast(TensorStorageMetadata, metadata.state_dict_metadata[name])
        chunks = [ChunkStorageMetadata(torch.Size(w.offsets), w.target.shape) for w in wishes]
        reads = create_read_items_for_chunk_list(name, stored, chunks)
        covered, needed = (
            sum(math.prod(item.lengths) for item in reads),
            sum(w.target.numel() for w in wishes),
        )
        if covered != needed:
            raise CheckpointError(
                f"{name!r}: {needed:,} numbers are needed here, and {covered:,} of them are stored"
            )
        items += reads
    times = Counter(map(_place, metadata.storage_data.values()))
    repeated = {index for index, place in metadata.storage_data.items() if times[_place(place)] > 1}
    return BlockLoader(wanted, LoadPlan(items), repeated)


def _place(stored: _StorageInfo) -> tuple[str, int]:
    return stored.relative_path, stored.offset


def files_of(metadata: Metadata, plan: LoadPlan) -> list[str]:
    """The files that a plan reads from."""
    stored = cast(Mapping[MetadataIndex, _StorageInfo], metadata.storage_data)
    return list(dict.fromkeys(stored[item.storage_index].relative_path for item in plan.items))


class BlockLoader:
    """The target of each block, in place of a planner: torch's reader asks it for targets only.

    Args:
        wanted: Name of a stored tensor -> the rectangles to read and their targets.
        plan: The parts of blocks to read; the index in the target identifies the request.
        repeated: Blocks stored where other blocks are: zeros, which are not written over zeros.
    """

    def __init__(
        self,
        wanted: Mapping[str, Sequence[Wanted]],
        plan: LoadPlan,
        repeated: Set[MetadataIndex],
    ) -> None:
        self.plan: LoadPlan = plan
        self._repeated = repeated
        self._wanted = wanted

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor to read into: the target, or a scratch tensor to be added to it."""
        target, share = self._target(read_item)
        in_place = share is None and read_item.storage_index not in self._repeated
        return target if in_place else torch.empty_like(target)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Add a scratch tensor to its target, times its share."""
        target, share = self._target(read_item)
        if share is not None:
            target.add_(tensor, alpha=share)
        elif read_item.storage_index in self._repeated:
            copy_written_rows(target, tensor)

    def _target(self, item: ReadItem) -> tuple[torch.Tensor, float | None]:
        wish = self._wanted[item.dest_index.fqn][cast(int, item.dest_index.index)]
        target = wish.target.detach()
        for dimension, (start, length) in enumerate(
            zip(item.dest_offsets, item.lengths, strict=True)
        ):
            target = target.narrow(dimension, start, length)
        return target, wish.share


class BlockChecker(BlockLoader):
    """Looks at each block instead of copying it.

    Args:
        wanted: As of `BlockLoader`.
        plan: As there.
        dtypes: Name of a stored tensor -> its dtype.
    """

    def __init__(
        self,
        wanted: Mapping[str, Sequence[Wanted]],
        plan: LoadPlan,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        super().__init__(wanted, plan, frozenset())
        self._dtypes = dtypes

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """A scratch tensor of the stored dtype."""
        target, _ = self._target(read_item)
        return torch.empty_like(target, dtype=self._dtypes[read_item.dest_index.fqn])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Check that its numbers fit the target.

        Raises:
            CheckpointError: One does not.
        """
        target, _ = self._target(read_item)
        problem = value_problem(repr(read_item.dest_index.fqn), target.dtype, tensor)
        if problem is not None:
            raise CheckpointError(problem)

"""Reading of checkpoints: blocks into tensors, and info and tensors without a model."""

from __future__ import annotations

import io
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tutorec._kernels.memory import copy_written_rows
from tutorec._loaded import value_problem, values_decide
from tutorec.distributed.checkpoint.entries import Request, row_requests
from tutorec.distributed.checkpoint.folder import Folder, path_below
from tutorec.distributed.checkpoint.manifest import (
    VERSION,
    Index,
    Manifest,
    StoredTensor,
    check_size,
    check_sizes,
    file_errors,
    parse_index,
    read_manifest,
    torch_metadata,
)
from tutorec.distributed.checkpoint.ranks import CheckpointRanks
from tutorec.distributed.plan.geometry import TableShard
from tutorec.errors import AgreementError, CheckpointError

V = TypeVar("V")
_READ_BYTES = 4 * 2**20
# Systems limit the open files of a process, often to 1,024.
_MOST_OPEN_FILES = 200
_ATTEMPTS = 5


@dataclass(frozen=True)
class CheckpointInfo:
    """Facts about a checkpoint.

    Args:
        version: Version of its format.
        world_size: W at the time of saving.
        step: Steps made, as passed to the save.
        position: Position in the data, as passed to the save.
        extra: As passed to the save.
        plan: The sharding plan as a JSON document; None for an unsharded model.
        tensors: Name -> (shape, dtype) as stored; names begin with ``model.`` or
            ``optimizer.state.``.
    """

    version: int
    world_size: int
    step: int | None
    position: Any
    extra: Any
    plan: Any
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def read_info(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Read the facts of a checkpoint; tensors are neither read nor checked. Not a collective.

    Safe for untrusted files: nothing in them is executed.

    Raises:
        CheckpointError: It is missing, damaged, or of another version.
    """
    return _read_one_save(path, CheckpointFiles.info)


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read all tensors of a checkpoint as plain tensors in this process.

    A state with one number per row is converted to that of an unsharded table: the mean over column
    slices, weighted by their widths. Safe for untrusted files: nothing in them is executed.

    Returns:
        Under ``"model"`` name -> tensor; under ``"optimizer"`` ``"state"``, parameter -> name of a
        state -> tensor or number, and ``"options"``, parameter -> options of its group, such as
        ``"lr"``.

    Raises:
        CheckpointError: It is damaged, or of another version.
    """
    return _read_one_save(path, _state_dict)


def _state_dict(files: CheckpointFiles) -> dict[str, Any]:
    files.keep_open(files.manifest.files)
    for name in files.manifest.files:
        files.check(name)

    with file_errors(files.folder):
        requests: dict[str, list[Request]] = {}
        model: dict[str, torch.Tensor] = {}
        states: dict[str, dict[str, Any]] = {}
        options: dict[str, dict[str, Any]] = {}
        for name, record in files.manifest.optimizers.items():
            states[name] = dict(record["numbers"])
            options[name] = record["options"]

        for name, stored in files.index.items():
            tensor, requests[name] = _unsharded(stored)
            if stored.path[0] == "model":
                model[stored.path[1]] = tensor
            else:
                _, _, parameter, key = stored.path
                states.setdefault(parameter, {})[key] = tensor

        files.read(requests)
    return {"model": model, "optimizer": {"state": states, "options": options}}


def _unsharded(stored: StoredTensor) -> tuple[torch.Tensor, list[Request]]:
    """An empty tensor for a stored tensor, and the requests that fill it."""
    if not stored.widths:
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        offsets = (0,) * len(stored.shape)
        return tensor, [Request(offsets, tensor)] if tensor.numel() else []

    rows = stored.shape[0] // len(stored.widths)
    tensor = torch.empty((rows, *stored.shape[1:]), dtype=stored.dtype)
    table = TableShard(0, 0, 0, rows, sum(stored.widths))
    return tensor, row_requests(tensor, table, rows, stored.shape, stored.widths)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | str | None:
    """The complete checkpoint of the highest step in a folder, or None; of equal steps the last.

    Interrupted saves are skipped. So is a checkpoint whose manifest is damaged, or of which a file
    is missing or has the wrong size. The contents of files are not read here; `load_checkpoint`
    detects changed bits.

    Returns:
        A path, or a URL if the folder was given as one.

    Raises:
        CheckpointError: The folder cannot be listed.
        TypeError: It is not a path.

    Example:
        >>> import tempfile
        >>> latest_checkpoint(tempfile.mkdtemp()) is None
        True
    """
    steps = complete_steps(Folder.from_path(folder))
    if not steps:
        return None
    return path_below(folder, max(steps, key=lambda name: (steps[name], name)))


def complete_steps(folder: Folder) -> dict[str, int]:
    """Name -> step of the complete checkpoints in a folder; -1 for one saved without a step.

    Raises:
        CheckpointError: The folder cannot be listed.
    """
    steps: dict[str, int] = {}
    names = folder.folders()
    for name in names:
        with suppress(CheckpointError, OSError):
            steps[name] = _complete_step(folder.below(name))

    is_changed = not steps and names != folder.folders()
    return complete_steps(folder) if is_changed else steps


def _complete_step(folder: Folder) -> int:
    """The step of a checkpoint, if it is complete.

    Raises:
        CheckpointError: It is not.
        OSError: The folder cannot be listed.
    """

    def check() -> int:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
        return -1 if manifest.step is None else manifest.step

    path = str(folder)
    alone = CheckpointRanks(None, f"reading the checkpoint {path}")
    return load_one_save(alone, lambda: saved_crc32(path), check)


def _read_one_save(path: str | os.PathLike[str], read: Callable[[CheckpointFiles], V]) -> V:
    """Read the files of one save, in this process."""

    def attempt() -> V:
        with CheckpointFiles(Folder.from_path(path)) as files:
            return read(files)

    alone = CheckpointRanks(None, f"reading the checkpoint {path}")
    return load_one_save(alone, lambda: saved_crc32(path), attempt)


def saved_crc32(path: str | os.PathLike[str]) -> str | None:
    """The CRC-32 of a manifest, which differs from save to save; None if it cannot be read."""
    with suppress(CheckpointError, TypeError):
        return read_manifest(Folder.from_path(path)).crc32
    return None


def load_one_save(
    ranks: CheckpointRanks, current: Callable[[], object], load: Callable[[], V]
) -> V:
    """Call ``load``, and again if it fails because another save has replaced what it loads.

    Args:
        ranks: The ranks that load.
        current: Which save is there now, as this rank sees it.
        load: Its errors are raised on every rank.

    Raises:
        AgreementError: ``load`` raises it.
        CheckpointError: ``load`` raises it, or there was another save at every attempt.
        TypeError: ``load`` raises it.
    """
    last_error: Exception | None = None
    for _ in range(_ATTEMPTS):
        before = current()
        try:
            return load()
        except (AgreementError, CheckpointError, TypeError) as error:
            if not any(ranks.gather(current() != before)):
                raise
            last_error = error
    raise CheckpointError(
        f"{last_error}; another save has replaced it in each of {_ATTEMPTS} attempts: load again; "
        "a CheckpointManager, which gives every save a folder of its own, replaces none"
    ) from last_error


class CheckpointFiles(FileSystem):
    """The files of a checkpoint, by plain names, which torch's reader reads.

    Files that are kept open can be read to the end on a disk, even if another save removes them.

    Args:
        folder: Folder of the checkpoint.

    Raises:
        CheckpointError: The manifest or the index is missing, damaged or malformed.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder: Folder = folder
        self._open_files: dict[str, IO[bytes]] = {}
        self.manifest: Manifest = read_manifest(folder)
        self.check(self.manifest.index)

        path = folder.file(self.manifest.index)
        with file_errors(path):
            try:
                content = folder.read(self.manifest.index)
                self.index: Index = parse_index(content, self.manifest)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{path} has an invalid format ({error}): load another checkpoint"
                ) from None
        self._metadata = torch_metadata(self.index)

    def __enter__(self) -> CheckpointFiles:
        """Return the files."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files that were kept open."""
        for file in self._open_files.values():
            file.close()

    def info(self) -> CheckpointInfo:
        """The public facts of the checkpoint."""
        manifest = self.manifest
        tensors = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.index.items()}
        return CheckpointInfo(
            VERSION,
            manifest.world_size,
            manifest.step,
            manifest.position,
            manifest.extra,
            manifest.plan,
            tensors,
        )

    def check(self, name: str) -> None:
        """Compare a file with the manifest's size and CRC-32.

        Raises:
            CheckpointError: The file is missing, truncated or changed.
        """
        path = self.folder.file(name)
        record = self.manifest.files[name]
        with (
            file_errors(path, "of the checkpoint cannot be read"),
            self.create_stream(name, "rb") as file,
        ):
            size = file.seek(0, os.SEEK_END)
            check_size(path, size, record)
            file.seek(0)
            crc32 = 0
            while block := file.read(_READ_BYTES):
                crc32 = zlib.crc32(block, crc32)

        if f"{crc32:08x}" != record.crc32:
            raise CheckpointError(
                f"{path} is damaged: its CRC-32 is {crc32:08x} and should be {record.crc32:.8}, "
                f"over {size:,} bytes; load another checkpoint"
            )

    def keep_open(self, names: Iterable[str]) -> None:
        """Open files until the end, as many as a process may have open.

        Raises:
            CheckpointError: A file is missing or not readable.
        """
        for name in names:
            if name not in self._open_files and len(self._open_files) < _MOST_OPEN_FILES:
                with file_errors(self.folder.file(name), "of the checkpoint cannot be read"):
                    self._open_files[name] = self.folder.open(name)

    def names_of_files(self, plan: LoadPlan) -> list[str]:
        """The files that a plan reads."""
        storage = cast(Mapping[MetadataIndex, _StorageInfo], self._metadata.storage_data)
        names = [storage[item.storage_index].relative_path for item in plan.items]
        return list(dict.fromkeys(names))

    def plan(self, requests: Mapping[str, Sequence[Request]]) -> LoadPlan:
        """Plan which part of which block to copy to which target, without reading.

        Args:
            requests: Name of a stored tensor -> the rectangles to read and their targets.

        Raises:
            CheckpointError: The blocks do not cover a rectangle.
        """
        items: list[ReadItem] = []
        for name, rectangles in requests.items():
            stored = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[name])
            chunks = [
                ChunkStorageMetadata(torch.Size(request.offsets), request.target.shape)
                for request in rectangles
            ]
            reads = create_read_items_for_chunk_list(name, stored, chunks)

            covered = sum(math.prod(item.lengths) for item in reads)
            needed = sum(request.target.numel() for request in rectangles)
            if covered != needed:
                raise CheckpointError(
                    f"{name!r}: {needed:,} numbers are needed here, and {covered:,} of them are "
                    "stored"
                )
            items += reads
        return LoadPlan(items)

    def read(self, requests: Mapping[str, Sequence[Request]]) -> None:
        """Fill targets from the stored blocks, one block in memory at a time.

        Args:
            requests: Name of a stored tensor -> the rectangles to read and their targets.

        Raises:
            CheckpointError: The blocks do not cover a rectangle, or are malformed.
        """
        plan = self.plan(requests)
        with torch.no_grad():
            for rectangles in requests.values():
                for request in rectangles:
                    if request.share is not None:
                        request.target.zero_()
        self._read_blocks(plan, _BlockLoader(requests, self._repeated_blocks()))

    def check_values(self, requests: Mapping[str, Sequence[Request]]) -> None:
        """Read the numbers that may be out of the range of their targets, and write nothing.

        Args:
            requests: As in `read`.

        Raises:
            CheckpointError: A number does not fit.
        """
        uncertain: dict[str, Sequence[Request]] = {}
        for name, rectangles in requests.items():
            dtype = self.index[name].dtype
            if any(values_decide(request.target.dtype, dtype) for request in rectangles):
                uncertain[name] = rectangles
        if uncertain:
            self._read_blocks(self.plan(uncertain), _ValueChecker(uncertain, self.index))

    def _read_blocks(self, plan: LoadPlan, targets: _BlockLoader) -> None:
        reader: Any = FileSystemReader(".")
        reader.fs = self
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        with torch.no_grad(), file_errors(self.folder):
            reader.read_data(plan, targets).wait()

    def _repeated_blocks(self) -> set[MetadataIndex]:
        """Blocks of which several are stored in the same bytes: zeros."""
        storage = cast(Mapping[MetadataIndex, _StorageInfo], self._metadata.storage_data)
        times = Counter((block.relative_path, block.offset) for block in storage.values())
        return {
            index
            for index, block in storage.items()
            if times[block.relative_path, block.offset] > 1
        }

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """A file from its beginning, for torch's reader."""
        name = str(path)
        file = self._open_files.get(name)
        if file is not None:
            file.seek(0)
            yield cast(io.IOBase, file)
            return
        with self.folder.open(name) as file:
            yield cast(io.IOBase, file)


class _BlockLoader:
    """The target of each block, in place of a planner: torch's reader needs only these methods.

    Args:
        requests: Name of a stored tensor -> the rectangles to read and their targets.
        repeated: Blocks of zeros, which are not written over zeros: memory that was never written
            stays unused.
    """

    def __init__(
        self, requests: Mapping[str, Sequence[Request]], repeated: set[MetadataIndex]
    ) -> None:
        self._requests = requests
        self._repeated = repeated

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor to read into: the target, or a scratch tensor."""
        target, share = self._target(read_item)
        is_direct = share is None and read_item.storage_index not in self._repeated
        return target if is_direct else torch.empty_like(target)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Copy a scratch tensor to its target, or add it, times its share."""
        target, share = self._target(read_item)
        if share is not None:
            target.add_(tensor, alpha=share)
        elif read_item.storage_index in self._repeated:
            copy_written_rows(target, tensor)

    def _target(self, item: ReadItem) -> tuple[torch.Tensor, float | None]:
        request = self._requests[item.dest_index.fqn][cast(int, item.dest_index.index)]
        target = request.target.detach()
        rectangle = zip(item.dest_offsets, item.lengths, strict=True)
        for dimension, (start, length) in enumerate(rectangle):
            target = target.narrow(dimension, start, length)
        return target, request.share


class _ValueChecker(_BlockLoader):
    """Checks the numbers of each block and copies nothing.

    Args:
        requests: As of `_BlockLoader`.
        index: The index of the checkpoint.
    """

    def __init__(self, requests: Mapping[str, Sequence[Request]], index: Index) -> None:
        super().__init__(requests, set())
        self._index = index

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """A scratch tensor of the stored dtype."""
        target, _ = self._target(read_item)
        return torch.empty_like(target, dtype=self._index[read_item.dest_index.fqn].dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Check that its numbers fit the target.

        Raises:
            CheckpointError: One does not.
        """
        target, _ = self._target(read_item)
        problem = value_problem(repr(read_item.dest_index.fqn), target.dtype, tensor)
        if problem is not None:
            raise CheckpointError(problem)

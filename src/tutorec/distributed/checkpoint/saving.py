"""Save a sharded model: each rank writes its shards, then rank 0 replaces the manifest.

Files have the format of torch.distributed.checkpoint, whose readers understand them: each block is
written by `torch.save`, and `.metadata` says where.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from tutorec._kernels.memory import is_all_zero
from tutorec._kernels.older_torch import forget_written_block
from tutorec.distributed.checkpoint.contents import Contents, collect_contents, process_group
from tutorec.distributed.checkpoint.folder import Folder, new_id
from tutorec.distributed.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Block,
    FileRecord,
    Index,
    Manifest,
    StoredTensor,
    check_sizes,
    index_to_text,
    read_manifest,
    remove_unlisted,
    torch_metadata,
    unlisted_files,
)
from tutorec.distributed.checkpoint.ranks import CheckpointRanks, in_first_replica
from tutorec.errors import CheckpointError
from tutorec.optim.keyed import KeyedOptimizer


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    *,
    step: int | None = None,
    position: Any = None,
    extra: Any = None,
) -> None:
    """Write a checkpoint atomically: the old one stays until the new one is complete.

    A collective: every rank calls it with the same path, on a shared file system. Weights, buffers
    and the state of optimizers in backward are saved; each rank writes its own part, in blocks of
    at most 4 MiB, so little extra memory is needed. For repeated saves use a `CheckpointManager`.

    Args:
        path: A folder or an fsspec URL (``s3://bucket/run``; ``memory://`` for one process only).
            An existing checkpoint is replaced; other files in the folder stay.
        model: A `DistributedModelParallel`, a sharded module, or any other module. The replicas of
            a `DMPCollection` are averaged by ``sync()`` first.
        optimizer: The optimizer outside of backward.
        step: Steps made so far.
        position: Position in the data: a JSON value, the same on every rank.
        extra: Any other JSON value, the same on every rank.

    Raises:
        AgreementError: Ranks differ in what they save.
        CheckpointError: A rank failed, or a value cannot be saved; ``path`` is unchanged.

    Example:
        >>> import tempfile, torch
        >>> from tutorec.distributed.checkpoint import load_checkpoint
        >>> folder = tempfile.mkdtemp() + "/first"
        >>> save_checkpoint(folder, torch.nn.Linear(2, 1), step=3)
        >>> load_checkpoint(folder, torch.nn.Linear(2, 1)).step
        3
    """
    operation = f"saving the checkpoint {path}"
    notes = Notes(step, position, extra)

    def save() -> None:
        ranks = CheckpointRanks(process_group(model), operation)
        write_save(prepare_save(ranks, path, model, optimizer, notes), ranks)

    in_first_replica(model, operation, save)


@dataclass(frozen=True)
class Notes:
    """What the caller stores with the tensors: step, position in the data, and an extra value."""

    step: int | None
    position: Any
    extra: Any

    def check(self) -> None:
        """Raise unless they can be stored as JSON.

        Raises:
            CheckpointError: A value cannot be stored.
        """
        step = self.step
        is_number = isinstance(step, int) and not isinstance(step, bool)
        if step is not None and not (is_number and step >= 0):
            raise CheckpointError(f"step is {step!r}: give a number of steps, an integer from 0")

        for name in ("position", "extra"):
            value = getattr(self, name)
            try:
                json.dumps(value, allow_nan=False)
                _check_keys(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise CheckpointError(
                    f"{name} cannot be stored as JSON ({error}): use numbers, text, lists, and "
                    "dicts with text as keys"
                ) from None


def _check_keys(value: Any) -> None:
    """Raise for dicts with keys that are not strings: JSON would change them.

    Raises:
        TypeError: A key is not a string.
    """
    if isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{key!r} is a key")
            _check_keys(member)
    elif isinstance(value, list | tuple):
        for member in value:
            _check_keys(member)


@dataclass(frozen=True)
class _Values:
    """The values of a block: a view of the model, or a copy."""

    name: str
    offsets: tuple[int, ...]
    numbers: torch.Tensor
    is_zero: bool


@dataclass
class PreparedSave:
    """What a rank will write.

    Args:
        folder: Folder of the checkpoint.
        index: The tensors of this rank, without blocks.
        blocks: The blocks that this rank writes.
        manifest: The fields of the manifest other than files and index.
    """

    folder: Folder
    index: Index
    blocks: list[_Values]
    manifest: dict[str, Any]


def prepare_save(
    ranks: CheckpointRanks,
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: KeyedOptimizer | None,
    notes: Notes,
    copy: bool = False,
) -> PreparedSave:
    """Collect the blocks to write, and check that ranks agree. A collective.

    Args:
        ranks: The ranks that save.
        path: Path of the checkpoint.
        model: As in `save_checkpoint`.
        optimizer: As in `save_checkpoint`.
        notes: Step, position and extra.
        copy: Copy all values now, so that the model may change before they are written.

    Raises:
        AgreementError: Ranks differ in what they save.
        CheckpointError: A rank cannot save this model, or cannot save to this folder.
        TypeError: This rank's arguments are of a wrong type.
    """

    def collect() -> tuple[Folder, Contents, Index, list[_Values]]:
        folder = Folder.from_path(path)
        notes.check()
        contents = collect_contents(model, optimizer)
        index, blocks = _collect_blocks(contents, ranks, copy)
        if ranks.rank == 0:
            _check_folder(folder)
        return folder, contents, index, blocks

    folder, contents, index, blocks = ranks.attempt(collect)
    shapes = {f"{name!r}: shape": str(list(entry.shape)) for name, entry in contents.model.items()}
    texts = {name: json.dumps(value, sort_keys=True) for name, value in asdict(notes).items()}
    ranks.require_equal({"path": str(folder), **texts, **contents.dense_optimizers(), **shapes})

    optimizers: dict[str, Any] = {}
    for rank_optimizers in reversed(ranks.gather(_optimizer_records(contents))):
        optimizers |= rank_optimizers

    plan = json.loads(contents.plan.to_json()) if contents.plan is not None else None
    manifest = {
        **asdict(notes),
        "world_size": ranks.world_size,
        "plan": plan,
        "optimizers": optimizers,
    }
    return PreparedSave(folder, index, blocks, manifest)


def _check_folder(folder: Folder) -> None:
    """Raise unless the folder is empty, a checkpoint, or the remains of an interrupted save.

    Raises:
        CheckpointError: It is a file, or a folder of other files.
    """
    try:
        sizes = folder.sizes()
        is_usable = MANIFEST in sizes or sizes.keys() == set(unlisted_files(folder))
    except NotADirectoryError:
        is_usable = False
    if not is_usable:
        raise CheckpointError(
            f"{folder} exists and is not a checkpoint ({MANIFEST} is missing): save under "
            "another path, or remove it"
        )


def _collect_blocks(
    contents: Contents, ranks: CheckpointRanks, copy: bool
) -> tuple[Index, list[_Values]]:
    """The tensors of a model and its optimizers, and the blocks that this rank writes."""
    index: Index = {}
    blocks: list[_Values] = []
    for entry in [*contents.model.values(), *contents.optimizer_entries()]:
        dtype = entry.shards[0].tensor.dtype if entry.shards else torch.float32
        index[entry.name] = StoredTensor(entry.path, dtype, entry.shape, entry.widths)
        for offsets, numbers in entry.blocks(ranks.rank, ranks.world_size):
            is_zero = is_all_zero(numbers)
            if is_zero:
                # One number in memory, which stays zero when the model changes.
                numbers = torch.zeros((), dtype=numbers.dtype).expand(numbers.shape)
            elif copy:
                numbers = _copy(numbers)
            blocks.append(_Values(entry.name, offsets, numbers, is_zero))
    return index, blocks


def _copy(numbers: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU: of a view, `torch.save` would write the whole storage."""
    result = torch.empty(numbers.shape, dtype=numbers.dtype)
    return result.copy_(numbers.detach())


def _optimizer_records(contents: Contents) -> dict[str, dict[str, Any]]:
    """Parameter -> its optimizer's class, group options and scalar states, as JSON values."""
    records: dict[str, dict[str, Any]] = {}
    for parameter in contents.optimized:
        options: dict[str, Any] = {}
        for key, value in parameter.group.items():
            if key != "params":
                # Only numbers, text, None, and lists of them are stored.
                with suppress(TypeError, ValueError, RuntimeError):
                    options[key] = json.loads(json.dumps(value, default=torch.Tensor.item))

        numbers: dict[str, bool | int | float] = {}
        for key, value in parameter.state.items():
            if isinstance(value, bool | int | float):
                numbers[key] = value

        records[parameter.name] = {
            "class": type(parameter.optimizer).__name__,
            "rule": parameter.rule,
            "options": options,
            "numbers": numbers,
        }
    return records


# The tensors of a rank with the blocks that it has written, and the file that has them.
_Written: TypeAlias = tuple[Index, dict[str, FileRecord]]


def write_save(
    save: PreparedSave, ranks: CheckpointRanks, on_complete: Callable[[], None] = lambda: None
) -> None:
    """Write a prepared save. A collective.

    Args:
        save: What this rank writes.
        ranks: The ranks that save; a background thread needs its own process group.
        on_complete: Called on rank 0 when the checkpoint is complete.

    Raises:
        CheckpointError: A rank could not write, or has ended; the previous checkpoint is unchanged.
    """
    with ExitStack() as lock:

        def start() -> str:
            if ranks.rank == 0:
                _start(save.folder, lock)
            return new_id()

        def complete() -> None:
            if ranks.rank == 0:
                _complete(save, save_id, written)
                on_complete()

        save_id = ranks.gather(ranks.attempt(start))[0]
        try:
            written = ranks.gather(ranks.attempt(lambda: _write_blocks(save, save_id, ranks.rank)))
            ranks.attempt(complete)
        except BaseException:
            if ranks.rank == 0:
                with suppress(Exception):
                    own = [name for name in unlisted_files(save.folder) if save_id in name]
                    save.folder.remove(own)
                    save.folder.remove_if_empty()
            raise


def _start(folder: Folder, lock: ExitStack) -> None:
    """Create the folder, lock it, and remove the files of interrupted saves.

    Raises:
        CheckpointError: Another run is saving into it.
    """
    folder.make()
    try:
        is_locked = lock.enter_context(folder.locked())
    except BlockingIOError:
        raise CheckpointError(
            f"another save into {folder} is under way: two runs that save to one path overwrite "
            "each other; give each its own"
        ) from None
    with suppress(CheckpointError):  # the files of a damaged checkpoint stay until then
        remove_unlisted(folder, is_locked)


def _write_blocks(save: PreparedSave, save_id: str, rank: int) -> _Written:
    """Write this rank's blocks to one file, one block in memory at a time, and flush it.

    Of blocks of zeros that have one shape and dtype only the first is written: rows of a table that
    no id has yet take no space.

    Raises:
        OSError: The disk is full, or the folder cannot be written to.
    """
    if not save.blocks:
        return save.index, {}

    file_name = f"__{rank}_{save_id}_0.distcp"
    file_size = 0
    crc32 = 0
    zeros: dict[tuple[torch.Size, torch.dtype], tuple[int, int]] = {}
    with save.folder.create(file_name) as file:
        for values in save.blocks:
            numbers = values.numbers
            form = (numbers.shape, numbers.dtype)
            location = zeros.get(form) if values.is_zero else None
            if location is None:
                content = _serialize(numbers)
                file.write(content)
                crc32 = zlib.crc32(content, crc32)
                location = (file_size, len(content))
                file_size += len(content)
                if values.is_zero:
                    zeros[form] = location

            block = Block(values.offsets, tuple(numbers.shape), file_name, *location)
            save.index[values.name].blocks.append(block)

        file.flush()
        if save.folder.is_local:
            os.fsync(file.fileno())
    return save.index, {file_name: FileRecord(file_size, f"{crc32:08x}")}


def _serialize(numbers: torch.Tensor) -> memoryview:
    """A block in the format of torch.distributed.checkpoint."""
    forget_written_block()
    buffer = io.BytesIO()
    torch.save(_copy(numbers), buffer)
    return buffer.getbuffer()


def _complete(save: PreparedSave, save_id: str, written: Sequence[_Written]) -> None:
    """Write the index, replace the manifest, and remove the previous checkpoint's files.

    Raises:
        CheckpointError: The ranks' blocks do not cover a tensor, or a file has disappeared.
    """
    index = _merge_blocks(written)
    content = index_to_text(index).encode()
    index_name = f"{save_id}.index"
    save.folder.replace(index_name, content)

    files = {index_name: FileRecord(len(content), f"{zlib.crc32(content):08x}")}
    for _, rank_files in written:
        files |= rank_files
    manifest = Manifest(**save.manifest, files=dict(sorted(files.items())), index=index_name)
    try:
        check_sizes(save.folder, manifest)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; this save has just written it: "
            "another run saves to the same path, or the ranks see different disks"
        ) from None

    replaced: list[str] = []
    with suppress(CheckpointError):  # there is none, or it is damaged
        replaced = list(read_manifest(save.folder).files)
    save.folder.replace(MANIFEST, manifest.to_text().encode())
    save.folder.replace(METADATA, pickle.dumps(torch_metadata(index)))
    with suppress(OSError):  # the next save removes them
        save.folder.remove(replaced)


def _merge_blocks(written: Sequence[_Written]) -> Index:
    """The tensors of all ranks with all their blocks.

    Raises:
        CheckpointError: The blocks do not cover a tensor.
    """
    index: Index = {}
    for rank_index, _ in written:
        for name, tensor in rank_index.items():
            # The dtype is that of a rank that has written.
            known = index.setdefault(name, tensor)
            if tensor is not known and tensor.blocks:
                tensor.blocks = known.blocks + tensor.blocks
                index[name] = tensor

    for name, tensor in index.items():
        numbers = math.prod(tensor.shape)
        if not tensor.blocks or tensor.stored_numbers != numbers:
            raise CheckpointError(
                f"{name!r} has {numbers:,} numbers, and the ranks have written "
                f"{tensor.stored_numbers:,} of them: every rank saves the same model, with the "
                "same optimizers"
            )
    return index

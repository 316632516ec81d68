"""Save a sharded model: each rank writes its shards, then rank 0 replaces the manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tutorec.distributed.checkpoint.contents import (
    Contents,
    contents_of,
    group_of,
    optimizer_entries,
    optimizer_facts,
)
from tutorec.distributed.checkpoint.folder import Folder, checked_folder, new_id
from tutorec.distributed.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Manifest,
    check_sizes,
    leftover_names,
    read_manifest,
    remove_leftovers,
)
from tutorec.distributed.checkpoint.ranks import RankBarrier
from tutorec.distributed.checkpoint.replicas import saved_by_the_first
from tutorec.distributed.checkpoint.storage import BlockSaver, Written, write_blocks, write_metadata
from tutorec.errors import CheckpointError
from tutorec.optim.keyed import KeyedOptimizer


@saved_by_the_first
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
    folder, problem = checked_folder(path)
    ranks = RankBarrier(group_of(model), f"saving the checkpoint {folder}")
    notes = {"step": step, "position": position, "extra": extra}
    write_save(prepare_save(ranks, folder, problem, (model, optimizer), notes), ranks)


@dataclass
class Save:
    """The blocks and files that a rank will write.

    Args:
        folder: Folder of the checkpoint.
        id: Eight hexadecimal digits in the names of its files.
        blocks: This rank's blocks.
        manifest: The manifest without the files.
        old: Files of the replaced checkpoint; on rank 0.
        held: The folder's lock; on rank 0.
        is_locked: Whether the folder has locks.
    """

    folder: Folder
    id: str = ""
    blocks: BlockSaver = field(default_factory=lambda: BlockSaver([], 0, 1))
    manifest: Manifest | None = None
    old: list[str] = field(default_factory=list)
    held: ExitStack = field(default_factory=ExitStack)
    is_locked: bool = False

    def give_up(self) -> None:
        """Remove the written files unless the manifest lists them, and release the lock."""
        with suppress(Exception):
            used = read_manifest(self.folder).files if MANIFEST in self.folder.sizes() else {}
            self.folder.remove(
                name for name in leftover_names(self.folder, used) if self.id and self.id in name
            )
            self.folder.remove_if_empty()
        self.held.close()


def prepare_save(
    ranks: RankBarrier,
    folder: Folder,
    problem: Exception | None,
    model_and_optimizer: tuple[nn.Module, KeyedOptimizer | None],
    notes: Mapping[str, Any],
    copy: bool = False,
) -> Save:
    """Collect the blocks to write, check that ranks agree, and create the folder. A collective.

    Args:
        ranks: The ranks that save.
        folder: Folder of the checkpoint.
        problem: An error that this rank has already found.
        model_and_optimizer: What to save.
        notes: Step, position and extra.
        copy: Copy all values now, so that the model may change before they are written.

    Raises:
        AgreementError: Ranks differ in what they save.
        CheckpointError: A rank cannot save this model, or cannot save to this folder.
        TypeError: This rank's arguments are of a wrong type.
    """
    save = Save(folder)

    def collect() -> Contents:
        contents = contents_of(*model_and_optimizer)
        entries = [*contents.model.values(), *optimizer_entries(contents)]
        save.blocks = BlockSaver(entries, ranks.rank, ranks.world_size, copy)
        _check_notes(notes)
        if ranks.rank == 0:
            _start(save)
        return contents

    try:
        contents = ranks.attempt(collect, problem)
        ranks.require_equal({"path": str(folder), **_facts(contents, notes)})
        save.id = ranks.from_first(save.id)
        save.manifest = Manifest(
            world_size=ranks.world_size,
            plan=json.loads(contents.plan.to_json()) if contents.plan is not None else None,
            files={},
            slices=_merged(ranks.gather(save.blocks.slices)),
            optimizers=_merged(ranks.gather(_optimizer_facts(contents))),
            **notes,
        )
    except BaseException:
        if ranks.rank == 0:
            save.give_up()
        raise
    return save


def write_save(
    save: Save, ranks: RankBarrier, on_complete: Callable[[], None] = lambda: None
) -> None:
    """Write a prepared save. A collective.

    Args:
        save: What this rank writes.
        ranks: The ranks that save; a background thread needs its own process group.
        on_complete: Called on rank 0 when the checkpoint is complete.

    Raises:
        CheckpointError: A rank could not write, or has ended; the previous checkpoint is unchanged.
    """

    def complete() -> None:
        if ranks.rank == 0:
            _complete(save, written)
            on_complete()

    try:
        written = ranks.gather(
            ranks.attempt(lambda: write_blocks(save.folder, save.id, save.blocks))
        )
        ranks.attempt(complete)
    except BaseException:
        if ranks.rank == 0:
            save.give_up()
        raise
    save.held.close()


def _start(save: Save) -> None:
    """Create and lock the folder, and remove the files of interrupted saves.

    Raises:
        CheckpointError: It is a file, or a folder that is not a checkpoint; or another process is
            saving there.
    """
    folder = save.folder
    if not _may_be_used(folder):
        raise CheckpointError(
            f"{folder} exists and is not a checkpoint ({MANIFEST} is missing): save under "
            "another path, or remove it"
        )
    folder.make()
    save.is_locked = save.held.enter_context(folder.locked())
    with suppress(CheckpointError):  # a damaged one is replaced, and kept until then
        save.old = list(read_manifest(folder).files) if MANIFEST in folder.sizes() else []
        remove_leftovers(folder, save.is_locked, dict.fromkeys(save.old))
    save.id = new_id()


def _may_be_used(folder: Folder) -> bool:
    """Whether the folder is empty, a checkpoint, or the remains of an interrupted save."""
    try:
        sizes = folder.sizes()
    except NotADirectoryError:
        return False
    return sizes.get(MANIFEST) is not None or sizes.keys() == set(leftover_names(folder))


def _complete(save: Save, written: Sequence[Written]) -> None:
    """Write the metadata, replace the manifest, and remove the previous checkpoint's files."""
    assert save.manifest is not None, "the manifest exists once all ranks agree"
    folder = save.folder
    files, account = write_metadata(folder, save.id, written)
    manifest = replace(
        save.manifest, files=dict(sorted(files.items())), metadata=f"{save.id}.metadata"
    )
    try:
        check_sizes(folder, manifest)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; this save has just written it: "
            "another run saves to the same path, or the ranks see different disks"
        ) from None
    folder.replace(MANIFEST, manifest.to_text().encode())
    folder.replace(METADATA, account)
    with suppress(OSError):  # the next save removes them
        folder.remove(set(save.old) - {METADATA})
        remove_leftovers(folder, save.is_locked, files)


def _facts(contents: Contents, notes: Mapping[str, Any]) -> dict[str, str]:
    """The facts that must be equal on all ranks."""
    facts = {name: json.dumps(value, sort_keys=True) for name, value in notes.items()}
    facts |= optimizer_facts(contents)
    return facts | {
        f"{name!r}: shape": str(list(entry.shape)) for name, entry in contents.model.items()
    }


def _check_notes(notes: Mapping[str, Any]) -> None:
    step = notes["step"]
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise CheckpointError(f"step is {step!r}: give a number of steps, an integer from 0")
    for name in ("position", "extra"):
        try:
            json.dumps(notes[name], allow_nan=False)
            _check_keys(notes[name])
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
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{key!r} is a key")
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            _check_keys(each)


def _optimizer_facts(contents: Contents) -> dict[str, dict[str, Any]]:
    """Parameter -> its optimizer's class, group options and scalar states, as JSON values."""
    facts: dict[str, dict[str, Any]] = {}
    for one in contents.optimized:
        options = {
            key: plain(value)
            for key, value in one.group.items()
            if key != "params" and is_plain(value)
        }
        numbers = {
            key: value for key, value in one.state.items() if isinstance(value, bool | int | float)
        }
        kind = type(one.optimizer).__name__
        facts[one.place.name] = {
            "kind": kind,
            "rule": one.rule,
            "options": options,
            "numbers": numbers,
        }
    return facts


def is_plain(value: Any) -> bool:
    """Whether an option can be stored: numbers, strings, None, and tuples of them."""
    if isinstance(value, tuple | list):
        return all(is_plain(each) for each in value)
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, bool | int | float | str)


def plain(value: Any) -> Any:
    """An option as a JSON value."""
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def _merged(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for each in reversed(of_ranks) for name, value in each.items()}

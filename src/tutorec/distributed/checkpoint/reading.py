"""Reading of a checkpoint's info and tensors in one process, without a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tutorec.distributed.checkpoint.entries import Wanted, wanted_rows
from tutorec.distributed.checkpoint.folder import Folder, folder_of, path_below
from tutorec.distributed.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    check_sizes,
    named_errors,
    of_one_save,
)
from tutorec.distributed.checkpoint.stored import SavedFiles, read_blocks
from tutorec.distributed.plan.geometry import ShardPiece
from tutorec.errors import CheckpointError


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


def info_of(manifest: Manifest, metadata: Metadata) -> CheckpointInfo:
    """The public facts of a checkpoint."""
    tensors = {
        name: (tuple(stored.size), stored.properties.dtype)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    return CheckpointInfo(
        manifest.version,
        manifest.world_size,
        manifest.step,
        manifest.position,
        manifest.extra,
        manifest.plan,
        tensors,
    )


def read_info(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Read the facts of a checkpoint; tensors are neither read nor checked. Not a collective.

    Safe for untrusted files: nothing in them is executed.

    Raises:
        CheckpointError: It is missing, damaged, or of a later version.
    """
    folder = folder_of(path)

    def read(manifest: Manifest) -> CheckpointInfo:
        with SavedFiles(folder, manifest) as files:
            return info_of(manifest, files.metadata())

    return of_one_save(folder, read)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | str | None:
    """The complete checkpoint of the highest step in a folder, or None; of equal steps the newest.

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
    parent = folder_of(folder)
    steps = whole_steps(parent, lambda name: whole_step(parent.below(name)))
    latest = [name for name, step in steps.items() if step == max(steps.values())]
    newest = max(
        latest, key=lambda name: (parent.below(name).modified(MANIFEST), name), default=None
    )
    return None if newest is None else path_below(folder, newest)


def subfolders(parent: Folder) -> set[str]:
    """The names of the folders in a folder.

    Raises:
        CheckpointError: It cannot be listed.
    """
    try:
        return set(parent.folders())
    except Exception as error:  # object stores raise their own errors
        raise CheckpointError(f"{parent} cannot be listed ({error}): give another folder") from None


def whole_steps(parent: Folder, step_of: Callable[[str], int | None]) -> dict[str, int]:
    """Name -> step of the complete checkpoints in a folder.

    Args:
        parent: The folder.
        step_of: The step of a complete checkpoint by its name, None for anything else.

    Raises:
        CheckpointError: The folder cannot be listed.
    """
    names: set[str] | None = None
    steps: dict[str, int] = {}
    while not steps:
        known, names = names, subfolders(parent)
        if names == known:
            break
        # A run may have removed the listed checkpoints meanwhile and added others.
        steps = {name: step for name in names if (step := step_of(name)) is not None}
    return steps


def whole_step(folder: Folder) -> int | None:
    """The step of a complete checkpoint (-1 if saved without one); None for anything else."""

    def read(manifest: Manifest) -> int:
        check_sizes(folder, manifest)
        return -1 if manifest.step is None else manifest.step

    try:
        return of_one_save(folder, read)
    except (CheckpointError, OSError):
        return None


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read all tensors of a checkpoint as plain tensors in this process.

    A state with one number per row is converted to that of an unsharded table: the mean over column
    slices, weighted by their widths. Safe for untrusted files: nothing in them is executed.

    Returns:
        Under ``"model"`` name -> tensor; under ``"optimizer"`` ``"state"``, parameter -> name of a
        state -> tensor or number, and ``"options"``, parameter -> options of its group, such as
        ``"lr"``.

    Raises:
        CheckpointError: It is damaged, or of a later version.
    """
    folder = folder_of(path)

    def read(manifest: Manifest) -> dict[str, Any]:
        with SavedFiles(folder, manifest) as files, named_errors(folder):
            return _state_dict(manifest, files)

    return of_one_save(folder, read)


def _state_dict(manifest: Manifest, files: SavedFiles) -> dict[str, Any]:
    metadata = files.metadata()
    files.hold(manifest.files)
    for name in manifest.files:
        files.check(name)
    requests: dict[str, list[Wanted]] = {}
    model: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, Any]] = {
        name: dict(each["numbers"]) for name, each in manifest.optimizers.items()
    }
    for name, stored in metadata.state_dict_metadata.items():
        tensor, requests[name] = _whole(
            cast(TensorStorageMetadata, stored), manifest.slices.get(name, [])
        )
        keys = cast(Mapping[str, tuple[str, ...]], metadata.planner_data)[name]
        if keys[0] == "model":
            model[keys[1]] = tensor
        else:
            states.setdefault(keys[2], {})[keys[3]] = tensor
    read_blocks(files, metadata, requests)
    options = {name: each["options"] for name, each in manifest.optimizers.items()}
    return {"model": model, "optimizer": {"state": states, "options": options}}


def _whole(stored: TensorStorageMetadata, widths: list[int]) -> tuple[torch.Tensor, list[Wanted]]:
    """An empty tensor of a stored tensor's shape, and the requests that fill it."""
    shape = tuple(stored.size)
    if widths:
        rows = shape[0] // len(widths)
        tensor = torch.empty((rows, *shape[1:]), dtype=stored.properties.dtype)
        table = ShardPiece(0, 0, 0, rows, sum(widths))
        return tensor, wanted_rows(tensor, table, rows, shape, widths)
    tensor = torch.empty(shape, dtype=stored.properties.dtype)
    return tensor, [Wanted((0,) * len(shape), tensor)] if tensor.numel() else []

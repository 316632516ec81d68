"""What a checkpoint says of itself, and its tensors in one process, without a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tutorec.distributed.checkpoint.entries import Wanted
from tutorec.distributed.checkpoint.folder import (
    VERSION,
    Manifest,
    check_file,
    checkpoints_in,
    read_manifest,
    target_of,
    whole_folder,
)
from tutorec.distributed.checkpoint.storage import METADATA, read_blocks, read_metadata
from tutorec.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says of itself.

    Args:
        version: Of its format.
        world_size: W of the ranks that saved it.
        step: Steps made, as it was given.
        position: Where the data stood, as it was given.
        extra: As it was given.
        plan: The sharding plan that it was saved under, as a JSON document; None of an unsharded model.
        tensors: Name -> (shape, dtype) as stored; ``model.`` and ``optimizer.state.`` stand before the model's names.
    """

    version: int
    world_size: int
    step: int | None
    position: Any
    extra: Any
    plan: Any
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def info_of(manifest: Manifest, metadata: Metadata) -> CheckpointInfo:
    """What a caller is told of a checkpoint."""
    tensors = {
        name: (tuple(stored.size), stored.properties.dtype)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    return CheckpointInfo(
        VERSION, manifest.world_size, manifest.step, manifest.position, manifest.extra, manifest.plan, tensors
    )


def read_info(path: str | os.PathLike[str]) -> CheckpointInfo:
    """What a checkpoint says of itself; its tensors are neither read nor checked. No ranks are needed.

    Raises:
        CheckpointError: There is none, it is damaged, or of a later version.
    """
    folder = whole_folder(target_of(path))
    manifest = read_manifest(folder)
    check_file(folder, METADATA, manifest.files[METADATA])
    return info_of(manifest, read_metadata(folder))


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint of the highest step in a folder, of equal ones the one written last; None where there is none.

    Folders of saves that were interrupted, and what is damaged, are passed over.

    Raises:
        CheckpointError: The folder cannot be looked into.
        TypeError: It is no path.

    Example:
        >>> import tempfile
        >>> latest_checkpoint(tempfile.mkdtemp()) is None
        True
    """
    found: list[tuple[int, float, Path]] = []
    target_of(folder)  # refuses what is no path
    parent = Path(os.path.abspath(folder))
    try:
        paths = checkpoints_in(parent) if parent.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"{parent} cannot be looked into ({error}): name another folder") from None
    for path in paths:
        try:
            step = read_info(path).step
            found.append((-1 if step is None else step, whole_folder(path).stat().st_mtime, path))
        except (CheckpointError, OSError):
            continue
    return max(found)[2] if found else None


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Any]:
    """All tensors of a checkpoint, whole and plain, in this process: for export, or to look at.

    A state with one number for each row comes as that of an uncut table: the mean over the slices of columns, by their
    widths.

    Returns:
        Under ``"model"`` name -> tensor; under ``"optimizer"`` ``"state"``, parameter -> name of a state -> tensor or
        number, and ``"options"``, parameter -> options of its group, such as ``"lr"``.

    Raises:
        CheckpointError: It is damaged, or of a later version.
    """
    folder = whole_folder(target_of(path))
    manifest = read_manifest(folder)
    for name, facts in manifest.files.items():
        check_file(folder, name, facts)
    metadata = read_metadata(folder)
    wanted: dict[str, list[Wanted]] = {}
    model: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, Any]] = {name: dict(each["numbers"]) for name, each in manifest.optimizers.items()}
    for name, stored in metadata.state_dict_metadata.items():
        tensor, wanted[name] = _whole(cast(TensorStorageMetadata, stored), manifest.slices.get(name, []))
        keys = cast(Mapping[str, tuple[str, ...]], metadata.planner_data)[name]
        if keys[0] == "model":
            model[keys[1]] = tensor
        else:
            states.setdefault(keys[2], {})[keys[3]] = tensor
    read_blocks(folder, metadata, wanted)
    options = {name: each["options"] for name, each in manifest.optimizers.items()}
    return {"model": model, "optimizer": {"state": states, "options": options}}


def _whole(stored: TensorStorageMetadata, widths: list[int]) -> tuple[torch.Tensor, list[Wanted]]:
    """An empty tensor for a stored one, and what fills it."""
    shape, slices = tuple(stored.size), max(1, len(widths))
    if slices == 1:
        tensor = torch.empty(shape, dtype=stored.properties.dtype)
        return tensor, [Wanted((0,) * len(shape), tensor)] if tensor.numel() else []
    rows = shape[0] // slices
    tensor = torch.empty((rows, *shape[1:]), dtype=stored.properties.dtype)
    zeros, total = (0,) * (len(shape) - 1), sum(widths)
    return tensor, [
        Wanted((index * rows, *zeros), tensor, width / total) for index, width in enumerate(widths) if tensor.numel()
    ]

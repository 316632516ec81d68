"""Save a model over its ranks: each writes what it holds, and the folder gets its name when all have."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutorec.distributed.checkpoint.contents import Contents, contents_of, group_of, optimizer_entries, optimizer_facts
from tutorec.distributed.checkpoint.entries import Entry
from tutorec.distributed.checkpoint.folder import Manifest, checked_target, complete, remove_partial, start_partial
from tutorec.distributed.checkpoint.ranks import Together
from tutorec.distributed.checkpoint.replicas import saved_by_the_first
from tutorec.distributed.checkpoint.storage import Written, write_blocks, write_metadata
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
    """Write a checkpoint, whole or not at all: until the new one is complete on the disk, the old one stays.

    A collective: every rank calls it with the same path, on a file system that all of them see. Weights, buffers and
    the state of optimizers that run inside backward are saved with the model; each rank writes its own part, in blocks
    of at most 4 MiB, so that little memory is needed beside the model.

    Args:
        path: Of the checkpoint, a folder. One that stands there is replaced.
        model: A `DistributedModelParallel`, a sharded module, or any other. A `DMPCollection` is brought together by
            its ``sync()`` first.
        optimizer: What steps outside of backward.
        step: Steps made so far.
        position: Where the data stands: a JSON value, the same on every rank.
        extra: Anything else that fits into JSON, the same on every rank.

    Raises:
        AgreementError: Ranks differ in what they save.
        CheckpointError: A rank could not write, has ended, or holds what cannot be saved; ``path`` is as it was.

    Example:
        >>> import tempfile, torch
        >>> from tutorec.distributed.checkpoint import load_checkpoint
        >>> folder = tempfile.mkdtemp() + "/first"
        >>> save_checkpoint(folder, torch.nn.Linear(2, 1), step=3)
        >>> load_checkpoint(folder, torch.nn.Linear(2, 1)).step
        3
    """
    target, problem = checked_target(path)
    ranks = Together(group_of(model), f"saving the checkpoint {target}")
    contents, entries, partial = Contents(), [], None
    notes: dict[str, Any] = {"step": step, "position": position, "extra": extra}
    try:
        if problem is not None:
            raise problem
        contents = contents_of(model, optimizer)
        entries = _entries(contents)
        _check_notes(notes)
        partial = start_partial(target) if ranks.rank == 0 else None
    except Exception as error:  # whatever it is, the others must not wait for this rank
        problem = error
    try:
        ranks.settle(problem)
        ranks.agree({"path": str(target), **_facts(contents, notes)})
        where = ranks.from_first(partial)
        assert where is not None, "settle raises where rank 0 has made no folder"
        written = _write(where, entries, ranks)
        optimizers = _merged(ranks.gather(_optimizer_facts(contents)))
        slices = _merged(ranks.gather({entry.name: list(entry.widths) for entry in entries if entry.widths}))
        if ranks.rank == 0:
            problem = _complete(where, target, written, (contents, ranks.world_size, slices, optimizers), notes)
        ranks.settle(problem)
    except BaseException:
        if partial is not None:
            remove_partial(partial)
        raise


def _entries(contents: Contents) -> list[Entry]:
    states = optimizer_entries(contents)
    return [*contents.model.values(), *(entry for of_parameter in states.values() for entry in of_parameter.values())]


def _write(partial: Path, entries: Sequence[Entry], ranks: Together) -> list[Written]:
    """Write this rank's blocks; what every rank has written."""
    written, problem = Written([], [], {}, {}), None
    try:
        written = write_blocks(partial, entries, ranks.rank, ranks.world_size)
    except Exception as error:
        problem = error
    ranks.settle(problem)
    return ranks.gather(written)


def _complete(
    partial: Path,
    target: Path,
    written: Sequence[Written],
    facts: tuple[Contents, int, Mapping[str, Any], Mapping[str, Any]],
    notes: Mapping[str, Any],
) -> Exception | None:
    """Write what is written once, and give the folder its name; what went wrong, if anything."""
    contents, world_size, slices, optimizers = facts
    plan = json.loads(contents.plan.to_json()) if contents.plan is not None else None
    try:
        files = write_metadata(partial, written)
        manifest = Manifest(
            world_size=world_size,
            plan=plan,
            files=dict(sorted(files.items())),
            slices=slices,
            optimizers=optimizers,
            **notes,
        )
        complete(partial, target, manifest)
    except Exception as error:
        return error
    return None


def _facts(contents: Contents, notes: Mapping[str, Any]) -> dict[str, str]:
    """What ranks must agree on."""
    facts = {name: json.dumps(value, sort_keys=True) for name, value in notes.items()}
    facts |= optimizer_facts(contents)
    return facts | {f"{name!r}: shape": str(list(entry.shape)) for name, entry in contents.model.items()}


def _check_notes(notes: Mapping[str, Any]) -> None:
    step = notes["step"]
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise CheckpointError(f"step is {step!r}, and it counts steps: a whole number from 0")
    for name in ("position", "extra"):
        try:
            json.dumps(notes[name], allow_nan=False)
            _check_keys(notes[name])
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{name} does not fit into JSON ({error}): use numbers, text, lists, and dicts with text as keys"
            ) from None


def _check_keys(value: Any) -> None:
    """Refuse dicts whose keys JSON would turn into text: they would come back as other dicts.

    Raises:
        TypeError: A key is no text.
    """
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{key!r} is a key")
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            _check_keys(each)


def _optimizer_facts(contents: Contents) -> dict[str, dict[str, Any]]:
    """Parameter -> its optimizer's class, its group's options and the numbers among its state, as JSON takes them."""
    found: dict[str, dict[str, Any]] = {}
    for one in contents.optimized:
        options = {key: plain(value) for key, value in one.group.items() if key != "params" and is_plain(value)}
        numbers = {key: value for key, value in one.state.items() if isinstance(value, bool | int | float)}
        kind = type(one.optimizer).__name__
        found[one.place.name] = {"kind": kind, "options": options, "numbers": numbers}
    return found


def is_plain(value: Any) -> bool:
    """Whether a group's option can be stored: numbers, text, None, and pairs of them."""
    if isinstance(value, tuple | list):
        return all(is_plain(each) for each in value)
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, bool | int | float | str)


def plain(value: Any) -> Any:
    """An option as JSON takes it."""
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def _merged(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for each in reversed(of_ranks) for name, value in each.items()}

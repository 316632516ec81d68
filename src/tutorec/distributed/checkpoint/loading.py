"""Load a checkpoint into a model under any plan, on any number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tutorec._loaded import dtype_problem
from tutorec.distributed.checkpoint.contents import (
    STATE,
    Contents,
    Optimized,
    contents_of,
    group_of,
    optimizer_facts,
    state_entry,
)
from tutorec.distributed.checkpoint.entries import (
    Entry,
    Form,
    Wanted,
    wanted_rectangles,
    wanted_rows,
)
from tutorec.distributed.checkpoint.folder import Folder, checked_folder
from tutorec.distributed.checkpoint.manifest import (
    TRIES,
    Manifest,
    is_replaced,
    named_errors,
    read_manifest,
    replaced_too_often,
)
from tutorec.distributed.checkpoint.ranks import RankBarrier, error_text
from tutorec.distributed.checkpoint.reading import CheckpointInfo, info_of
from tutorec.distributed.checkpoint.replicas import loaded_by_all
from tutorec.distributed.checkpoint.states import StoredState, check_rule, match_states, new_state
from tutorec.distributed.checkpoint.stored import (
    SavedFiles,
    check_conversions,
    files_of,
    plan_reading,
    read_blocks,
)
from tutorec.distributed.plan.geometry import ShardPiece
from tutorec.errors import AgreementError, CheckpointError
from tutorec.optim.keyed import KeyedOptimizer

_NOTHING = Manifest(0, None, None, None, None, {}, {}, {})
# A scheduler's base learning rate is loaded with the rate.
_RATES = ("lr", "initial_lr")


@dataclass
class _Order:
    """The changes to make after all checks have passed.

    Args:
        wanted: Name of a stored tensor -> the rectangles to read and their targets.
        states: (parameter and optimizer, new state) where the optimizer's state changes.
        options: (index of the group, option) -> (group, value to set, parameter that needs it).
    """

    wanted: dict[str, list[Wanted]] = field(default_factory=dict)
    states: list[tuple[Optimized, dict[str, Any]]] = field(default_factory=list)
    options: dict[tuple[int, str], tuple[dict[str, Any], Any, str]] = field(default_factory=dict)


@loaded_by_all
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    *,
    optimizer_state: bool = True,
) -> CheckpointInfo:
    """Load a checkpoint of any plan and number of ranks into a model and its optimizers.

    A collective: every rank calls it. All files are checked before anything is written, so a
    damaged checkpoint leaves the model unchanged. Each rank reads the blocks that overlap its
    shards, one at a time. If another save replaces the checkpoint meanwhile, one complete save is
    loaded. Nothing in the files is executed, so an untrusted checkpoint is safe to load; its values
    are not verified.

    Floating-point numbers may be rounded to the dtype of the model. Every other conversion that can
    change a number is refused, also that of a large float to infinity.

    Args:
        path: Path of the checkpoint.
        model: A `DistributedModelParallel`, a sharded module, or any other module, with the same
            tables and layers.
        optimizer: The optimizer that steps outside of backward; without it, its stored state is
            ignored.
        optimizer_state: Load the state of optimizers, which must be those that were saved; False
            loads the weights only, and any optimizers start anew.

    Returns:
        The checkpoint's info, with step and data position.

    Raises:
        AgreementError: Ranks load different checkpoints.
        CheckpointError: It is damaged, or of another version, model or optimizer; or its numbers do
            not fit the model's dtypes.

    Example:
        >>> import tempfile, torch
        >>> from tutorec.distributed.checkpoint import save_checkpoint
        >>> folder, layer = tempfile.mkdtemp() + "/first", torch.nn.Linear(2, 1)
        >>> save_checkpoint(folder, layer, position={"epoch": 1})
        >>> other = torch.nn.Linear(2, 1)
        >>> load_checkpoint(folder, other).position, torch.equal(layer.weight, other.weight)
        ({'epoch': 1}, True)
    """
    folder, problem = checked_folder(path)
    ranks = RankBarrier(group_of(model), f"loading the checkpoint {folder}")
    for _ in range(TRIES):
        manifest, contents, trouble = None, Contents(), problem
        try:
            if trouble is None:
                contents = contents_of(model, optimizer)
                manifest = read_manifest(folder)
        except Exception as error:  # any error: the other ranks must not wait for this rank
            trouble = error
        try:
            info = _load(ranks, folder, manifest, contents, trouble, optimizer_state)
        except (AgreementError, CheckpointError, TypeError):
            # Every rank gets here: each of these errors is raised on all ranks.
            if not any(ranks.gather(manifest is not None and is_replaced(folder, manifest))):
                raise
            continue
        if optimizer is not None and optimizer_state:
            optimizer.post_load_state_dict()
        return info
    raise CheckpointError(replaced_too_often(folder))


def _load(
    ranks: RankBarrier,
    folder: Folder,
    manifest: Manifest | None,
    contents: Contents,
    problem: Exception | None,
    optimizer_state: bool,
) -> CheckpointInfo:
    """Load the files of one manifest.

    Raises:
        AgreementError: Ranks have read different manifests, or load different parts.
        CheckpointError: A rank has a problem, this one's ``problem`` for example.
        TypeError: This rank's problem is a TypeError.
    """
    manifest = manifest or _NOTHING  # then there is a problem
    with SavedFiles(folder, manifest) as files:

        def check() -> tuple[Metadata, _Order]:
            metadata = files.metadata()
            with named_errors(folder):
                order = _order(contents, manifest, metadata, optimizer_state)
                plan = plan_reading(metadata, order.wanted).plan
            # One rank checks each file. All are opened first, because a later save may remove them.
            to_check = list(manifest.files)[ranks.rank :: ranks.world_size]
            files.hold([*files_of(metadata, plan), *to_check])
            for name in to_check:
                files.check(name)
            check_conversions(files, metadata, order.wanted)
            return metadata, order

        metadata, order = ranks.attempt(check, problem)
        facts = {"the checkpoint": f"of step {manifest.step}, manifest {manifest.digest}"}
        ranks.require_equal(
            {**facts, "optimizer_state": str(bool(optimizer_state)), **optimizer_facts(contents)}
        )

        def fill() -> None:
            try:
                _carry_out(order)
                read_blocks(files, metadata, order.wanted)
                for take_up in contents.take_up:
                    take_up()
            except Exception as error:
                raise CheckpointError(
                    f"{error_text(error)}; the model is filled in part: load again, or another "
                    "checkpoint"
                ) from error

        ranks.attempt(fill)
        for settle in contents.settle:
            settle()
    return info_of(manifest, metadata)


def _order(
    contents: Contents, manifest: Manifest, metadata: Metadata, optimizer_state: bool
) -> _Order:
    """Compute all changes without making any."""
    stored = metadata.state_dict_metadata
    order = _Order()
    _check_names(
        contents.model, [path[1] for path in metadata.planner_data.values() if path[0] == "model"]
    )
    for entry in contents.model.values():
        _want(order, entry, cast(TensorStorageMetadata, stored[entry.name]))
    if optimizer_state:
        for one in contents.optimized:
            _order_state(order, one, manifest, metadata)
    return order


def _check_names(entries: Mapping[str, Entry], stored: list[str]) -> None:
    missing, surplus = sorted(entries.keys() - set(stored)), sorted(set(stored) - entries.keys())
    if missing or surplus:
        raise CheckpointError(
            f"the checkpoint is from another model: {missing[:6]} are in the model only, "
            f"{surplus[:6]} are in the checkpoint only ({len(missing)} and {len(surplus)} in all)"
        )


def _want(order: _Order, entry: Entry, stored: TensorStorageMetadata) -> None:
    if entry.shape != tuple(stored.size):
        raise CheckpointError(
            f"{entry.name!r} is {list(entry.shape)} here and {list(stored.size)} in the checkpoint"
        )
    for part in entry.parts:
        _check_dtype(entry.name, part.tensor, stored.properties.dtype, tuple(stored.size))
    order.wanted.setdefault(entry.name, []).extend(wanted_rectangles(entry))


def _check_dtype(
    name: str, target: torch.Tensor, stored: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Refuse numbers that a conversion can change; rounding of floats is allowed.

    Raises:
        CheckpointError: It can.
    """
    problem = dtype_problem(repr(name), target.dtype, stored, single=not shape)
    if problem is not None:
        raise CheckpointError(f"{problem}; read_state_dict(path) reads it as it is stored")


def _want_rows(
    order: _Order, one: Optimized, tensor: torch.Tensor, name: str, state: StoredState
) -> None:
    """Request a state with one number per row, saved under any column shards."""
    rows, columns = one.parameter.shape
    piece, table = one.place.piece, one.place.table
    if table is not None:
        rows, columns = table.rows, table.columns
    widths = state.widths or (columns,)
    if (
        sum(widths) != columns
        or math.prod(state.shape) != len(widths) * rows
        or state.shape[:1] != (len(widths) * rows,)
    ):
        raise CheckpointError(
            f"{name!r} has one number for each of {rows} rows here, and is {list(state.shape)} in "
            f"the checkpoint, for slices of {list(widths)} columns"
        )
    _check_dtype(name, tensor, state.dtype, state.shape)
    piece = piece or ShardPiece(0, 0, 0, rows, columns)
    order.wanted.setdefault(name, []).extend(wanted_rows(tensor, piece, rows, state.shape, widths))


def _order_state(order: _Order, one: Optimized, manifest: Manifest, metadata: Metadata) -> None:
    """The state and the options of one parameter's optimizer."""
    name = one.place.name
    facts = manifest.optimizers.get(name)
    if facts is None:
        raise CheckpointError(
            f"the checkpoint has no optimizer for {name!r}: it was saved without one; "
            "load_checkpoint(..., optimizer_state=False) takes the weights alone"
        )
    check_rule(one, facts.get("rule", facts["kind"]))
    saved = _stored_states(one, manifest, metadata)
    matched = match_states(one, saved, facts["kind"])
    current = one.state
    fresh = {
        key: new_state(one, key, state) for key, state in matched.items() if key not in current
    }
    if not one.is_fused:
        reset = {
            key: None
            for key, value in current.items()
            if isinstance(value, torch.Tensor)
            and key not in matched
            and (key != "step" or not matched)
        }
        order.states.append((one, {**reset, **fresh, **facts["numbers"]}))
    for key, state in matched.items():
        tensor = fresh.get(key, current.get(key))
        assert isinstance(tensor, torch.Tensor), f"state {key!r} of {name!r} is not a tensor"
        entry = state_entry(one, state.key, tensor)
        if entry.form is Form.ROWS or _is_by_row(one, tensor, state):
            _want_rows(order, one, tensor.detach(), entry.name, state)
        else:
            _want(
                order, entry, cast(TensorStorageMetadata, metadata.state_dict_metadata[entry.name])
            )
    _order_options(order, one, facts)


def _is_by_row(one: Optimized, tensor: torch.Tensor, state: StoredState) -> bool:
    """Whether a state is per row where its shape is ambiguous: a dense table, or one column."""
    shape = one.parameter.shape
    by_row = tensor.dim() > 0 and len(shape) == 2 and tensor.numel() == shape[0]
    if by_row and tensor.shape == shape and shape[1] > 1:
        # One number per weight, for a shard without rows.
        by_row = False
    return by_row and (bool(state.widths) or tuple(tensor.shape) != state.shape)


def _stored_states(
    one: Optimized, manifest: Manifest, metadata: Metadata
) -> dict[str, StoredState]:
    """The stored states of a parameter."""
    states: dict[str, StoredState] = {}
    for full, path in cast(Mapping[str, tuple[str, ...]], metadata.planner_data).items():
        if path[:-1] == (*STATE, one.place.name):
            stored = cast(TensorStorageMetadata, metadata.state_dict_metadata[full])
            widths = tuple(manifest.slices.get(full, ()))
            states[path[-1]] = StoredState(
                path[-1], tuple(stored.size), stored.properties.dtype, widths
            )
    return states


def _order_options(order: _Order, one: Optimized, facts: Mapping[str, Any]) -> None:
    """Options of its group: all if the optimizer class is equal, else the learning rate only."""
    same = facts["kind"] == type(one.optimizer).__name__
    for key, value in facts["options"].items():
        if key not in _RATES and not (same and key in one.group):
            continue
        known = order.options.setdefault((id(one.group), key), (one.group, value, one.place.name))
        if known[1] != value:
            raise CheckpointError(
                f"{key} is {value!r} for {one.place.name!r} in the checkpoint and {known[1]!r} for "
                f"{known[2]!r}, and here they are updated together, with one: give each its own "
                "optimizer, or load with load_checkpoint(..., optimizer_state=False)"
            )


def _carry_out(order: _Order) -> None:
    """Apply the order: set scalars, create new states, drop states that the checkpoint lacks."""
    for one, changes in order.states:
        if changes and one.parameter not in one.states:
            one.states[one.parameter] = {}
        for key, value in changes.items():
            state = one.states[one.parameter]
            if value is None:
                state.pop(key)
            else:
                state[key] = value
    for (_, key), (group, value, _) in order.options.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value

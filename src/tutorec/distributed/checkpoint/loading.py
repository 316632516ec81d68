"""Load a checkpoint into a model under any plan, on any number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tutorec._loaded import dtype_problem
from tutorec.distributed.checkpoint.contents import (
    Contents,
    Parameter,
    collect_contents,
)
from tutorec.distributed.checkpoint.entries import Entry, Form, Request, row_requests
from tutorec.distributed.checkpoint.folder import Folder
from tutorec.distributed.checkpoint.manifest import (
    StoredTensor,
    file_errors,
)
from tutorec.distributed.checkpoint.ranks import CheckpointRanks, all_ranks, error_text
from tutorec.distributed.checkpoint.reading import (
    CheckpointFiles,
    CheckpointInfo,
    load_one_save,
    saved_crc32,
)
from tutorec.distributed.checkpoint.states import check_rule, match_states, new_state
from tutorec.distributed.plan.geometry import TableShard
from tutorec.errors import CheckpointError
from tutorec.optim.keyed import KeyedOptimizer

# A scheduler's base learning rate is loaded with the rate.
_RATES = ("lr", "initial_lr")


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
    shards, one at a time. If another save replaces the checkpoint meanwhile, one of the two is
    loaded, whole: on a disk, files that are open can still be read, and otherwise the load starts
    again. Nothing in the files is executed, so an untrusted checkpoint is safe to load; its values
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
            loads the weights only, and optimizers start from their initial state.

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
    ranks = CheckpointRanks(all_ranks(model), f"loading the checkpoint {path}")
    info = load_one_save(
        ranks,
        lambda: saved_crc32(path),
        lambda: _load(ranks, path, model, optimizer, bool(optimizer_state)),
    )
    if optimizer is not None and optimizer_state:
        optimizer.post_load_state_dict()
    return info


def _load(
    ranks: CheckpointRanks,
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: KeyedOptimizer | None,
    optimizer_state: bool,
) -> CheckpointInfo:
    """Load the files of one save."""
    with ExitStack() as open_files:

        def check() -> tuple[Contents, CheckpointFiles, _Changes]:
            folder = Folder.from_path(path)
            contents = collect_contents(model, optimizer)
            files = open_files.enter_context(CheckpointFiles(folder))
            with file_errors(folder):
                changes = _collect_changes(contents, files, optimizer_state)
                plan = files.plan(changes.requests)

            # One rank checks each file. Another save may remove what is not open yet.
            checked = list(files.manifest.files)[ranks.rank :: ranks.world_size]
            files.keep_open([*files.names_of_files(plan), *checked])
            for name in checked:
                files.check(name)
            files.check_values(changes.requests)
            return contents, files, changes

        contents, files, changes = ranks.attempt(check)
        manifest = files.manifest
        ranks.require_equal(
            {
                "the checkpoint": f"of step {manifest.step}, manifest {manifest.crc32}",
                "optimizer_state": str(optimizer_state),
                **contents.dense_optimizers(),
            }
        )

        def fill() -> None:
            try:
                changes.apply()
                files.read(changes.requests)
                for load_mapping in contents.load_mappings:
                    load_mapping()
            except Exception as error:
                raise CheckpointError(
                    f"{error_text(error)}; the model is filled in part: load again, or another "
                    "checkpoint"
                ) from error

        ranks.attempt(fill)
        for move_ids in contents.move_ids:
            move_ids()
        return files.info()


@dataclass
class _Changes:
    """The changes to make after all checks have passed.

    Args:
        requests: Name of a stored tensor -> the rectangles to read and their targets.
        states: (parameter, state -> new value, or None for a state that the checkpoint lacks).
        options: (id of the group, option) -> (group, value to set, name of a parameter).
    """

    requests: dict[str, list[Request]] = field(default_factory=dict)
    states: list[tuple[Parameter, dict[str, Any]]] = field(default_factory=list)
    options: dict[tuple[int, str], tuple[dict[str, Any], Any, str]] = field(default_factory=dict)

    def apply(self) -> None:
        """Set scalars and options, create new states, and drop those that the checkpoint lacks."""
        for parameter, values in self.states:
            if values and parameter.tensor not in parameter.states:
                parameter.states[parameter.tensor] = {}
            for key, value in values.items():
                state = parameter.states[parameter.tensor]
                if value is None:
                    state.pop(key)
                else:
                    state[key] = value

        for (_, key), (group, value, _) in self.options.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _collect_changes(contents: Contents, files: CheckpointFiles, optimizer_state: bool) -> _Changes:
    """Compute all changes without making any."""
    changes = _Changes()
    stored_names: set[str] = set()
    states: dict[str, dict[str, StoredTensor]] = {}
    for stored in files.index.values():
        if stored.path[0] == "model":
            stored_names.add(stored.path[1])
        else:
            states.setdefault(stored.path[2], {})[stored.path[3]] = stored

    _check_names(contents.model, stored_names)
    for entry in contents.model.values():
        _request(changes, entry, files.index[entry.name])

    if optimizer_state:
        for parameter in contents.optimized:
            record = files.manifest.optimizers.get(parameter.name)
            if record is None:
                raise CheckpointError(
                    f"the checkpoint has no optimizer for {parameter.name!r}: it was saved without "
                    "one; load_checkpoint(..., optimizer_state=False) takes the weights alone"
                )
            check_rule(parameter, record["rule"])
            _change_states(changes, parameter, states.get(parameter.name, {}), record)
            _change_options(changes, parameter, record)
    return changes


def _check_names(entries: Mapping[str, Entry], stored: set[str]) -> None:
    missing = sorted(entries.keys() - stored)
    surplus = sorted(stored - entries.keys())
    if missing or surplus:
        raise CheckpointError(
            f"the checkpoint is from another model: {missing[:6]} are in the model only, "
            f"{surplus[:6]} are in the checkpoint only ({len(missing)} and {len(surplus)} in all)"
        )


def _request(changes: _Changes, entry: Entry, stored: StoredTensor) -> None:
    """Request a tensor of the forms WHOLE and TABLE, or of ROWS under the same column shards.

    Raises:
        CheckpointError: The shapes differ, or a conversion can change the numbers.
    """
    if entry.shape != stored.shape:
        raise CheckpointError(
            f"{entry.name!r} is {list(entry.shape)} here and {list(stored.shape)} in the checkpoint"
        )
    for shard in entry.shards:
        _check_dtype(entry.name, shard.tensor, stored)
    changes.requests.setdefault(entry.name, []).extend(entry.requests())


def _check_dtype(name: str, target: torch.Tensor, stored: StoredTensor) -> None:
    """Refuse numbers that a conversion can change; rounding of floats is allowed.

    Raises:
        CheckpointError: It can.
    """
    problem = dtype_problem(repr(name), target.dtype, stored.dtype, single=not stored.shape)
    if problem is not None:
        raise CheckpointError(f"{problem}; read_state_dict(path) reads it as it is stored")


def _request_rows(
    changes: _Changes, parameter: Parameter, tensor: torch.Tensor, name: str, stored: StoredTensor
) -> None:
    """Request a state with one number per row, saved under any column shards.

    Raises:
        CheckpointError: Its shape does not fit the parameter.
    """
    rows, columns = parameter.tensor.shape
    bounds = parameter.bounds or TableShard(0, 0, 0, rows, columns)
    if parameter.table is not None:
        rows = parameter.table.rows
        columns = parameter.table.columns

    widths = stored.widths or (columns,)
    stored_rows = len(widths) * rows
    has_rows = stored.shape[:1] == (stored_rows,) and math.prod(stored.shape) == stored_rows
    if sum(widths) != columns or not has_rows:
        raise CheckpointError(
            f"{name!r} has one number for each of {rows} rows here, and is {list(stored.shape)} in "
            f"the checkpoint, for slices of {list(widths)} columns"
        )
    _check_dtype(name, tensor, stored)
    requests = row_requests(tensor, bounds, rows, stored.shape, widths)
    changes.requests.setdefault(name, []).extend(requests)


def _change_states(
    changes: _Changes,
    parameter: Parameter,
    stored: Mapping[str, StoredTensor],
    record: Mapping[str, Any],
) -> None:
    """The new states of one parameter's optimizer."""
    matches = match_states(parameter, stored)
    current = parameter.tensor_states
    created: dict[str, torch.Tensor] = {}
    for key, stored_key in matches.items():
        if key not in current:
            created[key] = new_state(parameter, stored[stored_key])

    if not parameter.is_fused:
        values: dict[str, Any] = {}
        for key in current:
            # A step count may stay if the optimizer that was saved has none.
            if key not in matches and (key != "step" or not matches):
                values[key] = None
        changes.states.append((parameter, {**values, **created, **record["numbers"]}))

    for key, stored_key in matches.items():
        tensor = created[key] if key in created else current[key]
        state = stored[stored_key]
        entry = parameter.state_entry(stored_key, tensor)
        if entry.form is Form.ROWS or _is_by_row(parameter, tensor, state):
            _request_rows(changes, parameter, tensor.detach(), entry.name, state)
        else:
            _request(changes, entry, state)


def _is_by_row(parameter: Parameter, tensor: torch.Tensor, stored: StoredTensor) -> bool:
    """Whether a state is per row where its shape is ambiguous: a dense table, or one column."""
    shape = parameter.tensor.shape
    is_by_row = tensor.dim() > 0 and len(shape) == 2 and tensor.numel() == shape[0]
    if is_by_row and tensor.shape == shape and shape[1] > 1:
        # One number per weight, for a shard without rows.
        return False
    return is_by_row and (bool(stored.widths) or tuple(tensor.shape) != stored.shape)


def _change_options(changes: _Changes, parameter: Parameter, record: Mapping[str, Any]) -> None:
    """Options of its group: all if the optimizer class is equal, else the learning rate only.

    Raises:
        CheckpointError: Parameters of one group had different values.
    """
    is_same_class = record["class"] == type(parameter.optimizer).__name__
    for key, value in record["options"].items():
        if key not in _RATES and not (is_same_class and key in parameter.group):
            continue

        option = (parameter.group, value, parameter.name)
        _, first_value, first_name = changes.options.setdefault((id(parameter.group), key), option)
        if first_value != value:
            raise CheckpointError(
                f"{key} is {value!r} for {parameter.name!r} in the checkpoint and {first_value!r} "
                f"for {first_name!r}, and here they are updated together, with one: give each its "
                "own optimizer, or load with load_checkpoint(..., optimizer_state=False)"
            )

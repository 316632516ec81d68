"""Which stored state of a parameter becomes which state of its optimizer here.

The names of states tell who keeps them. A fused kernel's are TorchRec's (``item.momentum1``), a torch optimizer's are
torch's (``sum``, ``exp_avg``). The numbers are the same, so that a table that was trained by one can go on with the
other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tutorec.distributed.checkpoint.contents import Optimized
from tutorec.errors import CheckpointError
from tutorec.optim.optimizers import PartialRowWiseAdam

# What torch's Adagrad and Adam keep, by the names of fused kernels: the first state is always momentum1.
_TORCH_TO_FUSED = {"sum": "momentum1", "exp_avg": "momentum1", "exp_avg_sq": "exp_avg_sq", "step": "step"}
_STEP = "step"
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
# What torch optimizers keep from their first step on.
_KEPT = {"Adam": _ADAM, "AdamW": _ADAM, "PartialRowWiseAdam": _ADAM}


@dataclass(frozen=True)
class StoredState:
    """A state as it is stored.

    Args:
        key: Its name.
        shape: Of the whole.
        dtype: Of its numbers.
        widths: Columns of each slice, of a state with one number for each row; else nothing.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    widths: tuple[int, ...] = ()


def match_states(one: Optimized, stored: Mapping[str, StoredState], kind: str) -> dict[str, StoredState]:
    """Name of a state here -> the stored one that it takes, by equal names or by equal meaning.

    Args:
        one: A parameter and its optimizer.
        stored: What the checkpoint has of this parameter.
        kind: Class of the optimizer that it had.

    Raises:
        CheckpointError: It was saved with another optimizer: states are missing, or there are some that are not kept.
    """
    keys = {key for key, value in one.state.items() if isinstance(value, torch.Tensor)}
    kind_here = type(one.optimizer).__name__
    if keys == stored.keys() or (not stored and not one.is_fused and (not keys or kind == kind_here)):
        return dict(stored)
    if not keys and not one.is_fused:
        matched = _named_as_torch(stored) if any("." in key for key in stored) else dict(stored)
        # Before its first step an optimizer does not say what it keeps.
        if kind_here == kind or set(matched) == _KEPT.get(kind_here):
            return matched
    by_meaning = {_meaning(key): state for key, state in stored.items()}
    matched = {key: by_meaning[_meaning(key)] for key in keys if _meaning(key) in by_meaning}
    # A count of steps is no loss where the other optimizer keeps none.
    missing = [key for key in keys - matched.keys() if _meaning(key) != _STEP]
    surplus = [meaning for meaning in by_meaning if meaning != _STEP and meaning not in map(_meaning, keys)]
    if missing or surplus:
        keeps = f"keeps {sorted(keys)}" if keys or one.is_fused else f"is {kind_here}"
        raise CheckpointError(
            f"the optimizer of {one.place.name!r} {keeps}, and the checkpoint has {sorted(stored)} of {kind}: it was "
            "saved with another optimizer; load_checkpoint(..., optimizer_state=False) takes the weights alone"
        )
    return matched


def new_state(one: Optimized, key: str, stored: StoredState) -> torch.Tensor:
    """A state of the right size for a torch optimizer that has none yet: zeros.

    Args:
        one: The parameter and its optimizer.
        key: Its name here.
        stored: What it is to take.

    Raises:
        CheckpointError: It keeps a number for each weight, and one for each row is stored, or the other way round.
    """
    rows, columns = one.parameter.shape if one.parameter.dim() == 2 else (0, 0)
    table = one.place.table
    numbers = math.prod(stored.shape)
    by_row = bool(stored.widths) or (columns > 1 and numbers == (rows if table is None else table.rows))
    if key == "exp_avg_sq" and by_row != isinstance(one.optimizer, PartialRowWiseAdam):
        kept, saved = ("weight", "row") if by_row else ("row", "weight")
        raise CheckpointError(
            f"{stored.key!r} of {one.place.name!r} has one number for each {saved}, and "
            f"{type(one.optimizer).__name__} keeps one for each {kept}; "
            "load_checkpoint(..., optimizer_state=False) takes the weights alone"
        )
    if not stored.shape:
        return torch.zeros((), dtype=stored.dtype)
    shape = (rows, 1) if by_row else stored.shape if table is None else tuple(one.parameter.shape)
    return torch.zeros(shape, dtype=stored.dtype, device=one.parameter.device)


def _named_as_torch(stored: Mapping[str, StoredState]) -> dict[str, StoredState]:
    """The states of a fused kernel under torch's names."""
    meanings = {_meaning(key): state for key, state in stored.items()}
    first = "exp_avg" if "exp_avg_sq" in meanings else "sum"
    return {first if meaning == "momentum1" else meaning: state for meaning, state in meanings.items()}


def _meaning(key: str) -> str:
    """``item.momentum1`` and ``sum`` mean the same."""
    last = key.rpartition(".")[2]
    return last if "." in key else _TORCH_TO_FUSED.get(key, key)

"""Matching of stored optimizer states to those of a parameter's optimizer.

A fused kernel uses TorchRec's state names (``item.momentum1``), a torch optimizer torch's (``sum``,
``exp_avg``). The values are the same, so training can continue with the other kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tutorec.distributed.checkpoint.contents import Optimized
from tutorec.errors import CheckpointError
from tutorec.optim.fused import EmbeddingFusedOptimizer
from tutorec.optim.optimizers import PartialRowWiseAdam

# torch's names of Adagrad and Adam states, by the names of fused kernels, whose first is momentum1.
_TORCH_TO_FUSED = {
    "sum": "momentum1",
    "exp_avg": "momentum1",
    "exp_avg_sq": "exp_avg_sq",
    "step": "step",
}
# Classes of torch optimizers and the kernels' rules that compute the same updates.
_CLASS_TO_RULE = {
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "RowWiseAdagrad": "rowwise_adagrad",
    "Adam": "adam",
    "AdamW": "adam",
    "PartialRowWiseAdam": "partial_rowwise_adam",
}
_STEP = "step"
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
# States that torch optimizers have after their first step.
_KEPT = {"Adam": _ADAM, "AdamW": _ADAM, "PartialRowWiseAdam": _ADAM}


@dataclass(frozen=True)
class StoredState:
    """A stored optimizer state.

    Args:
        key: Its name.
        shape: Shape of the whole tensor.
        dtype: Its dtype.
        widths: For a state with one number per row, the columns of each column shard; else empty.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    widths: tuple[int, ...] = ()


def check_rule(one: Optimized, saved: str) -> None:
    """Check that a parameter goes on under the optimizer that has trained it.

    Args:
        one: The parameter and its optimizer.
        saved: The rule of the optimizer that was saved, or its class in an earlier checkpoint,
            which does not say what a kernel computed.

    Raises:
        CheckpointError: It is another one.
    """
    here = one.rule
    unknown = saved == EmbeddingFusedOptimizer.__name__
    if unknown or _CLASS_TO_RULE.get(here, here) == _CLASS_TO_RULE.get(saved, saved):
        return
    raise CheckpointError(
        f"{one.place.name!r} was trained by {_named(saved)}, and here {_named(here)} would go on: "
        f"give it {_named(saved)} again; or load_checkpoint(..., optimizer_state=False) takes the "
        "weights alone, and every optimizer starts anew"
    )


def _named(rule: str) -> str:
    return f"{rule} in backward" if rule in _CLASS_TO_RULE.values() else rule


def match_states(
    one: Optimized, stored: Mapping[str, StoredState], kind: str
) -> dict[str, StoredState]:
    """Name of a local state -> the stored state that it loads, by name or by meaning.

    Args:
        one: A parameter and its optimizer.
        stored: The stored states of this parameter.
        kind: Class of the optimizer that was saved.

    Raises:
        CheckpointError: Another optimizer was saved: states are missing or have no counterpart.
    """
    keys = {key for key, value in one.state.items() if isinstance(value, torch.Tensor)}
    kind_here = type(one.optimizer).__name__
    if keys == stored.keys() or (
        not stored and not one.is_fused and (not keys or kind == kind_here)
    ):
        return dict(stored)
    if not keys and not one.is_fused:
        matched = _named_as_torch(stored) if any("." in key for key in stored) else dict(stored)
        # Before its first step a torch optimizer has no states to compare with.
        if kind_here == kind or set(matched) == _KEPT.get(kind_here):
            return matched
    by_meaning = {_meaning(key): state for key, state in stored.items()}
    matched = {key: by_meaning[_meaning(key)] for key in keys if _meaning(key) in by_meaning}
    # A step count may be dropped if the other optimizer does not have one.
    missing = [key for key in keys - matched.keys() if _meaning(key) != _STEP]
    surplus = [
        meaning for meaning in by_meaning if meaning != _STEP and meaning not in map(_meaning, keys)
    ]
    if missing or surplus:
        keeps = f"keeps {sorted(keys)}" if keys or one.is_fused else f"is {kind_here}"
        raise CheckpointError(
            f"the optimizer of {one.place.name!r} {keeps}, and the checkpoint has {sorted(stored)} "
            f"of {kind}: it was saved with another optimizer; load_checkpoint(..., "
            "optimizer_state=False) takes the weights alone"
        )
    return matched


def new_state(one: Optimized, key: str, stored: StoredState) -> torch.Tensor:
    """Zeros in the right shape, for a torch optimizer that has no state yet.

    Args:
        one: The parameter and its optimizer.
        key: Name of the local state.
        stored: The state to load into it.

    Raises:
        CheckpointError: The state is per weight and the stored one per row, or the reverse.
    """
    rows, columns = one.parameter.shape if one.parameter.dim() == 2 else (0, 0)
    table = one.place.table
    numbers = math.prod(stored.shape)
    by_row = bool(stored.widths) or (
        columns > 1 and numbers == (rows if table is None else table.rows)
    )
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
    return {
        first if meaning == "momentum1" else meaning: state for meaning, state in meanings.items()
    }


def _meaning(key: str) -> str:
    """``item.momentum1`` and ``sum`` mean the same."""
    last = key.rpartition(".")[2]
    return last if "." in key else _TORCH_TO_FUSED.get(key, key)

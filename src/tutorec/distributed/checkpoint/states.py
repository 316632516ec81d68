"""Matching of stored optimizer states to those of a parameter's optimizer.

A fused kernel uses TorchRec's state names (``item.momentum1``), a torch optimizer torch's (``sum``,
``exp_avg``). The values are the same, so training can continue with the other class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tutorec.distributed.checkpoint.contents import Parameter
from tutorec.distributed.checkpoint.manifest import (
    StoredTensor,
)
from tutorec.errors import CheckpointError

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
_WEIGHTS_ONLY = "load_checkpoint(..., optimizer_state=False) takes the weights alone"


def check_rule(parameter: Parameter, saved: str) -> None:
    """Check that a parameter goes on under the optimizer that has trained it.

    Args:
        parameter: The parameter and its optimizer.
        saved: The rule of the optimizer that was saved.

    Raises:
        CheckpointError: It is another one.
    """
    current = parameter.rule
    if _CLASS_TO_RULE.get(current, current) == _CLASS_TO_RULE.get(saved, saved):
        return
    raise CheckpointError(
        f"{parameter.name!r} was trained by {_rule_text(saved)}, and here {_rule_text(current)} "
        f"would go on: give it {_rule_text(saved)} again; or {_WEIGHTS_ONLY}, and every optimizer "
        "starts anew"
    )


def _rule_text(rule: str) -> str:
    return f"{rule} in backward" if rule in _CLASS_TO_RULE.values() else rule


def match_states(parameter: Parameter, stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Name of a local state -> name of the stored state that it loads, by name or by meaning.

    Args:
        parameter: A parameter and its optimizer.
        stored: The stored states of this parameter, by name, of an optimizer with the same rule.

    Raises:
        CheckpointError: Another optimizer was saved: states are missing or have no counterpart.
    """
    local = parameter.tensor_states.keys()
    same_names = {key: key for key in stored}
    if local == stored.keys():
        return same_names

    # A torch optimizer has no states before its first step, here or when it was saved.
    is_new = not local and not parameter.is_fused
    if is_new:
        is_from_kernel = any("." in key for key in stored)
        return _torch_names(stored) if is_from_kernel else same_names
    if not stored and not parameter.is_fused:
        return {}

    stored_by_meaning = {_meaning(key): key for key in stored}
    local_by_meaning = {_meaning(key): key for key in local}
    # A step count may be dropped or added: some optimizers have none.
    if (stored_by_meaning.keys() ^ local_by_meaning.keys()) - {_STEP}:
        raise CheckpointError(
            f"the optimizer of {parameter.name!r} keeps {sorted(local)}, and the checkpoint has "
            f"{sorted(stored)}: it was saved with another optimizer; {_WEIGHTS_ONLY}"
        )
    common = stored_by_meaning.keys() & local_by_meaning.keys()
    return {local_by_meaning[meaning]: stored_by_meaning[meaning] for meaning in common}


def new_state(parameter: Parameter, stored: StoredTensor) -> torch.Tensor:
    """Zeros in the right shape, for a torch optimizer that has no state yet.

    Args:
        parameter: The parameter and its optimizer.
        stored: The state to load into it.
    """
    tensor = parameter.tensor
    table = parameter.table
    if not stored.shape:
        return torch.zeros((), dtype=stored.dtype)

    shape = stored.shape if table is None else tuple(tensor.shape)
    if tensor.dim() == 2:
        local_rows, columns = tensor.shape
        rows = local_rows if table is None else table.rows
        if stored.widths or (columns > 1 and math.prod(stored.shape) == rows):
            shape = (local_rows, 1)
    return torch.zeros(shape, dtype=stored.dtype, device=tensor.device)


def _torch_names(stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Names of a fused kernel's states in torch's optimizers -> the kernel's names."""
    by_meaning = {_meaning(key): key for key in stored}
    first = by_meaning.pop("momentum1", None)
    if first is not None:
        by_meaning["exp_avg" if "exp_avg_sq" in by_meaning else "sum"] = first
    return by_meaning


def _meaning(key: str) -> str:
    """``item.momentum1`` and ``sum`` mean the same."""
    last = key.rpartition(".")[2]
    return last if "." in key else _TORCH_TO_FUSED.get(key, key)

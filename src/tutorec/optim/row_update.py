"""One optimizer step for the rows of a table that a batch touched, and for no other.

Plain SGD and both Adagrads are made by the kernels. Every other optimizer makes its own ``step`` on a small table: the
touched rows, their gradients and their state are gathered, stepped and written back. That is right for every optimizer
that treats each row, or each element, by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from tutorec._kernels.optimizer_spec import OptimizerKind, OptimizerSpec, UpdateStep
from tutorec._kernels.tbe_update import RowGroups, apply_update, sum_rows
from tutorec._kernels.unwritten import unwritten_zeros
from tutorec.optim.rates import check_rate
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad, rate_of_step

_KERNELS: dict[type[Optimizer], OptimizerKind] = {
    SGD: "sgd",
    Adagrad: "adagrad",
    RowWiseAdagrad: "rowwise_adagrad",
}
# They look at a whole matrix or a whole model at once; rows cannot be stepped apart.
_NOT_BY_ROW = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


class KernelUpdate(NamedTuple):
    """What the kernels make of an optimizer's step: the rule with its rate, and the state, [R] or [R, D]."""

    step: UpdateStep
    states: tuple[Tensor, ...]


@torch.no_grad()
def kernel_update(optimizer: Optimizer, table: Tensor) -> KernelUpdate | None:
    """The step that an optimizer is to make now, counted as made; None where it makes its own.

    Plain SGD and Adagrad on float32 are known to the kernels; anything more (momentum, weight decay, hooks around
    ``step``) goes through the optimizer's own ``step``.

    Raises:
        ValueError: The optimizer does not hold the table any more, or its rate is negative or not a number.
    """
    _bring_state(optimizer, table)
    group, kind = _group_of(optimizer, table), _KERNELS.get(type(optimizer))
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if kind is None or hooked or table.dtype is not torch.float32:
        return None
    if group["maximize"] or group["weight_decay"] or group.get("momentum"):
        return None
    rate, states = float(group["lr"]), ()
    if kind != "sgd":
        total = optimizer.state[table]["sum"]
        if total.dtype is not torch.float32 or not total.is_contiguous():
            return None
        states = (total if kind == "adagrad" else total.view(-1),)
        count = optimizer.state[table]["step"]
        count += 1
        rate = rate_of_step(group, count.item())
    # torch's schedulers warn when they are stepped before their optimizer.
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
    return KernelUpdate(UpdateStep(OptimizerSpec(kind, rate, group.get("eps", 0.0)), rate), states)


@torch.no_grad()
def update_rows(
    optimizer: Optimizer, update: KernelUpdate | None, table: Tensor, grad: Tensor, groups: RowGroups
) -> None:
    """Step the rows of a batch. A batch without ids is a step, too: the optimizer counts it.

    Args:
        optimizer: What ``apply_optimizer_in_backward`` left on the table.
        update: Its step as ``kernel_update`` gave it.
        table: [R, D], changed in place.
        grad: Gradient of each bag [bags, D].
        groups: The batch sorted by row.

    Raises:
        TypeError: The optimizer does not treat each row by itself.
    """
    if update is None:
        _step_compact(optimizer, _group_of(optimizer, table), table, groups.rows, sum_rows(grad, groups))
    else:
        apply_update(table.detach(), update.states, grad, groups, update.step)


def _bring_state(optimizer: Optimizer, table: Tensor) -> None:
    """State that was made before its table was moved follows it: ``model.to(device)`` moves parameters only."""
    state = optimizer.state.get(table, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.device != table.device:
            state[key] = value.to(table.device)


def _group_of(optimizer: Optimizer, table: Tensor) -> dict[str, Any]:
    """The parameter group that holds a table."""
    for group in optimizer.param_groups:
        if any(parameter is table for parameter in group["params"]):
            check_rate(group.get("lr"), f"{type(optimizer).__name__} in backward, for a table {list(table.shape)}")
            return group
    raise ValueError(
        f"{type(optimizer).__name__} in backward no longer holds its table of shape {list(table.shape)}; "
        "call apply_optimizer_in_backward again"
    )


def _step_compact(optimizer: Optimizer, group: dict[str, Any], table: Tensor, rows: Tensor, sums: Tensor) -> None:
    """Let the optimizer step a table of the touched rows alone.

    The small table has one row more, of zeros and without gradient: the state that the optimizer gives it is what rows
    that no batch has touched start from.
    """
    if type(optimizer).__name__ in _NOT_BY_ROW:
        raise TypeError(
            f"{type(optimizer).__name__} does not treat each row by itself, and a table of {table.shape[0]} rows "
            "is updated row by row during backward; use SGD, RowWiseAdagrad, Adagrad or Adam for tables"
        )
    weight = table.detach()
    # Row-wise state is float32 whatever the rows are, and SGD has none: both compute in float32.
    exact = type(optimizer) in (SGD, RowWiseAdagrad) and not group.get("momentum")
    dtype = torch.float32 if exact else weight.dtype
    small = nn.Parameter(_with_zero_row(weight[rows].to(dtype)))
    small.grad = _with_zero_row(sums.to(dtype))
    state = optimizer.state[table]
    by_row = {key for key, value in state.items() if isinstance(value, Tensor) and value.shape[:1] == table.shape[:1]}
    optimizer.state[small] = {
        key: torch.cat([value[rows], value[:1]]) if key in by_row else value for key, value in state.items()
    }
    groups, alone = optimizer.param_groups, {**group, "params": [small]}
    optimizer.param_groups = [alone]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
        moved = optimizer.state.pop(small)
    group.update({key: value for key, value in alone.items() if key != "params"})
    weight[rows] = small.detach()[:-1].to(weight.dtype)
    for key, value in moved.items():
        if isinstance(value, Tensor) and value.shape[:1] == small.shape[:1]:
            if key not in by_row:
                state[key] = unwritten_zeros((table.shape[0], *value.shape[1:]), value.dtype, value.device)
                if value[-1:].any():
                    state[key][:] = value[-1:]
            state[key][rows] = value[:-1]
        else:
            state[key] = value


def _with_zero_row(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])

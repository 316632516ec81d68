"""One optimizer step for the rows of a table that a batch touched, and no others.

The kernels implement plain SGD and both Adagrads. For any other optimizer, the touched rows, their
gradients and their state are gathered into a small table, on which its own ``step`` is called; the
results are written back. That is correct for every optimizer that treats rows, or elements,
independently.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from tutorec._kernels.memory import unwritten_zeros
from tutorec._kernels.specs import OptimizerKind, OptimizerSpec, UpdateStep
from tutorec._kernels.tbe_update import RowGroups, apply_update, sum_rows
from tutorec.optim.rates import check_rate
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad, rate_of_step

_KERNELS: dict[type[Optimizer], OptimizerKind] = {
    SGD: "sgd",
    Adagrad: "adagrad",
    RowWiseAdagrad: "rowwise_adagrad",
}
# They use a whole matrix or a whole model at once, so rows cannot be stepped independently.
_NOT_BY_ROW = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


class KernelUpdate(NamedTuple):
    """An optimizer's step for the kernels: the rule with its rate, and the state, [R] or [R, D]."""

    step: UpdateStep
    states: tuple[Tensor, ...]


def kernel_update(optimizer: Optimizer, table: Tensor) -> KernelUpdate | None:
    """The kernels' form of an optimizer's next step, and count the step; None for other optimizers.

    The kernels know plain SGD and Adagrad on float32. With anything else (momentum, weight decay,
    hooks around ``step``), the optimizer's own ``step`` is called.

    Raises:
        ValueError: The optimizer no longer has the table, or its rate is negative or NaN.
    """
    _bring_state(optimizer, table)
    group = _group_of(optimizer, table)
    rule = _KERNELS.get(type(optimizer))
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if rule is None or hooked or table.dtype is not torch.float32:
        return None
    if group["maximize"] or group["weight_decay"] or group.get("momentum"):
        return None

    rate = float(group["lr"])
    states = ()
    if rule != "sgd":
        total = optimizer.state[table]["sum"]
        if total.dtype is not torch.float32 or not total.is_contiguous():
            return None
        states = (total if rule == "adagrad" else total.view(-1),)
        count = optimizer.state[table]["step"]
        count += 1
        if group["lr_decay"]:
            rate = rate_of_step(group, count.item())

    # torch's schedulers warn if they are stepped before their optimizer.
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
    return KernelUpdate(UpdateStep(_rule(rule, rate, group.get("eps", 0.0)), rate), states)


# The same for all tables and most steps; to check its numbers again took a tenth of a small step.
_rule = lru_cache(maxsize=64)(OptimizerSpec)


@torch.no_grad()
def update_rows(
    optimizer: Optimizer,
    update: KernelUpdate | None,
    table: Tensor,
    grad: Tensor,
    groups: RowGroups,
) -> None:
    """Update the rows of a batch. A batch without ids is also a step, which the optimizer counts.

    Args:
        optimizer: The table's optimizer from ``apply_optimizer_in_backward``.
        update: The result of ``kernel_update``.
        table: [R, D], changed in place.
        grad: Gradient of each bag [bags, D].
        groups: The batch sorted by row.

    Raises:
        TypeError: The optimizer does not treat rows independently.
    """
    if update is None:
        _step_compact(
            optimizer, _group_of(optimizer, table), table, groups.rows, sum_rows(grad, groups)
        )
    else:
        apply_update(table.detach(), update.states, grad, groups, update.step)


def _bring_state(optimizer: Optimizer, table: Tensor) -> None:
    """Move state to the table's device: ``model.to(device)`` moves parameters only."""
    state = optimizer.state.get(table, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.device != table.device:
            state[key] = value.to(table.device)


def _group_of(optimizer: Optimizer, table: Tensor) -> dict[str, Any]:
    """The parameter group that contains a table."""
    for group in optimizer.param_groups:
        if any(parameter is table for parameter in group["params"]):
            rate = group.get("lr")
            if type(rate) is not float or not 0.0 <= rate < math.inf:
                owner = f"{type(optimizer).__name__} in backward, for a table {list(table.shape)}"
                check_rate(rate, owner)
            return group

    raise ValueError(
        f"{type(optimizer).__name__} in backward no longer holds its table of shape "
        f"{list(table.shape)}; call apply_optimizer_in_backward again"
    )


def _step_compact(
    optimizer: Optimizer, group: dict[str, Any], table: Tensor, rows: Tensor, sums: Tensor
) -> None:
    """Call the optimizer's step on a table of the touched rows.

    This table has one additional row of zeros without gradient: its new state is the initial state
    of rows that no batch has touched.
    """
    if type(optimizer).__name__ in _NOT_BY_ROW:
        raise TypeError(
            f"{type(optimizer).__name__} does not treat each row by itself, and a table of "
            f"{table.shape[0]} rows is updated row by row during backward; use SGD, "
            "RowWiseAdagrad, Adagrad or Adam for tables"
        )

    weight = table.detach()
    # Row-wise state is always float32, and SGD has none: both compute in float32.
    exact = type(optimizer) in (SGD, RowWiseAdagrad) and not group.get("momentum")
    dtype = torch.float32 if exact else weight.dtype
    small = nn.Parameter(_with_zero_row(weight[rows].to(dtype)))
    small.grad = _with_zero_row(sums.to(dtype))

    state = optimizer.state[table]
    by_row = {
        key
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape[:1] == table.shape[:1]
    }
    optimizer.state[small] = {
        key: torch.cat([value[rows], value[:1]]) if key in by_row else value
        for key, value in state.items()
    }

    groups = optimizer.param_groups
    alone = {**group, "params": [small]}
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
                state[key] = unwritten_zeros(
                    (table.shape[0], *value.shape[1:]), value.dtype, value.device
                )
                if value[-1:].any():
                    state[key][:] = value[-1:]
            state[key][rows] = value[:-1]
        else:
            state[key] = value


def _with_zero_row(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])

"""One optimizer step for the rows of a table that a batch touched, and for no other.

Plain SGD and row-wise Adagrad have roads of their own. Every other optimizer makes its own ``step`` on a small table:
the touched rows, their gradients and their state are gathered, stepped and written back. That is right for every
optimizer that treats each row, or each element, by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from tutorec._kernels.optimizer_spec import OptimizerKind, OptimizerSpec, UpdateStep
from tutorec._kernels.tbe_update import RowGroups, add_rows, apply_update, sort_rows, sum_rows
from tutorec.optim.rates import check_rate, is_rate
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad, rate_of_step

# They look at a whole matrix or a whole model at once; rows cannot be stepped apart.
_NOT_BY_ROW = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


@dataclass(frozen=True)
class RowGradients:
    """The gradient of one table [R, D] as a batch gives it: never built, only what it is a sum of.

    Row r's gradient is the sum of ``weights[i] * grad[bags[i]]`` over all i with ``ids[i] == r``.

    Attributes:
        ids: Rows of the table [N], in any order, repeated or not.
        bags: Row of ``grad`` that each id's row is moved by [N]; None where it is i itself.
        weights: Factor of each id [N], or None for 1.
        grad: [bags, D].
        rows: R.
    """

    ids: Tensor
    bags: Tensor | None
    weights: Tensor | None
    grad: Tensor
    rows: int

    @cached_property
    def groups(self) -> RowGroups:
        """The ids sorted by row."""
        return sort_rows(self.ids, self.bags, self.weights, self.rows)


@torch.no_grad()
def update_rows(optimizer: Optimizer, table: Tensor, touched: RowGradients) -> None:
    """Step the rows of a batch; the optimizer's own group says how fast, and its own state moves with the rows.

    A batch without ids is a step, too: the optimizer counts it.

    Args:
        optimizer: What ``apply_optimizer_in_backward`` left on the table.
        table: [R, D], changed in place.
        touched: The batch's gradient.

    Raises:
        TypeError: The optimizer does not treat each row by itself.
    """
    _bring_state(optimizer, table)
    group, plain = group_of(optimizer, table), fused_rule(optimizer, table)
    if plain is None:
        _step_compact(optimizer, group, table, touched)
        return
    mark_stepped(optimizer)
    if plain.kind == "sgd":
        add_rows(table, touched.ids, touched.bags, touched.weights, touched.grad, -plain.rate)
        return
    state = optimizer.state[table]
    state["step"] += 1
    rate = rate_of_step(group, state["step"].item())
    step = UpdateStep(OptimizerSpec(plain.kind, rate, plain.eps), rate)
    apply_update(table.detach(), (state["sum"].view(-1),), touched.grad, touched.groups, step)


def _bring_state(optimizer: Optimizer, table: Tensor) -> None:
    """State that was made before its table was moved follows it: ``model.to(device)`` moves parameters only."""
    state = optimizer.state.get(table, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.device != table.device:
            state[key] = value.to(table.device)


class Rule(NamedTuple):
    """What a kernel is told: ``"sgd"`` or ``"rowwise_adagrad"``, the rate of the group, and eps."""

    kind: OptimizerKind
    rate: float
    eps: float


def fused_rule(optimizer: Optimizer, table: Tensor) -> Rule | None:
    """The kernels' name for what an optimizer does to a table, or None where they have none.

    Plain SGD and row-wise Adagrad on float32 are known; anything more (momentum, weight decay, hooks around ``step``)
    goes through the optimizer's own ``step``.
    """
    kind = type(optimizer)
    if kind not in (SGD, RowWiseAdagrad) or table.dtype is not torch.float32:
        return None
    group = group_of(optimizer, table)
    if group["maximize"] or group["weight_decay"] or group.get("momentum") or _has_hooks(optimizer):
        return None
    if kind is SGD:
        return Rule("sgd", float(group["lr"]), 0.0)
    total = optimizer.state[table]["sum"]
    if total.dtype is not torch.float32 or not total.is_contiguous() or total.device != table.device:
        return None
    return Rule("rowwise_adagrad", float(group["lr"]), group["eps"])


def group_of(optimizer: Optimizer, table: Tensor) -> dict[str, Any]:
    """The parameter group that holds a table.

    Raises:
        ValueError: The optimizer holds it no longer, or its rate is negative or not a number.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter is table:
                if not is_rate(group.get("lr")):
                    owner = f"{type(optimizer).__name__} in backward, for a table {list(table.shape)}"
                    check_rate(group.get("lr"), owner)
                return group
    raise ValueError(
        f"{type(optimizer).__name__} in backward no longer holds its table of shape {list(table.shape)}; "
        "call apply_optimizer_in_backward again"
    )


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell torch's schedulers that a step was made: they warn when they are stepped before their optimizer."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]


def _has_hooks(optimizer: Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _step_compact(optimizer: Optimizer, group: dict[str, Any], table: Tensor, touched: RowGradients) -> None:
    """Let the optimizer step a table of the touched rows alone.

    The small table has one row more, of zeros and without gradient: the state that the optimizer gives it is what rows
    that no batch has touched start from.
    """
    if type(optimizer).__name__ in _NOT_BY_ROW:
        raise TypeError(
            f"{type(optimizer).__name__} does not treat each row by itself, and a table of {table.shape[0]} rows "
            "is updated row by row during backward; use SGD, RowWiseAdagrad, Adagrad or Adam for tables"
        )
    rows, weight = touched.groups.rows, table.detach()
    # Row-wise state is float32 whatever the rows are, and SGD has none: both compute in float32.
    exact = type(optimizer) in (SGD, RowWiseAdagrad) and not group.get("momentum")
    dtype = torch.float32 if exact else weight.dtype
    small = nn.Parameter(_with_zero_row(weight[rows].to(dtype)))
    small.grad = _with_zero_row(sum_rows(touched.grad, touched.groups).to(dtype))
    state = optimizer.state[table]
    ours = {key for key, value in state.items() if isinstance(value, Tensor) and value.shape[:1] == table.shape[:1]}
    optimizer.state[small] = {
        key: torch.cat([value[rows], value[:1]]) if key in ours else value for key, value in state.items()
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
            if key not in ours:
                state[key] = value[-1:].expand(table.shape[0], *value.shape[1:]).clone()
            state[key][rows] = value[:-1]
        else:
            state[key] = value


def _with_zero_row(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])

"""Rows that are given to another id: their optimizer state is reset."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_WAITING = "_rows_to_reset"


@torch.no_grad()
def reset_optimizer_rows(table: Tensor, rows: Tensor, in_place: bool = False) -> None:
    """Reset the state of rows of a table in its optimizers.

    That is done at once in those that ``apply_optimizer_in_backward`` left on the table, and in any
    other one before its next step. The table does not know the second kind: a hook that torch calls
    before each step of each optimizer reaches them. It is installed by the first call.

    Args:
        table: [R, D], a parameter.
        rows: [U].
        in_place: Whether the state of an optimizer in backward changes without autograd noticing.

    Example:
        >>> table = torch.nn.Parameter(torch.zeros(3, 2))
        >>> adagrad = torch.optim.Adagrad([table], lr=1.0)
        >>> table.sum().backward()
        >>> adagrad.step()
        >>> reset_optimizer_rows(table, torch.tensor([1]))
        >>> adagrad.step()  # the sum of squared gradients of row 1 starts from 0 again
        >>> adagrad.state[table]["sum"][:, 0].tolist()
        [2.0, 1.0, 2.0]
    """
    in_backward = getattr(table, "_in_backward_optimizers", ())
    for optimizer in in_backward:
        _reset(optimizer, table, rows, in_place)

    if table.requires_grad and not in_backward:
        waiting = table.__dict__.get(_WAITING)
        setattr(table, _WAITING, rows if waiting is None else torch.cat([waiting, rows]).unique())
        _install_hook()


@cache
def _install_hook() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Reset the rows that wait for a step of this optimizer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rows = parameter.__dict__.pop(_WAITING, None)
            if rows is not None:
                _reset(optimizer, parameter, rows)


@torch.no_grad()
def _reset(optimizer: Optimizer, table: Tensor, rows: Tensor, in_place: bool = False) -> None:
    """Give rows [U] of a table the state that they had before the first step."""
    for name, value in optimizer.state.get(table, {}).items():
        if isinstance(value, Tensor) and value.shape[:1] == table.shape[:1]:
            # Adagrad's sums of squared gradients may start above 0, all other accumulated state is
            # 0 at first.
            first = optimizer.defaults.get("initial_accumulator_value", 0) if name == "sum" else 0
            (value.data if in_place else value)[rows] = first

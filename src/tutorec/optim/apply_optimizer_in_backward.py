"""`apply_optimizer_in_backward`: an optimizer that steps during backward."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from tutorec.optim.in_backward import notice_steps
from tutorec.optim.keyed import KeyedOptimizer
from tutorec.optim.rates import check_rates
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad

_MARK = "_in_backward_optimizers"
_MARKS = (_MARK, "_optimizer_classes", "_optimizer_kwargs")


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[nn.Parameter],
    optimizer_kwargs: dict[str, Any],
) -> None:
    """Let backward update parameters; each gets its own optimizer.

    The effect depends on the parameter:

    ==================================  ============================================================
    a table of an unsharded collection  backward updates the rows in the batch; no dense gradient
    any other parameter                 the optimizer steps when the gradient is ready, and drops it
    a table that is sharded later       the sharder fuses the optimizer into the kernel
    ==================================  ============================================================

    On tables the semantics are those of fused kernels (``updating_lookup.py``). Change learning
    rates, and save and load state, through the optimizers in ``parameter._in_backward_optimizers``.
    A deep copy of a module has its own optimizers with the same rates and state; after torch's
    ``_apply_optimizer_in_backward`` it has none. Parameters that ``load_state_dict(assign=True)``
    inserts have no optimizer: call this function again. If an error is raised, no parameter has
    been changed.

    Args:
        optimizer_class: For example ``torch.optim.SGD`` or ``RowWiseAdagrad``.
        params: Parameters; a second call adds a second optimizer.
        optimizer_kwargs: Arguments of the constructor.

    Raises:
        TypeError: The optimizer does not take these arguments.
        ValueError: A parameter does not require grad, or belongs to a sharded table.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
        >>> weight.sum().backward()
        >>> weight.tolist(), weight.grad
        ([0.5, 0.5], None)

    Source:
        TorchRec's ``torchrec.optim.apply_optimizer_in_backward.apply_optimizer_in_backward``, which
        builds a dense gradient of the table in every step of an unsharded collection.
    """
    parameters = _checked(optimizer_class, params, optimizer_kwargs)
    notice_steps()

    for parameter, optimizer in [
        (param, optimizer_class([param], **optimizer_kwargs)) for param in parameters
    ]:
        if not hasattr(parameter, _MARK):
            _mark(parameter, [[], [], []])
        for name, mark in zip(_MARKS, (optimizer, optimizer_class, optimizer_kwargs), strict=True):
            getattr(parameter, name).append(mark)


def _mark(parameter: torch.Tensor, marks: list[list[Any]]) -> None:
    """Attach a parameter's optimizers, their classes and arguments, and the hooks that use them."""
    for name, values in zip(_MARKS, marks, strict=True):
        setattr(parameter, name, values)
    parameter.register_post_accumulate_grad_hook(_step_and_drop)
    # ``copy.deepcopy`` looks for the method on the object first; torch's own drops attributes.
    parameter.__deepcopy__ = partial(_copy_marked, parameter)  # pyright: ignore[reportAttributeAccessIssue]


def _copy_marked(parameter: torch.Tensor, memo: dict[int, Any]) -> Any:
    """A deep copy of a parameter, including its optimizers."""
    if id(parameter) in memo:
        return memo[id(parameter)]

    rows = parameter.detach().clone(memory_format=torch.preserve_format)
    twin = nn.Parameter(rows) if isinstance(parameter, nn.Parameter) else rows
    memo[id(parameter)] = twin.requires_grad_(parameter.requires_grad)
    _mark(twin, deepcopy([getattr(parameter, name) for name in _MARKS], memo))
    return twin


def _checked(
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[nn.Parameter],
    arguments: dict[str, Any],
) -> list[nn.Parameter]:
    """The parameters as a list; raises for parameters whose optimizer would have no effect."""
    # RowWiseAdagrad accepts and ignores any argument, as TorchRec's does.
    known = inspect.signature(RowWiseAdagrad).parameters
    unknown = (
        [name for name in arguments if name not in known]
        if optimizer_class is RowWiseAdagrad
        else []
    )
    if unknown:
        raise TypeError(f"RowWiseAdagrad does not take {unknown}, but {', '.join([*known][1:-1])}")

    parameters = list(params)
    for parameter in parameters:
        shape = list(parameter.shape)
        if not parameter.requires_grad:
            raise ValueError(
                f"a parameter of shape {shape} does not require grad, so that no backward reaches "
                "it; leave it out, or call requires_grad_() first"
            )
        if any(
            isinstance(optimizer, KeyedOptimizer) for optimizer in getattr(parameter, _MARK, ())
        ):
            raise ValueError(
                f"a parameter of shape {shape} is a sharded table's, whose optimizer is fused "
                "already: apply before sharding, or change rates in "
                "model.fused_optimizer.param_groups"
            )

    return parameters


def _step_and_drop(parameter: torch.Tensor) -> None:
    for optimizer in getattr(parameter, _MARK):
        check_rates(optimizer.param_groups, f"{type(optimizer).__name__} in backward")
        optimizer.step()
    parameter.grad = None

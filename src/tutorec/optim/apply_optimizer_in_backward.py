"""An optimizer that steps during backward: no gradient outlives the moment in which it is used."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

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
    """Let backward itself update parameters; each gets an optimizer of its own.

    What that does depends on whose parameters they are:

    ==================================  ================================================================
    a table of an unsharded collection  backward moves the rows in the batch, and builds no gradient [R, D]
    any other parameter                 the optimizer steps as soon as the gradient is there, and drops it
    a table that is sharded later       the sharder reads the mark and fuses the optimizer into the kernel
    ==================================  ================================================================

    On tables the semantics are those of fused kernels (``updating_lookup.py``). Learning rates are changed, and state
    is stored and loaded, through the optimizers, ``parameter._in_backward_optimizers``. A deep copy of a module has
    optimizers of its own, with the same rates and state; with torch's own ``_apply_optimizer_in_backward`` it has none.
    Parameters put in by ``load_state_dict(assign=True)`` carry no marks: apply again. Where it is refused, no parameter
    has been touched.

    Args:
        optimizer_class: Such as ``torch.optim.SGD`` or ``RowWiseAdagrad``.
        params: Parameters; a second call for one adds a second optimizer.
        optimizer_kwargs: For the constructor.

    Raises:
        TypeError: Arguments that the optimizer does not take.
        ValueError: A parameter that does not require grad, or one of a table that is sharded already.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
        >>> weight.sum().backward()
        >>> weight.tolist(), weight.grad
        ([0.5, 0.5], None)

    Source:
        TorchRec's ``torchrec.optim.apply_optimizer_in_backward.apply_optimizer_in_backward``, which takes a gradient of
        the size of the table for every step of an unsharded collection.
    """
    parameters = _checked(optimizer_class, params, optimizer_kwargs)
    for parameter, optimizer in [(each, optimizer_class([each], **optimizer_kwargs)) for each in parameters]:
        if not hasattr(parameter, _MARK):
            _mark(parameter, [[], [], []])
        for name, mark in zip(_MARKS, (optimizer, optimizer_class, optimizer_kwargs), strict=True):
            getattr(parameter, name).append(mark)


def _mark(parameter: torch.Tensor, marks: list[list[Any]]) -> None:
    """Give a parameter its lists of optimizers, their classes and their arguments, and what heeds them."""
    for name, of_parameter in zip(_MARKS, marks, strict=True):
        setattr(parameter, name, of_parameter)
    parameter.register_post_accumulate_grad_hook(_step_and_drop)
    # ``copy.deepcopy`` asks the object before its class; torch's copy of a parameter leaves attributes out.
    parameter.__deepcopy__ = partial(_copy_marked, parameter)  # pyright: ignore[reportAttributeAccessIssue]


def _copy_marked(parameter: torch.Tensor, memo: dict[int, Any]) -> Any:
    """A deep copy of a parameter, whose optimizers are copied with it."""
    if id(parameter) in memo:
        return memo[id(parameter)]
    rows = parameter.detach().clone(memory_format=torch.preserve_format).requires_grad_(parameter.requires_grad)
    twin = nn.Parameter(rows.detach(), rows.requires_grad) if isinstance(parameter, nn.Parameter) else rows
    memo[id(parameter)] = twin
    _mark(twin, deepcopy([getattr(parameter, name) for name in _MARKS], memo))
    return twin


def _checked(
    optimizer_class: type[torch.optim.Optimizer], params: Iterable[nn.Parameter], arguments: dict[str, Any]
) -> list[nn.Parameter]:
    """The parameters, unless their optimizer would be ignored."""
    # Ours takes any name and ignores it, as TorchRec's does.
    known = inspect.signature(RowWiseAdagrad).parameters
    unknown = [name for name in arguments if name not in known] if optimizer_class is RowWiseAdagrad else []
    if unknown:
        raise TypeError(
            f"RowWiseAdagrad does not take {unknown}; optimizer_kwargs may hold {', '.join([*known][1:-1])}"
        )
    parameters = list(params)
    for parameter in parameters:
        shape = list(parameter.shape)
        if not parameter.requires_grad:
            raise ValueError(
                f"a parameter of shape {shape} does not require grad, so that no backward reaches it; leave it out, or "
                "call requires_grad_() first"
            )
        if any(isinstance(each, KeyedOptimizer) for each in getattr(parameter, _MARK, ())):
            raise ValueError(
                f"a parameter of shape {shape} is a sharded table's, whose optimizer is fused already: apply before "
                "sharding, or change rates in model.fused_optimizer.param_groups"
            )
    return parameters


def _step_and_drop(parameter: torch.Tensor) -> None:
    for optimizer in getattr(parameter, _MARK):
        check_rates(optimizer.param_groups, f"{type(optimizer).__name__} in backward")
        optimizer.step()
    parameter.grad = None

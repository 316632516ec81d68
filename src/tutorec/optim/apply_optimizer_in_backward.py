"""An optimizer that steps during backward: no gradient outlives the moment in which it is used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_MARK = "_in_backward_optimizers"


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
    is stored and loaded, through the optimizers, ``parameter._in_backward_optimizers``. A deep copy of a module carries
    no marks, and neither do parameters put in by ``load_state_dict(assign=True)``: apply again.

    Args:
        optimizer_class: Such as ``torch.optim.SGD`` or ``RowWiseAdagrad``.
        params: Parameters; a second call for one adds a second optimizer.
        optimizer_kwargs: For the constructor.

    Raises:
        TypeError: ``optimizer_class`` is no class of optimizers, or ``params`` is one tensor.
        ValueError: A parameter does not require grad.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
        >>> weight.sum().backward()
        >>> weight.tolist(), weight.grad
        ([0.5, 0.5], None)

    See Also:
        TorchRec's ``torchrec.optim.apply_optimizer_in_backward.apply_optimizer_in_backward``, which takes a gradient of
        the size of the table for every step of an unsharded collection.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(f"optimizer_class is {optimizer_class!r}; pass a class of optimizers, such as torch.optim.SGD")
    if isinstance(params, torch.Tensor):
        raise TypeError(f"params is one tensor of shape {list(params.shape)}; pass a list, [parameter]")
    for parameter in params:
        if not parameter.requires_grad:
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} does not require grad, so that no backward reaches it; "
                "leave it out, or call requires_grad_() first"
            )
        optimizer = optimizer_class([parameter], **optimizer_kwargs)
        if not hasattr(parameter, _MARK):
            for name in (_MARK, "_optimizer_classes", "_optimizer_kwargs"):
                setattr(parameter, name, [])
            parameter.register_post_accumulate_grad_hook(_step_and_drop)
        for name, mark in (
            (_MARK, optimizer),
            ("_optimizer_classes", optimizer_class),
            ("_optimizer_kwargs", optimizer_kwargs),
        ):
            getattr(parameter, name).append(mark)


def _step_and_drop(parameter: torch.Tensor) -> None:
    for optimizer in getattr(parameter, _MARK):
        optimizer.step()
    parameter.grad = None

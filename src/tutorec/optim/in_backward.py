"""Parameters that backward has already updated: later changes of their gradients are errors.

A parameter with an optimizer in backward has no gradient when ``backward()`` returns. Three habits
of training loops work on gradients between ``backward()`` and ``step()``, and would pass such a
parameter over, or move it otherwise than its caller believes::

    scaler.scale(loss).backward()     the rows move by the scaled gradient
    clip_grad_norm_(parameters, 1.0)  nothing of the rows is clipped
    loss.backward(), again, step()    each pass moves the rows; see ``BackwardPasses``

Each is an error at its first use, which names the parameter and the remedy. A torch optimizer that
is given such a parameter moves nothing of it, and a warning says so.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import cache
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tutorec._check import warn_caller
from tutorec.optim.keyed import KeyedOptimizer

# How far above an optimizer's step the scaler that has called it may be, and in how many of its
# first steps it is looked for.
_FRAMES = 8
_CHECKED = 16
_CLIPPING = "torch.nn.utils.clip_grad"
_SCALER = "torch.amp.grad_scaler"
_GRAD: Any = Tensor.grad
_DENSE = "or give the table compute_kernel='dense', which keeps a gradient"


class InBackwardParameter(nn.Parameter):
    """A parameter that an optimizer in backward updates: it has no gradient after backward.

    Reading ``grad`` returns None, and raises where torch's clipping or loss scaling reads it.

    Raises:
        ValueError: ``clip_grad_norm_`` or a kin of it, or an enabled ``GradScaler``, reads it.
    """

    @property
    def grad(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The gradient; None once backward has returned."""
        gradient = _GRAD.__get__(self)
        if gradient is None:
            _tell_reader(self, sys._getframe(1))
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Set or drop the gradient."""
        _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Drop the gradient."""
        _GRAD.__delete__(self)


def check_clipped(parameters: Sequence[Tensor], caller: str) -> None:
    """Check that clipping reaches the parameters, before they are handed to ``caller``.

    Raises:
        ValueError: Backward updates one of them, without clipping.
    """
    for parameter in parameters:
        if isinstance(parameter, InBackwardParameter) and not _clips_itself(parameter):
            raise ValueError(_not_clipped(parameter, caller))


class HasFusedOptimizer(Protocol):
    """The methods of a model that `follow_steps` uses."""

    @property
    def fused_optimizer(self) -> Any:
        """A combined optimizer of those in backward."""
        ...


class _Stepped:
    """Record of a torch optimizer: the models whose parameters it steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._owned_ids = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        self.find_models()
        # Whether a scaler steps it is looked at in its first steps: it costs as much as all else.
        self.to_check = _CHECKED

    def find_models(self) -> None:
        """Look for them among the models that there are now."""
        self.models = [
            weakref.ref(model)
            for model in _followed
            if any(id(parameter) in self._owned_ids for parameter in model.parameters())
        ]


_followed: weakref.WeakSet[Any] = weakref.WeakSet()
_stepped: weakref.WeakKeyDictionary[Optimizer, _Stepped] = weakref.WeakKeyDictionary()


def follow_steps(model: HasFusedOptimizer) -> None:
    """Notice the steps of any torch optimizer of the model's other parameters.

    Such an optimizer knows nothing of the tables, whose passes end with its step, too.
    """
    if model.fused_optimizer.params:
        _followed.add(model)
        for known in _stepped.values():
            known.find_models()


@cache
def notice_steps() -> None:
    """Look at the parameters of every torch optimizer before its first step."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    # A keyed optimizer passes the step on to the torch optimizers in it. One that steps in backward
    # ends no step.
    if isinstance(optimizer, KeyedOptimizer) or torch._C._current_graph_task_id() != -1:
        return

    known = _stepped.get(optimizer)
    if known is None:
        known = _stepped[optimizer] = _Stepped(optimizer)
        _warn_optimizer(optimizer)

    for reference in known.models:
        model = reference()
        if model is None:
            continue
        if known.to_check:
            known.to_check -= 1
            _check_not_scaled(model.fused_optimizer)
        for _, fused in model.fused_optimizer.optimizers:
            # a module of the caller's may have an optimizer in backward of another class
            passes = getattr(fused, "passes", None)
            if passes is not None:
                passes.end()


def _check_not_scaled(fused: Any) -> None:
    """Raise if the step under way is a GradScaler's.

    Raises:
        ValueError: It is, and the loss was scaled.
    """
    frame: FrameType | None = sys._getframe(3)
    for _ in range(_FRAMES):
        if frame is None:
            return
        if frame.f_globals.get("__name__") == _SCALER:
            if frame.f_locals["self"].is_enabled():
                raise ValueError(_scaled(listed(list(fused.params))))
            return
        frame = frame.f_back


def _tell_reader(parameter: InBackwardParameter, frame: FrameType) -> None:
    """Raise where torch's clipping or loss scaling reads a missing gradient."""
    module = frame.f_globals.get("__name__")
    if module == _CLIPPING and not _clips_itself(parameter):
        # up to Python 3.11 a list comprehension is a function of its own
        caller = frame if frame.f_code.co_name.isidentifier() else frame.f_back or frame
        raise ValueError(_not_clipped(parameter, caller.f_code.co_name))

    if module == _SCALER:
        raise ValueError(_scaled(_name_of(parameter)))


def _warn_optimizer(optimizer: Optimizer) -> None:
    """Say of an optimizer that it is given parameters which backward updates."""
    missed = [
        _name_of(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if _optimizers(parameter) and optimizer not in _optimizers(parameter)
    ]

    if missed:
        name = type(optimizer).__name__
        warn_caller(
            f"{name} moves nothing of {', '.join(missed)}: backward updates it, with the optimizer "
            f"that was named for it or the default. Leave it out, {name}([p for _, p in "
            "in_backward_optimizer_filter(model.named_parameters())]); to train a table with "
            f"{name}, name it in fused_params before sharding, {_DENSE}"
        )


def _optimizers(parameter: Tensor) -> Sequence[Any]:
    return getattr(parameter, "_in_backward_optimizers", ())


def _clips_itself(parameter: Tensor) -> bool:
    """Whether the kernel that updates a parameter clips its gradient."""
    operators = [getattr(optimizer, "operator", None) for optimizer in _optimizers(parameter)]
    return any(
        operator is not None and operator.optimizer.max_gradient is not None
        for operator in operators
    )


def _not_clipped(parameter: Tensor, caller: str) -> str:
    return (
        f"{caller} comes too late for {_name_of(parameter)}: backward has updated it, and nothing "
        "of that was clipped. Leave it out, in_backward_optimizer_filter(model.named_parameters()) "
        "yields the others; clip a table in backward, fused_params={'gradient_clipping': True, "
        f"'max_gradient': 1.0}}, {_DENSE}"
    )


def _scaled(names: str) -> str:
    return (
        f"GradScaler comes too late for {names}: backward has moved it by the gradient of the "
        "scaled loss. Start again without a scaler, which torch.autocast(device_type, "
        f"torch.bfloat16) does not need; {_DENSE}"
    )


def _name_of(parameter: Tensor) -> str:
    for optimizer in _optimizers(parameter):
        params = getattr(optimizer, "params", {})
        for name, candidate in params.items():
            if candidate is parameter:
                return f"parameter {name!r}"
    return f"a parameter of shape {list(parameter.shape)}"


def listed(names: Sequence[str]) -> str:
    """Names of parameters, for messages."""
    return ("parameter " if len(names) == 1 else "parameters ") + ", ".join(map(repr, names))

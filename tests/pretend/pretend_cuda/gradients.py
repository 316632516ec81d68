"""Backward: its thread, and the devices of gradients that C++ makes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from pretend_cuda.devices import thread
from pretend_cuda.functions import PretendMode
from pretend_cuda.operators import has_numbers_of_cpu
from pretend_cuda.tensors import OnDevice


def install() -> None:
    """A mode leaves while it serves a call, ``backward`` too, in which functions in Python make
    tensors: enter it.
    """
    run = torch.autograd.graph._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        before, thread.backward = thread.backward, True
        try:
            with (
                contextlib.nullcontext() if torch._C._len_torch_function_stack() else PretendMode()
            ):
                return run(*args, **kwargs)
        finally:
            thread.backward = before

    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = run_in_mode
    _give_zeros_a_device()


def _give_zeros_a_device() -> None:
    """Zero and empty gradients that C++ makes for a function in Python say the CPU, which is what
    C++ sees.
    """
    # The class method itself, in Python or, from torch 2.15 on, in C++.
    forward, node = (
        vars(torch.autograd.Function)["apply"],
        torch.autograd.function.BackwardCFunction,
    )
    backward = node.apply

    def forward_and_note(cls: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward.__get__(None, cls)(*args, **kwargs)
        leaves = out if isinstance(out, tuple) else (out,)
        for leaf in leaves:
            if isinstance(leaf, OnDevice) and isinstance(leaf.grad_fn, node):
                leaf.grad_fn._where = [getattr(each, "where", None) for each in leaves]
        return out

    def backward_there(self: Any, *gradients: Any) -> Any:
        where = getattr(self, "_where", [None] * len(gradients))
        return backward(self, *(_zeros_there(*pair) for pair in zip(gradients, where, strict=True)))

    torch.autograd.Function.apply = classmethod(forward_and_note)
    node.apply = backward_there


def _zeros_there(gradient: Any, where: torch.device | None) -> Any:
    zeros = (
        isinstance(gradient, Tensor)
        and not isinstance(gradient, OnDevice)
        and not has_numbers_of_cpu(gradient)
    )
    return OnDevice(gradient, where) if zeros and where is not None else gradient

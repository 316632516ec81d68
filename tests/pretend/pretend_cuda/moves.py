"""Moves between devices: ``to``, ``cuda``, ``cpu`` and ``x.data = y``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pretend_cuda.devices import device_of
from pretend_cuda.memory import check_streams, note_stream
from pretend_cuda.streams import Stream
from pretend_cuda.tensors import OnDevice


class _Move(torch.autograd.Function):
    """A copy to another device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device) -> Tensor:
        ctx.origin = x.device
        return moved(x, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return moved(gradient, ctx.origin), None


def moved(x: Tensor, device: torch.device) -> Tensor:
    if isinstance(x, OnDevice) and device.type == "cuda":
        check_streams("a copy", [x])
    inner = (x.inner if isinstance(x, OnDevice) else x).detach().clone()
    if device.type != "cuda":
        return inner
    moved = OnDevice(inner, device)
    if Stream.entered:
        note_stream(moved)
    return moved


def moved_leaf(x: Tensor, device: torch.device) -> Tensor:
    with torch.no_grad():
        return moved(x, device)


def to(func: Any, args: Any, kwargs: Any) -> Any:
    """``Tensor.to``, ``cuda`` and ``cpu``."""
    x, rest = args[0], list(args[1:])
    device = device_of(kwargs.pop("device", None))
    if func is Tensor.cpu:
        device, rest = torch.device("cpu"), []
    elif func is Tensor.cuda:
        device = device or device_of(rest[0] if rest and rest[0] is not None else "cuda")
        rest = []
    for position, argument in enumerate(rest):
        if isinstance(argument, Tensor):
            device, rest[position] = argument.device, argument.dtype
        elif isinstance(argument, str | torch.device) or (type(argument) is int and position == 0):
            device = device_of(argument)
            del rest[position]
        else:
            continue
        break
    other = kwargs.pop("other", None)
    if other is not None:
        device, rest = other.device, [other.dtype]
    kwargs.pop("non_blocking", None)
    rest = [each for each in rest if isinstance(each, torch.dtype)]
    copy = kwargs.pop("copy", False)
    if device is not None and device.type == "meta":
        return Tensor.to(x.inner if isinstance(x, OnDevice) else x, "meta", *rest, **kwargs)
    if device is not None and device != x.device and not x.is_meta:
        x = (
            _Move.apply(x, device)
            if x.requires_grad and torch.is_grad_enabled()
            else moved_leaf(x, device)
        )
    elif device is not None and x.is_meta and device.type != "meta":
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    elif copy:
        x = x.clone()
    return Tensor.to(x, *rest, **kwargs) if rest or kwargs else x


def set_data(func: Any, args: Any, kwargs: Any) -> None:
    """``x.data = y``: the same Python object in other memory, on another device perhaps."""
    x, y = args
    if isinstance(x, OnDevice) and isinstance(y, OnDevice):
        func(x, y)
        x.inner, x.where = y.inner.detach(), y.where
    elif isinstance(x, OnDevice) or isinstance(y, OnDevice):
        grad, parameter = x.requires_grad, isinstance(x, torch.nn.Parameter)
        y = OnDevice(y.inner.detach(), y.where) if isinstance(y, OnDevice) else y.detach()
        if isinstance(y, OnDevice):
            y._is_param = parameter
        elif parameter:
            y = torch.nn.Parameter(y, False)
        y.__dict__.update(
            {
                key: value
                for key, value in x.__dict__.items()
                if key not in ("inner", "where", "_is_param")
            }
        )
        gradient, x.grad = x.grad, None
        torch.utils.swap_tensors(x, y)
        x.requires_grad_(grad)
        # On a GPU box it stays behind until it is moved, too; here that cannot be done to one that
        # a tensor holds.
        x.grad = None if gradient is None else moved_leaf(gradient, x.device)
    else:
        func(x, y)

"""Operators: each runs on the CPU tensors inside, after what a GPU box would refuse was refused."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pretend_cuda.groups import checked_collective
from pretend_cuda.memory import check_streams, note_stream
from pretend_cuda.streams import Stream
from pretend_cuda.tensors import OnDevice, closed, opened

# May read one device and write another.
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::_local_scalar_dense"}
# DistributedDataParallel's C++ allocates its buckets where it sees the parameters: on the CPU.
_INTO_BUCKET = torch.ops.aten.mul.out
# Take indices of the CPU for a tensor of any device.
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


def run_operator(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the CPU tensors inside, where a GPU box would run it at all."""
    name = _base_name(func)
    if name.startswith("c10d::"):
        args = checked_collective(name, args)
    tensors: list[Tensor] = []
    inner_args = opened(args, tensors)
    inner_kwargs = {key: opened(kwargs[key], tensors) for key in kwargs} if kwargs else kwargs
    into_bucket = func is _INTO_BUCKET
    if name not in _COPIES and not into_bucket:
        if name in _INDEXING and isinstance(args[0], OnDevice):
            # Indices may be on the CPU.
            opened((args[0], args[2:]), checked := [])
            check_devices(name, checked)
        else:
            check_devices(name, tensors)
    out = func(*inner_args, **inner_kwargs)
    if name == "aten::copy_":  # the target stays where it is
        return args[0]
    if into_bucket:
        return kwargs["out"]
    given = [each for each in tensors if isinstance(each, OnDevice)]
    if not Stream.entered:
        return closed(out, given[0].where, given)
    # A view reads nothing, and the program waits for a number.
    if not func.is_view and name != "aten::_local_scalar_dense":
        check_streams(name, given)
    result = closed(out, given[0].where, given)
    for each in result if isinstance(result, list | tuple) else (result,):
        note_stream(each, given)
    return result


@cache
def _base_name(func: Any) -> str:
    return func.name().split(".")[0]


def check_devices(name: str, tensors: list[Tensor]) -> None:
    """A tensor with a dimension takes part only where all others are; a single number of the CPU
    may come along.
    """
    devices = {
        each.where if isinstance(each, OnDevice) else None for each in tensors if _counts(each)
    }
    if len(devices) > 1 and not _zeros_of_autograd(devices, tensors):
        among = " and ".join(sorted(str(device or "cpu") for device in devices))
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{among}! (in {name})"
        )


def _zeros_of_autograd(devices: set[torch.device | None], tensors: list[Tensor]) -> bool:
    """Whether autograd's C++ calls, and the CPU's are zeros that it made: it takes all tensors for
    the CPU's.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back
    called_by_engine = frame is not None and frame.f_code.co_name == "_engine_run_backward"
    return (
        called_by_engine
        and len(devices - {None}) == 1
        and not any(map(has_numbers_of_cpu, tensors))
    )


def has_numbers_of_cpu(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not isinstance(tensor, OnDevice) and bool(tensor.any())


def _counts(tensor: Tensor) -> bool:
    return isinstance(tensor, OnDevice) or tensor.dim() > 0


def install() -> None:
    """Let operators of pretended tensors come here."""
    OnDevice.run_operator = staticmethod(run_operator)

"""Functions of torch that a tensor subclass cannot see, or that must be answered otherwise.

A mode sees every call of a function of torch. ``_SPECIAL`` has the functions that are answered
here; whatever takes ``device=`` makes its tensor on the CPU and says the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pretend_cuda.devices import device_of
from pretend_cuda.memory import note_stream
from pretend_cuda.moves import set_data, to
from pretend_cuda.operators import check_devices
from pretend_cuda.streams import Stream
from pretend_cuda.tensors import OnDevice, closed, opened


class PretendMode(TorchFunctionMode):
    """Factories with ``device=``, moves between devices, and what a subclass cannot see of a
    tensor.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, dict(kwargs or {}))
        # C++ sees a dense tensor
        if args and isinstance(args[0], OnDevice) and args[0].inner.is_sparse:
            return _inside(func, args, kwargs or {})
        if not kwargs:
            return func(*args)
        kwargs = dict(kwargs)
        if kwargs.get("device") is None:
            kwargs.pop("pin_memory", None)  # all memory of the CPU may be page-locked here
        if kwargs.get("device") is not None:
            return _made(func, args, kwargs)
        return func(*args, **kwargs)


def _made(func: Any, args: Any, kwargs: Any) -> Any:
    """A new tensor on the device that ``device=`` names."""
    device = device_of(kwargs.pop("device"))
    requires_grad = kwargs.pop("requires_grad", False)
    pinned = kwargs.pop("pin_memory", False)
    args, kwargs = opened(args, given := []), {key: opened(kwargs[key], given) for key in kwargs}
    out = func(*args, device="meta" if device.type == "meta" else "cpu", **kwargs)
    if device.type == "cuda":
        if pinned:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        out = OnDevice(out.detach().clone() if given else out.detach(), device)
        if Stream.entered:
            note_stream(out)
    return out.requires_grad_(requires_grad) if requires_grad else out


def _new_tensor(func: Any, args: Any, kwargs: Any) -> Any:
    kwargs.setdefault("device", args[0].device)
    return _made(torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs})


def _detached(func: Any, args: Any, kwargs: Any) -> Tensor:
    """In inference mode C++ gives what it makes of a subclass no version counter, and then asks for
    it.
    """
    x = args[0]
    if isinstance(x, OnDevice) and torch.is_inference_mode_enabled():
        return OnDevice(x.inner.detach(), x.where)
    return func(*args, **kwargs)


def _inside(func: Any, args: Any, kwargs: Any) -> Any:
    """A function whose C++ makes tensors on the device that C++ sees: run it on the
    tensors inside.
    """
    tensors: list[Tensor] = []
    inner_args, inner_kwargs = (
        opened(args, tensors),
        {key: opened(kwargs[key], tensors) for key in kwargs},
    )
    check_devices(func.__name__, tensors)
    devices = [each.where for each in tensors if isinstance(each, OnDevice)]
    out = func(*inner_args, **inner_kwargs)
    return closed(out, devices[0], ()) if devices else out


def _rows_of_bags(func: Any, args: Any, kwargs: Any) -> Any:
    """``embedding_bag``, which makes offsets for ids [B, L] itself, where no mode sees it."""
    ids, weight = args
    if ids.dim() == 2:
        words = {"device": ids.device}
        kwargs["offsets"] = _made(torch.arange, (0, ids.numel(), ids.shape[1]), words)
        ids = ids.reshape(-1)
        if kwargs["per_sample_weights"] is not None:
            kwargs["per_sample_weights"] = kwargs["per_sample_weights"].reshape(-1)
    return func(ids, weight, **kwargs)


def _as_on_class(name: str) -> Callable[..., Any]:
    """A method of OnDevice that torch's own would hide in C++."""

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        method = getattr(OnDevice, name) if isinstance(args[0], OnDevice) else func
        return method(*args, **kwargs)

    return call


def _pinned(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A copy in page-locked memory, which any memory of the CPU may be here."""
    x = args[0]
    if isinstance(x, OnDevice):
        return x.pin_memory()
    copy = x.clone()
    copy._pinned_here = True
    return copy


def _is_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    return getattr(args[0], "_pinned_here", False)


def _keeps_identity(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether ``x.data = y`` may change the memory of x, as ``Module.to`` asks: on a GPU box it
    may.
    """
    return any(isinstance(arg, OnDevice) for arg in args) or func(*args, **kwargs)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch._has_compatible_shallow_copy_type: _keeps_identity,
    Tensor.to: to,
    Tensor.cuda: to,
    Tensor.cpu: to,
    Tensor.data.__set__: set_data,
    Tensor.new_tensor: _new_tensor,
    Tensor.detach: _detached,
    torch.nn.functional.one_hot: _inside,
    torch.nn.functional.embedding_bag: _rows_of_bags,
    **{
        getattr(Tensor, name): _as_on_class(name)
        for name in ("tolist numpy get_device data_ptr storage_offset untyped_storage").split()
    },
    Tensor.pin_memory: _pinned,
    Tensor.is_pinned: _is_pinned,
}


def install() -> None:
    """A mode belongs to a thread: enter it in this one and in all that are started later."""
    PretendMode().__enter__()
    start = threading.Thread.start

    def start_in_mode(self: threading.Thread) -> None:
        run = self.run  # a subclass may have its own

        def run_in_mode() -> None:
            with PretendMode():
                run()

        self.run = run_in_mode  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_in_mode  # type: ignore[method-assign]

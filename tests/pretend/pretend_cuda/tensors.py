"""Tensors in CPU memory that say ``cuda:k``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from pretend_cuda.devices import device_of
from pretend_cuda.streams import Stream

if TYPE_CHECKING:
    from pretend_cuda.memory import StreamMemory


class OnDevice(Tensor):
    """A CPU tensor that says another device.

    Args:
        inner: The CPU tensor.
        where: The device that it says.
    """

    inner: Tensor
    where: torch.device
    made_on: StreamMemory | None = None
    # Runs each operator that has such a tensor among its arguments: `operators.run_operator`.
    run_operator: ClassVar[Callable[..., Any]]

    @staticmethod
    def __new__(cls, inner: Tensor, where: torch.device) -> OnDevice:
        return Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cpu",
        )

    def __init__(self, inner: Tensor, where: torch.device) -> None:
        self.inner, self.where = inner, where

    device = property(lambda self: self.where)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # the mode is for what a program calls, and slow
            return OnDevice.run_operator(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        body, grad = repr(self.inner.detach()), ""
        if self.grad_fn is not None:
            grad = f", grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            grad = ", requires_grad=True"
        text = f"{body[:-1]}, device='{self.where}'{grad})"
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                f"can't convert {self.where} device type tensor to numpy. Use Tensor.cpu() to copy "
                "the tensor to host memory first."
            )
        return self.inner.detach().numpy()

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.inner.tolist()

    def get_device(self) -> int:
        return self.where.index

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def storage_offset(self) -> int:
        return self.inner.storage_offset()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def is_pinned(self, *_: Any) -> bool:
        return False

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError(
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
        )

    def record_stream(self, stream: Any) -> None:
        if not isinstance(stream, Stream):
            raise TypeError(
                f"record_stream takes a torch.cuda.Stream, not a {type(stream).__name__}"
            )
        if self.made_on is not None:
            self.made_on.streams.add(stream)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if self.grad_fn is not None:
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy protocol"
            )
        copy = _wrapped(self.inner.detach().clone(), self.where, self.requires_grad, self)
        memo[id(self)] = copy
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        if getattr(self, "_is_param", False):
            return torch._utils._rebuild_parameter, (
                OnDevice(self.inner, self.where),
                self.requires_grad,
                OrderedDict(),
            )
        return rebuilt, (self.inner.detach(), str(self.where), self.requires_grad)


def _wrapped(inner: Tensor, where: torch.device, requires_grad: bool, like: Any = None) -> OnDevice:
    made = OnDevice(inner, where)
    if requires_grad:
        made.requires_grad_(True)
    if getattr(like, "_is_param", False):
        made._is_param = True
    return made


_map_locations: list[Any] = []  # of the calls of torch.load in progress


def rebuilt(inner: Tensor, where: str, requires_grad: bool) -> Tensor:
    """What unpickling makes: on the device where it was saved, or where ``torch.load`` is told to
    put it.
    """
    target = _map_locations[-1] if _map_locations else None
    device = device_of(
        where if target is None or callable(target) or isinstance(target, dict) else target
    )
    return (OnDevice(inner, device) if device.type == "cuda" else inner).requires_grad_(
        requires_grad
    )


def opened(value: Any, tensors: list[Tensor]) -> Any:
    """The value with the CPU tensors inside; the tensors that it held are appended to
    ``tensors``.
    """
    if isinstance(value, OnDevice):
        tensors.append(value)
        return value.inner
    if isinstance(value, list | tuple):
        return [opened(each, tensors) for each in value]
    if isinstance(value, Tensor):
        tensors.append(value)
    return value


def closed(value: Any, where: torch.device, given: Sequence[OnDevice]) -> Any:
    """The result on the device; what an operator wrote in place and returns is the tensor that was
    given.
    """
    if isinstance(value, Tensor):
        if isinstance(value, OnDevice):
            return value
        for each in given:
            if each.inner is value:
                return each
        return OnDevice(value, where)
    if isinstance(value, list | tuple):
        return type(value)(closed(each, where, given) for each in value)
    return value


def install() -> None:
    """Let ``torch.load`` put tensors on the devices that its ``map_location`` names."""
    load = torch.load

    def load_to(*args: Any, map_location: Any = None, **kwargs: Any) -> Any:
        _map_locations.append(map_location)
        try:
            return load(*args, map_location=map_location, **kwargs)
        finally:
            _map_locations.pop()

    # It is pickled by its name, as torch's is.
    load_to.__module__ = "torch"
    load_to.__qualname__ = "load"
    torch.load = load_to
    torch.serialization.add_safe_globals([rebuilt])

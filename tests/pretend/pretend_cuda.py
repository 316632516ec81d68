"""A GPU box without a GPU: tensors in CPU memory that say ``cuda:k``, and the error that a GPU box
would raise.

    install(count=2)
    x = torch.randn(4, 3, device="cuda")
    x + torch.ones(4, 3)        # RuntimeError: Expected all tensors to be on the same device ...

An :class:`OnDevice` wraps a CPU tensor. Python code sees its ``device`` and ``is_cuda``; C++
(autograd, views, operators) sees a tensor of the CPU, because a CPU build of torch has no autograd
for CUDA tensors. Every operator passes :func:`_dispatch`, which refuses what a GPU box refuses:
tensors of several devices in one operator, and a collective of a process group that has no backend
for the tensor's device.

A GPU's memory is used again as soon as a tensor is dropped, by the stream that made the tensor. So
what is made on a side stream and read on another one without ``record_stream`` is refused here; a
GPU box gives wrong numbers now and then.

What it cannot show: wrong numbers where one stream does not wait for another (everything is done at
once), CUDA kernels of fbgemm, nested tensors, lazy layers, time, and memory.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

# ------------------------------------------------------------------------------------------------
# devices


class _Devices:
    """The pretended devices of this process."""

    count = 0
    owner: int | None = None  # the process that first used a device: its forks cannot


class _Thread(threading.local):
    """What each thread has of its own, as with CUDA: the current device, the stream of each."""

    device = 0
    backward = False

    def __init__(self) -> None:
        self.streams: dict[int, _Stream] = {}


_thread = _Thread()


def _use_device() -> None:
    """What creates a CUDA context: a fork of a process that has one cannot use CUDA."""
    if _Devices.owner is None:
        _Devices.owner = os.getpid()
    if _Devices.owner != os.getpid():
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
            "you must use the 'spawn' start method"
        )


def _device(given: Any) -> torch.device | None:
    """The device that an argument names, with its index; None where it names none."""
    if given is None:
        return None
    device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    if device.type != "cuda":
        return device
    _use_device()
    index = _thread.device if device.index is None else device.index
    if index >= _Devices.count:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: cuda:{index} of {_Devices.count} devices"
        )
    return torch.device("cuda", index)


# ------------------------------------------------------------------------------------------------
# tensors


class OnDevice(Tensor):
    """A CPU tensor that says another device.

    Args:
        inner: The CPU tensor.
        where: The device that it says.
    """

    inner: Tensor
    where: torch.device
    made_on: _Memory | None = None

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
            return _dispatch(func, args, kwargs or {})

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
        if not isinstance(stream, _Stream):
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
        return _rebuild, (self.inner.detach(), str(self.where), self.requires_grad)


class _TypeOnABox(type):
    """``type`` in the modules of tutorec: there, too, ``type(x) is Tensor`` for a
    tensor of a GPU.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], OnDevice):
            return torch.nn.Parameter if isinstance(args[0], torch.nn.Parameter) else Tensor
        return type(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __getitem__(cls, of: Any) -> Any:
        return type[of]


class _Type(metaclass=_TypeOnABox):
    """Stands for ``type``."""


class _GiveType:
    """A finder that puts it into every module of tutorec before the module runs."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.startswith("tutorec.") else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_with_type(module: Any) -> None:
            module.type = _Type
            run(module)

        spec.loader.exec_module = run_with_type
        return spec


def _wrapped(inner: Tensor, where: torch.device, requires_grad: bool, like: Any = None) -> OnDevice:
    made = OnDevice(inner, where)
    if requires_grad:
        made.requires_grad_(True)
    if getattr(like, "_is_param", False):
        made._is_param = True
    return made


_map_location: list[Any] = []  # of the torch.load in progress


def _rebuild(inner: Tensor, where: str, requires_grad: bool) -> Tensor:
    """What unpickling makes: on the device where it was saved, or where ``torch.load`` is told to
    put it.
    """
    target = _map_location[-1] if _map_location else None
    device = _device(
        where if target is None or callable(target) or isinstance(target, dict) else target
    )
    return (OnDevice(inner, device) if device.type == "cuda" else inner).requires_grad_(
        requires_grad
    )


class _Move(torch.autograd.Function):
    """A copy to another device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device) -> Tensor:
        ctx.origin = x.device
        return _moved(x, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _moved(gradient, ctx.origin), None


def _moved(x: Tensor, device: torch.device) -> Tensor:
    if isinstance(x, OnDevice) and device.type == "cuda":
        _check_streams("a copy", [x])
    inner = (x.inner if isinstance(x, OnDevice) else x).detach().clone()
    if device.type != "cuda":
        return inner
    moved = OnDevice(inner, device)
    if _Stream.entered:
        _note_stream(moved)
    return moved


# ------------------------------------------------------------------------------------------------
# operators

# May read one device and write another.
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::_local_scalar_dense"}
# DistributedDataParallel's C++ allocates its buckets where it sees the parameters: on the CPU.
_INTO_BUCKET = torch.ops.aten.mul.out
# Take indices of the CPU for a tensor of any device.
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the CPU tensors inside, where a GPU box would run it at all."""
    name = _base_name(func)
    if name.startswith("c10d::"):
        args = _checked_collective(name, args)
    tensors: list[Tensor] = []
    inner_args = _opened(args, tensors)
    inner_kwargs = {key: _opened(kwargs[key], tensors) for key in kwargs} if kwargs else kwargs
    into_bucket = func is _INTO_BUCKET
    if name not in _COPIES and not into_bucket:
        if name in _INDEXING and isinstance(args[0], OnDevice):
            # Indices may be on the CPU.
            _opened((args[0], args[2:]), checked := [])
            _check_devices(name, checked)
        else:
            _check_devices(name, tensors)
    out = func(*inner_args, **inner_kwargs)
    if name == "aten::copy_":  # the target stays where it is
        return args[0]
    if into_bucket:
        return kwargs["out"]
    given = [each for each in tensors if isinstance(each, OnDevice)]
    if not _Stream.entered:
        return _closed(out, given[0].where, given)
    # A view reads nothing, and the program waits for a number.
    if not func.is_view and name != "aten::_local_scalar_dense":
        _check_streams(name, given)
    closed = _closed(out, given[0].where, given)
    for each in closed if isinstance(closed, list | tuple) else (closed,):
        _note_stream(each, given)
    return closed


class _Memory:
    """Memory that was taken on a side stream, and the streams on which it may be read."""

    def __init__(self, stream: _Stream) -> None:
        self.streams = {stream}


def _note_stream(made: Any, given: Sequence[OnDevice] = ()) -> None:
    """Note on which stream a tensor was made; one that shares memory with another has its note."""
    if not isinstance(made, OnDevice) or made.made_on is not None or made.inner.is_sparse:
        return
    storage = made.inner.untyped_storage().data_ptr()
    for each in given:
        if not each.inner.is_sparse and each.inner.untyped_storage().data_ptr() == storage:
            made.made_on = each.made_on
            return
    stream = _current_stream(made.where)
    if stream is not _default_stream(made.where):
        made.made_on = _Memory(stream)


def _check_streams(name: str, given: Sequence[OnDevice]) -> None:
    """Refuse memory of a side stream on another one; a backward runs on the streams of its
    forward.
    """
    for each in given:
        memory = each.made_on
        if memory is None or _thread.backward or _current_stream(each.where) in memory.streams:
            continue
        raise RuntimeError(
            f"{name} reads a tensor that another stream has made, and no record_stream keeps its "
            "memory"
        )


@cache
def _base_name(func: Any) -> str:
    return func.name().split(".")[0]


def _opened(value: Any, tensors: list[Tensor]) -> Any:
    """The value with the CPU tensors inside; the tensors that it held are appended to
    ``tensors``.
    """
    if isinstance(value, OnDevice):
        tensors.append(value)
        return value.inner
    if isinstance(value, list | tuple):
        return [_opened(each, tensors) for each in value]
    if isinstance(value, Tensor):
        tensors.append(value)
    return value


def _closed(value: Any, where: torch.device, given: Sequence[OnDevice]) -> Any:
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
        return type(value)(_closed(each, where, given) for each in value)
    return value


def _check_devices(name: str, tensors: list[Tensor]) -> None:
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
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back
    called_by_engine = frame is not None and frame.f_code.co_name == "_engine_run_backward"
    return (
        called_by_engine
        and len(devices - {None}) == 1
        and not any(map(_has_numbers_of_cpu, tensors))
    )


def _has_numbers_of_cpu(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not isinstance(tensor, OnDevice) and bool(tensor.any())


def _counts(tensor: Tensor) -> bool:
    return isinstance(tensor, OnDevice) or tensor.dim() > 0


# ------------------------------------------------------------------------------------------------
# process groups

# functions of torch.distributed before they were replaced
_real: dict[str, Callable[..., Any]] = {}
# Group name -> (what the caller asked for; the gloo group that carries the tensors where it asked
# for NCCL alone).
_groups: dict[str, tuple[str, Any]] = {}
_BOTH = "cpu:gloo,cuda:nccl"
# Types of more than a byte that NCCL carries.
_OF_NCCL = {
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}


def _asked(backend: Any) -> str:
    """The backend as a GPU box would understand it."""
    name = "" if backend is None else str(backend)
    return _BOTH if name in ("", "undefined") else name


def _real_backend(name: str) -> str:
    """What stands in for it: gloo, for tensors of the same devices."""
    if name == "nccl":
        return "cuda:gloo"
    return name.replace("nccl", "gloo")


def _register(group: Any, name: str, ranks: list[int] | None, options: dict[str, Any]) -> None:
    if isinstance(group, dist.ProcessGroup):
        # The group itself refuses tensors of the CPU; those that say cuda, and are of the CPU, go
        # through another one.
        carrier = _real["new_group"](ranks, backend="gloo", **options) if name == "nccl" else None
        _groups[group.group_name] = (name, carrier)


def _init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
    name = _asked(backend)
    kwargs.pop("device_id", None)
    _real["init_process_group"](_real_backend(name), *args, **kwargs)
    _register(dist.group.WORLD, name, None, {})


def _new_group(
    ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
) -> Any:
    name = _groups[dist.group.WORLD.group_name][0] if backend is None else _asked(backend)
    group = _real["new_group"](ranks, timeout, _real_backend(name), *args, **kwargs)
    local = {key: kwargs[key] for key in ("use_local_synchronization",) if key in kwargs}
    if isinstance(group, dist.ProcessGroup) or not local:
        _register(group, name, ranks, local)
    return group


def _get_backend(group: Any = None) -> str:
    group = dist.group.WORLD if group is None else group
    known = _groups.get(group.group_name)
    return _real["get_backend"](group) if known is None else known[0]


def _get_backend_config(group: Any = None) -> str:
    name = _get_backend(group)
    if ":" in name:
        return name
    return "cuda:nccl" if name == "nccl" else f"cpu:{name},cuda:{name}"


def _checked_collective(name: str, args: Any) -> Any:
    """Refuse tensors of other devices than this rank's; carry CUDA tensors where NCCL would."""
    _opened(args, given := [])
    tensors = {str(each.where) for each in given if isinstance(each, OnDevice)}
    plain = [each for each in given if not isinstance(each, OnDevice)]
    if plain or len(tensors) > 1:
        devices = sorted(tensors | {"cpu" for _ in plain})
        raise RuntimeError(
            f"Tensors must be CUDA and dense, and on one device, but {name} got {devices}"
        )
    position, group = next(
        (i, _unboxed(arg)) for i, arg in enumerate(args) if _unboxed(arg) is not None
    )
    backend, carrier = _groups.get(group.group_name, ("gloo", None))
    if "cuda" not in _get_backend_config(group):
        raise RuntimeError("No backend type associated with device type cuda")
    if "nccl" in backend and tensors != {f"cuda:{_thread.device}"}:
        raise RuntimeError(
            f"{name} over NCCL got tensors of {', '.join(sorted(tensors))} on a rank whose device "
            f"is cuda:{_thread.device}: Duplicate GPU detected"
        )
    if "nccl" in backend:
        _check_for_nccl([each for each in given if isinstance(each, OnDevice)])
    if carrier is None:
        return args
    return (*args[:position], carrier.boxed(), *args[position + 1 :])


def _check_for_nccl(tensors: list[OnDevice]) -> None:
    """Refuse what NCCL does not carry and gloo does."""
    for each in tensors:
        if each.dtype not in _OF_NCCL and each.element_size() > 1:
            raise RuntimeError(
                f"Input tensor data type is not supported for NCCL process group: {each.dtype}"
            )
        if not each.inner.is_contiguous():
            raise RuntimeError("Tensors must be contiguous")


def _unboxed(value: Any) -> Any:
    if isinstance(value, torch.ScriptObject):
        with contextlib.suppress(RuntimeError, TypeError):
            return dist.ProcessGroup.unbox(value)
    return None


# ------------------------------------------------------------------------------------------------
# functions of torch


class _PretendMode(TorchFunctionMode):
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
    device = _device(kwargs.pop("device"))
    requires_grad = kwargs.pop("requires_grad", False)
    pinned = kwargs.pop("pin_memory", False)
    args, kwargs = _opened(args, given := []), {key: _opened(kwargs[key], given) for key in kwargs}
    out = func(*args, device="meta" if device.type == "meta" else "cpu", **kwargs)
    if device.type == "cuda":
        if pinned:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        out = OnDevice(out.detach().clone() if given else out.detach(), device)
        if _Stream.entered:
            _note_stream(out)
    return out.requires_grad_(requires_grad) if requires_grad else out


def _to(func: Any, args: Any, kwargs: Any) -> Any:
    """``Tensor.to``, ``cuda`` and ``cpu``."""
    x, rest = args[0], list(args[1:])
    device = _device(kwargs.pop("device", None))
    if func is Tensor.cpu:
        device, rest = torch.device("cpu"), []
    elif func is Tensor.cuda:
        device = device or _device(rest[0] if rest and rest[0] is not None else "cuda")
        rest = []
    for position, argument in enumerate(rest):
        if isinstance(argument, Tensor):
            device, rest[position] = argument.device, argument.dtype
        elif isinstance(argument, str | torch.device) or (type(argument) is int and position == 0):
            device = _device(argument)
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
            else _moved_leaf(x, device)
        )
    elif device is not None and x.is_meta and device.type != "meta":
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    elif copy:
        x = x.clone()
    return Tensor.to(x, *rest, **kwargs) if rest or kwargs else x


def _moved_leaf(x: Tensor, device: torch.device) -> Tensor:
    with torch.no_grad():
        return _moved(x, device)


def _set_data(func: Any, args: Any, kwargs: Any) -> None:
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
        x.grad = None if gradient is None else _moved_leaf(gradient, x.device)
    else:
        func(x, y)


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
        _opened(args, tensors),
        {key: _opened(kwargs[key], tensors) for key in kwargs},
    )
    _check_devices(func.__name__, tensors)
    devices = [each.where for each in tensors if isinstance(each, OnDevice)]
    out = func(*inner_args, **inner_kwargs)
    return _closed(out, devices[0], ()) if devices else out


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
    Tensor.to: _to,
    Tensor.cuda: _to,
    Tensor.cpu: _to,
    Tensor.data.__set__: _set_data,
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


# ------------------------------------------------------------------------------------------------
# torch.cuda


class _Stream:
    """A stream; everything is done when it is asked for."""

    cuda_stream = 0
    entered = False  # any of this process

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = _device("cuda" if device is None else device)
        self._before: list[tuple[int, _Stream]] = []

    def __enter__(self) -> _Stream:
        index, _Stream.entered = self.device.index, True
        self._before.append((_thread.device, _current_stream(index)))
        _thread.device, _thread.streams[index] = index, self
        return self

    def __exit__(self, *_: Any) -> None:
        _thread.device, _thread.streams[self.device.index] = self._before.pop()

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, stream: Any) -> None:
        if not isinstance(stream, _Stream):
            raise TypeError(f"wait_stream takes a torch.cuda.Stream, not a {type(stream).__name__}")

    def wait_event(self, event: Any) -> None:
        if not isinstance(event, _Event):
            raise TypeError(f"wait_event takes a torch.cuda.Event, not a {type(event).__name__}")

    def record_event(self, event: Any = None) -> _Event:
        return _Event() if event is None else event


class _Event:
    """An event; it has happened when it was recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._timed = enable_timing

    def record(self, stream: Any = None) -> None:
        return None

    def wait(self, stream: Any = None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        if not self._timed:
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return 0.001


class _CurrentDevice:
    """``torch.cuda.device(k)``."""

    def __init__(self, device: Any) -> None:
        self.index = _device(device).index if device is not None else _thread.device

    def __enter__(self) -> None:
        self.before, _thread.device = _thread.device, self.index

    def __exit__(self, *_: Any) -> None:
        _thread.device = self.before


def _set_device(device: Any) -> None:
    _thread.device = _device(device).index


def _current_device() -> int:
    _use_device()
    return _thread.device


class _Properties:
    name, major, minor, total_memory, multi_processor_count = "pretended GPU", 9, 0, 16 << 30, 132

    def __init__(self, device: Any = None) -> None:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(_Devices.count)))
        self.uuid = f"pretended GPU {shown.split(',')[_device(device).index]}"


def _in_stream(stream: Any) -> Any:
    return contextlib.nullcontext() if stream is None else stream


_default_streams: dict[int, _Stream] = {}


def _default_stream(device: Any = None) -> _Stream:
    index = _device("cuda" if device is None else device).index
    return _default_streams.setdefault(index, _Stream(index))


def _current_stream(device: Any = None) -> _Stream:
    index = _device("cuda" if device is None else device).index
    return _thread.streams.get(index) or _default_stream(index)


def _set_stream(stream: Any) -> None:
    if stream is not None:
        _Stream.entered = True
        _thread.device, _thread.streams[stream.device.index] = stream.device.index, stream


class _Generator(torch.Generator):
    """A generator of a device; its numbers are those of the CPU's."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        where = _device(device)
        made = super().__new__(cls, device="cpu")
        made.where = where
        return made

    device = property(lambda self: self.where)


def _cuda_functions() -> dict[str, Any]:
    return {
        "is_available": lambda: _Devices.count > 0,
        "device_count": lambda: _Devices.count,
        "is_initialized": lambda: _Devices.owner == os.getpid(),
        "init": _use_device,
        "current_device": _current_device,
        "set_device": _set_device,
        "device": _CurrentDevice,
        "synchronize": lambda device=None: _use_device(),
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: _Properties.name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": _Properties,
        "mem_get_info": lambda device=None: (_Properties.total_memory, _Properties.total_memory),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "stream": _in_stream,
        "set_stream": _set_stream,
        "is_current_stream_capturing": lambda: False,
    }


def _accelerator_functions() -> dict[str, Any]:
    """Of ``torch.accelerator``, by which an optimizer of torch 2.15 asks whether a graph is being
    captured.
    """
    return {
        "is_available": lambda: _Devices.count > 0,
        "device_count": lambda: _Devices.count,
        "current_accelerator": lambda check_available=False: (
            torch.device("cuda") if _Devices.count else None
        ),
        "current_device_index": _current_device,
        "current_stream": _current_stream,
        "synchronize": lambda device=None: _use_device(),
    }


# ------------------------------------------------------------------------------------------------
# all together


def set_count(count: int) -> None:
    """Make it so many GPUs, of which a launcher may show this process some."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:  # an empty list hides all of them
        count = min(count, len([one for one in shown.split(",") if one]))
    _Devices.count = count


def install(count: int) -> None:
    """Give this process ``count`` pretended GPUs, in every thread, until it ends."""
    set_count(count)
    sys.meta_path.insert(0, _GiveType())
    for name, value in _cuda_functions().items():
        setattr(torch.cuda, name, value)
    for name, value in _accelerator_functions().items():
        setattr(torch.accelerator, name, value)
    torch.Generator = _Generator
    torch.cuda.nccl.version = lambda: (2, 28, 9)  # torch.distributed logs it with an error
    replaced = {
        "init_process_group": _init_process_group,
        "new_group": _new_group,
        "get_backend": _get_backend,
        "get_backend_config": _get_backend_config,
        "is_nccl_available": lambda: True,
    }
    for name, value in replaced.items():
        _real[name] = getattr(dist, name)
        for module in (dist, dist.distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, value)
    init_ddp = torch.nn.parallel.DistributedDataParallel.__init__

    @wraps(init_ddp)
    def init_ddp_with_own_gradients(self: Any, *args: Any, **kwargs: Any) -> None:
        # Its buckets are tensors that C++ made, on the CPU: gradients may not be views of them.
        init_ddp(self, *args, **{**kwargs, "gradient_as_bucket_view": False})

    torch.nn.parallel.DistributedDataParallel.__init__ = init_ddp_with_own_gradients
    load = torch.load

    def load_to(*args: Any, map_location: Any = None, **kwargs: Any) -> Any:
        _map_location.append(map_location)
        try:
            return load(*args, map_location=map_location, **kwargs)
        finally:
            _map_location.pop()

    load_to.__module__, load_to.__qualname__ = "torch", "load"  # pickled by its name, as torch's is
    torch.load = load_to
    torch.serialization.add_safe_globals([_rebuild])
    _enter_every_backward()
    _enter_every_thread()


def _enter_every_backward() -> None:
    """A mode leaves while it serves a call, ``backward`` too, in which functions in Python make
    tensors: enter it.
    """
    run = torch.autograd.graph._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        before, _thread.backward = _thread.backward, True
        try:
            with (
                contextlib.nullcontext() if torch._C._len_torch_function_stack() else _PretendMode()
            ):
                return run(*args, **kwargs)
        finally:
            _thread.backward = before

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
        and not _has_numbers_of_cpu(gradient)
    )
    return OnDevice(gradient, where) if zeros and where is not None else gradient


def _enter_every_thread() -> None:
    """A mode belongs to a thread: enter it in this one and in all that are started later."""
    _PretendMode().__enter__()
    start = threading.Thread.start

    def start_in_mode(self: threading.Thread) -> None:
        run = self.run  # a subclass may have its own

        def run_in_mode() -> None:
            with _PretendMode():
                run()

        self.run = run_in_mode  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_in_mode  # type: ignore[method-assign]

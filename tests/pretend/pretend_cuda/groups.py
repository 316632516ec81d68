"""Process groups: gloo carries the tensors, NCCL's and gloo's refusals are those of a GPU box."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from pretend_cuda.devices import thread
from pretend_cuda.tensors import OnDevice, opened

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


def checked_collective(name: str, args: Any) -> Any:
    """Refuse tensors of other devices than this rank's; carry CUDA tensors where NCCL would."""
    opened(args, given := [])
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
    if "nccl" in backend and tensors != {f"cuda:{thread.device}"}:
        raise RuntimeError(
            f"{name} over NCCL got tensors of {', '.join(sorted(tensors))} on a rank whose device "
            f"is cuda:{thread.device}: Duplicate GPU detected"
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


def install() -> None:
    """Replace the functions of ``torch.distributed`` that make groups and name their backends."""
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


def install_ddp() -> None:
    """Let gradients of DistributedDataParallel have memory of their own.

    Its buckets are tensors that C++ made, on the CPU: gradients may not be views of them.
    """
    init = torch.nn.parallel.DistributedDataParallel.__init__

    @wraps(init)
    def init_with_own_gradients(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "gradient_as_bucket_view": False})

    torch.nn.parallel.DistributedDataParallel.__init__ = init_with_own_gradients

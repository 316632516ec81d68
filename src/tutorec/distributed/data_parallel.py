"""Data parallelism of the dense layers of a sharded model.

`DistributedDataParallel` broadcasts rank 0's parameters when it wraps a module, and averages
gradients in backward. It must ignore shards: it would overwrite each rank's rows with rank 0's,
without an error.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tutorec.distributed.collectives.autograd import get_gradient_division
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.sharded_module import ShardedModule
from tutorec.optim.optimizers import in_backward_optimizer_filter
from tutorec.spmd.rank import backend_for

# Buffers are not broadcast at each forward. torch 2.13 has a new name for the option and warns at
# the old one.
_SYNC_BUFFERS = "forward_sync_buffers"
_DDP_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {
    _SYNC_BUFFERS if _SYNC_BUFFERS in _DDP_PARAMETERS else "broadcast_buffers": False
}
_COMPRESSION = {"fp16": "fp16_compress_hook", "bf16": "bf16_compress_hook"}


class HoldsModel(Protocol):
    """The attributes of a `DistributedModelParallel` that a wrapper uses."""

    _dmp_wrapped_module: nn.Module

    @property
    def module(self) -> nn.Module:
        """The sharded model."""
        ...


class DataParallelWrapper(ABC):
    """Base of wrappers of the dense layers of a sharded model.

    Source:
        TorchRec's ``torchrec.distributed.model_parallel.DataParallelWrapper``.
    """

    @abstractmethod
    def wrap(self, dmp: HoldsModel, env: ShardingEnv, device: torch.device) -> None:
        """Replace ``dmp._dmp_wrapped_module``, the sharded model, by the wrapped model."""


class DefaultDataParallelWrapper(DataParallelWrapper):
    """Wraps a model in `DistributedDataParallel`, which ignores all sharded parameters and buffers.

    A model without dense parameters is not wrapped.

    Args:
        bucket_cap_mb: Megabytes of gradients that are averaged together.
        static_graph: Whether every step uses the same dense parameters; then some may have no
            gradient at all.
        find_unused_parameters: Whether to find the used dense parameters at each step; needs
            ``static_graph=False``.
        allreduce_comm_precision: Data type in which gradients are sent: ``"fp16"``, or over NCCL
            ``"bf16"``; float32 by default.
        params_to_ignore: Names of further parameters that ranks do not share.
        ddp_kwargs: Further arguments of `DistributedDataParallel`.

    Raises:
        ValueError: The precision is unknown.

    Source:
        TorchRec's ``torchrec.distributed.model_parallel.DefaultDataParallelWrapper``.
    """

    def __init__(
        self,
        bucket_cap_mb: int = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
        allreduce_comm_precision: str | None = None,
        params_to_ignore: Iterable[str] | None = None,
        ddp_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if allreduce_comm_precision not in (None, *_COMPRESSION):
            raise ValueError(
                f"allreduce_comm_precision={allreduce_comm_precision!r}: gradients are sent as one "
                f"of {[*_COMPRESSION]}, or unchanged (None)"
            )

        self._options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            # DDP searches for unused parameters only if the graph may change.
            "static_graph": static_graph and not find_unused_parameters,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": True,
            **_KEEP_BUFFERS,
            **(ddp_kwargs or {}),
        }
        self._precision = allreduce_comm_precision
        self._params_to_ignore = set(params_to_ignore or ())

    def wrap(self, dmp: HoldsModel, env: ShardingEnv, device: torch.device) -> None:
        """Wrap the model, unless it has no dense parameters.

        Raises:
            ValueError: There are dense parameters but no process group, they were never allocated,
                one has an optimizer in backward, or the backend cannot add bfloat16.
        """
        module = dmp.module
        ignored = sharded_parameter_names(module) | self._params_to_ignore
        dense = {
            name: parameter
            for name, parameter in module.named_parameters()
            if name not in ignored and parameter.requires_grad
        }
        if not dense:
            return
        first = next(iter(dense))

        if env.process_group is None:
            raise ValueError(
                "DistributedDataParallel needs a process group for the dense parameters "
                f"({first!r} and {len(dense) - 1} more), and this ShardingEnv has none: use "
                "ShardingEnv.from_process_group, or init_data_parallel=False"
            )

        unmade = [name for name, parameter in dense.items() if parameter.is_meta]
        if unmade:
            raise ValueError(
                f"dense parameter {unmade[0]!r} and {len(unmade) - 1} more are on the meta device "
                "and have no values: leave init_parameters=True, or allocate and fill them before "
                "init_data_parallel()"
            )

        stepped = [name for name, _ in in_backward_optimizer_filter(dense.items(), include=True)]
        if stepped:
            raise ValueError(
                f"dense parameter {stepped[0]!r} and {len(stepped) - 1} more have an optimizer in "
                "backward, which would step with the gradient of this rank alone: "
                "apply_optimizer_in_backward to the tables that the plan shards, and give the "
                "dense parameters an ordinary optimizer"
            )

        if (
            self._precision == "bf16"
            and (carrier := backend_for(env.process_group, device.type)) != "nccl"
        ):
            raise ValueError(
                f"allreduce_comm_precision='bf16' needs NCCL, and {carrier} carries the gradients "
                f"of {device.type}: use 'fp16'"
            )

        # DDP reads this attribute of the module that it wraps.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted(ignored))
        wrapped = DistributedDataParallel(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=env.process_group,
            **self._options,
        )
        if self._precision is not None or not get_gradient_division():
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            hook = getattr(
                default_hooks,
                _COMPRESSION[self._precision] if self._precision else "allreduce_hook",
            )
            wrapped.register_comm_hook(
                env.process_group,
                hook if get_gradient_division() else _summing(hook, env.world_size),
            )
        dmp._dmp_wrapped_module = wrapped


def _summing(averages: Callable[..., Any], world_size: int) -> Callable[..., Any]:
    """A DDP hook that sums gradients over ranks, from one that averages them."""
    # A lambda, since DDP requires specific annotations or none.
    return lambda group, bucket: averages(group, bucket).then(
        lambda averaged: averaged.value().mul_(world_size)
    )


def sharded_parts(module: nn.Module) -> Iterator[tuple[str, ShardedModule[Any, Any, Any, Any]]]:
    """(path, module) of every sharded module in a model, each once."""
    for path, child in module.named_modules():
        if isinstance(child, ShardedModule):
            yield path, child


def sharded_parameter_names(module: nn.Module) -> set[str]:
    """Names of all parameters and buffers inside sharded modules, including nested ones."""
    return {
        f"{path}.{name}" if path else name
        for path, child in sharded_parts(module)
        for names in (child.named_parameters(), child.named_buffers())
        for name, _ in names
    }

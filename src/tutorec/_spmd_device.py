"""Which device is a rank's own, and which backends carry its process group."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["BOTH_BACKENDS", "backend_for", "device", "local_place", "pick_backend", "under_torchrun"]

BOTH_BACKENDS = "cpu:gloo,cuda:nccl"


def device() -> torch.device:
    """The device of this rank: ``cuda:k`` where every rank has a GPU of its own, else the CPU.

    A process that is in no process group yet is one rank of those that torchrun describes, or a world of one.

    Example:
        >>> import torch
        >>> torch.ones(2, device=device()).device == device()
        True
    """
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return torch.device("cpu")
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is not None:
        on_gpu, index = backend_for(group, "cuda") == "nccl", torch.cuda.current_device()
    else:
        index, ranks_here = local_place(0, 1) if under_torchrun() else (torch.cuda.current_device(), 1)
        on_gpu = pick_backend("auto", ranks_here) == BOTH_BACKENDS
    return torch.device("cuda", index) if on_gpu else torch.device("cpu")


def pick_backend(backend: str, ranks_here: int) -> str:
    """The process group's backend where ``ranks_here`` ranks share this machine.

    Where each of them can have a GPU, one group carries tensors of the CPU by gloo and tensors of the GPUs by NCCL.
    Elsewhere it is gloo. ``"nccl"`` demands a GPU for each rank.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = gpus >= ranks_here and torch.distributed.is_nccl_available()
    if backend == "nccl" and not enough:
        raise ValueError(
            f"backend='nccl' needs a GPU for each rank: {ranks_here} ranks, {gpus} GPUs; use 'gloo' or 'auto'"
        )
    return BOTH_BACKENDS if enough and backend != "gloo" else "gloo"


def backend_for(group: Any, device_type: str) -> str | None:
    """What carries the group's tensors of ``"cpu"`` or ``"cuda"``: ``"gloo"``, ``"nccl"``; None when nothing does."""
    import torch.distributed as dist

    carriers = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return carriers.get(device_type)


def local_place(rank: int, world_size: int) -> tuple[int, int]:
    """Index of this rank among those of its machine, and their number, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ

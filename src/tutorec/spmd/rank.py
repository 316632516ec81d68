"""One rank: its device, the backends of its process group, its progress, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import socket
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed
    from torch._C._distributed_c10d import Store

BOTH_BACKENDS = "cpu:gloo,cuda:nccl"
_END_SECONDS = 0.05
_groups: weakref.WeakSet[torch.distributed.ProcessGroup] = weakref.WeakSet()

# Of each rank, in memory that outlives it: its number of exchanges and what the last ones were for,
# split by |. ``messages.py`` reads it.
PROGRESS_BYTES = 512
_PROGRESS_FILE = "progress"
_exchanges = 0
_latest: deque[str] = deque(maxlen=8)
_memory: list[tuple[mmap.mmap, int]] = []


def device() -> torch.device:
    """The device of this rank: ``cuda:k`` where every rank has a GPU of its own, else the CPU.

    A process that is in no process group yet is one rank of those that torchrun describes, or a
    world of one. Where a launcher shows each rank one GPU alone, only the group tells: call
    :func:`tutorec.spmd.init` first.

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
        on_gpu = backend_for(group, "cuda") == "nccl"
        index = torch.cuda.current_device()
    else:
        index = int(os.environ["LOCAL_RANK"]) if under_torchrun() else torch.cuda.current_device()
        ranks_here = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else 1
        on_gpu = torch.cuda.device_count() >= ranks_here
    return torch.device("cuda", index) if on_gpu else torch.device("cpu")


def own_gpu(local_rank: int) -> int | None:
    """Index of the GPU of the rank with this index on its machine; None if it has none.

    A launcher may show each rank one GPU alone, at index 0.
    """
    import torch

    gpus = (
        torch.cuda.device_count()
        if torch.cuda.is_available() and torch.distributed.is_nccl_available()
        else 0
    )
    return local_rank if local_rank < gpus else 0 if gpus == 1 else None


def pick_backend(backend: str, store: Store, rank: int, world_size: int, gpu: int | None) -> str:
    """The backend of a process group whose ranks exchange their GPUs through the store.

    Where no rank lacks a GPU and no two share one, the group carries tensors of the CPU by gloo and
    tensors of the GPUs by NCCL. Elsewhere it is gloo.

    Args:
        backend: ``"auto"``; ``"gloo"``, which leaves GPUs alone; ``"nccl"``, which demands a GPU
            for each rank.
        store: The rendezvous of the group.
        rank: This process's rank.
        world_size: W, the number of ranks.
        gpu: Index of this rank's GPU, from :func:`own_gpu`.

    Raises:
        ValueError: the backend is ``"nccl"``, and there are fewer GPUs than ranks.
    """
    import torch

    uuid = (
        "" if gpu is None or backend == "gloo" else str(torch.cuda.get_device_properties(gpu).uuid)
    )
    store.set(f"GPU of rank {rank}", uuid)
    if not uuid and backend != "nccl":
        return "gloo"

    gpus = {store.get(f"GPU of rank {other}") for other in range(world_size)} - {b""}
    if len(gpus) == world_size:
        return BOTH_BACKENDS
    if backend == "nccl":
        counts = f"{world_size} ranks, {len(gpus)} GPUs"
        raise ValueError(f"backend='nccl' needs a GPU per rank: {counts}; use 'gloo' or 'auto'")
    return "gloo"


def backend_for(group: Any, device_type: str) -> str | None:
    """The backend of the group's ``"cpu"`` or ``"cuda"`` tensors: gloo, nccl, or None."""
    import torch.distributed as dist

    carriers = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return carriers.get(device_type)


def loopback() -> dict[str, str]:
    """The environment in which gloo uses the loopback interface; empty if there is none."""
    with contextlib.suppress(AttributeError, OSError):
        names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}
    return {}


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def note(stage: str) -> None:
    """This rank begins an exchange; called before each."""
    global _exchanges
    _exchanges += 1
    _latest.append(stage)
    for memory, start in _memory:
        text = f"{_exchanges}|{'|'.join(_latest)}".encode()
        memory[start : start + PROGRESS_BYTES] = text[:PROGRESS_BYTES].ljust(PROGRESS_BYTES)


def share_progress(folder: str, rank: int, world_size: int) -> mmap.mmap:
    """Memory that a pool's ranks and caller share, through a file that can then be removed.

    Args:
        folder: Of the pool.
        rank: Where this rank writes from now on; the caller says -1 and writes nothing.
        world_size: W, ranks.
    """
    descriptor = os.open(os.path.join(folder, _PROGRESS_FILE), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.truncate(descriptor, PROGRESS_BYTES * world_size)
        memory = mmap.mmap(descriptor, PROGRESS_BYTES * world_size)
    finally:
        os.close(descriptor)

    _memory[:] = [(memory, PROGRESS_BYTES * rank)] if rank >= 0 else _memory
    return memory


def give_threads_time(group: torch.distributed.ProcessGroup) -> None:
    """Wait a moment at this process's end if the group still exists, without the GIL.

    A thread of gloo that has ended a collective drops its tensors a moment later, and needs the
    interpreter for that. If Python is exiting just then, the thread is ended in code that C++ does
    not allow, and the process aborts with "terminate called without an active exception": on a busy
    machine two in a hundred scripts whose last step is a collective. ``destroy_process_group`` does
    not help where a model still holds the group.
    """
    _groups.add(group)


@atexit.register
def _wait() -> None:
    if _groups:
        time.sleep(_END_SECONDS)

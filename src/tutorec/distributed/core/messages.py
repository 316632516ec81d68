"""Messages between ranks that are rare and small, and block: integers, objects, one rank's tensor.

What a training step exchanges is in flight while the rank computes; see ``comm.py``, whose rules
hold here too.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tutorec.distributed.comm import announce
from tutorec.spmd.devices import backend_for


def broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup, stage: str) -> None:
    """Overwrite a tensor on every rank with that of one rank. Blocks.

    The source sends the tensor to each other rank.

    Args:
        tensor: Same shape and dtype on every rank; written in place.
        source: The rank of ``group`` whose values are used.
        group: The ranks.
        stage: The name under which the bytes are counted.
    """
    world_size = group.size()
    if world_size == 1:
        return
    size = tensor.numel() * tensor.element_size() if group.rank() == source else 0
    announce(group, stage, [size] * world_size)
    dist.broadcast(tensor, dist.get_global_rank(group, source), group)


def message_device(group: dist.ProcessGroup) -> torch.device:
    """Device on which a message must be: the CPU, or the GPU if the group supports no other."""
    if backend_for(group, "cpu") is not None:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def broadcast_object(value: Any, source: int, group: dist.ProcessGroup, stage: str) -> Any:
    """Return a picklable object of one rank on every rank. Blocks; for rare, small messages.

    Args:
        value: The object; ignored on ranks other than ``source``.
        source: A rank of ``group``.
        group: The ranks.
        stage: The name under which the bytes are counted.

    Returns:
        The source's object: the same object on the source, a copy elsewhere.
    """
    if group.size() == 1:
        return value
    mine = group.rank() == source
    device = message_device(group)
    pickled = (
        torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        if mine
        else torch.empty(0)
    )
    size = torch.tensor([pickled.numel()], device=device)
    broadcast(size, source, group, stage)
    content = (
        pickled.to(device) if mine else torch.empty(int(size), dtype=torch.uint8, device=device)
    )
    broadcast(content, source, group, stage)
    return value if mine else pickle.loads(content.cpu().numpy().tobytes())


def all_gather_ints(values: Sequence[int], group: dist.ProcessGroup, stage: str) -> list[list[int]]:
    """The 64-bit integers of every rank, in rank order; every rank passes the same number of them.

    Blocks. Sends ``8 * len(values)`` bytes to each other rank.
    """
    world_size = group.size()
    if world_size == 1:
        return [list(values)]
    announce(group, stage, [8 * len(values)] * world_size)
    device = message_device(group)
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine, group)
    return torch.stack(gathered).tolist()


def all_gather_objects(value: Any, group: dist.ProcessGroup, stage: str) -> list[Any]:
    """A picklable object of every rank, in rank order. Blocks; for rare, small messages."""
    world_size = group.size()
    if world_size == 1:
        return [value]
    announce(group, stage, [0] * world_size)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, value, group)
    return gathered

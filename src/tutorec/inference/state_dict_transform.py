"""Transfer of a sharded model's state to an unsharded model, under TorchRec's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.state.sharded_tensor import ShardedTensor
from tutorec.distributed.state.state_dict import sharded_tensor

__all__ = ["state_dict_gather", "state_dict_to_device"]


def state_dict_to_device(
    state_dict: Mapping[str, torch.Tensor | ShardedTensor],
    pg: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, torch.Tensor | ShardedTensor]:
    """A state with its tensors on another device; sharded tensors keep their shards.

    Nothing is sent between ranks. Tensors that are already on the device are not copied.

    Args:
        state_dict: State of a sharded model, on every rank.
        pg: A process group of the model's ranks with a backend for the device: gloo for the CPU.
        device: The device.

    Source:
        TorchRec's ``torchrec.inference.state_dict_transform.state_dict_to_device``.
    """
    return {
        name: _moved(value, pg, device) if isinstance(value, ShardedTensor) else value.to(device)
        for name, value in state_dict.items()
    }


def _moved(value: Any, pg: dist.ProcessGroup, device: torch.device) -> ShardedTensor:
    metadata = value.metadata()
    ranks = dist.get_process_group_ranks(pg)
    shards = metadata.shards_metadata
    rectangles = [
        (list(shard.shard_offsets), list(shard.shard_sizes), ranks.index(shard.placement.rank()))
        for shard in shards
    ]
    local = [shard.tensor.to(device) for shard in value.local_shards()]
    dtype = metadata.tensor_properties.dtype
    env = ShardingEnv.from_process_group(pg)

    return sharded_tensor(metadata.size, rectangles, local, dtype, env, device)


def state_dict_gather(
    src: Mapping[str, torch.Tensor | ShardedTensor], dst: Mapping[str, torch.Tensor]
) -> None:
    """Copy a state into another's tensors; sharded tensors are gathered on rank 0. A collective.

    `full_state_dict` does this without a destination.

    Args:
        src: A sharded model's state, with the names of ``dst``.
        dst: An unsharded model's state; on ranks other than 0 its tables may be on the meta device.

    Raises:
        KeyError: ``src`` lacks a name.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> state_dict_gather({"weight": torch.tensor([[3.0, 4.0]])}, model.state_dict())
        >>> model.weight.tolist()
        [[3.0, 4.0]]

    Source:
        TorchRec's ``torchrec.inference.state_dict_transform.state_dict_gather``.
    """
    missing = [name for name in dst if name not in src]
    if missing:
        raise KeyError(f"the state lacks {missing[:5]}; it has {list(src)[:5]}")

    for name, target in dst.items():
        value = src[name]
        if isinstance(value, ShardedTensor):
            value.gather(out=target if dist.get_rank() == 0 else None, dtype=target.dtype)
        else:
            target.copy_(value)

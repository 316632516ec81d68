"""The norm of gradients over ranks, the ``reduce_norm`` of `GradientClippingOptimizer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tutorec.distributed import comm
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.data_parallel import sharded_parts
from tutorec.distributed.plan.plan import ShardingType

_STAGE = "gradient norm"


class NormOverRanks:
    """Reduces numbers over ranks, and knows which gradients are sharded.

    Sharded are the gradients of sharded tables with the ``dense`` kernel. Dense layers and
    data-parallel tables have the same gradient on every rank, which counts once. Each call sends 8
    bytes to each other rank.

    Args:
        model: A model with sharded collections.
        env: The ranks.

    Example:
        >>> import torch
        >>> reduce = NormOverRanks(torch.nn.Linear(2, 1), ShardingEnv.from_local(1, 0))
        >>> reduce(torch.tensor(25.0), largest=False)
        tensor(25.)
    """

    def __init__(self, model: nn.Module, env: ShardingEnv) -> None:
        self._group = env.group_for("the norm of sharded gradients") if env.world_size > 1 else None
        collections: list[Any] = [
            child for _, child in sharded_parts(model) if hasattr(child, "local_shards")
        ]

        # A rank without gradients has a zero on the CPU, for which another backend than the other
        # ranks' would be used.
        self._device = next((parameter.device for parameter in model.parameters()), None)
        self._device = next((child._device for child in collections), self._device)
        # Referenced so that no other object gets the id of a deleted one.
        self._sharded: dict[int, Tensor] = {
            id(rows): rows
            for child in collections
            for shards in child.local_shards()
            if shards.table.sharding_type is not ShardingType.DATA_PARALLEL
            for rows in shards.rows
        }

    def is_sharded(self, parameter: Tensor) -> bool:
        """Whether a parameter is a shard of a table with shards on other ranks."""
        return id(parameter) in self._sharded

    def __call__(self, part: Tensor, largest: bool) -> Tensor:
        """The sum or maximum over ranks of ``part []``, with the same bits on all ranks."""
        if self._group is None:
            return part
        own = part.detach().to(self._device).view(1).contiguous()
        every = comm.all_gather(own, [1] * self._group.size(), self._group, _STAGE).wait()
        return torch.amax(every) if largest else every.sum()


__all__ = ["NormOverRanks"]

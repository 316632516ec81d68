"""The norm of gradients that lie on several ranks: what `GradientClippingOptimizer` is given as ``reduce_norm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tutorec.distributed import comm
from tutorec.distributed.data_parallel import sharded_parts
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.plan import ShardingType

_STAGE = "gradient norm"


class NormOverRanks:
    """Adds up numbers over ranks, and knows which gradients a rank has only a part of.

    Those are the gradients of sharded tables with the ``dense`` kernel. Of dense layers and of data-parallel tables
    every rank has the same gradient, which counts once. Each call sends 8 bytes to each other rank.

    Args:
        model: With its collections sharded.
        env: The ranks.

    Example:
        >>> import torch
        >>> reduce = NormOverRanks(torch.nn.Linear(2, 1), ShardingEnv.from_local(1, 0))
        >>> reduce(torch.tensor(25.0), largest=False)
        tensor(25.)
    """

    def __init__(self, model: nn.Module, env: ShardingEnv) -> None:
        self._group = env.group_for("the norm of sharded gradients") if env.world_size > 1 else None
        parts: list[Any] = [part for _, part in sharded_parts(model)]
        # A rank without gradients has a zero on the CPU, which another backend would carry than the others' parts.
        self._device = next((parameter.device for parameter in model.parameters()), None)
        self._device = next((part._device for part in parts), self._device)
        # Held so that no other object takes the id of one that is gone.
        self._sharded: dict[int, Tensor] = {
            id(rows): rows
            for part in parts
            for held in part.held_tables()
            if held.table.sharding_type is not ShardingType.DATA_PARALLEL
            for rows in held.rows
        }

    def is_sharded(self, parameter: Tensor) -> bool:
        """Whether it is rows or columns of a table whose others lie elsewhere."""
        return id(parameter) in self._sharded

    def __call__(self, part: Tensor, largest: bool) -> Tensor:
        """The sum over ranks of ``part []``, or the largest; added in rank order, so that all get the same bits."""
        if self._group is None:
            return part
        mine = part.detach().to(self._device).view(1).contiguous()
        every = comm.all_gather(mine, [1] * self._group.size(), self._group, _STAGE).wait()
        return torch.amax(every) if largest else every.sum()


__all__ = ["NormOverRanks"]

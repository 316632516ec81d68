"""Ratings of a placed plan, from the estimates of its shards.

Corresponds to TorchRec's ``torchrec.distributed.planner.perf_models``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tutorec.distributed.planner.interfaces import PerfModel
from tutorec.distributed.planner.options import Floats, ShardingOption

if TYPE_CHECKING:
    from tutorec.distributed.planner.topology import Topology


class NoopPerfModel(PerfModel):
    """Rates a plan by its slowest rank: the milliseconds of the rank's shards.

    Args:
        topology: The ranks.

    Example:
        >>> from types import SimpleNamespace
        >>> from tutorec.distributed.planner.options import Perf, Shard, ShardingOption, Storage
        >>> import torch
        >>> shards = [
        ...     Shard([4, 4], [row, 0], Storage(9, 0), Perf(1 + row, 0, 2, 0), rank=row // 4)
        ...     for row in (0, 4)
        ... ]
        >>> table = "item", torch.empty(8, 4), ("", torch.nn.Identity())
        >>> halves = ShardingOption(*table, [1.0], 2, "row_wise", "uniform", "fused", shards)
        >>> NoopPerfModel(SimpleNamespace(world_size=2)).rate([halves])
        7.0

    Source:
        TorchRec's ``NoopPerfModel``.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology: Topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """Milliseconds of the slowest rank.

        Args:
            plan: Options with placed and estimated shards.

        Raises:
            PlannerError: A shard is not placed, is on a rank outside the topology, or has no
                estimate.
        """
        return _largest_sum(plan, self._topology.world_size, ShardingOption.times)


class NoopStorageModel(PerfModel):
    """Rates a plan by its fullest rank: the bytes of HBM of the rank's shards.

    Args:
        topology: The ranks.

    Source:
        TorchRec's ``NoopStorageModel``.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology: Topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """Bytes of HBM on the fullest rank.

        Args:
            plan: Options with placed and estimated shards.

        Raises:
            PlannerError: A shard is not placed, is on a rank outside the topology, or has no
                estimate.
        """
        return _largest_sum(
            plan, self._topology.world_size, lambda option: option.memory()[:, 0].astype(float)
        )


def _largest_sum(
    plan: list[ShardingOption], world_size: int, amounts: Callable[[ShardingOption], Floats]
) -> float:
    """The largest sum over ranks."""
    sums = np.zeros(world_size)
    for option in plan:
        np.add.at(sums, option.placed_ranks(world_size), amounts(option))
    return float(sums.max())

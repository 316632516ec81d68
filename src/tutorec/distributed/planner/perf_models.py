"""Ratings of a placed plan, from the estimates of its shards.

Corresponds to TorchRec's ``torchrec.distributed.planner.perf_models``.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.planner.topology import Floats, Topology
from tutorec.distributed.planner.types import PerfModel


class _LargestSum(PerfModel):
    """Rates a plan by the rank with the largest sum of a number of its shards.

    Args:
        topology: The ranks.
    """

    def __init__(self, topology: Topology) -> None:
        self._world_size = topology.world_size

    def rate(self, plan: list[ShardingOption]) -> float:
        """The largest sum.

        Args:
            plan: Options with placed and estimated shards.

        Raises:
            PlannerError: A shard is not placed, is on a rank outside the topology, or has no
                estimate.
        """
        sums = np.zeros(self._world_size)
        for option in plan:
            np.add.at(sums, option.placed_ranks(self._world_size), self._amounts(option))
        return float(sums.max())

    @abstractmethod
    def _amounts(self, option: ShardingOption) -> Floats:
        """The number of each shard, ``[P]``."""


class NoopPerfModel(_LargestSum):
    """Rates a plan by its slowest rank: the milliseconds of the rank's shards.

    Args:
        topology: The ranks.

    Example:
        >>> from types import SimpleNamespace
        >>> from tutorec.distributed.planner.options import Shard, ShardingOption
        >>> from tutorec.distributed.planner.topology import Perf, Storage
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

    def _amounts(self, option: ShardingOption) -> Floats:
        return option.times()


class NoopStorageModel(_LargestSum):
    """Rates a plan by its fullest rank: the bytes of HBM of the rank's shards.

    Args:
        topology: The ranks.

    Source:
        TorchRec's ``NoopStorageModel``.
    """

    def _amounts(self, option: ShardingOption) -> Floats:
        return option.memory()[:, 0].astype(float)

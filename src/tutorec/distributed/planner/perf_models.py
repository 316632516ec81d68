"""Rating of a placed plan, from the estimates of its shards.

Corresponds to TorchRec's ``torchrec.distributed.planner.perf_models``.
"""

from __future__ import annotations

import numpy as np

from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.planner.types import PerfModel


class NoopPerfModel(PerfModel):
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

    def __init__(self, topology: Topology) -> None:
        self._world_size = topology.world_size

    def rate(self, plan: list[ShardingOption]) -> float:
        """Milliseconds of the slowest rank.

        Args:
            plan: Options with placed and estimated shards.

        Raises:
            PlannerError: A shard is not placed, is on a rank outside the topology, or has no
                estimate.
        """
        rank_times = np.zeros(self._world_size)
        for option in plan:
            np.add.at(rank_times, option.placed_ranks(self._world_size), option.times())

        return float(rank_times.max())

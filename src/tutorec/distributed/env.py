"""Which process group a sharded module lives in."""

from __future__ import annotations

import torch.distributed as dist


class ShardingEnv:
    """The ranks that share the tables of a module: how many there are, and which of them this process is.

    Args:
        world_size: W, ranks.
        rank: This process, from 0.
        pg: The process group, or None where no collective is needed.

    Example:
        >>> env = ShardingEnv.from_local(world_size=2, rank=0)
        >>> env.world_size, env.process_group is None
        (2, True)
    """

    def __init__(self, world_size: int, rank: int, pg: dist.ProcessGroup | None = None) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside of a world of {world_size}: ranks are 0 to {world_size - 1}")
        self.world_size: int = world_size
        self.rank: int = rank
        self.process_group: dist.ProcessGroup | None = pg

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup) -> ShardingEnv:
        """The environment of a process group: training over several processes."""
        return cls(pg.size(), pg.rank(), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """An environment without a process group: one process that drives several devices (inference)."""
        return cls(world_size, rank, None)

    def group_for(self, what: str) -> dist.ProcessGroup | None:
        """The process group; None only in a world of 1, where nothing is sent.

        Raises:
            ValueError: There are several ranks and no group, so ``what`` cannot be done.
        """
        if self.process_group is None and self.world_size > 1:
            raise ValueError(
                f"{what} over {self.world_size} ranks needs a process group, and this ShardingEnv has none "
                "(from_local): use ShardingEnv.from_process_group(torch.distributed.group.WORLD)"
            )
        return self.process_group

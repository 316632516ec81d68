"""Which process group a sharded module lives in."""

from __future__ import annotations

import os
from itertools import groupby

import torch.distributed as dist


class ShardingEnv:
    """The ranks that share the tables of a module: how many there are, and which of them this process is.

    Args:
        world_size: W, ranks.
        rank: This process, from 0.
        pg: The process group, or None where no collective is needed.
        local_size: Ranks per host; by default what ``LOCAL_WORLD_SIZE`` says of the ranks of ``pg``, where that makes
            hosts of equal size, else all of them.

    Example:
        >>> env = ShardingEnv.from_local(world_size=2, rank=0)
        >>> env.world_size, env.local_size, env.process_group is None
        (2, 2, True)
    """

    def __init__(
        self, world_size: int, rank: int, pg: dist.ProcessGroup | None = None, *, local_size: int | None = None
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside of a world of {world_size}: ranks are 0 to {world_size - 1}")
        if local_size is not None and (local_size < 1 or world_size % local_size):
            raise ValueError(
                f"{world_size} ranks make no hosts of {local_size} ranks each: local_size divides the number of ranks"
            )
        self.world_size: int = world_size
        self.rank: int = rank
        self.process_group: dist.ProcessGroup | None = pg
        self.local_size: int = local_size or (_local_size(pg) if pg is not None else world_size)

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


def local_world_size() -> int | None:
    """What ``LOCAL_WORLD_SIZE`` says, the ranks of a host; None where it is not set, or 0.

    Raises:
        ValueError: It is no whole number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "0")
    if not text.isdecimal():
        raise ValueError(f"LOCAL_WORLD_SIZE is {text!r} and not a number of ranks per host: set it, or unset it")
    return int(text) or None


def _local_size(pg: dist.ProcessGroup) -> int:
    """Ranks per host of a group; all of them where its hosts differ in size, or nothing is known of hosts."""
    ranks = dist.get_process_group_ranks(pg)
    on_host = local_world_size()
    if on_host is None:
        return len(ranks)
    hosts = [len(list(members)) for _, members in groupby(ranks, key=lambda rank: rank // on_host)]
    return hosts[0] if len(set(hosts)) == 1 else len(ranks)

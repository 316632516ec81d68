"""`ShardingEnv`: the ranks over which a module is sharded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from itertools import groupby

import torch.distributed as dist

from tutorec.spmd.rank import under_torchrun


class ShardingEnv:
    """The ranks that share the tables of a module, and the rank of this process.

    Args:
        world_size: W, number of ranks.
        rank: Rank of this process, from 0.
        pg: The process group, or None if no collectives are needed.
        output_dtensor: TorchRec's; must be False. State dicts hold ShardedTensors.
        local_size: Ranks per host; by default ``LOCAL_WORLD_SIZE`` if that splits ``pg`` into hosts
            of equal size, else all ranks.

    Example:
        >>> env = ShardingEnv.from_local(world_size=2, rank=0)
        >>> env.world_size, env.local_size, env.process_group is None
        (2, 2, True)
    """

    def __init__(
        self,
        world_size: int,
        rank: int,
        pg: dist.ProcessGroup | None = None,
        output_dtensor: bool = False,
        *,
        local_size: int | None = None,
    ) -> None:
        if output_dtensor:
            raise ValueError(
                "output_dtensor=True: state dicts hold ShardedTensors, not DTensors; leave it out"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside of a world of ranks 0 to {world_size - 1}")
        if local_size is not None and (local_size < 1 or world_size % local_size):
            raise ValueError(
                f"{world_size} ranks cannot be split into hosts of {local_size}: "
                "local_size must divide the number of ranks"
            )

        self.world_size: int = world_size
        self.rank: int = rank
        self.process_group: dist.ProcessGroup | None = pg
        self.local_size: int = local_size or (_local_size(pg) if pg is not None else world_size)

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup) -> ShardingEnv:
        """The environment of a process group, for training with several processes."""
        return cls(pg.size(), pg.rank(), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """An environment without process group: one process drives several devices (inference)."""
        return cls(world_size, rank, None)

    def group_for(self, what: str) -> dist.ProcessGroup | None:
        """Return the process group; None only in a world of 1, where nothing is sent.

        Raises:
            ValueError: There are several ranks and no group; ``what`` names the operation that
                needs it.
        """
        if self.process_group is None and self.world_size > 1:
            raise ValueError(
                f"{what} over {self.world_size} ranks needs a process group, and this ShardingEnv "
                "has none (from_local): use "
                "ShardingEnv.from_process_group(torch.distributed.group.WORLD)"
            )
        return self.process_group


def local_world_size() -> int | None:
    """``LOCAL_WORLD_SIZE``, the ranks of a host; None if not set or 0, or if host sizes differ.

    Raises:
        ValueError: It is not an integer.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "0")
    if not text.isdecimal():
        raise ValueError(
            f"LOCAL_WORLD_SIZE is {text!r}, not a number of ranks per host: set it, or unset it"
        )
    return None if hosts_differ(int(text)) else int(text) or None


def hosts_differ(local_size: int) -> bool:
    """Whether torchrun runs hosts with different numbers of ranks; this one has ``local_size``.

    Each host then says another ``LOCAL_WORLD_SIZE``, and no rank may go by its own. Elsewhere
    nothing is known of it.
    """
    hosts = os.environ.get("GROUP_WORLD_SIZE", "")
    world_size = os.environ.get("WORLD_SIZE", "")
    return under_torchrun() and hosts.isdecimal() and int(hosts) * local_size != int(world_size)


def get_local_size(world_size: int | None = None) -> int:
    """L, the ranks of a host: ``LOCAL_WORLD_SIZE``, as torchrun and `Ranks` set it, or MPI's.

    If it is not set, all ranks share one host; TorchRec assumes 8 ranks per host. If it does not
    divide the number of ranks, or torchrun runs on hosts of different sizes, a warning is issued
    and all ranks share one host.

    Args:
        world_size: W; by default that of the default process group.

    Example:
        >>> get_local_size(world_size=2)
        2

    Source:
        TorchRec's ``torchrec.distributed.comm.get_local_size``.
    """
    world_size = dist.get_world_size() if world_size is None else world_size

    names = (
        "LOCAL_WORLD_SIZE",
        "MPI_LOCALNRANKS",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    )
    local_size = _number_in_environment(names)
    if local_size is None:
        return world_size

    differ = hosts_differ(local_size)
    if local_size < 1 or world_size % local_size or differ:
        reason = "is not that of every host" if differ else f"does not divide {world_size} ranks"
        warnings.warn(
            f"LOCAL_WORLD_SIZE={local_size} {reason}: all ranks are assumed to share one host",
            stacklevel=2,
        )
        return world_size
    return local_size


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """This rank's number on its host: ``LOCAL_RANK`` (or MPI's variable), else rank modulo L.

    Args:
        world_size: W; by default that of the default process group.
        rank: This rank; by default that in the default process group. Used if ``LOCAL_RANK`` is not
            set or not less than L.

    Example:
        >>> get_local_rank(world_size=2, rank=1)
        1

    Source:
        TorchRec's ``torchrec.distributed.comm.get_local_rank``.
    """
    local_size = get_local_size(world_size)

    names = (
        "LOCAL_RANK",
        "MPI_LOCALRANKID",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
    )
    local_rank = _number_in_environment(names)
    if local_rank is None or local_rank >= local_size:
        return (dist.get_rank() if rank is None else rank) % local_size
    return local_rank


def _number_in_environment(names: Sequence[str]) -> int | None:
    """The value of the first set variable, a number from 0; launchers set one of them."""
    for name in names:
        text = os.environ.get(name, "-1")
        if not text.lstrip("-").isdigit():
            raise ValueError(f"{name}={text!r} is not a number of ranks: torchrun and Ranks set it")
        if int(text) >= 0:
            return int(text)
    return None


def ranks_per_host(ranks: Sequence[int], local_size: int) -> int:
    """How many of some ranks share a host; all of them where that differs from host to host.

    Args:
        ranks: Global ranks, ascending.
        local_size: L, ranks of the program on each host.

    Example:
        >>> (
        ...     ranks_per_host([0, 2, 4, 6], local_size=4),
        ...     ranks_per_host([0, 1, 2, 4], local_size=4),
        ... )
        (2, 4)
    """
    hosts = [
        len(list(members)) for _, members in groupby(ranks, key=lambda rank: rank // local_size)
    ]
    return hosts[0] if len(set(hosts)) == 1 else len(ranks)


def sharding_groups(
    world_size: int, size: int, use_inter_host_allreduce: bool = False
) -> list[list[int]]:
    """The ranks of each group that holds a replica of all tables: see `replicas`.

    Args:
        world_size: W.
        size: G, ranks of each group.
        use_inter_host_allreduce: Whether groups are consecutive ranks; otherwise a group is every
            (W / G)-th rank.

    Raises:
        ValueError: W is not divisible by G.

    Example:
        >>> sharding_groups(8, 4), sharding_groups(8, 4, use_inter_host_allreduce=True)
        ([[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]])
    """
    if size < 1 or world_size % size:
        fits = [divisor for divisor in range(1, world_size + 1) if world_size % divisor == 0]
        raise ValueError(
            f"{world_size} ranks cannot be divided into groups of sharding_group_size={size}: "
            f"give one of {fits}"
        )

    groups = world_size // size
    if use_inter_host_allreduce:
        return [list(range(first, first + size)) for first in range(0, world_size, size)]
    return [list(range(first, world_size, groups)) for first in range(groups)]


def _local_size(pg: dist.ProcessGroup) -> int:
    """Ranks per host of a group; all of them if hosts are unknown."""
    ranks = dist.get_process_group_ranks(pg)
    on_host = local_world_size()
    return len(ranks) if on_host is None else ranks_per_host(ranks, on_host)

"""Subgroups of a process group: the ranks of a host, and those with the same local rank."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tutorec.distributed.comm import all_gather_ints, check_thread, default_group


@dataclass(frozen=True)
class HostGroups:
    """The two subgroups that a rank belongs to.

    Args:
        intra: The L ranks of this rank's host; their traffic stays inside the machine.
        cross: The H ranks with this rank's local rank, one per host; their traffic is between
            machines.
    """

    intra: dist.ProcessGroup
    cross: dist.ProcessGroup


# Subgroups of a group by ranks per host; None is the group itself, to avoid a reference
# cycle.
_Subgroups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, _Subgroups]] = (
    weakref.WeakKeyDictionary()
)
# How often this rank has made subgroups together with only the other members of a group.
_rounds_of_names = 0


def host_groups(group: dist.ProcessGroup, local_size: int) -> HostGroups:
    """The groups inside and across hosts of ``local_size`` consecutive ranks of ``group``.

    The first call is collective over ``group``; later calls return the same groups. With 4 ranks on
    2 hosts, rank 3 gets ``intra = {2, 3}`` and ``cross = {1, 3}``.

    Args:
        group: The ranks; may be a part of all ranks of the program.
        local_size: L, ranks per host.

    Raises:
        ValueError: ``local_size`` does not divide the number of ranks.

    Source:
        TorchRec's ``torchrec.distributed.comm.intra_and_cross_node_pg``, which supports the default
        group only.
    """
    world_size = group.size()
    if local_size < 1 or world_size % local_size:
        fits = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"{world_size} ranks cannot be split into hosts of {local_size}: local_size "
            f"(LOCAL_WORLD_SIZE) may be one of {fits}"
        )

    known = _host_groups.setdefault(group, {})
    if local_size not in known:
        check_thread(group)
        known[local_size] = _make_host_groups(group, world_size // local_size, local_size)

    intra, cross = known[local_size]
    return HostGroups(group if intra is None else intra, group if cross is None else cross)


def _make_host_groups(group: dist.ProcessGroup, hosts: int, local_size: int) -> _Subgroups:
    """The groups (intra, cross) of this rank; None for one that equals ``group``."""
    ranks = dist.get_process_group_ranks(group)
    inside = (
        [ranks[host * local_size : (host + 1) * local_size] for host in range(hosts)]
        if hosts > 1
        else []
    )
    across = [ranks[rank::local_size] for rank in range(local_size)] if local_size > 1 else []

    # torch names a group by the number of groups that the rank has made, so every rank of the
    # program must make every group. Ranks outside of `group` do not run this call; then only its
    # members make the subgroup, under a name that they agree on.
    alone = group != default_group()
    backend = dist.get_backend(group)
    me = dist.get_rank()

    groups: list[dist.ProcessGroup | None] = []
    with _agreed_names(group) if alone else nullcontext():
        for subgroups in (inside, across):
            created = [
                dist.new_group(members, backend=backend, use_local_synchronization=alone)
                for members in subgroups
            ]
            own = [pg for members, pg in zip(subgroups, created, strict=True) if me in members]
            groups.append(cast(dist.ProcessGroup, own[0]) if own else None)

    return groups[0], groups[1]


def twin_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new gloo group of the same ranks, for another thread; a collective call of ``group``.

    Args:
        group: The ranks; may be a part of all ranks of the program.
    """
    ranks = dist.get_process_group_ranks(group)
    alone = group != default_group()
    with _agreed_names(group) if alone else nullcontext():
        return cast(
            dist.ProcessGroup,
            dist.new_group(ranks, backend="gloo", use_local_synchronization=alone),
        )


@contextmanager
def _agreed_names(group: dist.ProcessGroup) -> Iterator[None]:
    """Set the number by which torch names a group to one that the members of ``group`` agree on."""
    global _rounds_of_names
    number = max(rounds for (rounds,) in all_gather_ints([_rounds_of_names], group, "host groups"))
    _rounds_of_names = number + 1

    hashed = distributed_c10d._hash_ranks_to_str
    count = distributed_c10d._world.group_count
    distributed_c10d._hash_ranks_to_str = lambda ranks: (
        f"tutorec_{number}_{'_'.join(map(str, ranks))}"
    )

    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = hashed
        # torch 2.15 counts groups, and only on the ranks that make them
        distributed_c10d._world.group_count = count

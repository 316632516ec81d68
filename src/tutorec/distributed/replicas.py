"""Replicas of sharded tables: groups of ranks that each hold all tables, and the mean over them.

Over many ranks, tables that are sharded over all of them send to all of them. In *2D parallelism* they are sharded over
a group of G ranks, and W / G groups have a replica of every table each. Of W = 8 ranks and groups of G = 4::

    use_inter_host_allreduce      False                    True
    sharding groups               0 2 4 6    1 3 5 7       0 1 2 3    4 5 6 7
    ranks with the same shards    01  23  45  67           04  15  26  37

A step sends within a sharding group; ranks with the same shards, a *replica group*, take the mean of what they hold
every so many steps. With ``False`` it is the mean that tends to stay on a host, with ``True`` it is the step.

Corresponds to what TorchRec's ``DMPCollection`` calls sharding and replica process groups.

Where tables are sharded within groups and R groups have replicas, ranks that hold the same shards average them. Their
E numbers are cut into blocks of at most 2 ** 22, of which each replica adds up its part, as even as can be. For each
block of E numbers, E_r = E / R of replica r (the first E % R replicas one more), replica r sends replica s

    replica weights    4 * (E_s + E_r)                                      all weights that a rank holds
    replica states     4 * (E_s + E_r)                                      of its optimizer, but numbers of steps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tutorec.distributed import comm
from tutorec.distributed.collectives.host_groups import host_groups
from tutorec.distributed.embedding_base import ShardedEmbeddingModule
from tutorec.distributed.env import sharding_groups

REPLICA_WEIGHTS, REPLICA_STATES = "replica weights", "replica states"
# Numbers that replicas average at a time: 16 MiB beside the model.
BLOCK_NUMBERS = 2**22

AllReduce = Callable[[list[torch.Tensor]], None]


@dataclass(frozen=True)
class ReplicaGroups:
    """The two groups of this rank.

    Args:
        sharding: The G ranks that hold one replica of the tables together.
        replica: The W / G ranks that hold the same shards.
        ranks: Ranks of the program in each sharding group ``[W / G][G]``.
    """

    sharding: dist.ProcessGroup
    replica: dist.ProcessGroup
    ranks: list[list[int]]

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, sharding_group_size: int, use_inter_host_allreduce: bool = False
    ) -> ReplicaGroups:
        """Those of this rank; every rank of ``group`` calls it together.

        Raises:
            ValueError: The ranks do not make groups of this size.
        """
        everyone = dist.get_process_group_ranks(group)
        numbers = sharding_groups(len(everyone), sharding_group_size, use_inter_host_allreduce)
        ranks = [[everyone[number] for number in members] for members in numbers]
        if use_inter_host_allreduce:
            found = host_groups(group, sharding_group_size)
            return cls(found.intra, found.cross, ranks)
        found = host_groups(group, len(numbers))
        return cls(found.cross, found.intra, ranks)


class ReplicaMean:
    """Takes the mean over replicas of the weights that this rank holds, and of the state of their fused optimizers.

    Every rank of the replica group calls the same methods in the same order. Numbers travel as said above;
    they are added in rank order, so that all replicas get the same bits.

    Args:
        parts: The sharded collections.
        group: The ranks that hold the same shards.
    """

    def __init__(
        self, parts: Sequence[ShardedEmbeddingModule[Any, Any, Any, Any, Any]], group: dist.ProcessGroup
    ) -> None:
        self.parts, self._group = list(parts), group

    def weights(self) -> list[torch.Tensor]:
        """This rank's pieces of tables ``[R, D]``, live."""
        return [rows.detach() for part in self.parts for held in part.held_tables() for rows in held.rows]

    def states(self) -> list[torch.Tensor]:
        """State of the optimizers that run inside backward, ``[R]`` and ``[R, D]``, live; no numbers of steps."""
        return [
            state
            for part in self.parts
            for _, optimizer in part.fused_optimizer.optimizers
            for states in optimizer.state.values()
            for state in states.values()
            if state.dim() > 0
        ]

    @torch.no_grad()
    def spread(self) -> None:
        """Give every replica the weights of the first one."""
        for rows in self.weights():
            whole = rows.contiguous()
            comm.broadcast(whole, 0, self._group, REPLICA_WEIGHTS)
            rows.copy_(whole)

    def average(self, include_optimizer_state: bool, all_reduce: AllReduce | None) -> None:
        """Take the mean.

        Args:
            include_optimizer_state: Of the optimizer state, too.
            all_reduce: Puts the mean into each of some tensors of one type, by collectives of its own.
        """
        for stage, chosen in ((REPLICA_WEIGHTS, self.weights), (REPLICA_STATES, self.states)):
            if stage == REPLICA_STATES and not include_optimizer_state:
                continue
            if all_reduce is None:
                self._average(chosen(), stage)
            elif tensors := chosen():
                all_reduce(tensors)

    @torch.no_grad()
    def _average(self, tensors: Sequence[torch.Tensor], stage: str) -> None:
        replicas = self._group.size()
        if replicas == 1:
            return
        for block in sync_blocks([tuple(tensor.shape) for tensor in tensors]):
            parts = [tensors[index][first:end] for index, first, end in block]
            flat = torch.cat([part.reshape(-1) for part in parts])
            counts = even_counts(flat.numel(), replicas)
            mean = comm.reduce_scatter(flat, counts, self._group, stage).wait() / replicas
            means = comm.all_gather(mean, counts, self._group, stage).wait()
            for part, numbers in zip(parts, means.split_with_sizes([part.numel() for part in parts]), strict=True):
                part.copy_(numbers.view(part.shape))


__all__ = ["AllReduce", "ReplicaGroups", "ReplicaMean"]


def sync_blocks(shapes: Sequence[tuple[int, ...]], most: int = BLOCK_NUMBERS) -> Iterator[list[tuple[int, int, int]]]:
    """The blocks in which replicas average tensors: (which tensor, first row, end row) of each part of a block.

    Args:
        shapes: Of each tensor, ``[R]`` or ``[R, D]``; in which order they come makes no difference to the bytes.
        most: Numbers of a block, unless a single row has more.

    Example:
        >>> list(sync_blocks([(5,), (3, 4)], most=8))
        [[(1, 0, 2)], [(1, 2, 3), (0, 0, 4)], [(0, 4, 5)]]
    """
    block: list[tuple[int, int, int]] = []
    free = most
    for index in sorted(range(len(shapes)), key=lambda each: (-len(shapes[each]), shapes[each])):
        rows, width, first = shapes[index][0], _width(shapes[index]), 0
        while first < rows:
            if block and free < width:
                yield block
                block, free = [], most
            end = min(rows, first + max(1, free // width))
            block.append((index, first, end))
            free, first = free - (end - first) * width, end
    if block:
        yield block


def even_counts(numbers: int, parts: int) -> list[int]:
    """So many numbers in parts as even as can be, the first ones larger.

    Example:
        >>> even_counts(8, 3)
        [3, 3, 2]
    """
    whole, rest = divmod(numbers, parts)
    return [whole + (part < rest) for part in range(parts)]


def sync_parts(shapes: Sequence[tuple[int, ...]], replicas: int) -> list[int]:
    """Of the numbers of some tensors, how many each of R replicas adds up: the sum over blocks of E_r.

    Replica r sends replica s ``4 * (parts[r] + parts[s])`` bytes.

    Args:
        shapes: Of each tensor, ``[R]`` or ``[R, D]``.
        replicas: How many ranks hold the same shards.

    Example:
        >>> sync_parts([(3, 4), (5,)], replicas=2)
        [9, 8]
    """
    parts = [0] * replicas
    for block in sync_blocks(shapes):
        numbers = sum((end - first) * _width(shapes[index]) for index, first, end in block)
        parts = [part + more for part, more in zip(parts, even_counts(numbers, replicas), strict=True)]
    return parts


def _width(shape: tuple[int, ...]) -> int:
    """Numbers of a row."""
    return max(shape[1], 1) if len(shape) > 1 else 1

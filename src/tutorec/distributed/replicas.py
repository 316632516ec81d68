"""Replicas of sharded tables: groups of ranks that each shard all tables, and the mean over groups.

In *2D parallelism* tables are not sharded over all ranks but over each of W / G groups of G ranks,
so that a step sends within a group only. Of W = 8 ranks and groups of G = 4::

    use_inter_host_allreduce      False                    True
    sharding groups               0 2 4 6    1 3 5 7       0 1 2 3    4 5 6 7
    ranks with the same shards    01  23  45  67           04  15  26  37

Ranks with the same shards form a *replica group*, which averages its shards every few steps. With
``False`` the mean tends to stay on one host, with ``True`` the step does.

Corresponds to what TorchRec's ``DMPCollection`` calls sharding and replica process groups.

R replicas average their shards in blocks of at most 2 ** 22 elements. Each replica adds up an equal
share of a block. For each block of E elements, of which replica r adds E_r = E / R (the first E % R
replicas one more), replica r sends replica s

::

    replica weights    4 * (E_s + E_r)        all weights that a rank holds
    replica states     4 * (E_s + E_r)        of its optimizer, but no step counts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tutorec.distributed import comm
from tutorec.distributed.collectives.host_groups import host_groups
from tutorec.distributed.core.env import sharding_groups
from tutorec.distributed.embedding_base import ShardedEmbeddingModule

REPLICA_WEIGHTS = "replica weights"
REPLICA_STATES = "replica states"
# Elements that replicas average at a time: 16 MiB in addition to the model.
BLOCK_NUMBERS = 2**22

AllReduce = Callable[[list[torch.Tensor]], None]


@dataclass(frozen=True)
class ReplicaGroups:
    """The sharding group and the replica group of this rank.

    Args:
        sharding: The G ranks that share one replica of the tables.
        replica: The W / G ranks that hold the same shards.
        ranks: Global ranks of each sharding group ``[W / G][G]``.
    """

    sharding: dist.ProcessGroup
    replica: dist.ProcessGroup
    ranks: list[list[int]]

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup,
        sharding_group_size: int,
        use_inter_host_allreduce: bool = False,
    ) -> ReplicaGroups:
        """Make the groups; a collective call of ``group``.

        Raises:
            ValueError: The ranks cannot be divided into groups of this size.
        """
        everyone = dist.get_process_group_ranks(group)
        numbers = sharding_groups(len(everyone), sharding_group_size, use_inter_host_allreduce)
        ranks = [[everyone[number] for number in members] for members in numbers]

        if use_inter_host_allreduce:
            groups = host_groups(group, sharding_group_size)
            return cls(groups.intra, groups.cross, ranks)

        groups = host_groups(group, len(numbers))
        return cls(groups.cross, groups.intra, ranks)


class ReplicaMean:
    """Averages this rank's weights and the state of their fused optimizers over replicas.

    Every rank of the replica group calls the same methods in the same order. Values are added in
    rank order, so all replicas get the same bits.

    Args:
        parts: The sharded collections.
        group: The ranks that hold the same shards.
    """

    def __init__(
        self,
        parts: Sequence[ShardedEmbeddingModule[Any, Any, Any, Any, Any]],
        group: dist.ProcessGroup,
    ) -> None:
        self.parts = list(parts)
        self._group = group

    def weights(self) -> list[torch.Tensor]:
        """This rank's shards ``[R, D]``, as live views."""
        return [
            rows.detach()
            for collection in self.parts
            for shards in collection.local_shards()
            for rows in shards.rows
        ]

    def states(self) -> list[torch.Tensor]:
        """State of the fused optimizers, ``[R]`` and ``[R, D]``, live; without step counts."""
        return [
            state
            for collection in self.parts
            for _, optimizer in collection.fused_optimizer.optimizers
            for states in optimizer.state.values()
            for state in states.values()
            if state.dim() > 0
        ]

    @torch.no_grad()
    def spread(self) -> None:
        """Copy the weights of the first replica to all others."""
        for rows in self.weights():
            contiguous = rows.contiguous()
            comm.broadcast(contiguous, 0, self._group, REPLICA_WEIGHTS)
            rows.copy_(contiguous)

    def average(self, include_optimizer_state: bool, all_reduce: AllReduce | None) -> None:
        """Replace values by their mean over replicas.

        Args:
            include_optimizer_state: Whether to average optimizer state, too.
            all_reduce: Averages a list of tensors of one dtype, with its own collectives.
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
            slices = [tensors[index][first:end] for index, first, end in block]
            flat = torch.cat([rows.reshape(-1) for rows in slices])
            counts = even_counts(flat.numel(), replicas)
            mean = comm.reduce_scatter(flat, counts, self._group, stage).wait() / replicas
            means = comm.all_gather(mean, counts, self._group, stage).wait()

            for rows, numbers in zip(
                slices, means.split_with_sizes([rows.numel() for rows in slices]), strict=True
            ):
                rows.copy_(numbers.view(rows.shape))


__all__ = ["AllReduce", "ReplicaGroups", "ReplicaMean"]


def sync_blocks(
    shapes: Sequence[tuple[int, ...]], most: int = BLOCK_NUMBERS
) -> Iterator[list[tuple[int, int, int]]]:
    """The blocks in which replicas average tensors: (tensor, first row, end row) of each part.

    Args:
        shapes: Shape of each tensor, ``[R]`` or ``[R, D]``; their order does not change the bytes.
        most: Maximum elements per block, unless a single row has more.

    Example:
        >>> list(sync_blocks([(5,), (3, 4)], most=8))
        [[(1, 0, 2)], [(1, 2, 3), (0, 0, 4)], [(0, 4, 5)]]
    """
    block: list[tuple[int, int, int]] = []
    free = most
    for index in sorted(range(len(shapes)), key=lambda each: (-len(shapes[each]), shapes[each])):
        rows = shapes[index][0]
        width = _width(shapes[index])
        first = 0
        while first < rows:
            if block and free < width:
                yield block
                block = []
                free = most
            end = min(rows, first + max(1, free // width))
            block.append((index, first, end))
            free = free - (end - first) * width
            first = end

    if block:
        yield block


def even_counts(numbers: int, parts: int) -> list[int]:
    """Split a number into parts that are as equal as possible, larger ones first.

    Example:
        >>> even_counts(8, 3)
        [3, 3, 2]
    """
    quotient, remainder = divmod(numbers, parts)
    return [quotient + (index < remainder) for index in range(parts)]


def sync_parts(shapes: Sequence[tuple[int, ...]], replicas: int) -> list[int]:
    """The elements of some tensors that each of R replicas adds up: the sum of E_r over blocks.

    Replica r sends replica s ``4 * (parts[r] + parts[s])`` bytes.

    Args:
        shapes: Shape of each tensor, ``[R]`` or ``[R, D]``.
        replicas: R, the ranks that hold the same shards.

    Example:
        >>> sync_parts([(3, 4), (5,)], replicas=2)
        [9, 8]
    """
    totals = [0] * replicas
    for block in sync_blocks(shapes):
        numbers = sum((end - first) * _width(shapes[index]) for index, first, end in block)
        totals = [
            total + count
            for total, count in zip(totals, even_counts(numbers, replicas), strict=True)
        ]
    return totals


def _width(shape: tuple[int, ...]) -> int:
    """Elements of a row."""
    return max(shape[1], 1) if len(shape) > 1 else 1

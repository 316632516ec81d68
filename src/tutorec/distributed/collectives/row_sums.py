"""The exchanges that add partial sums of rows, on the way to the ranks of their samples.

::

    PooledEmbeddingsReduceScatter   split rows: each rank has a partial sum             added
    HostPooledEmbeddings            split inside a host: added there, concatenated across hosts
    PooledEmbeddingsAllGather       local rows, to every rank, whose gradients are added; no sharding
                                    type uses it

``forward`` and ``variable`` are those of ``rows.py``. Gradients are divided by W.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from tutorec.awaitable import Awaitable, NoWait, map_awaitable
from tutorec.distributed import comm
from tutorec.distributed.collectives.host_groups import HostGroups
from tutorec.distributed.collectives.rows import (
    GRADIENTS_STAGE,
    ROWS_STAGE,
    RowMoves,
    codecs_of,
    exchange_flat,
    exchange_matrix,
    samples_of_ranks,
)
from tutorec.distributed.core.qcomm import QuantizedCommCodecs


class PooledEmbeddingsReduceScatter(nn.Module):
    """All samples, partial sums -> local samples, sums.

    Rank r sends ``batch_size_per_rank[s] * D`` elements to each other rank s, and
    ``batch_size_per_rank[r] * D`` to each in backward. Partial sums are added in rank order.

    Args:
        pg: The ranks; None in a world of 1.
        codecs: Data types in which rows and gradients are sent; None keeps them as they are. Sums
            are computed in float32.

    Source:
        TorchRec's ``PooledEmbeddingsReduceScatter``.
    """

    def __init__(
        self, pg: dist.ProcessGroup | None, codecs: QuantizedCommCodecs | None = None
    ) -> None:
        super().__init__()
        self._pg, self._codecs = pg, codecs

    def forward(
        self, local_embs: torch.Tensor, input_splits: Sequence[int] | None = None
    ) -> Awaitable[torch.Tensor]:
        """``local_embs [sum of B_s, D]`` -> awaitable of ``[B_local, D]``; the splits are B_s.

        Raises:
            ValueError: As in `PooledEmbeddingsAllToAll`.
        """
        if self._pg is None or self._pg.size() == 1:
            return NoWait(local_embs)
        batch_sizes = samples_of_ranks(local_embs, input_splits, self._pg.size())
        samples, columns = batch_sizes[self._pg.rank()], local_embs.shape[1]
        moves = _into_sum(self._pg, [count * columns for count in batch_sizes], self._codecs)
        return exchange_matrix(moves, local_embs, samples, [columns], len(batch_sizes))

    def variable(self, flat: torch.Tensor, counts: Sequence[int]) -> Awaitable[torch.Tensor]:
        """``flat [sum of counts]`` -> awaitable of ``[counts[rank]]``, counts per rank."""
        if self._pg is None or self._pg.size() == 1:
            return NoWait(flat)
        return exchange_flat(_into_sum(self._pg, list(counts), self._codecs), flat, len(counts))


class HostPooledEmbeddings(nn.Module):
    """All samples, partial sums of the host's columns -> local samples, all columns.

    Inside a host, rank (h, l) sends the samples of rank (h', l') to rank (h, l'), for each h' and
    l': D_h columns each. Across hosts it sends the sums of the samples of rank (h', l) to that
    rank. Backward sends the same numbers in reverse.

    ::

        rank (h, l), L ranks on each of H hosts     slices for every rank
          | reduce-scatter inside the host          adds the slices for ranks (0, l) ... (H-1, l)
          | all-to-all across hosts                 sends slice (h', l) to its rank
        H slices for rank (h, l), one from each host

    Each sum is sent between hosts once, not once per rank that holds a partial sum.

    Args:
        hosts: This rank's groups, from `host_groups`; None in a world of 1.
        rank: This rank in the group of all ranks.
        local_size: L, ranks per host.
        dim_sum_per_host: D_h, the columns that each host looks up: H numbers.
        codecs: Data types in which rows and gradients are sent, in both steps; None keeps them as
            they are. Sums are computed in float32.

    Source:
        The two steps of TorchRec's ``TwRwPooledEmbeddingDist``.
    """

    def __init__(
        self,
        hosts: HostGroups | None,
        rank: int,
        local_size: int,
        dim_sum_per_host: Sequence[int],
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._hosts, self._rank, self._codecs = hosts, rank, codecs
        self._columns = list(dim_sum_per_host)
        self._width = self._columns[rank // local_size]
        self._world_size = local_size * len(self._columns)

    def forward(
        self, pooled: torch.Tensor, batch_size_per_rank: Sequence[int]
    ) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D_h]`` -> awaitable of ``[B_local, sum of D_h]``."""
        if self._hosts is None or self._world_size == 1:
            return NoWait(pooled)
        samples = batch_size_per_rank[self._rank]
        counts_out = [count * self._width for count in batch_size_per_rank]
        counts_in = [samples * width for width in self._columns]
        moves = _into_host_sums(self._hosts, counts_out, counts_in, self._codecs)
        return exchange_matrix(moves, pooled, samples, self._columns, self._world_size)

    def variable(
        self, flat: torch.Tensor, counts_out: Sequence[int], counts_in: Sequence[int]
    ) -> Awaitable[torch.Tensor]:
        """``flat [sum of counts_out]`` -> awaitable of ``[sum of counts_in]``.

        ``counts_out`` are the elements of each rank's samples, W numbers; ``counts_in`` the
        elements that each host has for the local samples, H numbers.
        """
        if self._hosts is None or self._world_size == 1:
            return NoWait(flat)
        moves = _into_host_sums(self._hosts, list(counts_out), list(counts_in), self._codecs)
        return exchange_flat(moves, flat, self._world_size)


class PooledEmbeddingsAllGather(nn.Module):
    """Local rows -> the rows of all ranks, rank 0's first.

    Rank r sends its ``B * D`` elements to each other rank, and the gradients of their rows to them
    in backward.

    Args:
        pg: The ranks; None in a world of 1.
        codecs: Data types in which rows and gradients are sent; None keeps them as they are.
            Gradients are summed in float32.

    Source:
        TorchRec's ``PooledEmbeddingsAllGather``.
    """

    def __init__(
        self, pg: dist.ProcessGroup | None, codecs: QuantizedCommCodecs | None = None
    ) -> None:
        super().__init__()
        self._pg, self._codecs = pg, codecs

    def forward(self, local_emb: torch.Tensor) -> Awaitable[torch.Tensor]:
        """``local_emb [B, ...]``, the same shape on every rank -> awaitable of ``[W * B, ...]``."""
        if self._pg is None or self._pg.size() == 1:
            return NoWait(local_emb)
        group, row, world_size = self._pg, local_emb.shape[1:], self._pg.size()
        counts = [local_emb.numel()] * world_size
        forward, backward = codecs_of(self._codecs)
        moves = RowMoves(
            lambda flat: comm.all_gather(flat, counts, group, ROWS_STAGE, forward),
            lambda flat: comm.reduce_scatter(flat, counts, group, GRADIENTS_STAGE, backward),
        )
        gathered = exchange_flat(moves, local_emb.reshape(-1), world_size)
        return map_awaitable(lambda flat: flat.view(-1, *row), gathered)


def _into_sum(
    group: dist.ProcessGroup, counts: list[int], codecs: QuantizedCommCodecs | None
) -> RowMoves:
    """Reduce-scatter: slice r is summed on rank r."""
    forward, backward = codecs_of(codecs)
    return RowMoves(
        lambda flat: comm.reduce_scatter(flat, counts, group, ROWS_STAGE, forward),
        lambda flat: comm.all_gather(flat, counts, group, GRADIENTS_STAGE, backward),
    )


def _into_host_sums(
    hosts: HostGroups,
    counts_out: list[int],
    counts_in: list[int],
    codecs: QuantizedCommCodecs | None,
) -> RowMoves:
    """Reduce-scatter inside each host, then all-to-all of the sums across hosts.

    Waiting for the first step issues the second.

    Args:
        hosts: The groups of this rank's host and of its local rank on every host.
        counts_out: Elements of each rank's slice: W numbers, the same on the ranks of a host.
        counts_in: Elements received from each host: H numbers.
        codecs: Data types in which they are sent, in both steps.
    """
    forward, backward = codecs_of(codecs)
    local_size, host_count = hosts.intra.size(), len(counts_in)
    # Slices are ordered by host; the reduce-scatter inside the host needs those of one local rank
    # side by side.
    by_place = [counts_out[place::local_size] for place in range(local_size)]
    sums, across = [sum(counts) for counts in by_place], by_place[hosts.intra.rank()]

    def rows(flat: torch.Tensor) -> Awaitable[torch.Tensor]:
        slices = flat.split(counts_out)
        placed = torch.cat(
            [each for place in range(local_size) for each in slices[place::local_size]]
        )
        return map_awaitable(
            lambda summed: comm.all_to_all(
                summed, across, counts_in, hosts.cross, ROWS_STAGE, forward
            ).wait(),
            comm.reduce_scatter(placed, sums, hosts.intra, ROWS_STAGE, forward),
        )

    def spread(mine: torch.Tensor) -> torch.Tensor:
        flat = comm.all_gather(mine, sums, hosts.intra, GRADIENTS_STAGE, backward).wait()
        slices = flat.split([count for counts in by_place for count in counts])
        return torch.cat([each for host in range(host_count) for each in slices[host::host_count]])

    def gradients(flat: torch.Tensor) -> Awaitable[torch.Tensor]:
        crossed = comm.all_to_all(flat, counts_in, across, hosts.cross, GRADIENTS_STAGE, backward)
        return map_awaitable(spread, crossed)

    return RowMoves(rows, gradients)


__all__ = ["HostPooledEmbeddings", "PooledEmbeddingsAllGather", "PooledEmbeddingsReduceScatter"]

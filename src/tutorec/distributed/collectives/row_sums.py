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
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from tutorec.awaitable import Awaitable, NoWait
from tutorec.distributed import comm
from tutorec.distributed.collectives.host_groups import HostGroups
from tutorec.distributed.collectives.rows import (
    GRADIENTS_STAGE,
    ROWS_STAGE,
    RowExchange,
    ViewAwaitable,
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
        self._pg = pg
        self._codecs = codecs

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
        samples = batch_sizes[self._pg.rank()]
        columns = local_embs.shape[1]
        counts = [count * columns for count in batch_sizes]

        exchange = RowsIntoSums(self._pg, counts, self._codecs)
        return exchange_matrix(exchange, local_embs, samples, [columns], len(batch_sizes))

    def variable(self, flat: torch.Tensor, counts: Sequence[int]) -> Awaitable[torch.Tensor]:
        """``flat [sum of counts]`` -> awaitable of ``[counts[rank]]``, counts per rank."""
        if self._pg is None or self._pg.size() == 1:
            return NoWait(flat)
        exchange = RowsIntoSums(self._pg, list(counts), self._codecs)
        return exchange_flat(exchange, flat, len(counts))


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
        self._hosts = hosts
        self._rank = rank
        self._codecs = codecs
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
        exchange = RowsIntoHostSums(self._hosts, counts_out, counts_in, self._codecs)
        return exchange_matrix(exchange, pooled, samples, self._columns, self._world_size)

    def variable(
        self, flat: torch.Tensor, counts_out: Sequence[int], counts_in: Sequence[int]
    ) -> Awaitable[torch.Tensor]:
        """``flat [sum of counts_out]`` -> awaitable of ``[sum of counts_in]``.

        ``counts_out`` are the elements of each rank's samples, W numbers; ``counts_in`` the
        elements that each host has for the local samples, H numbers.
        """
        if self._hosts is None or self._world_size == 1:
            return NoWait(flat)
        exchange = RowsIntoHostSums(self._hosts, list(counts_out), list(counts_in), self._codecs)
        return exchange_flat(exchange, flat, self._world_size)


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
        self._pg = pg
        self._codecs = codecs

    def forward(self, local_emb: torch.Tensor) -> Awaitable[torch.Tensor]:
        """``local_emb [B, ...]``, the same shape on every rank -> awaitable of ``[W * B, ...]``."""
        if self._pg is None or self._pg.size() == 1:
            return NoWait(local_emb)

        world_size = self._pg.size()
        counts = [local_emb.numel()] * world_size
        exchange = RowsToAll(self._pg, counts, self._codecs)
        gathered = exchange_flat(exchange, local_emb.reshape(-1), world_size)
        return ViewAwaitable(gathered, (-1, *local_emb.shape[1:]))


class _RowsOfRanks(RowExchange):
    """An exchange in which one slice belongs to each rank.

    Args:
        group: The ranks.
        counts: Elements of each rank's slice.
        codecs: Data types in which rows and gradients are sent; None keeps them as they are.
    """

    def __init__(
        self, group: dist.ProcessGroup, counts: list[int], codecs: QuantizedCommCodecs | None
    ) -> None:
        super().__init__(codecs)
        self._group = group
        self._counts = counts


class RowsToAll(_RowsOfRanks):
    """All-gather of rows; their gradients are added."""

    def send(self, rows: torch.Tensor) -> Awaitable[torch.Tensor]:
        """Send this rank's rows to every rank."""
        return comm.all_gather(rows, self._counts, self._group, ROWS_STAGE, self._forward_codec)

    def send_back(self, gradients: torch.Tensor) -> Awaitable[torch.Tensor]:
        """Add the gradients of this rank's rows from every rank."""
        return comm.reduce_scatter(
            gradients, self._counts, self._group, GRADIENTS_STAGE, self._backward_codec
        )


class RowsIntoSums(_RowsOfRanks):
    """Reduce-scatter of partial sums: slice r is summed on rank r."""

    def send(self, rows: torch.Tensor) -> Awaitable[torch.Tensor]:
        """Add this rank's slice from every rank."""
        return comm.reduce_scatter(rows, self._counts, self._group, ROWS_STAGE, self._forward_codec)

    def send_back(self, gradients: torch.Tensor) -> Awaitable[torch.Tensor]:
        """Send the gradients of this rank's sums to every rank."""
        return comm.all_gather(
            gradients, self._counts, self._group, GRADIENTS_STAGE, self._backward_codec
        )


class RowsIntoHostSums(RowExchange):
    """Reduce-scatter inside each host, then all-to-all of the sums across hosts.

    Waiting for the first step issues the second.

    Args:
        hosts: The groups of this rank's host and of its local rank on every host.
        counts_out: Elements of each rank's slice: W numbers, the same on the ranks of a host.
        counts_in: Elements received from each host: H numbers.
        codecs: Data types in which they are sent, in both steps.
    """

    def __init__(
        self,
        hosts: HostGroups,
        counts_out: list[int],
        counts_in: list[int],
        codecs: QuantizedCommCodecs | None,
    ) -> None:
        super().__init__(codecs)
        self._hosts = hosts
        self._counts_out = counts_out
        self._counts_in = counts_in

        # Slices are ordered by host; the reduce-scatter inside the host needs those of one local
        # rank as neighbors.
        local_size = hosts.intra.size()
        self._counts_by_local_rank = [counts_out[rank::local_size] for rank in range(local_size)]
        self._sums = [sum(counts) for counts in self._counts_by_local_rank]
        self._counts_across = self._counts_by_local_rank[hosts.intra.rank()]

    def send(self, rows: torch.Tensor) -> Awaitable[torch.Tensor]:
        """Add slices inside the host; the sums are sent across hosts when they are waited for."""
        slices = rows.split(self._counts_out)
        local_size = len(self._sums)
        by_local_rank = [slices[rank::local_size] for rank in range(local_size)]
        summed = comm.reduce_scatter(
            torch.cat([*chain.from_iterable(by_local_rank)]),
            self._sums,
            self._hosts.intra,
            ROWS_STAGE,
            self._forward_codec,
        )
        return _SumsAcrossHosts(self, summed)

    def send_across(self, sums: torch.Tensor) -> torch.Tensor:
        """The second step: sums of this host -> those of every host. Blocks."""
        return comm.all_to_all(
            sums,
            self._counts_across,
            self._counts_in,
            self._hosts.cross,
            ROWS_STAGE,
            self._forward_codec,
        ).wait()

    def send_back(self, gradients: torch.Tensor) -> Awaitable[torch.Tensor]:
        """Send gradients across hosts; they are spread inside the host when waited for."""
        crossed = comm.all_to_all(
            gradients,
            self._counts_in,
            self._counts_across,
            self._hosts.cross,
            GRADIENTS_STAGE,
            self._backward_codec,
        )
        return _GradientsInsideHost(self, crossed)

    def spread(self, gradients: torch.Tensor) -> torch.Tensor:
        """The second step of the way back: gradients of sums -> those of all slices. Blocks."""
        flat = comm.all_gather(
            gradients, self._sums, self._hosts.intra, GRADIENTS_STAGE, self._backward_codec
        ).wait()

        slices = flat.split([*chain.from_iterable(self._counts_by_local_rank)])
        host_count = len(self._counts_in)
        by_host = [slices[host::host_count] for host in range(host_count)]
        return torch.cat([*chain.from_iterable(by_host)])


class _SumsAcrossHosts(Awaitable[torch.Tensor]):
    """Sums of a host in flight; waiting for them sends them across hosts."""

    def __init__(self, exchange: RowsIntoHostSums, sums: Awaitable[torch.Tensor]) -> None:
        self._exchange = exchange
        self._sums = sums

    def _wait_impl(self) -> torch.Tensor:
        sums = self._sums.wait()
        del self._sums
        return self._exchange.send_across(sums)


class _GradientsInsideHost(Awaitable[torch.Tensor]):
    """Gradients in flight across hosts; waiting for them spreads them inside the host."""

    def __init__(self, exchange: RowsIntoHostSums, crossed: Awaitable[torch.Tensor]) -> None:
        self._exchange = exchange
        self._crossed = crossed

    def _wait_impl(self) -> torch.Tensor:
        crossed = self._crossed.wait()
        del self._crossed
        return self._exchange.spread(crossed)


__all__ = ["HostPooledEmbeddings", "PooledEmbeddingsAllGather", "PooledEmbeddingsReduceScatter"]

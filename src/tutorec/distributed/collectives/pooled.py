"""Pooled rows travel back to the rank of their sample.

    PooledEmbeddingsAllToAll        whole rows: every rank has some columns of my samples     they stand side by side
    PooledEmbeddingsReduceScatter   split rows: every rank has a part of each sum             they are added
    HostPooledEmbeddings            split inside a host: added there, side by side from host to host

``forward`` takes a matrix, samples of rank 0 first. ``variable`` takes a batch whose features have different numbers of
samples, as one flat tensor: for each rank its samples' rows, feature after feature, since those form no matrix.
Gradients travel the other way and are divided by W once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from tutorec.awaitable import Awaitable, NoWait
from tutorec.distributed.collectives.autograd import Exchange, gradient_divisor, issue
from tutorec.distributed.collectives.rows import (
    GRADIENTS_STAGE,
    ROWS_STAGE,
    FlatMove,
    RowsIntoHostSums,
    RowsIntoSum,
    RowsToRanks,
    Then,
)
from tutorec.distributed.comm import HostGroups
from tutorec.distributed.qcomm import QuantizedCommCodecs


class PooledEmbeddingsAllToAll(nn.Module):
    """Every sample, my columns -> my samples, every column.

    Rank r sends ``batch_size_per_rank[s] * dim_sum_per_rank[r]`` elements to rank s, and receives as many in backward.

    Args:
        pg: The ranks; None in a world of 1.
        dim_sum_per_rank: D_r, the columns that each rank looks up: W numbers.
        device: TorchRec's; has no effect, since rows stay on the device where they are.
        codecs: In what type rows and gradients travel; None: as they are.

    Raises:
        TypeError: There is no list of numbers.
        ValueError: The numbers are not as many as the ranks.

    Source:
        TorchRec's ``PooledEmbeddingsAllToAll``.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup | None,
        dim_sum_per_rank: Sequence[int],
        device: torch.device | None = None,
        *,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        world_size = 1 if pg is None else pg.size()
        if not isinstance(dim_sum_per_rank, Sequence) or isinstance(dim_sum_per_rank, str):
            raise TypeError(f"dim_sum_per_rank={dim_sum_per_rank!r} is no list: give each rank's number of columns")
        if len(dim_sum_per_rank) != world_size:
            raise ValueError(
                f"dim_sum_per_rank {list(dim_sum_per_rank)} is for {len(dim_sum_per_rank)} ranks, and there are "
                f"{world_size}: give each rank's number of columns"
            )
        self._pg = pg
        self._columns = list(dim_sum_per_rank)
        self._codecs = codecs

    def forward(
        self, pooled: torch.Tensor, batch_size_per_rank: Sequence[int] | None = None
    ) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D_mine]`` -> promise of ``[B_mine, sum of D_r]``, columns in rank order.

        Raises:
            ValueError: The rows are not those of the batch sizes, or, where none are given, no equal share for each
                rank.
        """
        if self._pg is None or len(self._columns) == 1:
            return NoWait(pooled)
        batch_size_per_rank = _samples_of_ranks(pooled, batch_size_per_rank, len(self._columns))
        samples, columns = batch_size_per_rank[self._pg.rank()], self._columns[self._pg.rank()]
        rows_out = [count * columns for count in batch_size_per_rank]
        rows_in = [samples * width for width in self._columns]
        move = RowsToRanks(self._pg, rows_out, rows_in, self._codecs)
        return issue(_Matrix(move, batch_size_per_rank, samples, self._columns), pooled)

    def variable(
        self, flat: torch.Tensor, counts_out: Sequence[int], counts_in: Sequence[int]
    ) -> Awaitable[torch.Tensor]:
        """``flat [sum of counts_out]`` -> promise of ``[sum of counts_in]``: elements for, and from, each rank."""
        if self._pg is None or len(self._columns) == 1:
            return NoWait(flat)
        move = RowsToRanks(self._pg, list(counts_out), list(counts_in), self._codecs)
        return issue(FlatMove(move, len(counts_out)), flat)


class PooledEmbeddingsReduceScatter(nn.Module):
    """Every sample, my part of each sum -> my samples, the sums.

    Rank r sends ``batch_size_per_rank[s] * D`` elements to each other rank s, and ``batch_size_per_rank[r] * D`` to
    each in backward. Parts are added in rank order.

    Args:
        pg: The ranks; None in a world of 1.
        codecs: In what type rows and gradients travel; None: as they are. Sums are made in float32.

    Source:
        TorchRec's ``PooledEmbeddingsReduceScatter``.
    """

    def __init__(self, pg: dist.ProcessGroup | None, codecs: QuantizedCommCodecs | None = None) -> None:
        super().__init__()
        self._pg = pg
        self._codecs = codecs

    def forward(
        self, pooled: torch.Tensor, batch_size_per_rank: Sequence[int] | None = None
    ) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D]`` -> promise of ``[B_mine, D]``.

        Raises:
            ValueError: As in `PooledEmbeddingsAllToAll`.
        """
        if self._pg is None or self._pg.size() == 1:
            return NoWait(pooled)
        batch_size_per_rank = _samples_of_ranks(pooled, batch_size_per_rank, self._pg.size())
        samples, columns = batch_size_per_rank[self._pg.rank()], pooled.shape[1]
        move = RowsIntoSum(self._pg, [count * columns for count in batch_size_per_rank], self._codecs)
        return issue(_Matrix(move, batch_size_per_rank, samples, [columns]), pooled)

    def variable(self, flat: torch.Tensor, counts: Sequence[int]) -> Awaitable[torch.Tensor]:
        """``flat [sum of counts]`` -> promise of ``[counts[me]]``: elements of each rank's samples."""
        if self._pg is None or self._pg.size() == 1:
            return NoWait(flat)
        return issue(FlatMove(RowsIntoSum(self._pg, list(counts), self._codecs), len(counts)), flat)


class HostPooledEmbeddings(nn.Module):
    """Every sample, my part of the sums of my host's columns -> my samples, every column.

    Inside a host rank (h, l) sends the samples of rank (h', l') to its neighbour (h, l'), for each h' and l': D_h
    columns each. Across hosts it sends the sums of the samples of rank (h', l) to that rank. Backward the same numbers.

    Args:
        hosts: This rank's groups, `comm.host_groups`; None in a world of 1.
        rank: This rank in the group of all.
        local_size: L, ranks of each host.
        dim_sum_per_host: D_h, the columns that each host looks up: H numbers.
        codecs: In what type rows and gradients travel, in both steps; None: as they are. Sums are made in float32.

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
        self._host = rank // local_size
        self._columns = list(dim_sum_per_host)
        self._world_size = local_size * len(self._columns)
        self._codecs = codecs

    def forward(self, pooled: torch.Tensor, batch_size_per_rank: Sequence[int]) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D_h]`` -> promise of ``[B_mine, sum of D_h over hosts]``, columns in host order."""
        if self._hosts is None or self._world_size == 1:
            return NoWait(pooled)
        samples, columns = batch_size_per_rank[self._rank], self._columns[self._host]
        rows_out = [count * columns for count in batch_size_per_rank]
        move = RowsIntoHostSums(self._hosts, rows_out, [samples * width for width in self._columns], self._codecs)
        return issue(_Matrix(move, batch_size_per_rank, samples, self._columns), pooled)

    def variable(
        self, flat: torch.Tensor, counts_out: Sequence[int], counts_in: Sequence[int]
    ) -> Awaitable[torch.Tensor]:
        """``flat [sum of counts_out]`` -> promise of ``[sum of counts_in]``.

        ``counts_out`` are the elements of each rank's samples, W numbers; ``counts_in`` those that each host has for
        my samples, H numbers.
        """
        if self._hosts is None or self._world_size == 1:
            return NoWait(flat)
        move = RowsIntoHostSums(self._hosts, list(counts_out), list(counts_in), self._codecs)
        return issue(FlatMove(move, self._world_size), flat)


def _samples_of_ranks(pooled: torch.Tensor, given: Sequence[int] | None, world_size: int) -> Sequence[int]:
    """B_s of each rank: as given, else equal shares of the rows."""
    rows = pooled.shape[0]
    if given is None:
        if rows % world_size:
            raise ValueError(
                f"{rows} pooled rows are no equal share for each of {world_size} ranks: give batch_size_per_rank, the "
                "number of samples of each"
            )
        return [rows // world_size] * world_size
    if len(given) != world_size or sum(given) != rows:
        raise ValueError(
            f"batch_size_per_rank {list(given)} is for {len(given)} ranks and {sum(given)} samples, and there are "
            f"{world_size} ranks and {rows} pooled rows"
        )
    return given


class _Matrix(Exchange):
    """A flat move of matrices: what arrives from each source stands side by side.

    Args:
        move: Of flat tensors.
        batch_size_per_rank: B_s, W numbers.
        samples: B_mine.
        columns: Of each source.
    """

    def __init__(
        self, move: Exchange, batch_size_per_rank: Sequence[int], samples: int, columns: Sequence[int]
    ) -> None:
        self._move, self._samples, self._columns = move, samples, columns
        self._world_size, self._all_samples = len(batch_size_per_rank), sum(batch_size_per_rank)
        self._counts = [samples * width for width in columns]
        self._sent_shape = torch.Size()

    def issue(self, sent: torch.Tensor) -> Awaitable[torch.Tensor]:
        # Samples are the outer dimension, so that what goes to one rank lies in one piece already.
        self._sent_shape = sent.shape
        found = sent.shape[0]
        assert found == self._all_samples, f"pooled rows of {found} samples, planned for {self._all_samples}"
        if isinstance(self._move, RowsToRanks):  # what is mine need not be copied on the way
            return Then(self._move.issue_slices(sent), self._join)
        return Then(self._move.issue(sent), lambda flat: self._join(flat.split(self._counts)))

    def issue_back(self, gradient: torch.Tensor) -> Awaitable[torch.Tensor]:
        # Laid out and divided in one pass.
        flat, divisor = gradient.new_empty(sum(self._counts)), gradient_divisor(self._world_size)
        parts = zip(gradient.split(self._columns, dim=1), self._blocks(flat.split(self._counts)), strict=True)
        for columns, block in parts:
            torch.div(columns, divisor, out=block)
        return Then(self._move.issue_back(flat), lambda arrived: arrived.view(self._sent_shape))

    def _join(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """The slices of all sources side by side."""
        blocks = self._blocks(slices)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)

    def _blocks(self, slices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The samples' columns of each source, ``[B_mine, D]`` each."""
        return [part.view(self._samples, width) for part, width in zip(slices, self._columns, strict=True)]


__all__ = [
    "GRADIENTS_STAGE",
    "ROWS_STAGE",
    "HostPooledEmbeddings",
    "PooledEmbeddingsAllToAll",
    "PooledEmbeddingsReduceScatter",
]

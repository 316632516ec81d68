"""The exchanges of rows: back to the ranks of their samples or ids, and their gradients in reverse.

::

    PooledEmbeddingsAllToAll        whole rows: each rank has some columns of a sample  concatenated
    PooledEmbeddingsReduceScatter   split rows: each rank has a partial sum             added
    HostPooledEmbeddings            split inside a host: added there, concatenated across hosts
    SequenceEmbeddingsAllToAll      a row per id, to the rank that sent the id
    PooledEmbeddingsAllGather       local rows, to every rank; no sharding type uses it

``forward`` of the pooled exchanges takes a matrix, samples of rank 0 first. ``variable`` takes a
flat tensor, for batches whose features have different numbers of samples: for each rank its
samples' rows, feature after feature. Gradients are divided by W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tutorec.awaitable import Awaitable, NoWait, map_awaitable
from tutorec.distributed import comm
from tutorec.distributed.collectives.autograd import gradient_divisor, issue
from tutorec.distributed.collectives.host_groups import HostGroups
from tutorec.distributed.qcomm import QuantizedCommCodecs

ROWS_STAGE = "output rows"
GRADIENTS_STAGE = "output gradients"


class _Moves(NamedTuple):
    """The exchange of flat rows, and the reverse exchange of their gradients.

    Args:
        rows: ``[N]`` -> awaitable of the received elements, flat or one slice per source.
        gradients: Gradients of the received elements ``[M]`` -> awaitable of those of the sent
            elements ``[N]``.
    """

    rows: Callable[[torch.Tensor], Awaitable[Any]]
    gradients: Callable[[torch.Tensor], Awaitable[torch.Tensor]]


class PooledEmbeddingsAllToAll(nn.Module):
    """All samples, local columns -> local samples, all columns.

    Rank r sends ``batch_size_per_rank[s] * dim_sum_per_rank[r]`` elements to rank s, and receives
    as many in backward.

    Args:
        pg: The ranks; None in a world of 1.
        dim_sum_per_rank: D_r, the columns that each rank looks up: W numbers.
        device: TorchRec's; has no effect, since rows stay on their device.
        codecs: Data types in which rows and gradients are sent; None keeps them as they are.

    Raises:
        ValueError: There is not one number per rank.

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
        if len(dim_sum_per_rank) != world_size:
            raise ValueError(
                f"dim_sum_per_rank {list(dim_sum_per_rank)} is for {len(dim_sum_per_rank)} ranks, "
                f"and there are {world_size}: give each rank's number of columns"
            )
        self._pg, self._codecs = pg, codecs
        self._columns = list(dim_sum_per_rank)

    def forward(
        self, pooled: torch.Tensor, batch_size_per_rank: Sequence[int] | None = None
    ) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D_local]`` -> awaitable of ``[B_local, sum of D_r]``.

        Raises:
            ValueError: The number of rows does not match the batch sizes or, without batch sizes,
                is not divisible by W.
        """
        if self._pg is None or len(self._columns) == 1:
            return NoWait(pooled)
        batch_sizes = _samples_of_ranks(pooled, batch_size_per_rank, len(self._columns))
        samples, width = batch_sizes[self._pg.rank()], self._columns[self._pg.rank()]
        counts_out = [count * width for count in batch_sizes]
        moves = _to_ranks(
            self._pg, counts_out, [samples * width for width in self._columns], self._codecs
        )
        return _matrices(moves, pooled, samples, self._columns, len(batch_sizes))

    def variable(
        self, flat: torch.Tensor, counts_out: Sequence[int], counts_in: Sequence[int]
    ) -> Awaitable[torch.Tensor]:
        """``flat [sum of counts_out]`` -> awaitable of ``[sum of counts_in]``, counts per rank."""
        return _rows_to_ranks(self._pg, flat, counts_out, counts_in, self._codecs)


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
        self, pooled: torch.Tensor, batch_size_per_rank: Sequence[int] | None = None
    ) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D]`` -> awaitable of ``[B_local, D]``.

        Raises:
            ValueError: As in `PooledEmbeddingsAllToAll`.
        """
        if self._pg is None or self._pg.size() == 1:
            return NoWait(pooled)
        batch_sizes = _samples_of_ranks(pooled, batch_size_per_rank, self._pg.size())
        samples, columns = batch_sizes[self._pg.rank()], pooled.shape[1]
        moves = _into_sum(self._pg, [count * columns for count in batch_sizes], self._codecs)
        return _matrices(moves, pooled, samples, [columns], len(batch_sizes))

    def variable(self, flat: torch.Tensor, counts: Sequence[int]) -> Awaitable[torch.Tensor]:
        """``flat [sum of counts]`` -> awaitable of ``[counts[rank]]``, counts per rank."""
        if self._pg is None or self._pg.size() == 1:
            return NoWait(flat)
        return _flat_rows(_into_sum(self._pg, list(counts), self._codecs), flat, len(counts))


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
        return _matrices(moves, pooled, samples, self._columns, self._world_size)

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
        return _flat_rows(moves, flat, self._world_size)


class SequenceEmbeddingsAllToAll(nn.Module):
    """A row per received id -> a row per sent id.

    Rows are flat, since ids of tables of different widths may be sent together; the caller knows
    the shapes. A rank that has looked up nothing takes part in backward, too.

    Args:
        pg: The ranks; None in a world of 1.
        codecs: Data types in which rows and gradients are sent; None keeps them as they are.

    Source:
        TorchRec's ``SequenceEmbeddingsAllToAll``.
    """

    def __init__(
        self, pg: dist.ProcessGroup | None, codecs: QuantizedCommCodecs | None = None
    ) -> None:
        super().__init__()
        self._pg, self._codecs = pg, codecs

    def forward(
        self, rows: torch.Tensor, counts_out: Sequence[int], counts_in: Sequence[int]
    ) -> Awaitable[torch.Tensor]:
        """``rows [sum of counts_out]`` -> awaitable of ``[sum of counts_in]``, counts per rank."""
        return _rows_to_ranks(self._pg, rows, counts_out, counts_in, self._codecs)


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
        forward, backward = _directions(self._codecs)
        moves = _Moves(
            lambda flat: comm.all_gather(flat, counts, group, ROWS_STAGE, forward),
            lambda flat: comm.reduce_scatter(flat, counts, group, GRADIENTS_STAGE, backward),
        )
        gathered = _flat_rows(moves, local_emb.reshape(-1), world_size)
        return map_awaitable(lambda flat: flat.view(-1, *row), gathered)


def _to_ranks(
    group: dist.ProcessGroup,
    counts_out: list[int],
    counts_in: list[int],
    codecs: QuantizedCommCodecs | None,
    slices: bool = True,
) -> _Moves:
    """All-to-all; received slices stay separate if that saves a copy of this rank's own slice."""
    forward, backward = _directions(codecs)
    exchange = comm.all_to_all_slices if slices else comm.all_to_all
    return _Moves(
        lambda flat: exchange(flat, counts_out, counts_in, group, ROWS_STAGE, forward),
        lambda flat: comm.all_to_all(flat, counts_in, counts_out, group, GRADIENTS_STAGE, backward),
    )


def _into_sum(
    group: dist.ProcessGroup, counts: list[int], codecs: QuantizedCommCodecs | None
) -> _Moves:
    """Reduce-scatter: slice r is summed on rank r."""
    forward, backward = _directions(codecs)
    return _Moves(
        lambda flat: comm.reduce_scatter(flat, counts, group, ROWS_STAGE, forward),
        lambda flat: comm.all_gather(flat, counts, group, GRADIENTS_STAGE, backward),
    )


def _into_host_sums(
    hosts: HostGroups,
    counts_out: list[int],
    counts_in: list[int],
    codecs: QuantizedCommCodecs | None,
) -> _Moves:
    """Reduce-scatter inside each host, then all-to-all of the sums across hosts.

    Waiting for the first step issues the second.

    Args:
        hosts: The groups of this rank's host and of its local rank on every host.
        counts_out: Elements of each rank's slice: W numbers, the same on the ranks of a host.
        counts_in: Elements received from each host: H numbers.
        codecs: Data types in which they are sent, in both steps.
    """
    forward, backward = _directions(codecs)
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

    return _Moves(rows, gradients)


def _rows_to_ranks(
    group: dist.ProcessGroup | None,
    rows: torch.Tensor,
    counts_out: Sequence[int],
    counts_in: Sequence[int],
    codecs: QuantizedCommCodecs | None,
) -> Awaitable[torch.Tensor]:
    if group is None or group.size() == 1:
        return NoWait(rows)
    moves = _to_ranks(group, list(counts_out), list(counts_in), codecs, slices=False)
    return _flat_rows(moves, rows, len(counts_out))


def _flat_rows(moves: _Moves, rows: torch.Tensor, world_size: int) -> Awaitable[torch.Tensor]:
    """Issue an exchange of flat rows."""
    return issue(
        lambda sent: moves.rows(_flat(sent)),
        lambda gradient: moves.gradients(_flat(gradient / gradient_divisor(world_size))),
        rows,
    )


def _matrices(
    moves: _Moves, pooled: torch.Tensor, samples: int, columns: Sequence[int], world_size: int
) -> Awaitable[torch.Tensor]:
    """Issue an exchange of a matrix of samples, in which each rank's slice is contiguous.

    Args:
        moves: The exchange of its elements.
        pooled: ``[sum of B_s, D]``.
        samples: B_local.
        columns: Columns from each source, whose slices ``[B_local, D]`` are concatenated.
        world_size: W.
    """
    shape, counts = pooled.shape, [samples * width for width in columns]

    def blocks(slices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [part.view(samples, width) for part, width in zip(slices, columns, strict=True)]

    def side_by_side(arrived: Any) -> torch.Tensor:
        parts = blocks(arrived.split(counts) if isinstance(arrived, torch.Tensor) else arrived)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def gradients(gradient: torch.Tensor) -> Awaitable[torch.Tensor]:
        # Copied into its layout and divided in one pass.
        flat, divisor = gradient.new_empty(sum(counts)), gradient_divisor(world_size)
        for part, block in zip(
            gradient.split(columns, dim=1), blocks(flat.split(counts)), strict=True
        ):
            torch.div(part, divisor, out=block)
        return map_awaitable(lambda arrived: arrived.view(shape), moves.gradients(flat))

    return issue(
        lambda sent: map_awaitable(side_by_side, moves.rows(_flat(sent))), gradients, pooled
    )


def _samples_of_ranks(
    pooled: torch.Tensor, given: Sequence[int] | None, world_size: int
) -> Sequence[int]:
    """B_s of each rank: as given, else equal shares of the rows."""
    rows = pooled.shape[0]
    if given is None:
        if rows % world_size:
            raise ValueError(
                f"{rows} pooled rows cannot be divided equally among {world_size} ranks: "
                "give batch_size_per_rank, the number of samples of each"
            )
        return [rows // world_size] * world_size
    if len(given) != world_size or sum(given) != rows:
        raise ValueError(
            f"batch_size_per_rank {list(given)} is for {len(given)} ranks and {sum(given)} "
            f"samples, and there are {world_size} ranks and {rows} pooled rows"
        )
    return given


def _flat(values: torch.Tensor) -> torch.Tensor:
    """``values`` as one contiguous 1-D tensor, outside the graph."""
    # A slice [N, 1] of a wider tensor flattens to a tensor with a stride.
    return values.detach().reshape(-1).contiguous()


def _directions(codecs: QuantizedCommCodecs | None) -> tuple[Any, Any]:
    return (None, None) if codecs is None else (codecs.forward, codecs.backward)


__all__ = [
    "GRADIENTS_STAGE",
    "ROWS_STAGE",
    "HostPooledEmbeddings",
    "PooledEmbeddingsAllGather",
    "PooledEmbeddingsAllToAll",
    "PooledEmbeddingsReduceScatter",
    "SequenceEmbeddingsAllToAll",
]

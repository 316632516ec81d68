"""Rows travel back to the rank of their sample, or of their id; gradients travel the other way, divided by W once.

    PooledEmbeddingsAllToAll        whole rows: every rank has some columns of my samples     side by side
    PooledEmbeddingsReduceScatter   split rows: every rank has a part of each sum             added
    HostPooledEmbeddings            split inside a host: added there, side by side from host to host
    SequenceEmbeddingsAllToAll      a row for each id, to the rank that sent the id
    PooledEmbeddingsAllGather       my rows, to every rank; no sharding type uses it

``forward`` of the pooled ones takes a matrix, samples of rank 0 first. ``variable`` takes a batch whose features have
different numbers of samples, as one flat tensor: for each rank its samples' rows, feature after feature, since those
form no matrix.
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
    """How flat rows travel, and how their gradients travel back.

    Args:
        rows: ``[N]`` -> awaitable of what arrives, flat or as one slice from each source.
        gradients: Of what arrived ``[M]`` -> awaitable of those of what was sent ``[N]``.
    """

    rows: Callable[[torch.Tensor], Awaitable[Any]]
    gradients: Callable[[torch.Tensor], Awaitable[torch.Tensor]]


class PooledEmbeddingsAllToAll(nn.Module):
    """Every sample, my columns -> my samples, every column.

    Rank r sends ``batch_size_per_rank[s] * dim_sum_per_rank[r]`` elements to rank s, and receives as many in backward.

    Args:
        pg: The ranks; None in a world of 1.
        dim_sum_per_rank: D_r, the columns that each rank looks up: W numbers.
        device: TorchRec's; has no effect, since rows stay on the device where they are.
        codecs: In what type rows and gradients travel; None: as they are.

    Raises:
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
        """``pooled [sum of B_s, D_mine]`` -> promise of ``[B_mine, sum of D_r]``, columns in rank order.

        Raises:
            ValueError: The rows are not those of the batch sizes, or, where none are given, no
                equal share for each rank.
        """
        if self._pg is None or len(self._columns) == 1:
            return NoWait(pooled)
        batch_sizes = _samples_of_ranks(pooled, batch_size_per_rank, len(self._columns))
        samples, width = batch_sizes[self._pg.rank()], self._columns[self._pg.rank()]
        counts_out = [count * width for count in batch_sizes]
        moves = _to_ranks(self._pg, counts_out, [samples * width for width in self._columns], self._codecs)
        return _matrices(moves, pooled, samples, self._columns, len(batch_sizes))

    def variable(
        self, flat: torch.Tensor, counts_out: Sequence[int], counts_in: Sequence[int]
    ) -> Awaitable[torch.Tensor]:
        """``flat [sum of counts_out]`` -> promise of ``[sum of counts_in]``: elements for, and from, each rank."""
        return _rows_to_ranks(self._pg, flat, counts_out, counts_in, self._codecs)


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
        self._pg, self._codecs = pg, codecs

    def forward(
        self, pooled: torch.Tensor, batch_size_per_rank: Sequence[int] | None = None
    ) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D]`` -> promise of ``[B_mine, D]``.

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
        """``flat [sum of counts]`` -> promise of ``[counts[me]]``: elements of each rank's samples."""
        if self._pg is None or self._pg.size() == 1:
            return NoWait(flat)
        return _flat_rows(_into_sum(self._pg, list(counts), self._codecs), flat, len(counts))


class HostPooledEmbeddings(nn.Module):
    """Every sample, my part of the sums of my host's columns -> my samples, every column.

    Inside a host rank (h, l) sends the samples of rank (h', l') to its neighbour (h, l'), for each h' and l': D_h
    columns each. Across hosts it sends the sums of the samples of rank (h', l) to that rank. Backward the same numbers.

    ::

        rank (h, l), L ranks on each of H hosts     slices for every rank
          | reduce-scatter inside the host          I sum the slices for ranks (0, l) ... (H-1, l)
          | all-to-all across hosts                 slice (h', l) goes to its rank
        H slices for me, one from each host

    So that each sum crosses between hosts once, and not once for each rank that holds a part of it.

    Args:
        hosts: This rank's groups, `host_groups`; None in a world of 1.
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
        self._hosts, self._rank, self._codecs = hosts, rank, codecs
        self._columns = list(dim_sum_per_host)
        self._width = self._columns[rank // local_size]
        self._world_size = local_size * len(self._columns)

    def forward(self, pooled: torch.Tensor, batch_size_per_rank: Sequence[int]) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D_h]`` -> promise of ``[B_mine, sum of D_h over hosts]``, columns in host order."""
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
        """``flat [sum of counts_out]`` -> promise of ``[sum of counts_in]``.

        ``counts_out`` are the elements of each rank's samples, W numbers; ``counts_in`` those that each host has for
        my samples, H numbers.
        """
        if self._hosts is None or self._world_size == 1:
            return NoWait(flat)
        moves = _into_host_sums(self._hosts, list(counts_out), list(counts_in), self._codecs)
        return _flat_rows(moves, flat, self._world_size)


class SequenceEmbeddingsAllToAll(nn.Module):
    """A row for each id that arrived -> a row for each id that I sent.

    Flat, since ids of tables of different widths may travel together: the caller knows the shapes. A rank that has
    looked up nothing takes part in backward, too.

    Args:
        pg: The ranks; None in a world of 1.
        codecs: In what type rows and gradients travel; None: as they are.

    Source:
        TorchRec's ``SequenceEmbeddingsAllToAll``.
    """

    def __init__(self, pg: dist.ProcessGroup | None, codecs: QuantizedCommCodecs | None = None) -> None:
        super().__init__()
        self._pg, self._codecs = pg, codecs

    def forward(
        self, rows: torch.Tensor, counts_out: Sequence[int], counts_in: Sequence[int]
    ) -> Awaitable[torch.Tensor]:
        """``rows [sum of counts_out]`` -> promise of ``[sum of counts_in]``: elements for, and from, each rank."""
        return _rows_to_ranks(self._pg, rows, counts_out, counts_in, self._codecs)


class PooledEmbeddingsAllGather(nn.Module):
    """My rows -> the rows of every rank, those of rank 0 first.

    Rank r sends its ``B * D`` elements to each other rank, and the gradients of their rows to them in backward.

    Args:
        pg: The ranks; None in a world of 1.
        codecs: In what type rows and gradients travel; None: as they are. Gradients are summed in float32.

    Source:
        TorchRec's ``PooledEmbeddingsAllGather``.
    """

    def __init__(self, pg: dist.ProcessGroup | None, codecs: QuantizedCommCodecs | None = None) -> None:
        super().__init__()
        self._pg, self._codecs = pg, codecs

    def forward(self, local_emb: torch.Tensor) -> Awaitable[torch.Tensor]:
        """``local_emb [B, ...]``, the same shape on every rank -> promise of ``[W * B, ...]``."""
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
    """Slice r of what I have goes to rank r; what arrives is apart where that saves a copy of my own slice."""
    forward, backward = _directions(codecs)
    exchange = comm.all_to_all_slices if slices else comm.all_to_all
    return _Moves(
        lambda flat: exchange(flat, counts_out, counts_in, group, ROWS_STAGE, forward),
        lambda flat: comm.all_to_all(flat, counts_in, counts_out, group, GRADIENTS_STAGE, backward),
    )


def _into_sum(group: dist.ProcessGroup, counts: list[int], codecs: QuantizedCommCodecs | None) -> _Moves:
    """Slice r of what every rank has is summed on rank r."""
    forward, backward = _directions(codecs)
    return _Moves(
        lambda flat: comm.reduce_scatter(flat, counts, group, ROWS_STAGE, forward),
        lambda flat: comm.all_gather(flat, counts, group, GRADIENTS_STAGE, backward),
    )


def _into_host_sums(
    hosts: HostGroups, counts_out: list[int], counts_in: list[int], codecs: QuantizedCommCodecs | None
) -> _Moves:
    """Slice r of what the ranks of a host have is summed in the host, and the sums of all hosts go to rank r.

    The second step of each move is issued by waiting for it.

    Args:
        hosts: The groups of this rank's host, and of its number on every host.
        counts_out: Elements of each rank's slice: W numbers, the same on the ranks of a host.
        counts_in: Elements that arrive from each host: H numbers.
        codecs: In what type they travel; both steps round.
    """
    forward, backward = _directions(codecs)
    local_size, host_count = hosts.intra.size(), len(counts_in)
    # Slices stand host by host; the sum inside the host wants those of one local number together.
    by_place = [counts_out[place::local_size] for place in range(local_size)]
    sums, across = [sum(counts) for counts in by_place], by_place[hosts.intra.rank()]

    def rows(flat: torch.Tensor) -> Awaitable[torch.Tensor]:
        slices = flat.split(counts_out)
        placed = torch.cat([each for place in range(local_size) for each in slices[place::local_size]])
        return map_awaitable(
            lambda summed: comm.all_to_all(summed, across, counts_in, hosts.cross, ROWS_STAGE, forward).wait(),
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
    """Issue a move of rows of which nothing but their number is known."""
    return issue(
        lambda sent: moves.rows(_flat(sent)),
        lambda gradient: moves.gradients(_flat(gradient / gradient_divisor(world_size))),
        rows,
    )


def _matrices(
    moves: _Moves, pooled: torch.Tensor, samples: int, columns: Sequence[int], world_size: int
) -> Awaitable[torch.Tensor]:
    """Issue a move of a matrix, whose outer dimension is samples, so that what goes to a rank lies in one range.

    Args:
        moves: Of its elements.
        pooled: ``[sum of B_s, D]``.
        samples: B_mine.
        columns: Of each source, whose slices ``[B_mine, D]`` are put side by side.
        world_size: W.
    """
    shape, counts = pooled.shape, [samples * width for width in columns]

    def blocks(slices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [part.view(samples, width) for part, width in zip(slices, columns, strict=True)]

    def side_by_side(arrived: Any) -> torch.Tensor:
        parts = blocks(arrived.split(counts) if isinstance(arrived, torch.Tensor) else arrived)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def gradients(gradient: torch.Tensor) -> Awaitable[torch.Tensor]:
        # Laid out and divided in one pass.
        flat, divisor = gradient.new_empty(sum(counts)), gradient_divisor(world_size)
        for part, block in zip(gradient.split(columns, dim=1), blocks(flat.split(counts)), strict=True):
            torch.div(part, divisor, out=block)
        return map_awaitable(lambda arrived: arrived.view(shape), moves.gradients(flat))

    return issue(lambda sent: map_awaitable(side_by_side, moves.rows(_flat(sent))), gradients, pooled)


def _samples_of_ranks(pooled: torch.Tensor, given: Sequence[int] | None, world_size: int) -> Sequence[int]:
    """B_s of each rank: as given, else equal shares of the rows."""
    rows = pooled.shape[0]
    if given is None:
        if rows % world_size:
            raise ValueError(
                f"{rows} pooled rows are no equal share for each of {world_size} ranks: "
                "give batch_size_per_rank, the number of samples of each"
            )
        return [rows // world_size] * world_size
    if len(given) != world_size or sum(given) != rows:
        raise ValueError(
            f"batch_size_per_rank {list(given)} is for {len(given)} ranks and {sum(given)} samples, "
            f"and there are {world_size} ranks and {rows} pooled rows"
        )
    return given


def _flat(values: torch.Tensor) -> torch.Tensor:
    """``values`` as one contiguous row of numbers, outside of the graph."""
    # A slice [N, 1] of a wider tensor reshapes to a row with gaps.
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

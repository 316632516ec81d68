"""The exchange of pooled rows: back to the ranks of their samples, and their gradients in reverse.

Each rank has some columns of a sample; those that arrive are concatenated. ``forward`` takes a
matrix, samples of rank 0 first. ``variable`` takes a flat tensor, for batches whose features have
different numbers of samples: for each rank its samples' rows, feature after feature. Gradients are
divided by W. Exchanges that add partial sums are in ``row_sums.py``, those of a row per id in
``sequence.py``.
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
from tutorec.distributed.core.qcomm import QuantizedCommCodecs

ROWS_STAGE = "output rows"
GRADIENTS_STAGE = "output gradients"


class RowMoves(NamedTuple):
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
        self, local_embs: torch.Tensor, batch_size_per_rank: Sequence[int] | None = None
    ) -> Awaitable[torch.Tensor]:
        """``local_embs [sum of B_s, D_local]`` -> awaitable of ``[B_local, sum of D_r]``.

        Raises:
            ValueError: The number of rows does not match the batch sizes or, without batch sizes,
                is not divisible by W.
        """
        if self._pg is None or len(self._columns) == 1:
            return NoWait(local_embs)
        batch_sizes = samples_of_ranks(local_embs, batch_size_per_rank, len(self._columns))
        samples, width = batch_sizes[self._pg.rank()], self._columns[self._pg.rank()]
        counts_out = [count * width for count in batch_sizes]
        moves = _to_ranks(
            self._pg, counts_out, [samples * width for width in self._columns], self._codecs
        )
        return exchange_matrix(moves, local_embs, samples, self._columns, len(batch_sizes))

    def variable(
        self, flat: torch.Tensor, counts_out: Sequence[int], counts_in: Sequence[int]
    ) -> Awaitable[torch.Tensor]:
        """``flat [sum of counts_out]`` -> awaitable of ``[sum of counts_in]``, counts per rank."""
        return rows_to_ranks(self._pg, flat, counts_out, counts_in, self._codecs)


def _to_ranks(
    group: dist.ProcessGroup,
    counts_out: list[int],
    counts_in: list[int],
    codecs: QuantizedCommCodecs | None,
    slices: bool = True,
) -> RowMoves:
    """All-to-all; received slices stay separate if that saves a copy of this rank's own slice."""
    forward, backward = codecs_of(codecs)
    exchange = comm.all_to_all_slices if slices else comm.all_to_all
    return RowMoves(
        lambda flat: exchange(flat, counts_out, counts_in, group, ROWS_STAGE, forward),
        lambda flat: comm.all_to_all(flat, counts_in, counts_out, group, GRADIENTS_STAGE, backward),
    )


def rows_to_ranks(
    group: dist.ProcessGroup | None,
    rows: torch.Tensor,
    counts_out: Sequence[int],
    counts_in: Sequence[int],
    codecs: QuantizedCommCodecs | None,
) -> Awaitable[torch.Tensor]:
    """Flat rows -> awaitable of flat rows.

    Args:
        group: The ranks; None in a world of 1.
        rows: ``[sum of counts_out]``.
        counts_out: Elements for each rank.
        counts_in: Elements from each rank.
        codecs: Data types in which rows and gradients are sent.
    """
    if group is None or group.size() == 1:
        return NoWait(rows)
    moves = _to_ranks(group, list(counts_out), list(counts_in), codecs, slices=False)
    return exchange_flat(moves, rows, len(counts_out))


def exchange_flat(moves: RowMoves, rows: torch.Tensor, world_size: int) -> Awaitable[torch.Tensor]:
    """Issue an exchange of flat rows."""
    return issue(
        lambda sent: moves.rows(_flat(sent)),
        lambda gradient: moves.gradients(_flat(gradient / gradient_divisor(world_size))),
        rows,
    )


def exchange_matrix(
    moves: RowMoves, pooled: torch.Tensor, samples: int, columns: Sequence[int], world_size: int
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


def samples_of_ranks(
    pooled: torch.Tensor, given: Sequence[int] | None, world_size: int
) -> Sequence[int]:
    """B_s of each rank: as given, else equal shares of the rows.

    Raises:
        ValueError: The rows cannot be divided so.
    """
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


def codecs_of(codecs: QuantizedCommCodecs | None) -> tuple[Any, Any]:
    """Data types of rows and of their gradients; None keeps them as they are."""
    return (None, None) if codecs is None else (codecs.forward, codecs.backward)


__all__ = [
    "GRADIENTS_STAGE",
    "ROWS_STAGE",
    "PooledEmbeddingsAllToAll",
    "RowMoves",
    "codecs_of",
    "exchange_flat",
    "exchange_matrix",
    "rows_to_ranks",
    "samples_of_ranks",
]

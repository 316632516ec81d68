"""The exchange of pooled rows: back to the ranks of their samples, and their gradients in reverse.

Each rank has some columns of a sample; those that arrive are concatenated. ``forward`` takes a
matrix, samples of rank 0 first. ``variable`` takes a flat tensor, for batches whose features have
different numbers of samples: for each rank its samples' rows, feature after feature. Gradients are
divided by W. Exchanges that add partial sums are in ``row_sums.py``, those of a row per id in
``sequence.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutorec.awaitable import Awaitable, NoWait
from tutorec.distributed import comm
from tutorec.distributed.collectives.autograd import gradient_divisor, issue
from tutorec.distributed.core.qcomm import QuantizedCommCodecs

ROWS_STAGE = "output rows"
GRADIENTS_STAGE = "output gradients"


class RowExchange(ABC):
    """An exchange of flat rows, and the reverse exchange of their gradients.

    Args:
        codecs: Data types in which rows and gradients are sent; None keeps them as they are.
    """

    def __init__(self, codecs: QuantizedCommCodecs | None) -> None:
        self._forward_codec = None if codecs is None else codecs.forward
        self._backward_codec = None if codecs is None else codecs.backward

    @abstractmethod
    def send(self, rows: torch.Tensor) -> Awaitable[Any]:
        """``rows [N]`` -> awaitable of the received elements, flat or one slice per source."""

    @abstractmethod
    def send_back(self, gradients: torch.Tensor) -> Awaitable[torch.Tensor]:
        """Gradients of the received elements ``[M]`` -> awaitable of those of the sent ones."""


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

        self._pg = pg
        self._codecs = codecs
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
        samples = batch_sizes[self._pg.rank()]
        local_columns = self._columns[self._pg.rank()]

        # Received slices stay separate, which saves a copy of this rank's own slice.
        exchange = RowsToRanks(
            self._pg,
            counts_out=[count * local_columns for count in batch_sizes],
            counts_in=[samples * columns for columns in self._columns],
            codecs=self._codecs,
            as_slices=True,
        )
        return exchange_matrix(exchange, local_embs, samples, self._columns, len(batch_sizes))

    def variable(
        self, flat: torch.Tensor, counts_out: Sequence[int], counts_in: Sequence[int]
    ) -> Awaitable[torch.Tensor]:
        """``flat [sum of counts_out]`` -> awaitable of ``[sum of counts_in]``, counts per rank."""
        return rows_to_ranks(self._pg, flat, counts_out, counts_in, self._codecs)


class RowsToRanks(RowExchange):
    """All-to-all of rows.

    Args:
        group: The ranks.
        counts_out: Elements for each rank.
        counts_in: Elements from each rank.
        codecs: Data types in which rows and gradients are sent; None keeps them as they are.
        as_slices: Whether received elements come as a slice per rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        counts_out: list[int],
        counts_in: list[int],
        codecs: QuantizedCommCodecs | None,
        as_slices: bool,
    ) -> None:
        super().__init__(codecs)
        self._group = group
        self._counts_out = counts_out
        self._counts_in = counts_in
        self._all_to_all = comm.all_to_all_slices if as_slices else comm.all_to_all

    def send(self, rows: torch.Tensor) -> Awaitable[Any]:
        """Send each rank its elements."""
        return self._all_to_all(
            rows, self._counts_out, self._counts_in, self._group, ROWS_STAGE, self._forward_codec
        )

    def send_back(self, gradients: torch.Tensor) -> Awaitable[torch.Tensor]:
        """Send each rank the gradients of its elements."""
        return comm.all_to_all(
            gradients,
            self._counts_in,
            self._counts_out,
            self._group,
            GRADIENTS_STAGE,
            self._backward_codec,
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
    exchange = RowsToRanks(group, list(counts_out), list(counts_in), codecs, as_slices=False)
    return exchange_flat(exchange, rows, len(counts_out))


def exchange_flat(
    exchange: RowExchange, rows: torch.Tensor, world_size: int
) -> Awaitable[torch.Tensor]:
    """Issue an exchange of flat rows, whose gradients are divided by W."""
    flat = _FlatRows(exchange, world_size)
    return issue(flat.send, flat.send_back, rows)


def exchange_matrix(
    exchange: RowExchange,
    pooled: torch.Tensor,
    samples: int,
    columns: Sequence[int],
    world_size: int,
) -> Awaitable[torch.Tensor]:
    """Issue an exchange of a matrix of samples, in which each rank's slice is contiguous.

    Args:
        exchange: The exchange of its elements.
        pooled: ``[sum of B_s, D]``.
        samples: B_local.
        columns: Columns from each source, whose slices ``[B_local, D]`` are concatenated.
        world_size: W.
    """
    matrix = _Matrix(exchange, pooled.shape, samples, columns, world_size)
    return issue(matrix.send, matrix.send_back, pooled)


class _FlatRows:
    """Flat rows on their way, and their gradients on the way back."""

    def __init__(self, exchange: RowExchange, world_size: int) -> None:
        self._exchange = exchange
        self._world_size = world_size

    def send(self, rows: torch.Tensor) -> Awaitable[torch.Tensor]:
        return self._exchange.send(_flat(rows))

    def send_back(self, gradient: torch.Tensor) -> Awaitable[torch.Tensor]:
        return self._exchange.send_back(_flat(gradient / gradient_divisor(self._world_size)))


class _Matrix:
    """A matrix of samples on its way, and its gradients on the way back."""

    def __init__(
        self,
        exchange: RowExchange,
        shape: torch.Size,
        samples: int,
        columns: Sequence[int],
        world_size: int,
    ) -> None:
        self._exchange = exchange
        self._shape = shape
        self._samples = samples
        self._columns = list(columns)
        self._world_size = world_size

    def send(self, pooled: torch.Tensor) -> Awaitable[torch.Tensor]:
        return ColumnsAwaitable(self._exchange.send(_flat(pooled)), self._samples, self._columns)

    def send_back(self, gradient: torch.Tensor) -> Awaitable[torch.Tensor]:
        divisor = gradient_divisor(self._world_size)
        flat = gradient.new_empty(self._samples * sum(self._columns))

        # Copied into its layout and divided in one pass.
        blocks = _blocks(flat, self._samples, self._columns)
        for columns, block in zip(gradient.split(self._columns, dim=1), blocks, strict=True):
            torch.div(columns, divisor, out=block)
        return ViewAwaitable(self._exchange.send_back(flat), self._shape)


class ColumnsAwaitable(Awaitable[torch.Tensor]):
    """Columns in flight from every source; ``wait()`` concatenates them.

    Args:
        arriving: The elements of each source: ``[samples, D]``, flat, as slices or in one tensor.
        samples: B_local.
        columns: D of each source.
    """

    def __init__(self, arriving: Awaitable[Any], samples: int, columns: Sequence[int]) -> None:
        self._arriving = arriving
        self._samples = samples
        self._columns = columns

    def _wait_impl(self) -> torch.Tensor:
        arrived = self._arriving.wait()
        del self._arriving
        blocks = _blocks(arrived, self._samples, self._columns)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


class ViewAwaitable(Awaitable[torch.Tensor]):
    """A flat tensor in flight; ``wait()`` returns it in a shape.

    Args:
        arriving: The tensor.
        shape: The shape, as ``Tensor.view`` takes it.
    """

    def __init__(self, arriving: Awaitable[torch.Tensor], shape: Sequence[int]) -> None:
        self._arriving = arriving
        self._shape = shape

    def _wait_impl(self) -> torch.Tensor:
        flat = self._arriving.wait()
        del self._arriving
        return flat.view(self._shape)


def _blocks(
    elements: torch.Tensor | Sequence[torch.Tensor], samples: int, columns: Sequence[int]
) -> list[torch.Tensor]:
    """Views ``[samples, D]`` of the elements of each source."""
    if isinstance(elements, torch.Tensor):
        elements = elements.split([samples * width for width in columns])
    return [block.view(samples, width) for block, width in zip(elements, columns, strict=True)]


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


__all__ = [
    "GRADIENTS_STAGE",
    "ROWS_STAGE",
    "ColumnsAwaitable",
    "PooledEmbeddingsAllToAll",
    "RowExchange",
    "RowsToRanks",
    "ViewAwaitable",
    "exchange_flat",
    "exchange_matrix",
    "rows_to_ranks",
    "samples_of_ranks",
]

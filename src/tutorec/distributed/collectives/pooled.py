"""Pooled rows travel back to the rank of their sample (table-wise and column-wise sharding)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from tutorec.awaitable import Awaitable, NoWait
from tutorec.distributed import comm
from tutorec.distributed.collectives.autograd import Exchange, issue

ROWS_STAGE = "output rows"
GRADIENTS_STAGE = "output gradients"


class PooledEmbeddingsAllToAll(nn.Module):
    """Every sample, my columns -> my samples, every column.

    Rank r sends ``batch_size_per_rank[s] * dim_sum_per_rank[r]`` elements to rank s, and receives as many in backward.

    Args:
        pg: The ranks; None in a world of 1.
        dim_sum_per_rank: D_r, the columns that each rank looks up: W numbers.

    Source:
        TorchRec's ``PooledEmbeddingsAllToAll``.
    """

    def __init__(self, pg: dist.ProcessGroup | None, dim_sum_per_rank: Sequence[int]) -> None:
        super().__init__()
        self._pg = pg
        self._columns = list(dim_sum_per_rank)

    def forward(self, pooled: torch.Tensor, batch_size_per_rank: Sequence[int]) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D_mine]`` -> promise of ``[B_mine, sum of D_r]``, columns in rank order."""
        if self._pg is None or len(self._columns) == 1:
            return NoWait(pooled)
        return issue(_PooledExchange(self._pg, self._columns, list(batch_size_per_rank)), pooled)


class _PooledExchange(Exchange):
    def __init__(self, group: dist.ProcessGroup, columns: list[int], samples: list[int]) -> None:
        me = group.rank()
        self._group = group
        self._columns = columns
        self._my_samples = samples[me]
        # The two sides of the exchange; backward swaps them.
        self._rows_out = [count * columns[me] for count in samples]
        self._rows_in = [samples[me] * width for width in columns]
        self._sent_shape = (sum(samples), columns[me])

    def issue(self, sent: torch.Tensor) -> Awaitable[torch.Tensor]:
        assert sent.shape == self._sent_shape, f"pooled rows are {tuple(sent.shape)}, planned {self._sent_shape}"
        # Samples are the outer dimension, so that what goes to one rank lies in one piece already.
        flat = sent.detach().contiguous().view(-1)
        arriving = comm.all_to_all(flat, self._rows_out, self._rows_in, self._group, ROWS_STAGE)
        return _Joined(arriving, self._rows_in, self._my_samples, self._columns)

    def issue_back(self, gradient: torch.Tensor) -> Awaitable[torch.Tensor]:
        world_size = len(self._columns)
        slices = [columns.reshape(-1) for columns in gradient.split(self._columns, dim=1)]
        flat = torch.cat(slices).div_(world_size)
        arriving = comm.all_to_all(flat, self._rows_in, self._rows_out, self._group, GRADIENTS_STAGE)
        return _Reshaped(arriving, self._sent_shape)


class _Joined(Awaitable[torch.Tensor]):
    """The slices of all ranks side by side: ``[B_mine, sum of D_r]``."""

    def __init__(self, arriving: Awaitable[torch.Tensor], counts: list[int], samples: int, columns: list[int]) -> None:
        self._parts = (arriving, counts, samples, columns)

    def _wait_impl(self) -> torch.Tensor:
        arriving, counts, samples, columns = self._parts
        slices = arriving.wait().split(counts)
        return torch.cat([part.view(samples, width) for part, width in zip(slices, columns, strict=True)], dim=1)


class _Reshaped(Awaitable[torch.Tensor]):
    def __init__(self, arriving: Awaitable[torch.Tensor], shape: tuple[int, int]) -> None:
        self._parts = (arriving, shape)

    def _wait_impl(self) -> torch.Tensor:
        arriving, shape = self._parts
        return arriving.wait().view(shape)

"""Rows of every rank on every rank: `PooledEmbeddingsAllGather`, which no sharding type here uses."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tutorec.awaitable import Awaitable, NoWait
from tutorec.distributed import comm
from tutorec.distributed.collectives.autograd import Exchange, issue
from tutorec.distributed.collectives.rows import GRADIENTS_STAGE, ROWS_STAGE, FlatMove, Then
from tutorec.distributed.qcomm import CommCodec, QuantizedCommCodecs


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
        self._pg = pg
        self._codecs = codecs or QuantizedCommCodecs()

    def forward(self, local_emb: torch.Tensor) -> Awaitable[torch.Tensor]:
        """``local_emb [B, ...]``, the same shape on every rank -> promise of ``[W * B, ...]``."""
        if self._pg is None or self._pg.size() == 1:
            return NoWait(local_emb)
        row = local_emb.shape[1:]
        move = FlatMove(_RowsToAll(self._pg, local_emb.numel(), self._codecs), self._pg.size())
        return Then(issue(move, local_emb.reshape(-1)), lambda flat: flat.view(-1, *row))


class _RowsToAll(Exchange):
    """What every rank has goes to every rank."""

    def __init__(self, group: dist.ProcessGroup, elements: int, codecs: QuantizedCommCodecs) -> None:
        self._group, self._codecs = group, codecs
        self._counts = [elements] * group.size()

    def issue(self, sent: torch.Tensor) -> Awaitable[torch.Tensor]:
        """``[counts[me]]`` -> promise of ``[sum(counts)]``, rank 0's elements first."""
        codec = self._codecs.forward
        arriving = comm.all_gather(_encoded(sent, codec), self._counts, self._group, ROWS_STAGE)
        return Then(arriving, lambda arrived: _decoded(arrived, codec, sent.dtype))

    def issue_back(self, gradient: torch.Tensor) -> Awaitable[torch.Tensor]:
        """``[sum(counts)]`` -> promise of ``[counts[me]]``, summed in rank order."""
        codec = self._codecs.backward
        arriving = comm.reduce_scatter(_encoded(gradient, codec), self._counts, self._group, GRADIENTS_STAGE)
        return Then(arriving, lambda total: _decoded(total, codec, gradient.dtype))


def _encoded(values: torch.Tensor, codec: CommCodec | None) -> torch.Tensor:
    values = values.detach().contiguous()
    return values if codec is None else codec.encode(values)


def _decoded(values: torch.Tensor, codec: CommCodec | None, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype) if codec is None else codec.decode(values, dtype)


__all__ = ["PooledEmbeddingsAllGather"]

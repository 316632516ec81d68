"""Rows that are not pooled travel back to the rank of their id."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from tutorec.awaitable import Awaitable, NoWait
from tutorec.distributed.collectives.autograd import issue
from tutorec.distributed.collectives.rows import FlatMove, RowsToRanks
from tutorec.distributed.qcomm import QuantizedCommCodecs


class SequenceEmbeddingsAllToAll(nn.Module):
    """A row for each id that arrived -> a row for each id that I sent.

    Flat, since ids of tables of different widths may travel together: the caller knows the shapes. Gradients travel the
    other way and are divided by W; a rank that has looked up nothing takes part in that, too.

    Args:
        pg: The ranks; None in a world of 1.
        codecs: In what type rows and gradients travel; None: as they are.

    Source:
        TorchRec's ``SequenceEmbeddingsAllToAll``.
    """

    def __init__(self, pg: dist.ProcessGroup | None, codecs: QuantizedCommCodecs | None = None) -> None:
        super().__init__()
        self._pg = pg
        self._codecs = codecs

    def forward(
        self, rows: torch.Tensor, counts_out: Sequence[int], counts_in: Sequence[int]
    ) -> Awaitable[torch.Tensor]:
        """``rows [sum of counts_out]`` -> promise of ``[sum of counts_in]``: elements for, and from, each rank."""
        if self._pg is None or self._pg.size() == 1:
            return NoWait(rows)
        move = RowsToRanks(self._pg, list(counts_out), list(counts_in), self._codecs)
        return issue(FlatMove(move, len(counts_out)), rows)


__all__ = ["SequenceEmbeddingsAllToAll"]

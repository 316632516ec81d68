"""How the tensors of a checkpoint are stored, and which blocks a rank writes and reads.

A checkpoint holds whole tensors under the names of the unsharded model, each split into blocks. A
rank writes the blocks of its shards. A rank that loads requests rectangles and reads them from all
blocks that overlap. There are three forms::

    WHOLE    a dense tensor or a number, unchanged
    TABLE    a table's weights, or a state of their shape: [R, D]
    ROWS     a state with one number per row. Each of S column shards has its own; they are stored
             one after the other: [S * R], in TorchRec's order

A ROWS state that was saved under other column shards is read as a function of the column, constant
on each shard: a new shard takes the mean over its columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate, pairwise

import torch

from tutorec.distributed.core.tables import Table
from tutorec.distributed.plan.geometry import TableShard
from tutorec.distributed.plan.plan import ShardingType

# Saving and loading need memory for one block at a time, in addition to the model.
BLOCK_BYTES = 4 * 2**20


class Form(Enum):
    """How a tensor is stored, see the module."""

    WHOLE = auto()
    TABLE = auto()
    ROWS = auto()


@dataclass(frozen=True)
class Request:
    """A rectangle of a stored tensor that a rank reads.

    Args:
        offsets: In the stored tensor.
        target: The tensor that receives it, of the rectangle's shape.
        share: Factor for adding it to the target; None: it overwrites the target.
    """

    offsets: tuple[int, ...]
    target: torch.Tensor
    share: float | None = None


@dataclass(frozen=True)
class LocalShard:
    """A tensor of this rank, and the rectangle of the table that it is, or belongs to.

    Args:
        tensor: The live tensor.
        bounds: The rectangle; None for a dense tensor.
    """

    tensor: torch.Tensor
    bounds: TableShard | None = None


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, and its shards on this rank.

    Args:
        path: Keys that lead to it in the nested state dict, e.g. ``("model", "over.weight")``.
        form: How it is stored.
        shards: The shards on this rank, of equal dtype and number of dimensions.
        table: The table that it belongs to; None for a dense tensor.
    """

    path: tuple[str, ...]
    form: Form
    shards: tuple[LocalShard, ...]
    table: Table | None = None

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""
        return ".".join(self.path)

    @property
    def widths(self) -> tuple[int, ...]:
        """For a ROWS state the columns of each column shard; else empty."""
        return self.table.slice_widths if self.form is Form.ROWS and self.table is not None else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor as stored; without a local shard ``[R, D]`` or ``[S * R]``."""
        local = tuple(self.shards[0].tensor.shape) if self.shards else ()
        if self.table is None or self.form is Form.WHOLE:
            return local
        if self.form is Form.TABLE:
            return self.table.rows, self.table.columns
        return len(self.widths) * self.table.rows, *local[1:]

    def blocks(self, rank: int, world_size: int) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """The blocks that this rank writes, as offsets and views of at most 4 MiB or one row.

        What several ranks hold is written once: a dense tensor by rank 0, a replicated table by the
        ranks in turn, block by block, and a number of a table by the rank of its first shard.
        """
        table = self.table
        is_replicated = table is not None and table.sharding_type is ShardingType.DATA_PARALLEL
        if self.form is Form.WHOLE:
            writer = 0 if table is None or is_replicated else table.shards[0].rank
            if rank == writer:
                for shard in self.shards[:1]:
                    yield from _row_blocks(shard.tensor, self.offsets(shard))
            return

        for shard in self.shards:
            if shard.tensor.numel() == 0:
                continue
            for number, block in enumerate(_row_blocks(shard.tensor, self.offsets(shard))):
                if not is_replicated or number % world_size == rank:
                    yield block

    def requests(self) -> list[Request]:
        """The rectangles that this rank reads, of the form WHOLE or TABLE."""
        return [
            Request(self.offsets(shard), shard.tensor)
            for shard in self.shards
            if shard.tensor.numel()
        ]

    def offsets(self, shard: LocalShard) -> tuple[int, ...]:
        """Offsets of a shard in the whole tensor."""
        zeros = (0,) * shard.tensor.dim()
        if self.table is None or shard.bounds is None or self.form is Form.WHOLE:
            return zeros
        if self.form is Form.TABLE:
            return shard.bounds.row_offset, shard.bounds.column_offset
        return self.table.first_row_state(shard.bounds), *zeros[1:]


def row_requests(
    target: torch.Tensor, bounds: TableShard, rows: int, shape: Sequence[int], widths: Sequence[int]
) -> list[Request]:
    """The requests of a rank for a state with one number per row.

    Args:
        target: The state of its shard, ``[R]`` or ``[R, 1]``.
        bounds: The shard's rows and columns.
        rows: R of the table.
        shape: Shape of the stored state, ``[S * R]`` or ``[S * R, 1]``.
        widths: Columns of each of the S column shards that were saved.

    Example:
        >>> target = torch.zeros(2)
        >>> table = TableShard(rank=0, row_offset=0, column_offset=0, rows=2, columns=8)
        >>> requests = row_requests(target, table, 2, [4], [6, 2])
        >>> [(request.offsets, request.share) for request in requests]
        [((0,), 0.75), ((2,), 0.25)]
    """
    if bounds.rows == 0:
        return []

    target = target.view(bounds.rows, *shape[1:])
    zeros = (0,) * (len(shape) - 1)
    first_column = bounds.column_offset
    end_column = bounds.column_offset + bounds.columns

    requests: list[Request] = []
    for number, (start, end) in enumerate(pairwise(accumulate(widths, initial=0))):
        common = min(end_column, end) - max(first_column, start)
        if common > 0:
            offsets = (number * rows + bounds.row_offset, *zeros)
            share = None if common == bounds.columns else common / bounds.columns
            requests.append(Request(offsets, target, share))
    return requests


def _row_blocks(
    tensor: torch.Tensor, offsets: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Split a tensor into blocks of rows; an empty tensor is one block, which readers look for."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        yield offsets, tensor
        return

    row_bytes = tensor[:1].numel() * tensor.element_size()
    step = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, tensor.shape[0], step):
        yield (offsets[0] + start, *offsets[1:]), tensor[start : start + step]

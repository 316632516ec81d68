"""The tensors of a checkpoint: how each is stored, and which blocks a rank needs.

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

from tutorec.distributed.core.tables import PlacedTable
from tutorec.distributed.plan.geometry import ShardPiece
from tutorec.distributed.plan.plan import ShardingType

# Saving and loading need memory for one block at a time, in addition to the model.
BLOCK_BYTES = 4 * 2**20


class Form(Enum):
    """How a tensor is stored, see the module."""

    WHOLE = auto()
    TABLE = auto()
    ROWS = auto()


@dataclass(frozen=True)
class Part:
    """The part of a tensor that this rank holds.

    Args:
        tensor: The live tensor.
        piece: The table shard that it is, or belongs to; None for a dense tensor.
    """

    tensor: torch.Tensor
    piece: ShardPiece | None = None


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, and the parts of it on this rank.

    Args:
        path: Keys that lead to it in the nested state dict, e.g. ``("model", "over.weight")``.
        form: How it is stored.
        parts: The parts on this rank, of equal form, dtype and number of dimensions.
        table: The table that it belongs to; None for a dense tensor.
    """

    path: tuple[str, ...]
    form: Form
    parts: tuple[Part, ...]
    table: PlacedTable | None = None

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
        """Shape of the whole tensor as stored; without a local part ``[R, D]`` or ``[S * R]``."""
        tensor = self.parts[0].tensor if self.parts else None
        if self.table is None or self.form is Form.WHOLE:
            return tuple(tensor.shape) if tensor is not None else ()
        if self.form is Form.TABLE:
            return self.table.rows, self.table.columns
        trailing = tuple(tensor.shape[1:]) if tensor is not None else ()
        return len(self.widths) * self.table.rows, *trailing


@dataclass(frozen=True)
class Block:
    """A block to write: its offsets in the whole tensor, and a view of the rank's values."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class Wanted:
    """A rectangle of a stored tensor that a rank requests.

    Args:
        offsets: In the stored tensor.
        target: The tensor that receives it, of the rectangle's shape.
        share: Factor for adding it to the target; None: it overwrites the target.
    """

    offsets: tuple[int, ...]
    target: torch.Tensor
    share: float | None = None


def stored_blocks(entry: Entry, rank: int, world_size: int) -> Iterator[Block]:
    """The blocks of an entry that this rank writes, each at most 4 MiB or one row.

    What several ranks hold is written once: a dense tensor by rank 0, a replicated table by the
    ranks in turn, block by block, and a number of a table by the rank of its first shard.

    Args:
        entry: The tensor.
        rank: This rank.
        world_size: W.
    """
    copies = entry.table is not None and entry.table.sharding_type is ShardingType.DATA_PARALLEL
    if entry.form is Form.WHOLE or entry.table is None:
        writer = entry.table.pieces[0].rank if entry.table is not None and not copies else 0
        if rank == writer and entry.parts:
            tensor = entry.parts[0].tensor
            offsets = (0,) * tensor.dim()
            # An empty tensor needs a block too: readers find a tensor by its blocks.
            yield from _cut(tensor, offsets) if tensor.numel() else [Block(offsets, tensor)]
        return
    for part in entry.parts:
        blocks = _cut(part.tensor, _stored_at(entry, part))
        yield from (
            block for index, block in enumerate(blocks) if not copies or index % world_size == rank
        )


def wanted_rectangles(entry: Entry) -> list[Wanted]:
    """The requests of this rank for a stored tensor of the form WHOLE or TABLE."""
    return [
        Wanted(_stored_at(entry, part), part.tensor) for part in entry.parts if part.tensor.numel()
    ]


def wanted_rows(
    target: torch.Tensor, piece: ShardPiece, rows: int, shape: Sequence[int], widths: Sequence[int]
) -> list[Wanted]:
    """The requests of a rank for a state with one number per row.

    Args:
        target: The state of its shard, ``[R]`` or ``[R, 1]``.
        piece: The shard's rows and columns.
        rows: R of the table.
        shape: Shape of the stored state, ``[S * R]`` or ``[S * R, 1]``.
        widths: Columns of each of the S column shards that were saved.

    Example:
        >>> kept = torch.zeros(2)
        >>> whole = ShardPiece(rank=0, row_offset=0, column_offset=0, rows=2, columns=8)
        >>> [(wish.offsets, wish.share) for wish in wanted_rows(kept, whole, 2, [4], [6, 2])]
        [((0,), 0.75), ((2,), 0.25)]
    """
    if piece.rows == 0:
        return []
    zeros = (0,) * (len(shape) - 1)
    target = target.view(piece.rows, *shape[1:])
    first, last = piece.column_offset, piece.column_offset + piece.columns
    requests = []
    for index, (start, end) in enumerate(pairwise(accumulate(widths, initial=0))):
        common = min(last, end) - max(first, start)
        if common > 0:
            share = None if common == piece.columns else common / piece.columns
            requests.append(Wanted((index * rows + piece.row_offset, *zeros), target, share))
    return requests


def _stored_at(entry: Entry, part: Part) -> tuple[int, ...]:
    """Offsets of a part in the whole tensor."""
    piece = part.piece
    if entry.form is Form.WHOLE or piece is None or entry.table is None:
        return (0,) * part.tensor.dim()
    if entry.form is Form.TABLE:
        return piece.row_offset, piece.column_offset
    return entry.table.first_row_state(piece), *(0,) * (part.tensor.dim() - 1)


def _cut(tensor: torch.Tensor, offsets: tuple[int, ...]) -> Iterator[Block]:
    """Split a tensor into blocks of rows; an empty tensor has no blocks."""
    if tensor.dim() == 0:
        yield Block(offsets, tensor)
        return
    rows = tensor.shape[0]
    bytes_of_row = max(1, tensor[:1].numel() * tensor.element_size())
    step = max(1, BLOCK_BYTES // bytes_of_row)
    for start in range(0, rows if tensor.numel() else 0, step):
        yield Block((offsets[0] + start, *offsets[1:]), tensor[start : start + step])

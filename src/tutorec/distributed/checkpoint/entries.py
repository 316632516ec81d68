"""The tensors of a checkpoint: how each is stored, and which blocks of a stored one a rank wants.

A checkpoint knows whole tensors under the names of the unsharded model, each cut into blocks. A rank stores the blocks
of what it holds; who loads asks for rectangles, and takes them out of whatever blocks there are. Three forms exist::

    WHOLE    a dense tensor, or a number: as it is
    TABLE    a table's weights and any state of their shape: [R, D]
    ROWS     a state with one number for each row. Where a table is cut by columns each slice has its own, so that S
             slices are stored one behind the other: [S * R], as TorchRec numbers them

A ROWS state that another plan cuts otherwise is read as a function of the column, constant on each slice: a new slice
takes the mean over the columns that it covers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate, pairwise

import torch

from tutorec.distributed.plan import ShardingType
from tutorec.distributed.shard_geometry import ShardPiece
from tutorec.distributed.tables import PlacedTable

# Saving and loading hold one block at a time beside the model.
BLOCK_BYTES = 4 * 2**20


class Form(Enum):
    """How a tensor is stored, see the module."""

    WHOLE = auto()
    TABLE = auto()
    ROWS = auto()


@dataclass(frozen=True)
class Part:
    """What of a tensor lies on this rank.

    Args:
        tensor: Live.
        piece: Which rectangle of the table it is, or belongs to; None of a dense tensor.
    """

    tensor: torch.Tensor
    piece: ShardPiece | None = None


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint and what this rank has of it.

    Args:
        path: Keys that lead to it in the nested state dict, e.g. ``("model", "over.weight")``.
        form: How it is stored.
        parts: What lies here. Of one form, dtype and number of dimensions.
        table: Whose weights or state it is; None of a dense tensor.
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
        """Of a ROWS state: columns of each slice, in column order; of others nothing."""
        return self.table.slice_widths if self.form is Form.ROWS and self.table is not None else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor as it is stored; of a state that has no part here ``[R, D]`` or ``[S * R]``."""
        tensor = self.parts[0].tensor if self.parts else None
        if self.table is None or self.form is Form.WHOLE:
            return tuple(tensor.shape) if tensor is not None else ()
        if self.form is Form.TABLE:
            return self.table.rows, self.table.columns
        trailing = tuple(tensor.shape[1:]) if tensor is not None else ()
        return len(self.widths) * self.table.rows, *trailing


@dataclass(frozen=True)
class Block:
    """A block that is written: where in the whole tensor it lies, and its numbers, a view of what the rank holds."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class Wanted:
    """A rectangle that a rank wants of a stored tensor.

    Args:
        offsets: In the stored tensor.
        target: Where it goes, of the rectangle's shape.
        share: What it is multiplied by before it is added to the target; None: the target becomes it.
    """

    offsets: tuple[int, ...]
    target: torch.Tensor
    share: float | None = None


def stored_blocks(entry: Entry, rank: int, world_size: int) -> Iterator[Block]:
    """The blocks of an entry that this rank writes, none larger than 4 MiB unless one row is.

    What several ranks have is written once: a dense tensor by rank 0, the copies of a table block by block in turn, a
    number that belongs to a table by the rank of its first piece.

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
            # An empty one has a block all the same: it is known by its blocks.
            yield from _cut(tensor, offsets) if tensor.numel() else [Block(offsets, tensor)]
        return
    for part in entry.parts:
        blocks = _cut(part.tensor, _stored_at(entry, part))
        yield from (block for index, block in enumerate(blocks) if not copies or index % world_size == rank)


def wanted_rectangles(entry: Entry) -> list[Wanted]:
    """What this rank wants of a stored tensor of the form WHOLE or TABLE."""
    return [Wanted(_stored_at(entry, part), part.tensor) for part in entry.parts if part.tensor.numel()]


def wanted_rows(
    target: torch.Tensor, piece: ShardPiece, rows: int, shape: Sequence[int], widths: Sequence[int]
) -> list[Wanted]:
    """What a rank wants of a state with one number for each row.

    Args:
        target: The numbers of its piece, ``[R]`` or ``[R, 1]``.
        piece: Rows and columns that they belong to.
        rows: R of the table.
        shape: Of the stored state, ``[S * R]`` or ``[S * R, 1]``.
        widths: Columns of each of the S slices that are stored.

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
    """Where a part lies in the whole tensor."""
    piece = part.piece
    if entry.form is Form.WHOLE or piece is None or entry.table is None:
        return (0,) * part.tensor.dim()
    if entry.form is Form.TABLE:
        return piece.row_offset, piece.column_offset
    return entry.table.first_row_state(piece), *(0,) * (part.tensor.dim() - 1)


def _cut(tensor: torch.Tensor, offsets: tuple[int, ...]) -> Iterator[Block]:
    """A tensor in blocks of rows; one that is empty has none."""
    if tensor.dim() == 0:
        yield Block(offsets, tensor)
        return
    rows = tensor.shape[0]
    bytes_of_row = max(1, tensor[:1].numel() * tensor.element_size())
    step = max(1, BLOCK_BYTES // bytes_of_row)
    for start in range(0, rows if tensor.numel() else 0, step):
        yield Block((offsets[0] + start, *offsets[1:]), tensor[start : start + step])

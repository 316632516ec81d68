"""Sizes and offsets of shards: the one place where they are computed.

The planner costs what these functions return, hand-written plans are made of it, and the sharded modules allocate it,
so that what was planned is what is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tutorec.distributed.plan import EmbeddingComputeKernel, ParameterSharding, ShardingType


@dataclass(frozen=True)
class ShardPiece:
    """A rectangle of a table on one rank.

    Args:
        rank: Who holds it.
        row_offset: First row of the table that it holds.
        column_offset: First column of the table that it holds.
        rows: R of the piece.
        columns: D of the piece.
    """

    rank: int
    row_offset: int
    column_offset: int
    rows: int
    columns: int


def placement(rank: int, device_type: str, local_size: int = 1) -> str:
    """Where a shard lies, as torch writes it.

    Args:
        rank: The rank that holds it.
        device_type: ``"cpu"`` or ``"cuda"``.
        local_size: Ranks per host; a CUDA device is numbered within its host.

    Example:
        >>> placement(3, "cuda", local_size=2), placement(3, "cpu")
        ('rank:3/cuda:1', 'rank:3/cpu')
    """
    return f"rank:{rank}/cpu" if device_type == "cpu" else f"rank:{rank}/{device_type}:{rank % local_size}"


def table_wise_pieces(rows: int, columns: int, rank: int) -> list[ShardPiece]:
    """The pieces of a table that lives whole on one rank: one.

    Example:
        >>> table_wise_pieces(4096, 64, rank=1)
        [ShardPiece(rank=1, row_offset=0, column_offset=0, rows=4096, columns=64)]
    """
    return [ShardPiece(rank, 0, 0, rows, columns)]


def sharding_spec(pieces: Sequence[ShardPiece], device_type: str, local_size: int = 1) -> EnumerableShardingSpec:
    """The pieces in torch's vocabulary.

    Example:
        >>> sharding_spec(table_wise_pieces(8, 4, rank=0), "cpu").shards[0].shard_sizes
        [8, 4]
    """
    return EnumerableShardingSpec(
        [
            ShardMetadata(
                [piece.row_offset, piece.column_offset],
                [piece.rows, piece.columns],
                placement(piece.rank, device_type, local_size),
            )
            for piece in pieces
        ]
    )


def pieces_of(sharding: ParameterSharding) -> list[ShardPiece]:
    """The pieces that a plan lists for one table.

    Raises:
        ValueError: A shard is placed on no rank.

    Example:
        >>> pieces_of(table_wise_sharding((8, 4), rank=2, device_type="cpu"))[0].rank
        2
    """
    pieces = []
    for shard in sharding.shards():
        remote = shard.placement
        rank = remote.rank() if remote is not None else None
        if rank is None:
            raise ValueError(f"shard {shard} has no rank in its placement: it reads like 'rank:0/cpu'")
        row, column = shard.shard_offsets
        rows, columns = shard.shard_sizes
        pieces.append(ShardPiece(rank, row, column, rows, columns))
    return pieces


def table_wise_sharding(
    shape: Sequence[int],
    rank: int,
    device_type: str,
    local_size: int = 1,
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
) -> ParameterSharding:
    """A table ``[R, D]`` whole on ``rank``, as an entry of a plan.

    Args:
        shape: ``(R, D)``.
        rank: Where it goes.
        device_type: ``"cpu"`` or ``"cuda"``.
        local_size: Ranks per host.
        compute_kernel: How its rows are kept.

    Example:
        >>> table_wise_sharding((8, 4), rank=0, device_type="cpu").sharding_type
        'table_wise'
    """
    rows, columns = shape
    pieces = table_wise_pieces(rows, columns, rank)
    return ParameterSharding(
        sharding_type=ShardingType.TABLE_WISE.value,
        compute_kernel=compute_kernel.value,
        ranks=[piece.rank for piece in pieces],
        sharding_spec=sharding_spec(pieces, device_type, local_size),
    )


def exact_cover(pieces: Sequence[ShardPiece], rows: int, columns: int) -> bool:
    """Whether the pieces cover a table ``[R, D]`` once: inside it, without gap or overlap.

    Example:
        >>> exact_cover(table_wise_pieces(8, 4, rank=0), 8, 4)
        True
        >>> exact_cover([ShardPiece(0, 0, 0, 8, 2)], 8, 4)
        False
    """
    if sum(piece.rows * piece.columns for piece in pieces) != rows * columns:
        return False
    for index, a in enumerate(pieces):
        if min(a.row_offset, a.column_offset, a.rows, a.columns) < 0:
            return False
        if a.row_offset + a.rows > rows or a.column_offset + a.columns > columns:
            return False
        for b in pieces[:index]:
            rows_meet = a.row_offset < b.row_offset + b.rows and b.row_offset < a.row_offset + a.rows
            columns_meet = (
                a.column_offset < b.column_offset + b.columns and b.column_offset < a.column_offset + a.columns
            )
            if rows_meet and columns_meet:
                return False
    return True

"""Shards with their ranks, as plans list them; `plan/sizes.py` has their sizes and offsets alone.

The planner estimates costs from these functions, hand-written plans use them, and sharded modules
allocate what they return, so a module has exactly the shards that were planned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ParameterSharding, ShardingType
from tutorec.distributed.plan.sizes import MIN_CW_DIM, cut_arrays, slice_width


@dataclass(frozen=True)
class ShardPiece:
    """A rectangle of a table on one rank.

    Args:
        rank: The rank that holds it.
        row_offset: Its first row in the table.
        column_offset: Its first column in the table.
        rows: R of the shard.
        columns: D of the shard.
    """

    rank: int
    row_offset: int
    column_offset: int
    rows: int
    columns: int

    @property
    def offsets(self) -> list[int]:
        """Its first row and column in the table."""
        return [self.row_offset, self.column_offset]

    @property
    def sizes(self) -> list[int]:
        """R and D of the shard."""
        return [self.rows, self.columns]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The shard's part of a whole table ``[R, D]``, a view."""
        rows = whole[self.row_offset : self.row_offset + self.rows]
        return rows[:, self.column_offset : self.column_offset + self.columns]


def placement(rank: int, device_type: str, local_size: int = 1) -> str:
    """The placement of a shard, in torch's notation.

    Args:
        rank: The rank that holds it.
        device_type: ``"cpu"`` or ``"cuda"``.
        local_size: Ranks per host; CUDA devices are numbered per host.

    Example:
        >>> placement(3, "cuda", local_size=2), placement(3, "cpu")
        ('rank:3/cuda:1', 'rank:3/cpu')
    """
    return (
        f"rank:{rank}/cpu"
        if device_type == "cpu"
        else f"rank:{rank}/{device_type}:{rank % local_size}"
    )


def table_wise_pieces(rows: int, columns: int, rank: int) -> list[ShardPiece]:
    """The single shard of a table-wise table.

    Example:
        >>> table_wise_pieces(4096, 64, rank=1)
        [ShardPiece(rank=1, row_offset=0, column_offset=0, rows=4096, columns=64)]
    """
    return [ShardPiece(rank, 0, 0, rows, columns)]


def row_wise_pieces(
    rows: int, columns: int, ranks: Sequence[int], sizes: Sequence[int] | None = None
) -> list[ShardPiece]:
    """The shards of a table split by rows, one per rank, in row order.

    Each rank but the last ones holds ``ceil(R / len(ranks))`` rows, so an id divided by that number
    gives its rank's position. If R is not divisible, the last shards are shorter or empty.

    Args:
        rows: R of the table.
        columns: D of the table.
        ranks: The ranks: all ranks (row-wise), or those of one host (table-row-wise).
        sizes: Rows of each shard, if not equal; a surplus beyond the last row is cut off.

    Raises:
        ValueError: The sizes add up to fewer rows than the table has, or one is negative.

    Example:
        >>> [(piece.row_offset, piece.rows) for piece in row_wise_pieces(5, 4, ranks=range(4))]
        [(0, 2), (2, 2), (4, 1), (5, 0)]
        >>> [piece.rows for piece in row_wise_pieces(5, 4, ranks=range(2), sizes=[1, 9])]
        [1, 4]
    """
    wanted = [-(-rows // len(ranks))] * len(ranks) if sizes is None else sizes
    if sum(wanted) < rows or min(wanted, default=0) < 0:
        raise ValueError(
            f"its {rows} rows are more than the sizes {list(wanted)} hold, or one is negative"
        )
    starts = [min(start, rows) for start in accumulate(wanted, initial=0)]
    return [
        ShardPiece(rank, start, 0, end - start, columns)
        for rank, (start, end) in zip(ranks, pairwise(starts), strict=True)
    ]


def bucket_rows(rows: int, world_size: int, num_buckets: int) -> list[int]:
    """Rows per rank of a table whose rows are split between equal buckets only.

    Args:
        rows: R of the table.
        world_size: W.
        num_buckets: Number of buckets; it must divide R.

    Raises:
        ValueError: ``num_buckets`` does not divide R or is less than W.

    Example:
        >>> bucket_rows(10, world_size=4, num_buckets=5)
        [4, 2, 2, 2]
    """
    if num_buckets < world_size or rows % num_buckets:
        raise ValueError(
            f"num_buckets={num_buckets} must divide the {rows} rows and be at least the number "
            f"of ranks, {world_size}"
        )
    whole, more = divmod(num_buckets, world_size)
    return [rows // num_buckets * (whole + (rank < more)) for rank in range(world_size)]


def calculate_shard_sizes_and_offsets(
    tensor: torch.Tensor,
    world_size: int,
    local_world_size: int,
    sharding_type: str,
    col_wise_shard_dim: int | None = None,
    device_memory_sizes: Sequence[int] | None = None,
    num_buckets: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Sizes and offsets of the shards of a table, without their ranks.

    Args:
        tensor: Its weights ``[R, D]``; they may be on the meta device.
        world_size: W.
        local_world_size: Ranks per host.
        sharding_type: A `ShardingType` value.
        col_wise_shard_dim: Minimum columns of a column shard, 128 by default.
        device_memory_sizes: For row-wise: rows are split in proportion to the ranks' memory.
        num_buckets: See `bucket_rows`.

    Returns:
        ``[rows, columns]`` of each shard, and its offset ``[row, column]``.

    Example:
        >>> calculate_shard_sizes_and_offsets(torch.empty(5, 4), 2, 2, "row_wise")
        ([[3, 4], [2, 4]], [[0, 0], [3, 0]])

    Source:
        TorchRec's ``torchrec.distributed.sharding_plan.calculate_shard_sizes_and_offsets``.
    """
    rows, columns = tensor.shape
    kind = ShardingType(sharding_type)
    if kind is ShardingType.ROW_WISE and (num_buckets or device_memory_sizes):
        if device_memory_sizes:
            whole, unit = sum(device_memory_sizes), rows // (num_buckets or rows)
            sizes = [rows // unit * each // whole * unit for each in device_memory_sizes]
            sizes[-1] += rows - sum(sizes)
        else:
            sizes = bucket_rows(rows, world_size, num_buckets or rows)
        pieces = row_wise_pieces(rows, columns, range(len(sizes)), sizes)
        return [[each.rows, columns] for each in pieces], [[each.row_offset, 0] for each in pieces]
    width = slice_width(columns, col_wise_shard_dim or MIN_CW_DIM)
    cut = cut_arrays(kind, (rows, columns), world_size, local_world_size, width)
    return cut[0].tolist(), cut[1].tolist()


def column_wise_pieces(rows: int, widths: Sequence[int], ranks: Sequence[int]) -> list[ShardPiece]:
    """The shards of a table split by columns, in column order; a rank may hold several.

    Args:
        rows: R of the table.
        widths: D of each shard.
        ranks: The rank of each shard: any ranks (column-wise), or ranks of one host
            (table-column-wise).

    Example:
        >>> [
        ...     (piece.rank, piece.column_offset, piece.columns)
        ...     for piece in column_wise_pieces(8, [4, 2], ranks=[1, 0])
        ... ]
        [(1, 0, 4), (0, 4, 2)]
    """
    starts = accumulate(widths, initial=0)
    return [
        ShardPiece(rank, 0, start, rows, width)
        for rank, start, width in zip(ranks, starts, widths, strict=False)
    ]


def grid_pieces(
    rows: int, widths: Sequence[int], hosts: Sequence[int], local_size: int
) -> list[ShardPiece]:
    """The shards of a grid-sharded table: column shards on hosts, split by rows over their ranks.

    Shards are ordered by host, and within a host by row.

    Args:
        rows: R of the table.
        widths: D of each column shard.
        hosts: The host of each column shard, from 0.
        local_size: Ranks per host.

    Example:
        >>> [
        ...     (p.rank, p.row_offset, p.column_offset, p.rows, p.columns)
        ...     for p in grid_pieces(8, [2, 2], [0, 1], 2)
        ... ]
        [(0, 0, 0, 4, 2), (1, 4, 0, 4, 2), (2, 0, 2, 4, 2), (3, 4, 2, 4, 2)]
    """
    pieces = []
    for host, start, width in zip(hosts, accumulate(widths, initial=0), widths, strict=False):
        for piece in row_wise_pieces(rows, width, host_ranks(host, local_size)):
            pieces.append(ShardPiece(piece.rank, piece.row_offset, start, piece.rows, width))
    return pieces


def data_parallel_pieces(rows: int, columns: int, world_size: int) -> list[ShardPiece]:
    """The replicas of a table: all of it on every rank. A plan lists no shards for it.

    Example:
        >>> data_parallel_pieces(8, 4, world_size=2)[1]
        ShardPiece(rank=1, row_offset=0, column_offset=0, rows=8, columns=4)
    """
    return [ShardPiece(rank, 0, 0, rows, columns) for rank in range(world_size)]


def host_ranks(host: int, local_size: int) -> range:
    """The ranks of a host; hosts have ``local_size`` consecutive ranks each.

    Example:
        >>> list(host_ranks(1, local_size=2))
        [2, 3]
    """
    return range(host * local_size, (host + 1) * local_size)


def sharding_spec(
    pieces: Sequence[ShardPiece], device_type: str | Sequence[str], local_size: int = 1
) -> EnumerableShardingSpec:
    """The shards as torch's sharding spec, with one device type for all or one per shard.

    Example:
        >>> sharding_spec(table_wise_pieces(8, 4, rank=0), "cpu").shards[0].shard_sizes
        [8, 4]
    """
    return EnumerableShardingSpec(
        [
            ShardMetadata(piece.offsets, piece.sizes, placement(piece.rank, device, local_size))
            for piece, device in zip(
                pieces,
                repeat(device_type) if isinstance(device_type, str) else device_type,
                strict=False,
            )
        ]
    )


def pieces_of(sharding: ParameterSharding) -> list[ShardPiece]:
    """The shards that a plan lists for one table.

    Raises:
        ValueError: A placement has no rank.

    Example:
        >>> pieces_of(table_wise_sharding((8, 4), rank=2, device_type="cpu"))[0].rank
        2
    """
    pieces = []
    for shard in sharding.shards():
        remote = shard.placement
        rank = remote.rank() if remote is not None else None
        if rank is None:
            raise ValueError(f"shard {shard} has no rank in its placement: write 'rank:0/cpu'")
        row, column = shard.shard_offsets
        rows, columns = shard.shard_sizes
        pieces.append(ShardPiece(rank, row, column, rows, columns))
    return pieces


def parameter_sharding(
    sharding_type: ShardingType,
    pieces: Sequence[ShardPiece],
    device_type: str | Sequence[str],
    local_size: int = 1,
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
) -> ParameterSharding:
    """The entry of a plan for the shards of one table.

    Args:
        sharding_type: The sharding type.
        pieces: The shards, in plan order.
        device_type: ``"cpu"`` or ``"cuda"``, for all shards or for each.
        local_size: Ranks per host.
        compute_kernel: The compute kernel.

    Example:
        >>> entry = parameter_sharding(
        ...     ShardingType.ROW_WISE, row_wise_pieces(8, 4, ranks=[0, 1]), "cpu"
        ... )
        >>> entry.ranks, [shard.shard_sizes for shard in entry.shards()]
        ([0, 1], [[4, 4], [4, 4]])
    """
    replicated = sharding_type is ShardingType.DATA_PARALLEL
    return ParameterSharding(
        sharding_type=sharding_type.value,
        compute_kernel=compute_kernel.value,
        ranks=[piece.rank for piece in pieces],
        sharding_spec=None if replicated else sharding_spec(pieces, device_type, local_size),
        shape=(
            max(piece.row_offset + piece.rows for piece in pieces),
            max(piece.column_offset + piece.columns for piece in pieces),
        ),
    )


def table_wise_sharding(
    shape: Sequence[int],
    rank: int,
    device_type: str,
    local_size: int = 1,
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
) -> ParameterSharding:
    """The entry of a plan for a table ``[R, D]`` on one rank.

    Args:
        shape: ``(R, D)``.
        rank: The rank.
        device_type: ``"cpu"`` or ``"cuda"``.
        local_size: Ranks per host.
        compute_kernel: The compute kernel.

    Example:
        >>> table_wise_sharding((8, 4), rank=0, device_type="cpu").sharding_type
        'table_wise'
    """
    rows, columns = shape
    pieces = table_wise_pieces(rows, columns, rank)
    return parameter_sharding(
        ShardingType.TABLE_WISE, pieces, device_type, local_size, compute_kernel
    )


def exact_cover(pieces: Sequence[ShardPiece], rows: int, columns: int) -> bool:
    """Whether shards cover a table ``[R, D]`` exactly once; empty shards are allowed.

    It takes ``O(n log n)`` steps for n shards.

    Example:
        >>> exact_cover(table_wise_pieces(8, 4, rank=0), 8, 4)
        True
        >>> exact_cover([ShardPiece(0, 0, 0, 8, 2)], 8, 4)
        False
    """
    if sum(piece.rows * piece.columns for piece in pieces) != rows * columns:
        return False
    for piece in pieces:
        if min(piece.row_offset, piece.column_offset, piece.rows, piece.columns) < 0:
            return False
        if piece.row_offset + piece.rows > rows or piece.column_offset + piece.columns > columns:
            return False
    # The areas add up to the table's, so without overlap there is no gap.
    return not any(_overlaps([piece for piece in pieces if piece.rows and piece.columns]))


def _overlaps(pieces: Sequence[ShardPiece]) -> Iterator[bool]:
    """For each shard, by first row, whether it overlaps one that began before and has not ended."""
    # At a row where one shard ends and another begins, the end comes first.
    ends = [(piece.row_offset + piece.rows, 0, index) for index, piece in enumerate(pieces)]
    begins = [(piece.row_offset, 1, index) for index, piece in enumerate(pieces)]
    # Column ranges of the shards that contain this row. They are disjoint, so only neighbors need
    # to be compared.
    crossed: list[tuple[int, int]] = []
    for _, begin, index in sorted(ends + begins):
        columns = (pieces[index].column_offset, pieces[index].column_offset + pieces[index].columns)
        place = bisect_left(crossed, columns)
        if not begin:
            del crossed[place]
            continue
        left_ends = crossed[place - 1][1] if place else 0
        right_begins = crossed[place][0] if place < len(crossed) else columns[1]
        yield left_ends > columns[0] or right_begins < columns[1]
        crossed.insert(place, columns)

"""Shards with their ranks, as plans list them; `plan/sizes.py` has their sizes and offsets alone.

The planner estimates costs from these functions, hand-written plans use them, and sharded modules
allocate what they return, so a module has exactly the shards that were planned.

`checked_shards` reads the shards that a plan lists. Each sharding type can rely on::

    data_parallel        the whole table on every rank
    table_wise           one shard
    column_wise          column shards on any ranks; a rank may hold several
    table_column_wise    column shards on the ranks of one host
    row_wise             one range of rows on each rank of the world, in rank order
    table_row_wise       one range of rows on each rank of one host, in rank order
    grid_shard           column shards, each split by rows as in table_row_wise
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, repeat

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ParameterSharding, ShardingType
from tutorec.distributed.plan.sizes import MIN_CW_DIM, cut_arrays, slice_width


@dataclass(frozen=True)
class TableShard:
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

    def view(self, table: torch.Tensor) -> torch.Tensor:
        """The shard's rectangle of a table ``[R, D]``, a view."""
        rows = table[self.row_offset : self.row_offset + self.rows]
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


def table_wise_shards(rows: int, columns: int, rank: int) -> list[TableShard]:
    """The single shard of a table-wise table.

    Example:
        >>> table_wise_shards(4096, 64, rank=1)
        [TableShard(rank=1, row_offset=0, column_offset=0, rows=4096, columns=64)]
    """
    return [TableShard(rank, 0, 0, rows, columns)]


def row_wise_shards(
    rows: int, columns: int, ranks: Sequence[int], sizes: Sequence[int] | None = None
) -> list[TableShard]:
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
        >>> [(shard.row_offset, shard.rows) for shard in row_wise_shards(5, 4, ranks=range(4))]
        [(0, 2), (2, 2), (4, 1), (5, 0)]
        >>> [shard.rows for shard in row_wise_shards(5, 4, ranks=range(2), sizes=[1, 9])]
        [1, 4]
    """
    row_counts = [-(-rows // len(ranks))] * len(ranks) if sizes is None else sizes
    if sum(row_counts) < rows or min(row_counts, default=0) < 0:
        raise ValueError(
            f"its {rows} rows are more than the sizes {list(row_counts)} hold, or one is negative"
        )

    starts = [min(start, rows) for start in accumulate(row_counts, initial=0)]
    return [
        TableShard(rank, start, 0, end - start, columns)
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

    per_rank, remainder = divmod(num_buckets, world_size)
    return [rows // num_buckets * (per_rank + (rank < remainder)) for rank in range(world_size)]


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
    sharding = ShardingType(sharding_type)

    if sharding is ShardingType.ROW_WISE and (num_buckets or device_memory_sizes):
        if device_memory_sizes:
            total_memory = sum(device_memory_sizes)
            unit = rows // (num_buckets or rows)
            sizes = [rows // unit * item // total_memory * unit for item in device_memory_sizes]
            sizes[-1] += rows - sum(sizes)
        else:
            sizes = bucket_rows(rows, world_size, num_buckets or rows)
        shards = row_wise_shards(rows, columns, range(len(sizes)), sizes)
        return [[item.rows, columns] for item in shards], [[item.row_offset, 0] for item in shards]

    width = slice_width(columns, col_wise_shard_dim or MIN_CW_DIM)
    cut = cut_arrays(sharding, (rows, columns), world_size, local_world_size, width)
    return cut[0].tolist(), cut[1].tolist()


def column_wise_shards(rows: int, widths: Sequence[int], ranks: Sequence[int]) -> list[TableShard]:
    """The shards of a table split by columns, in column order; a rank may hold several.

    Args:
        rows: R of the table.
        widths: D of each shard.
        ranks: The rank of each shard: any ranks (column-wise), or ranks of one host
            (table-column-wise).

    Example:
        >>> [
        ...     (shard.rank, shard.column_offset, shard.columns)
        ...     for shard in column_wise_shards(8, [4, 2], ranks=[1, 0])
        ... ]
        [(1, 0, 4), (0, 4, 2)]
    """
    starts = accumulate(widths, initial=0)
    return [
        TableShard(rank, 0, start, rows, width)
        for rank, start, width in zip(ranks, starts, widths, strict=False)
    ]


def grid_shards(
    rows: int, widths: Sequence[int], hosts: Sequence[int], local_size: int
) -> list[TableShard]:
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
        ...     for p in grid_shards(8, [2, 2], [0, 1], 2)
        ... ]
        [(0, 0, 0, 4, 2), (1, 4, 0, 4, 2), (2, 0, 2, 4, 2), (3, 4, 2, 4, 2)]
    """
    shards = []
    for host, start, width in zip(hosts, accumulate(widths, initial=0), widths, strict=False):
        for shard in row_wise_shards(rows, width, host_ranks(host, local_size)):
            shards.append(TableShard(shard.rank, shard.row_offset, start, shard.rows, width))
    return shards


def data_parallel_shards(rows: int, columns: int, world_size: int) -> list[TableShard]:
    """The replicas of a table: all of it on every rank. A plan lists no shards for it.

    Example:
        >>> data_parallel_shards(8, 4, world_size=2)[1]
        TableShard(rank=1, row_offset=0, column_offset=0, rows=8, columns=4)
    """
    return [TableShard(rank, 0, 0, rows, columns) for rank in range(world_size)]


def host_ranks(host: int, local_size: int) -> range:
    """The ranks of a host; hosts have ``local_size`` consecutive ranks each.

    Example:
        >>> list(host_ranks(1, local_size=2))
        [2, 3]
    """
    return range(host * local_size, (host + 1) * local_size)


def sharding_spec(
    shards: Sequence[TableShard], device_type: str | Sequence[str], local_size: int = 1
) -> EnumerableShardingSpec:
    """The shards as torch's sharding spec, with one device type for all or one per shard.

    Example:
        >>> sharding_spec(table_wise_shards(8, 4, rank=0), "cpu").shards[0].shard_sizes
        [8, 4]
    """
    return EnumerableShardingSpec(
        [
            ShardMetadata(shard.offsets, shard.sizes, placement(shard.rank, device, local_size))
            for shard, device in zip(
                shards,
                repeat(device_type) if isinstance(device_type, str) else device_type,
                strict=False,
            )
        ]
    )


def shards_in_plan(sharding: ParameterSharding) -> list[TableShard]:
    """The shards that a plan lists for one table.

    Raises:
        ValueError: A placement has no rank.

    Example:
        >>> shards_in_plan(table_wise_sharding((8, 4), rank=2, device_type="cpu"))[0].rank
        2
    """
    shards = []
    for shard in sharding.shards():
        remote = shard.placement
        rank = remote.rank() if remote is not None else None
        if rank is None:
            raise ValueError(f"shard {shard} has no rank in its placement: write 'rank:0/cpu'")
        row, column = shard.shard_offsets
        rows, columns = shard.shard_sizes
        shards.append(TableShard(rank, row, column, rows, columns))
    return shards


def parameter_sharding(
    sharding_type: ShardingType,
    shards: Sequence[TableShard],
    device_type: str | Sequence[str],
    local_size: int = 1,
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
) -> ParameterSharding:
    """The entry of a plan for the shards of one table.

    Args:
        sharding_type: The sharding type.
        shards: The shards, in plan order.
        device_type: ``"cpu"`` or ``"cuda"``, for all shards or for each.
        local_size: Ranks per host.
        compute_kernel: The compute kernel.

    Example:
        >>> entry = parameter_sharding(
        ...     ShardingType.ROW_WISE, row_wise_shards(8, 4, ranks=[0, 1]), "cpu"
        ... )
        >>> entry.ranks, [shard.shard_sizes for shard in entry.shards()]
        ([0, 1], [[4, 4], [4, 4]])
    """
    replicated = sharding_type is ShardingType.DATA_PARALLEL

    return ParameterSharding(
        sharding_type=sharding_type.value,
        compute_kernel=compute_kernel.value,
        ranks=[shard.rank for shard in shards],
        sharding_spec=None if replicated else sharding_spec(shards, device_type, local_size),
        shape=(
            max(shard.row_offset + shard.rows for shard in shards),
            max(shard.column_offset + shard.columns for shard in shards),
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
    shards = table_wise_shards(rows, columns, rank)
    return parameter_sharding(
        ShardingType.TABLE_WISE, shards, device_type, local_size, compute_kernel
    )


def exact_cover(shards: Sequence[TableShard], rows: int, columns: int) -> bool:
    """Whether shards cover a table ``[R, D]`` exactly once; empty shards are allowed.

    It takes ``O(n log n)`` steps for n shards.

    Example:
        >>> exact_cover(table_wise_shards(8, 4, rank=0), 8, 4)
        True
        >>> exact_cover([TableShard(0, 0, 0, 8, 2)], 8, 4)
        False
    """
    if sum(shard.rows * shard.columns for shard in shards) != rows * columns:
        return False

    for shard in shards:
        if min(shard.row_offset, shard.column_offset, shard.rows, shard.columns) < 0:
            return False
        if shard.row_offset + shard.rows > rows or shard.column_offset + shard.columns > columns:
            return False
    # The areas add up to the table's, so without overlap there is no gap.
    return not any(_overlaps([shard for shard in shards if shard.rows and shard.columns]))


def _overlaps(shards: Sequence[TableShard]) -> Iterator[bool]:
    """For each shard, by first row, whether it overlaps one that began before and has not ended."""
    # At a row where one shard ends and another begins, the end comes first.
    ends = [(shard.row_offset + shard.rows, 0, index) for index, shard in enumerate(shards)]
    begins = [(shard.row_offset, 1, index) for index, shard in enumerate(shards)]

    # Column ranges of the shards that contain this row. They are disjoint, so only neighbors need
    # to be compared.
    crossed: list[tuple[int, int]] = []
    for _, begin, index in sorted(ends + begins):
        columns = (shards[index].column_offset, shards[index].column_offset + shards[index].columns)
        position = bisect_left(crossed, columns)

        if not begin:
            del crossed[position]
            continue
        left_ends = crossed[position - 1][1] if position else 0
        right_begins = crossed[position][0] if position < len(crossed) else columns[1]
        yield left_ends > columns[0] or right_begins < columns[1]
        crossed.insert(position, columns)


# --- the shards that a plan lists


def checked_shards(
    table: str,
    shape: tuple[int, int],
    sharding: ParameterSharding,
    world_size: int,
    local_size: int,
) -> tuple[TableShard, ...]:
    """The shards of a table, by columns, then by rows; a replicated table has one per rank.

    Args:
        table: Name of the table, for messages.
        shape: ``(R, D)``.
        sharding: Its entry in the plan.
        world_size: W.
        local_size: Ranks per host.

    Returns:
        The shards in that order.

    Raises:
        ValueError: The plan is for a table of another shape, or its shards do not cover the table
            or do not match the sharding type.

    Example:
        >>> checked_shards(
        ...     "item",
        ...     (8, 4),
        ...     table_wise_sharding((8, 4), 1, "cpu"),
        ...     world_size=2,
        ...     local_size=2,
        ... )
        (TableShard(rank=1, row_offset=0, column_offset=0, rows=8, columns=4),)
    """
    if sharding.shape is not None and sharding.shape != shape:
        raise ValueError(
            f"the plan was made for a table {table!r} of {sharding.shape[0]} x {sharding.shape[1]} "
            f"rows and columns, and this one has {shape[0]} x {shape[1]}; make the plan from this "
            "module"
        )

    sharding_type = ShardingType(sharding.sharding_type)
    if sharding_type is ShardingType.DATA_PARALLEL:
        return _replicated(table, shape, sharding, world_size)
    shards = shards_in_plan(sharding)
    for shard in shards:
        if not 0 <= shard.rank < world_size:
            raise ValueError(
                f"the plan puts table {table!r} on rank {shard.rank}, and the world has "
                f"{world_size} ranks: 0 to {world_size - 1}"
            )

    shard_ranks = sorted({shard.rank for shard in shards})
    if sharding.ranks is not None and shards and sorted(set(sharding.ranks)) != shard_ranks:
        raise ValueError(
            f"the plan names ranks {sharding.ranks} for table {table!r}, and places its shards on "
            f"ranks {shard_ranks}; let ranks say where the shards are, or leave ranks=None"
        )

    rows, columns = shape
    if not exact_cover(shards, rows, columns):
        shards = [(shard.offsets, shard.sizes) for shard in shards]
        raise ValueError(
            f"the plan's shards of table {table!r} do not cover its {rows} x {columns} rows and "
            f"columns once: (offsets, sizes) {shards}; make the plan from this module"
        )

    shards.sort(key=lambda shard: (shard.column_offset, shard.row_offset))
    problem = _misplaced(sharding_type, shards, rows, world_size, local_size)
    if problem is not None:
        raise ValueError(f"table {table!r} is {sharding_type.value}, which is {problem}")
    return tuple(shards)


def _replicated(
    table: str, shape: tuple[int, int], sharding: ParameterSharding, world_size: int
) -> tuple[TableShard, ...]:
    if sharding.sharding_spec is not None:
        raise ValueError(
            f"table {table!r} is data_parallel, which is the whole table on every rank, and the "
            "plan lists shards; leave sharding_spec=None"
        )
    if sharding.ranks is not None and sorted(sharding.ranks) != list(range(world_size)):
        raise ValueError(
            f"table {table!r} is data_parallel, which is the whole table on every rank of "
            f"{world_size}, and the plan names ranks {sharding.ranks}; name them all, or none"
        )
    return tuple(data_parallel_shards(*shape, world_size))


def _misplaced(
    kind: ShardingType, shards: Sequence[TableShard], rows: int, world_size: int, local_size: int
) -> str | None:
    """A description of what the sharding type requires and the shards violate, or None."""
    ranks = [shard.rank for shard in shards]
    if kind is ShardingType.TABLE_WISE:
        return None if len(shards) == 1 else f"one shard, and the plan has {len(shards)}"

    if kind in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE):
        short = [shard for shard in shards if shard.rows != rows or not shard.columns]
        if short:
            return (
                f"shards of {rows} rows and at least one column, and the plan has one of "
                f"{short[0].rows} x {short[0].columns} on rank {short[0].rank}"
            )
        if kind is ShardingType.TABLE_COLUMN_WISE:
            hosts = sorted({rank // local_size for rank in ranks})
            if len(hosts) > 1:
                return (
                    f"shards on one host of {local_size} ranks, and the plan has ranks {ranks} "
                    f"on hosts {hosts}"
                )
        return None

    if kind is ShardingType.ROW_WISE:
        if len({shard.column_offset for shard in shards}) > 1 or ranks != list(range(world_size)):
            return (
                f"a range of rows on each of ranks 0 to {world_size - 1}, in this order, and "
                f"the plan has {ranks}"
            )
        return None
    return _misplaced_on_hosts(kind, shards, world_size, local_size)


def _misplaced_on_hosts(
    kind: ShardingType, shards: Sequence[TableShard], world_size: int, local_size: int
) -> str | None:
    """The same for sharding types that split rows inside a host."""
    if world_size % local_size:
        return (
            f"made for hosts of as many ranks each, and {world_size} ranks are not a multiple "
            f"of {local_size}"
        )

    slices = [
        list(members) for _, members in groupby(shards, key=lambda shard: shard.column_offset)
    ]
    if kind is ShardingType.TABLE_ROW_WISE and len(slices) > 1:
        return f"one range of columns, and the plan has {len(slices)}"
    for members in slices:
        ranks = [shard.rank for shard in members]
        on_host = list(host_ranks(ranks[0] // local_size, local_size))
        if ranks != on_host:
            return (
                f"a range of rows on each rank of a host, in rank order; local_size is "
                f"{local_size}, and the plan has ranks {ranks} where {on_host} are a host"
            )
    return None

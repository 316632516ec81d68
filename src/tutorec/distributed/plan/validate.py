"""Check that the shards listed in a plan cover their table and match the sharding type.

Each sharding type can rely on::

    data_parallel        the whole table on every rank
    table_wise           one shard
    column_wise          column shards on any ranks; a rank may hold several
    table_column_wise    column shards on the ranks of one host
    row_wise             one range of rows on each rank of the world, in rank order
    table_row_wise       one range of rows on each rank of one host, in rank order
    grid_shard           column shards, each split by rows as in table_row_wise
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tutorec.distributed.plan.geometry import (
    ShardPiece,
    data_parallel_pieces,
    exact_cover,
    host_ranks,
    pieces_of,
)
from tutorec.distributed.plan.plan import ParameterSharding, ShardingType


def placed_pieces(
    table: str,
    shape: tuple[int, int],
    sharding: ParameterSharding,
    world_size: int,
    local_size: int,
) -> tuple[ShardPiece, ...]:
    """The shards of a table, by columns, then by rows; a replicated table has one per rank.

    Args:
        table: Name of the table, for messages.
        shape: ``(R, D)``.
        sharding: Its entry in the plan.
        world_size: W.
        local_size: Ranks per host.

    Raises:
        ValueError: The plan is for a table of another shape, or its shards do not cover the table
            or do not match the sharding type.

    Example:
        >>> from tutorec.distributed.plan.geometry import table_wise_sharding
        >>> placed_pieces(
        ...     "item",
        ...     (8, 4),
        ...     table_wise_sharding((8, 4), 1, "cpu"),
        ...     world_size=2,
        ...     local_size=2,
        ... )
        (ShardPiece(rank=1, row_offset=0, column_offset=0, rows=8, columns=4),)
    """
    if sharding.shape is not None and sharding.shape != shape:
        raise ValueError(
            f"the plan was made for a table {table!r} of {sharding.shape[0]} x {sharding.shape[1]} "
            f"rows and columns, and this one has {shape[0]} x {shape[1]}; make the plan from this "
            "module"
        )
    kind = ShardingType(sharding.sharding_type)
    if kind is ShardingType.DATA_PARALLEL:
        return _replicated(table, shape, sharding, world_size)
    pieces = pieces_of(sharding)
    for piece in pieces:
        if not 0 <= piece.rank < world_size:
            raise ValueError(
                f"the plan puts table {table!r} on rank {piece.rank}, and the world has "
                f"{world_size} ranks: 0 to {world_size - 1}"
            )
    held = sorted({piece.rank for piece in pieces})
    if sharding.ranks is not None and pieces and sorted(set(sharding.ranks)) != held:
        raise ValueError(
            f"the plan names ranks {sharding.ranks} for table {table!r}, and places its shards on "
            f"ranks {held}; let ranks say where the shards are, or leave ranks=None"
        )
    rows, columns = shape
    if not exact_cover(pieces, rows, columns):
        shards = [(piece.offsets, piece.sizes) for piece in pieces]
        raise ValueError(
            f"the plan's shards of table {table!r} do not cover its {rows} x {columns} rows and "
            f"columns once: (offsets, sizes) {shards}; make the plan from this module"
        )
    pieces.sort(key=lambda piece: (piece.column_offset, piece.row_offset))
    problem = _misplaced(kind, pieces, rows, world_size, local_size)
    if problem is not None:
        raise ValueError(f"table {table!r} is {kind.value}, which is {problem}")
    return tuple(pieces)


def _replicated(
    table: str, shape: tuple[int, int], sharding: ParameterSharding, world_size: int
) -> tuple[ShardPiece, ...]:
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
    return tuple(data_parallel_pieces(*shape, world_size))


def _misplaced(
    kind: ShardingType, pieces: Sequence[ShardPiece], rows: int, world_size: int, local_size: int
) -> str | None:
    """A description of what the sharding type requires and the shards violate, or None."""
    ranks = [piece.rank for piece in pieces]
    if kind is ShardingType.TABLE_WISE:
        return None if len(pieces) == 1 else f"one shard, and the plan has {len(pieces)}"
    if kind in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE):
        short = [piece for piece in pieces if piece.rows != rows or not piece.columns]
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
        if len({piece.column_offset for piece in pieces}) > 1 or ranks != list(range(world_size)):
            return (
                f"a range of rows on each of ranks 0 to {world_size - 1}, in this order, and "
                f"the plan has {ranks}"
            )
        return None
    return _misplaced_on_hosts(kind, pieces, world_size, local_size)


def _misplaced_on_hosts(
    kind: ShardingType, pieces: Sequence[ShardPiece], world_size: int, local_size: int
) -> str | None:
    """The same for sharding types that split rows inside a host."""
    if world_size % local_size:
        return (
            f"made for hosts of as many ranks each, and {world_size} ranks are not a multiple "
            f"of {local_size}"
        )
    slices = [
        list(members) for _, members in groupby(pieces, key=lambda piece: piece.column_offset)
    ]
    if kind is ShardingType.TABLE_ROW_WISE and len(slices) > 1:
        return f"one range of columns, and the plan has {len(slices)}"
    for members in slices:
        ranks = [piece.rank for piece in members]
        on_host = list(host_ranks(ranks[0] // local_size, local_size))
        if ranks != on_host:
            return (
                f"a range of rows on each rank of a host, in rank order; local_size is "
                f"{local_size}, and the plan has ranks {ranks} where {on_host} are a host"
            )
    return None

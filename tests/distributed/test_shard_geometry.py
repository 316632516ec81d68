"""Sizes and offsets of shards: every type's shards cover the table once, and lie where the type
says.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutorec.distributed.plan.geometry import (
    TableShard,
    checked_shards,
    column_wise_shards,
    data_parallel_shards,
    exact_cover,
    grid_shards,
    host_ranks,
    parameter_sharding,
    placement,
    row_wise_shards,
    shards_in_plan,
    table_wise_shards,
)
from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.plan.sizes import cut_arrays, slice_width


def cut(
    draw: st.DrawFn, kind: ShardingType, rows: int, columns: int, hosts: int, local_size: int
) -> list[TableShard]:
    """A plan's shards of one table, on any ranks that the type allows."""
    world_size = hosts * local_size
    ranks = st.integers(0, world_size - 1)
    host = draw(st.integers(0, hosts - 1))
    parts = draw(
        st.sampled_from([parts for parts in range(1, columns + 1) if columns % parts == 0])
    )
    widths = [columns // parts] * parts
    if kind is ShardingType.TABLE_WISE:
        return table_wise_shards(rows, columns, draw(ranks))
    if kind is ShardingType.ROW_WISE:
        return row_wise_shards(rows, columns, range(world_size))
    if kind is ShardingType.TABLE_ROW_WISE:
        return row_wise_shards(rows, columns, host_ranks(host, local_size))
    if kind is ShardingType.COLUMN_WISE:
        return column_wise_shards(rows, widths, [draw(ranks) for _ in widths])
    if kind is ShardingType.TABLE_COLUMN_WISE:
        on_host = st.sampled_from(list(host_ranks(host, local_size)))
        return column_wise_shards(rows, widths, [draw(on_host) for _ in widths])
    if kind is ShardingType.GRID_SHARD:
        return grid_shards(
            rows, widths, [draw(st.integers(0, hosts - 1)) for _ in widths], local_size
        )
    return data_parallel_shards(rows, columns, world_size)


@given(
    data=st.data(),
    kind=st.sampled_from(ShardingType),
    rows=st.integers(1, 40),
    columns=st.sampled_from([1, 3, 4, 6, 12]),
    hosts=st.integers(1, 3),
    local_size=st.integers(1, 4),
)
def test_pieces_of_every_type_cover_the_table_and_are_accepted_as_that_type(
    data, kind, rows, columns, hosts, local_size
):
    shards = data.draw(st.composite(cut)(kind, rows, columns, hosts, local_size))
    entry = parameter_sharding(kind, shards, "cpu", local_size)
    assert entry.shape == (rows, columns)
    assert entry.ranks == [shard.rank for shard in shards]
    if kind is ShardingType.DATA_PARALLEL:
        assert entry.sharding_spec is None
    else:
        assert exact_cover(shards, rows, columns)
        assert shards_in_plan(entry) == shards
    placed = checked_shards("t", (rows, columns), entry, hosts * local_size, local_size)
    assert sorted(placed, key=str) == sorted(shards, key=str)


@given(rows=st.integers(1, 1000), parts=st.integers(1, 9))
def test_row_ranges_are_as_long_as_the_first_until_the_rows_end(rows, parts):
    shards = row_wise_shards(rows, 4, range(parts))
    block = shards[0].rows
    assert block == -(-rows // parts)
    # The place of an id's rank is a division.
    for number in {0, rows // 2, rows - 1}:
        holder = shards[number // block]
        assert holder.row_offset <= number < holder.row_offset + holder.rows


def test_more_ranks_than_rows_leave_the_last_ones_empty():
    assert [shard.rows for shard in row_wise_shards(10, 4, range(4))] == [3, 3, 3, 1]
    assert [shard.rows for shard in row_wise_shards(2, 4, range(4))] == [1, 1, 0, 0]


def test_grid_pieces_stand_host_after_host():
    shards = grid_shards(5, [2, 2], hosts=[1, 0], local_size=2)
    assert [(p.rank, p.row_offset, p.rows, p.column_offset, p.columns) for p in shards] == [
        (2, 0, 3, 0, 2),
        (3, 3, 2, 0, 2),
        (0, 0, 3, 2, 2),
        (1, 3, 2, 2, 2),
    ]


@pytest.mark.parametrize(
    "shards",
    [
        [],
        [TableShard(0, 0, 0, 4, 3)],
        [TableShard(0, 0, 0, 2, 4), TableShard(1, 1, 0, 2, 4)],
        [TableShard(0, 0, 0, 2, 4), TableShard(1, 3, 0, 2, 4)],
        [TableShard(0, 0, 0, 5, 4), TableShard(1, 4, 0, -1, 4)],
        [TableShard(0, 0, 0, 4, 3), TableShard(1, 0, 2, 2, 2)],
        [TableShard(0, 0, 0, 4, 2), TableShard(1, 0, 0, 4, 2)],
        [TableShard(0, 0, 0, 4, 4), TableShard(1, 5, 0, 0, 4)],
    ],
    ids=[
        "nothing",
        "gap",
        "overlap",
        "outside",
        "negative",
        "columns overlap",
        "the same twice",
        "empty outside",
    ],
)
def test_pieces_with_gaps_or_overlaps_are_no_cover(shards):
    assert not exact_cover(shards, 4, 4)


def covers_by_cell(shards: list[TableShard], rows: int, columns: int) -> bool:
    """The definition: every cell is in one shard, and no shard has a cell outside."""
    cells = [
        (row, column)
        for shard in shards
        for row in range(shard.row_offset, shard.row_offset + shard.rows)
        for column in range(shard.column_offset, shard.column_offset + shard.columns)
    ]
    return sorted(cells) == list(itertools.product(range(rows), range(columns)))


@given(
    st.lists(
        st.builds(
            TableShard,
            st.just(0),
            st.integers(0, 2),
            st.integers(0, 2),
            st.integers(0, 3),
            st.integers(0, 3),
        ).filter(
            lambda shard: (
                shard.row_offset + shard.rows <= 3 and shard.column_offset + shard.columns <= 3
            )
        ),
        max_size=5,
    )
)
def test_exact_cover_agrees_with_counting_cells(shards):
    assert exact_cover(shards, 3, 3) == covers_by_cell(shards, 3, 3)


def rectangles(
    draw: st.DrawFn, row: int, column: int, rows: int, columns: int, depth: int
) -> list[TableShard]:
    """A rectangle, cut in two again and again: covers that are no grid."""
    if depth == 0 or (rows < 2 and columns < 2) or draw(st.integers(0, 3)) == 0:
        return [TableShard(0, row, column, rows, columns)]
    if columns < 2 or (rows >= 2 and draw(st.booleans())):
        at = draw(st.integers(1, rows - 1))
        above = rectangles(draw, row, column, at, columns, depth - 1)
        return above + rectangles(draw, row + at, column, rows - at, columns, depth - 1)
    at = draw(st.integers(1, columns - 1))
    left = rectangles(draw, row, column, rows, at, depth - 1)
    return left + rectangles(draw, row, column + at, rows, columns - at, depth - 1)


@given(st.data())
def test_any_tiling_is_a_cover_and_a_moved_tile_is_none(data):
    shards = data.draw(st.permutations(data.draw(st.composite(rectangles)(0, 0, 6, 6, 4))))
    assert exact_cover(shards, 6, 6)
    if len(shards) > 1:
        first = shards[0]
        other = shards[1]
        moved = TableShard(0, other.row_offset, other.column_offset, first.rows, first.columns)
        assert exact_cover([moved, *shards[1:]], 6, 6) == covers_by_cell([moved, *shards[1:]], 6, 6)


def test_five_hundred_shards_are_checked_in_few_steps():
    shards = grid_shards(4096, [8] * 64, hosts=list(range(64)), local_size=8)
    assert len(shards) == 512
    comparisons = 0

    class Counted(int):
        def __lt__(self, other: int) -> bool:
            nonlocal comparisons
            comparisons += 1
            return int(self) < int(other)

    counted = [
        TableShard(
            shard.rank, Counted(shard.row_offset), shard.column_offset, shard.rows, shard.columns
        )
        for shard in shards
    ]
    assert exact_cover(counted, 4096, 512)
    # All pairs would be 131,000.
    assert comparisons < 30_000


def entry(kind: ShardingType, shards: list[TableShard]):
    return parameter_sharding(kind, shards, "cpu")


@pytest.mark.parametrize(
    ("kind", "shards", "message"),
    [
        (
            ShardingType.TABLE_WISE,
            row_wise_shards(8, 4, [0, 1]),
            "is table_wise, which is one shard, and the plan has 2",
        ),
        (
            ShardingType.ROW_WISE,
            row_wise_shards(8, 4, [0, 1]),
            r"each of ranks 0 to 3, in this order.* has \[0, 1\]",
        ),
        (
            ShardingType.ROW_WISE,
            row_wise_shards(8, 4, [1, 0, 2, 3]),
            r"and the plan has \[1, 0, 2, 3\]",
        ),
        (
            ShardingType.ROW_WISE,
            grid_shards(8, [2, 2], [0, 1], 2),
            "is row_wise, which is a range of rows on each",
        ),
        (
            ShardingType.TABLE_ROW_WISE,
            row_wise_shards(8, 4, [1, 2]),
            r"has ranks \[1, 2\] where \[0, 1\] are a host",
        ),
        (
            ShardingType.TABLE_ROW_WISE,
            row_wise_shards(8, 4, range(4)),
            r"has ranks \[0, 1, 2, 3\] where \[0, 1\] are",
        ),
        (
            ShardingType.TABLE_ROW_WISE,
            grid_shards(8, [2, 2], [0, 1], 2),
            "one range of columns, and the plan has 2",
        ),
        (
            ShardingType.GRID_SHARD,
            column_wise_shards(8, [2, 2], [0, 2]),
            r"has ranks \[0\] where \[0, 1\] are a host",
        ),
        (
            ShardingType.COLUMN_WISE,
            row_wise_shards(8, 4, [0, 1]),
            "8 rows and at least one column.* 4 x 4 on rank 0",
        ),
        (
            ShardingType.TABLE_COLUMN_WISE,
            column_wise_shards(8, [2, 2], [1, 2]),
            r"\[1, 2\] on hosts \[0, 1\]",
        ),
        (
            ShardingType.COLUMN_WISE,
            column_wise_shards(8, [2, 2], [1, 4]),
            "on rank 4, and the world has 4 ranks: 0 to",
        ),
        (
            ShardingType.COLUMN_WISE,
            column_wise_shards(8, [2], [1]),
            "made for a table 't' of 8 x 2 rows and columns, and this one has 8 x 4",
        ),
        (
            ShardingType.DATA_PARALLEL,
            data_parallel_shards(8, 4, 2),
            r"every rank of 4, and the plan names ranks \[0, 1\]",
        ),
    ],
)
def test_pieces_that_do_not_fit_their_type_are_refused(kind, shards, message):
    with pytest.raises(ValueError, match=message):
        checked_shards("t", (8, 4), entry(kind, shards), world_size=4, local_size=2)


def test_a_replicated_table_with_shards_is_refused():
    sharding = entry(ShardingType.TABLE_WISE, table_wise_shards(8, 4, 0))
    sharding.sharding_type = "data_parallel"
    with pytest.raises(ValueError, match="shards; leave sharding_spec=None"):
        checked_shards("t", (8, 4), sharding, world_size=1, local_size=1)


def test_ranks_that_are_not_those_of_the_shards_are_refused():
    sharding = entry(ShardingType.TABLE_WISE, table_wise_shards(8, 4, 0))
    sharding.ranks = [1]
    with pytest.raises(ValueError, match=r"ranks \[1\].*table 't'.*ranks \[0\]"):
        checked_shards("t", (8, 4), sharding, world_size=2, local_size=2)
    sharding.ranks = None
    assert len(checked_shards("t", (8, 4), sharding, world_size=2, local_size=2)) == 1


def test_hosts_of_unequal_size_are_refused_where_a_type_needs_hosts():
    rows = entry(ShardingType.TABLE_ROW_WISE, row_wise_shards(8, 4, [0, 1]))
    with pytest.raises(ValueError, match=r"3 ranks.* multiple of 2"):
        checked_shards("t", (8, 4), rows, world_size=3, local_size=2)
    columns = entry(ShardingType.COLUMN_WISE, column_wise_shards(8, [2, 2], [0, 2]))
    assert len(checked_shards("t", (8, 4), columns, world_size=3, local_size=2)) == 2


def test_placed_pieces_stand_in_column_and_row_order():
    shards = grid_shards(8, [2, 2], [1, 0], 2)
    placed = checked_shards(
        "t", (8, 4), entry(ShardingType.GRID_SHARD, shards[::-1]), world_size=4, local_size=2
    )
    assert list(placed) == shards


def test_cuda_devices_are_numbered_within_their_host():
    assert [placement(rank, "cuda", local_size=2) for rank in range(4)] == [
        "rank:0/cuda:0",
        "rank:1/cuda:1",
        "rank:2/cuda:0",
        "rank:3/cuda:1",
    ]


@given(
    kind=st.sampled_from(ShardingType),
    rows=st.integers(1, 40),
    columns=st.sampled_from([1, 3, 4, 8, 12, 64]),
    hosts=st.integers(1, 3),
    local_size=st.integers(1, 4),
    at_least=st.integers(1, 70),
)
def test_planner_arrays_are_the_pieces_of_the_plan(
    kind: ShardingType, rows: int, columns: int, hosts: int, local_size: int, at_least: int
):
    world_size, width = hosts * local_size, slice_width(columns, at_least)
    widths = [width] * (columns // width)
    written = {
        ShardingType.DATA_PARALLEL: lambda: data_parallel_shards(rows, columns, world_size),
        ShardingType.TABLE_WISE: lambda: table_wise_shards(rows, columns, 0),
        ShardingType.ROW_WISE: lambda: row_wise_shards(rows, columns, range(world_size)),
        ShardingType.TABLE_ROW_WISE: lambda: row_wise_shards(rows, columns, range(local_size)),
        ShardingType.COLUMN_WISE: lambda: column_wise_shards(rows, widths, [0] * len(widths)),
        ShardingType.TABLE_COLUMN_WISE: lambda: column_wise_shards(rows, widths, [0] * len(widths)),
        ShardingType.GRID_SHARD: lambda: grid_shards(rows, widths, [0] * len(widths), local_size),
    }[kind]()
    sizes, offsets = cut_arrays(kind, (rows, columns), world_size, local_size, width)
    assert sizes.tolist() == [[shard.rows, shard.columns] for shard in written]
    assert offsets.tolist() == [[shard.row_offset, shard.column_offset] for shard in written]


@given(columns=st.integers(1, 300), at_least=st.integers(1, 300))
def test_slice_width_is_the_narrowest_allowed(columns: int, at_least: int):
    width = slice_width(columns, at_least)
    allowed = [each for each in range(at_least, columns) if each % 4 == 0 and columns % each == 0]
    assert width == min([*allowed, columns])

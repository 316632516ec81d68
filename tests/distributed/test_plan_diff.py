"""The difference of two plans: what is reported, and how many bytes would move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutorec.distributed.plan.geometry import (
    column_wise_shards,
    data_parallel_shards,
    parameter_sharding,
    row_wise_shards,
    shards_in_plan,
    table_wise_shards,
)
from tutorec.distributed.plan.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)


def plan(path: str = "", **tables: ParameterSharding) -> ShardingPlan:
    return ShardingPlan({path: EmbeddingModuleShardingPlan(tables)})


def whole(rank: int, rows: int = 8, columns: int = 4) -> ParameterSharding:
    return parameter_sharding(
        ShardingType.TABLE_WISE, table_wise_shards(rows, columns, rank), "cpu"
    )


def rows_split(ranks: int, rows: int = 8, columns: int = 4) -> ParameterSharding:
    return parameter_sharding(
        ShardingType.ROW_WISE, row_wise_shards(rows, columns, range(ranks)), "cpu"
    )


def columns_split(widths: list[int], ranks: list[int], rows: int = 8) -> ParameterSharding:
    return parameter_sharding(
        ShardingType.COLUMN_WISE, column_wise_shards(rows, widths, ranks), "cpu"
    )


def copies(ranks: int, rows: int = 8, columns: int = 4) -> ParameterSharding:
    return parameter_sharding(
        ShardingType.DATA_PARALLEL, data_parallel_shards(rows, columns, ranks), "cpu"
    )


def test_equal_plans_have_no_difference():
    diff = plan(item=whole(0), user=rows_split(2)).diff(plan(item=whole(0), user=rows_split(2)))
    assert not diff
    assert len(diff) == 0
    assert str(diff) == "the plans are the same for 2 tables"


def test_devices_and_the_names_of_2022_make_no_difference():
    here = parameter_sharding(ShardingType.TABLE_WISE, table_wise_shards(8, 4, 1), "cpu")
    there = parameter_sharding(
        ShardingType.TABLE_WISE, table_wise_shards(8, 4, 1), "cuda", 2, EmbeddingComputeKernel.FUSED
    )
    there.compute_kernel = "batched_fused"
    assert not plan(item=here).diff(plan(item=there))


@pytest.mark.parametrize(
    ("before", "after", "moved"),
    [
        (whole(0), whole(1), 8 * 4 * 4),
        (whole(0), rows_split(2), 4 * 4 * 4),
        (rows_split(2), whole(0), 4 * 4 * 4),
        (rows_split(2), columns_split([2, 2], [0, 1]), 2 * (4 * 2 * 4)),
        (columns_split([2, 2], [0, 1]), columns_split([2, 2], [1, 0]), 2 * (8 * 2 * 4)),
        (whole(1), copies(4), 3 * 8 * 4 * 4),
        (copies(4), whole(1), 0),
    ],
)
def test_moved_bytes_are_what_ranks_do_not_hold(before, after, moved):
    diff = plan(item=before).diff(plan(item=after))
    assert len(diff) == 1
    assert diff.moved_bytes == moved


def test_tables_that_one_plan_lacks_are_named():
    diff = plan("sparse", item=whole(0)).diff(plan("sparse", user=whole(0)))
    assert [(change.path, change.table, change.before, change.after) for change in diff] == [
        ("sparse", "item", "table_wise, fused, on 0", ""),
        ("sparse", "user", "", "table_wise, fused, on 0"),
    ]
    assert "not there" in str(diff)
    assert "sparse.item" in str(diff)


def test_another_kernel_is_a_difference_that_moves_nothing():
    dense = whole(0)
    dense.compute_kernel = "dense"
    diff = plan(item=whole(0)).diff(plan(item=dense))
    assert (len(diff), diff.moved_bytes) == (1, 0)


def test_a_page_of_differences_says_how_many_follow():
    tables = {f"t{number}": number for number in range(50)}
    diff = plan(**{name: whole(0) for name in tables}).diff(
        plan(**{name: whole(1) for name in tables})
    )
    assert str(diff).endswith("and 10 tables more: iterate over the diff for all of them")
    assert max(len(line) for line in str(diff).splitlines()) <= 100
    assert diff._repr_html_().count("<tr>") == 41


def test_html_of_a_plan_escapes_names():
    html = plan("<b>", **{"a<script>": whole(0)})._repr_html_()
    assert "<script>" not in html
    assert "a&lt;script&gt;" in html
    assert "&lt;b&gt;" in html
    assert "[8, 4]" in html


ENTRIES = st.one_of(
    st.integers(0, 3).map(lambda rank: whole(rank, 6, 4)),
    st.sampled_from([1, 2, 4]).map(lambda ranks: rows_split(ranks, 6, 4)),
    st.lists(st.integers(0, 3), min_size=2, max_size=2).map(
        lambda ranks: columns_split([1, 3], ranks, 6)
    ),
    st.just(copies(4, 6, 4)),
)


def held(entry: ParameterSharding) -> np.ndarray:
    """``[rank, row, column]``: who holds which number."""
    numbers = np.zeros((4, 6, 4), dtype=bool)
    for piece in shards_in_plan(entry):
        rows = slice(piece.row_offset, piece.row_offset + piece.rows)
        numbers[piece.rank, rows, piece.column_offset : piece.column_offset + piece.columns] = True
    if not entry.shards():
        numbers[:] = True
    return numbers


@given(ENTRIES, ENTRIES)
def test_moved_bytes_equal_those_counted_number_by_number(before, after):
    diff = plan(item=before).diff(plan(item=after))
    counted = 4 * int((held(after) & ~held(before)).sum())
    assert diff.moved_bytes == counted
    alike = before.sharding_type == after.sharding_type and bool(
        (held(after) == held(before)).all()
    )
    assert bool(diff) is not alike

"""Rows drawn shard by shard: the numbers do not depend on how a table is cut, and no rank holds all
of it.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutorec.distributed.core import initial_rows
from tutorec.distributed.core.initial_rows import draw_shard
from tutorec.distributed.plan.geometry import (
    TableShard,
    column_wise_shards,
    grid_shards,
    row_wise_shards,
    table_wise_shards,
)
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.types import DataType


def joined(config: EmbeddingBagConfig, shards: list[TableShard], seed: int) -> torch.Tensor:
    """The table, put together from what each rank has drawn."""
    table = torch.full((config.num_embeddings, config.embedding_dim), torch.nan)
    for shard in shards:
        rows = slice(shard.row_offset, shard.row_offset + shard.rows)
        table[rows, shard.column_offset : shard.column_offset + shard.columns] = draw_shard(
            config, shard, seed
        )
    return table


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_rows, "_BLOCK", 12)


@given(
    rows=st.integers(1, 40),
    parts=st.integers(1, 5),
    seed=st.integers(0, 2**40),
    columns=st.sampled_from([1, 6]),
)
def test_numbers_do_not_depend_on_the_plan(rows, parts, seed, columns):
    config = EmbeddingBagConfig(rows, columns, "t", feature_names=["f"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_rows, "_BLOCK", 12)
        whole = joined(config, table_wise_shards(rows, columns, 0), seed)
        assert not whole.isnan().any()
        assert torch.equal(
            joined(config, row_wise_shards(rows, columns, range(parts)), seed), whole
        )
        assert torch.equal(
            joined(config, column_wise_shards(rows, [1] * columns, [0] * columns), seed), whole
        )
        assert torch.equal(
            joined(config, grid_shards(rows, [1] * columns, [0] * columns, parts), seed), whole
        )


@pytest.mark.usefixtures("small_blocks")
def test_rows_fill_the_configs_range_and_differ_between_blocks_tables_and_seeds():
    config = EmbeddingBagConfig(
        400, 4, "t", feature_names=["f"], weight_init_min=2.0, weight_init_max=3.0
    )
    whole = draw_shard(config, TableShard(0, 0, 0, 400, 4), 5)
    assert 2.0 <= float(whole.min()) < 2.05
    assert 2.95 < float(whole.max()) < 3.0
    assert abs(float(whole.mean()) - 2.5) < 0.05
    assert whole.unique().numel() > 1590
    other = EmbeddingBagConfig(
        400, 4, "u", feature_names=["f"], weight_init_min=2.0, weight_init_max=3.0
    )
    assert not torch.equal(draw_shard(other, TableShard(0, 0, 0, 400, 4), 5), whole)
    assert not torch.equal(draw_shard(config, TableShard(0, 0, 0, 400, 4), 6), whole)


@pytest.mark.usefixtures("small_blocks")
def test_an_empty_piece_has_no_rows():
    config = EmbeddingBagConfig(5, 4, "t", feature_names=["f"])
    assert draw_shard(config, TableShard(3, 5, 0, 0, 4), 1).shape == (0, 4)


def test_the_callers_random_state_is_left_alone():
    for init_fn in (None, lambda weight: weight.normal_()):
        config = EmbeddingBagConfig(8, 4, "t", feature_names=["f"], init_fn=init_fn)
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        draw_shard(config, TableShard(0, 0, 0, 8, 4), 1)
        assert torch.equal(torch.rand(4), expected)


def test_an_init_fn_sees_the_whole_table():
    shapes = []

    def number_rows(weight: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        return torch.arange(8.0).unsqueeze(1).expand(8, 4)

    config = EmbeddingBagConfig(8, 4, "t", feature_names=["f"], init_fn=number_rows)
    shard = draw_shard(config, TableShard(1, 5, 2, 3, 2), 1)
    assert shard.tolist() == [[5.0, 5.0], [6.0, 6.0], [7.0, 7.0]]
    assert shapes == [(8, 4)]
    assert shard.untyped_storage().nbytes() == shard.numel() * 4


def test_numbers_are_of_the_tables_format():
    config = EmbeddingBagConfig(8, 4, "t", feature_names=["f"], data_type=DataType.FP16)
    assert draw_shard(config, TableShard(0, 0, 0, 8, 4), 1).dtype == torch.float16


def test_a_part_of_a_table_that_fits_nowhere_is_drawn():
    config = EmbeddingBagConfig(10**12, 64, "t", feature_names=["f"])
    shard = draw_shard(config, TableShard(9, 9 * 10**11, 32, 20_000, 32), 1)
    assert shard.shape == (20_000, 32)
    assert float(shard.abs().max()) <= 1e-6

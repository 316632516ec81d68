"""Predicted bytes, by hand for each type; `simulate/test_simulated_bytes.py` compares them with
what is sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed.byte_formulas import (
    COPIES_IDS,
    COPIES_ROWS,
    COPIES_SIZES,
    COPIES_SUMS,
    COPIES_WEIGHTS,
    GRADIENTS,
    IDS,
    ROWS,
    SIZES,
    STRIDES,
    WEIGHTS,
    Bytes,
    StepBatches,
    step_traffic,
)
from distributed.cases import group, tables_of
from distributed.row_cases import loss
from distributed.sharding.test_any_plan import (
    Case,
    Word,
    apply_optimizers,
    batch_of,
    cases,
    collection,
    generator,
)
from distributed.sharding.test_any_plan_rows import collection as row_collection
from hypothesis import strategies as st

from tutorec.distributed.collectives import kjt, rows, sparse_gradients
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.tables import Table
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from tutorec.distributed.plan.geometry import (
    TableShard,
    column_wise_shards,
    data_parallel_shards,
    grid_shards,
    row_wise_shards,
    table_wise_shards,
)
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ShardingType
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel
from tutorec.distributed.traffic import Traffic, count_traffic
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def placed(kind: ShardingType, shards: list[TableShard], rows: int = 8, **changes: Any) -> Table:
    facts: dict[str, Any] = {
        "name": "t",
        "rows": rows,
        "columns": 4,
        "dtype": torch.float32,
        "pooling": "sum",
        "weighted": False,
        "features": ("f",),
        "output_keys": ("f",),
        "sharding_type": kind,
        "kernel": EmbeddingComputeKernel.FUSED,
        "optimizer": None,
        "shards": tuple(shards),
    }
    return Table(**(facts | changes))


# Rank r brings r + 1 samples and 10 * (r + 1) ids, of which a range of rows has its share of 8.
SAMPLES = [{"f": rank + 1} for rank in range(4)]


def share(rank: int, feature: str, first: int, end: int) -> int:
    return 10 * (rank + 1) * (end - first) // 8


BATCHES = StepBatches(SAMPLES, share)


def matrix(traffic: Bytes, stage: str) -> list[list[int]]:
    return [
        [traffic[stage, source, destination] for destination in range(4)] for source in range(4)
    ]


def test_table_wise_bytes_are_those_of_the_hand():
    traffic = step_traffic([placed(ShardingType.TABLE_WISE, table_wise_shards(8, 4, 1))], BATCHES)
    assert matrix(traffic, SIZES) == [[24 * (s != d) for d in range(4)] for s in range(4)]
    # Rank r sends 4 * (its samples + its ids) to rank 1, which sends 4 * samples * 4 columns back.
    assert matrix(traffic, IDS) == [[0, 44, 0, 0], [0, 0, 0, 0], [0, 132, 0, 0], [0, 176, 0, 0]]
    assert matrix(traffic, ROWS) == [[0] * 4, [16, 0, 48, 64], [0] * 4, [0] * 4]
    assert matrix(traffic, GRADIENTS) == [[0, 16, 0, 0], [0] * 4, [0, 48, 0, 0], [0, 64, 0, 0]]
    assert {stage for stage, _, _ in traffic} == {SIZES, IDS, ROWS, GRADIENTS}


def test_column_wise_sends_ids_to_every_slice():
    shards = column_wise_shards(8, [1, 2, 1], [2, 0, 2])
    traffic = step_traffic([placed(ShardingType.COLUMN_WISE, shards)], BATCHES)
    # Rank 2 has two slices, and gets the ids twice.
    assert matrix(traffic, IDS)[3] == [176, 0, 352, 0]
    assert matrix(traffic, ROWS) == [[0, 16, 24, 32], [0] * 4, [8, 16, 0, 32], [0] * 4]


def test_row_wise_sends_a_part_of_every_sum():
    traffic = step_traffic(
        [placed(ShardingType.ROW_WISE, row_wise_shards(8, 4, range(4)))], BATCHES
    )
    # 2 of 8 rows a rank: a quarter of 40 ids, and all 4 lengths.
    assert matrix(traffic, IDS)[3] == [4 * (4 + 10)] * 3 + [0]
    assert matrix(traffic, ROWS) == [
        [0, 32, 48, 64],
        [16, 0, 48, 64],
        [16, 32, 0, 64],
        [16, 32, 48, 0],
    ]
    assert matrix(traffic, GRADIENTS) == [
        list(row) for row in zip(*matrix(traffic, ROWS), strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "shards"),
    [
        (ShardingType.TABLE_ROW_WISE, row_wise_shards(8, 4, [2, 3])),
        (ShardingType.GRID_SHARD, grid_shards(8, [3, 1], [1, 1], 2)),
    ],
)
def test_rows_split_inside_a_host_are_added_there_and_cross_once(kind, shards):
    traffic = step_traffic([placed(kind, shards)], BATCHES, local_size=2)
    # 16 bytes a sample. Rank 2 adds for ranks 0 and 2, with 1 + 3 samples; rank 3 for 1 and 3, with
    # 2 + 4.
    assert matrix(traffic, ROWS) == [[0] * 4, [0] * 4, [16, 0, 0, 16 * 6], [0, 32, 16 * 4, 0]]
    assert matrix(traffic, GRADIENTS) == [
        [0, 0, 16, 0],
        [0, 0, 0, 32],
        [0, 0, 0, 64],
        [0, 0, 96, 0],
    ]


def test_rows_that_are_not_pooled_go_back_to_their_ids():
    table = placed(ShardingType.TABLE_ROW_WISE, row_wise_shards(8, 4, [2, 3]), pooling="none")
    traffic = step_traffic([table], BATCHES, local_size=2)
    assert matrix(traffic, ROWS) == [[0] * 4, [0] * 4, [80, 160, 0, 320], [80, 160, 240, 0]]


def test_weights_strides_wide_ids_and_narrow_rows_have_their_price():
    one = [
        placed(
            ShardingType.TABLE_WISE, table_wise_shards(8, 4, 1), weighted=True, features=("f", "f")
        )
    ]
    traffic = step_traffic(
        one, StepBatches(SAMPLES, share, variable=True), row_bytes=2, gradient_bytes=4
    )
    assert traffic[WEIGHTS, 0, 1] == 4 * 20
    assert (traffic[STRIDES, 0, 1], traffic[STRIDES, 1, 0]) == (16, 0)
    assert (traffic[ROWS, 1, 0], traffic[GRADIENTS, 0, 1]) == (16, 32)
    for rows_of_table, id_bytes in ((2**31 - 1, 4), (2**31, 8)):
        large = placed(
            ShardingType.TABLE_WISE, table_wise_shards(rows_of_table, 4, 1), rows_of_table
        )
        ten = StepBatches(SAMPLES, lambda rank, feature, first, end: 10)
        assert step_traffic([large], ten)[IDS, 0, 1] == id_bytes * 11


def test_a_replicated_table_sends_what_was_looked_up_while_that_is_less_than_the_table():
    copies = data_parallel_shards(8, 4, 4)
    # 100 ids and 10 lengths of 4 bytes, 10 rows of 16: 600 bytes, more than twice the table of 128.
    as_sums = step_traffic([placed(ShardingType.DATA_PARALLEL, copies)], BATCHES)
    assert {stage for stage, _, _ in as_sums} == {COPIES_SIZES, COPIES_SUMS}
    assert matrix(as_sums, COPIES_SIZES)[2] == [16, 16, 0, 16]
    assert matrix(as_sums, COPIES_SUMS)[2] == [64, 64, 0, 64]
    # 19 x 4 numbers and more make 8 * R * D = 608.
    table = placed(ShardingType.DATA_PARALLEL, data_parallel_shards(19, 4, 4), 19)
    ten = StepBatches(SAMPLES, lambda rank, feature, first, end: 10 * (rank + 1))
    as_bags = step_traffic([table], ten)
    assert matrix(as_bags, COPIES_IDS)[2] == [4 * (3 + 30)] * 2 + [0, 4 * (3 + 30)]
    assert matrix(as_bags, COPIES_ROWS)[2] == [48, 48, 0, 48]
    assert not matrix(as_bags, COPIES_SUMS)[0][1]
    # Rows of their own: 100 ids, and 100 rows of 16 bytes, are 2000 bytes.
    rows = placed(ShardingType.DATA_PARALLEL, data_parallel_shards(63, 4, 4), 63, pooling="none")
    not_pooled = step_traffic([rows], ten)
    assert matrix(not_pooled, COPIES_SIZES)[0][1] == 8
    assert (matrix(not_pooled, COPIES_IDS)[2][0], matrix(not_pooled, COPIES_ROWS)[2][0]) == (
        120,
        480,
    )


def test_numbers_that_do_not_divide_are_summed_by_the_first_ranks():
    table = placed(ShardingType.DATA_PARALLEL, data_parallel_shards(3, 3, 4), 3, columns=3)
    traffic = step_traffic([table], BATCHES)
    # 9 numbers: 3, 2, 2 and 2.
    assert matrix(traffic, COPIES_SUMS)[0] == [0, 20, 20, 20]
    assert matrix(traffic, COPIES_SUMS)[1] == [20, 0, 16, 16]


def test_worlds_of_one_send_nothing():
    copy = placed(ShardingType.DATA_PARALLEL, data_parallel_shards(8, 4, 1))
    assert not step_traffic([copy], StepBatches(SAMPLES[:1], share))
    alone = placed(ShardingType.ROW_WISE, row_wise_shards(8, 4, [0]))
    assert not step_traffic([alone], StepBatches(SAMPLES[:1], share))


def test_types_of_one_collection_add_up():
    tables = [
        placed(ShardingType.TABLE_WISE, table_wise_shards(8, 4, 1)),
        placed(ShardingType.ROW_WISE, row_wise_shards(8, 4, range(4)), name="u"),
    ]
    both = step_traffic(tables, BATCHES)
    assert both == step_traffic(tables[:1], BATCHES) + step_traffic(tables[1:], BATCHES)
    assert both[SIZES, 0, 1] == 48


def test_stages_are_called_as_the_exchanges_call_them():
    assert (SIZES, STRIDES) == (kjt.SIZES_STAGE, kjt.STRIDES_STAGE)
    assert (IDS, WEIGHTS) == (kjt.IDS_STAGE, kjt.WEIGHTS_STAGE)
    assert (ROWS, GRADIENTS) == (rows.ROWS_STAGE, rows.GRADIENTS_STAGE)
    assert (COPIES_SIZES, COPIES_IDS) == (sparse_gradients.SIZES_STAGE, sparse_gradients.IDS_STAGE)
    assert (COPIES_WEIGHTS, COPIES_ROWS) == (
        sparse_gradients.WEIGHTS_STAGE,
        sparse_gradients.ROWS_STAGE,
    )
    assert sparse_gradients.SUMS_STAGE == COPIES_SUMS


def test_numbers_of_batches_are_counted_by_feature_and_range():
    batch = KeyedJaggedTensor(
        ["f", "g"], torch.tensor([7, 0, 3, 3, 1]), lengths=torch.tensor([0, 3, 1, 1])
    )
    found = StepBatches.of([batch, batch])
    assert found.samples == [{"f": 2, "g": 2}] * 2
    assert [found.ids(1, "f", *ends) for ends in ((0, 8), (0, 3), (3, 7), (7, 8), (8, 8))] == [
        3,
        1,
        1,
        1,
        0,
    ]
    assert [found.ids(0, "g", *ends) for ends in ((0, 2), (2, 4))] == [1, 1]
    assert not found.variable


@st.composite
def cases_with_copies(draw: st.DrawFn, world_size: int, local_size: int) -> Case:
    """A case in which some tables are replicated."""
    case = draw(cases(world_size, local_size))
    copied: Word = ("dp", None)
    return replace(
        case,
        words={
            name: draw(st.sampled_from([copied, word, word])) for name, word in case.words.items()
        },
    )


Found = tuple[Traffic, list[Table]]


def count_cases(
    rank: int, world_size: int, drawn: list[Case], narrow: bool, pooled: bool
) -> list[Found]:
    """What this rank sends in the second step of each case, and the tables as they were placed."""
    env = ShardingEnv.from_process_group(group())
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    codecs = get_qcomm_codecs_registry(config) if narrow else None
    found = []
    for case in drawn:
        words = {
            name: data_parallel() if word[0] == "dp" else generator(word)
            for name, word in case.words.items()
        }
        features = batch_of(case, rank)
        unsharded = collection(case) if pooled else row_collection(case)
        sharder = (EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder)(
            qcomm_codecs_registry=codecs
        )
        plan = construct_module_sharding_plan(unsharded, words, local_size=env.local_size)
        apply_optimizers(case, unsharded.embedding_bags if pooled else unsharded.embeddings)
        sharded: Any = sharder.shard(unsharded, plan, env)  # pyright: ignore[reportArgumentType]

        def step(sharded: Any = sharded, features: KeyedJaggedTensor = features) -> None:
            results = sharded(features).wait()
            (results.values().sum() if pooled else loss(results, rank)).backward()

        step()
        with count_traffic() as traffic:
            step()
        found.append((traffic, tables_of(sharded)))
    return found

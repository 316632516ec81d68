"""Plans: written by hand, printed, and the geometry of their shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tutorec.distributed.plan import EmbeddingComputeKernel, ShardingPlan, ShardingType
from tutorec.distributed.shard_geometry import ShardPiece, exact_cover, pieces_of, placement, table_wise_pieces
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

PRINTED = """module: 

    param     | sharding type | compute kernel | ranks
------------- | ------------- | -------------- | -----
product_table | table_wise    | fused          | [0]  
user_table    | table_wise    | fused          | [0]  

    param     | shard offsets | shard sizes |   placement  
------------- | ------------- | ----------- | -------------
product_table | [0, 0]        | [4096, 64]  | rank:0/cuda:0
user_table    | [0, 0]        | [4096, 64]  | rank:0/cuda:0"""  # noqa: W291 - the printed form pads its last column


def tutorial_collection(device: str = "cpu") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(num_embeddings=4096, embedding_dim=64, name="product_table", feature_names=["product"]),
            EmbeddingBagConfig(num_embeddings=4096, embedding_dim=64, name="user_table", feature_names=["user"]),
        ],
        device=torch.device(device),
    )


def test_plan_prints_its_two_tables():
    words = {"product_table": table_wise(rank=0), "user_table": table_wise(rank=0)}
    module_plan = construct_module_sharding_plan(tutorial_collection("meta"), words, device_type="cuda")
    assert str(ShardingPlan({"": module_plan})) == PRINTED
    on_cpu = construct_module_sharding_plan(tutorial_collection(), words, device_type="cpu")
    assert str(on_cpu).splitlines()[-1] == "user_table    | [0, 0]        | [4096, 64]  | rank:0/cpu"
    two = str(ShardingPlan({"a": module_plan, "b": on_cpu}))
    assert two.count("module: ") == 2
    assert "rank:0/cuda:0\n\nmodule: b\n\n" in two


def test_kernel_of_a_hand_written_plan_is_fused_and_both_spellings_are_accepted():
    ebc = tutorial_collection()
    plan = construct_module_sharding_plan(
        ebc, {"product_table": table_wise(1, "batched_dense"), "user_table": table_wise(0)}, world_size=2
    )
    assert {name: sharding.compute_kernel for name, sharding in plan.items()} == {
        "product_table": "dense",
        "user_table": "fused",
    }
    assert plan["product_table"].ranks == [1]
    assert EmbeddingComputeKernel("batched_fused") is EmbeddingComputeKernel.FUSED
    with pytest.raises(ValueError, match="'quick' is unknown: use one of dense, fused, "):
        table_wise(0, "quick")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"product_table": 0},
            r"missing \['user_table'\], unknown \[\]; its tables are \['product_table', 'user_table'",
        ),
        ({"product_table": 0, "user_table": 0, "x": 0}, r"missing \[\], unknown \['x'\]"),
        (
            {"product_table": 0, "user_table": 2},
            r"table_wise\(rank=2\) for table 'user_table': the world has 2 ranks, 0",
        ),
        ({"product_table": 0, "user_table": -1}, r"table_wise\(rank=-1\)"),
    ],
)
def test_words_that_do_not_fit_the_module_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        construct_module_sharding_plan(
            tutorial_collection(), {name: table_wise(rank) for name, rank in words.items()}, world_size=2
        )


def test_module_without_a_sharder_is_refused():
    with pytest.raises(ValueError, match="no sharder for a Linear: pass sharder=, or a module of EmbeddingBagColl"):
        construct_module_sharding_plan(nn.Linear(2, 2), {})


def test_sharding_types_have_torchrecs_values():
    assert [kind.value for kind in ShardingType] == [
        "data_parallel",
        "table_wise",
        "column_wise",
        "row_wise",
        "table_row_wise",
        "table_column_wise",
        "grid_shard",
    ]


@given(rows=st.integers(1, 50), columns=st.integers(1, 50), rank=st.integers(0, 7))
def test_table_wise_pieces_cover_the_table_and_survive_the_plan(rows, columns, rank):
    pieces = table_wise_pieces(rows, columns, rank)
    assert exact_cover(pieces, rows, columns)
    ebc = EmbeddingBagCollection(
        [EmbeddingBagConfig(rows, columns, "t", feature_names=["f"])], device=torch.device("meta")
    )
    plan = construct_module_sharding_plan(ebc, {"t": table_wise(rank)}, world_size=8, device_type="cpu")
    assert pieces_of(plan["t"]) == pieces


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [ShardPiece(0, 0, 0, 4, 3)],
        [ShardPiece(0, 0, 0, 2, 4), ShardPiece(1, 1, 0, 2, 4)],
        [ShardPiece(0, 0, 0, 2, 4), ShardPiece(1, 3, 0, 2, 4)],
        [ShardPiece(0, 0, 0, 5, 4), ShardPiece(1, 4, 0, -1, 4)],
    ],
    ids=["nothing", "gap", "overlap", "outside", "negative"],
)
def test_pieces_with_gaps_or_overlaps_are_no_cover(pieces):
    assert not exact_cover(pieces, 4, 4)


def test_cuda_devices_are_numbered_within_their_host():
    assert [placement(rank, "cuda", local_size=2) for rank in range(4)] == [
        "rank:0/cuda:0",
        "rank:1/cuda:1",
        "rank:2/cuda:0",
        "rank:3/cuda:1",
    ]

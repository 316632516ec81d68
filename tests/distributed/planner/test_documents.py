"""The plans that the documents print come out of the planner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.planner.models import documents_tables, only, pieces

from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.planner import EmbeddingShardingPlanner, Topology
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

LARGE, SMALL = ("large_table_0", "large_table_1"), ("small_table_0", "small_table_1")
NAMES = (*LARGE, *SMALL)
DEVICES = ("cuda", "cpu")


def place(rank: int, device: str, local_size: int) -> str:
    return f"rank:{rank}/cpu" if device == "cpu" else f"rank:{rank}/cuda:{rank % local_size}"


def planned(
    device: str,
    sharding_type: str,
    world_size: int = 2,
    local_size: int | None = None,
    **words: Any,
) -> Any:
    topology = Topology(world_size, device, local_world_size=local_size)
    planner = EmbeddingShardingPlanner(
        topology=topology, constraints=only(NAMES, sharding_type, **words)
    )
    plan = planner.plan(documents_tables(), [EmbeddingBagCollectionSharder()])
    assert list(plan.plan) == [""]
    assert list(plan.plan[""]) == list(NAMES)
    return plan.plan[""]


@pytest.mark.parametrize("device", DEVICES)
def test_table_wise_plan_is_the_documents(device):
    plan = planned(device, "table_wise")
    for names, rows in ((LARGE, 4096), (SMALL, 1024)):
        for rank, name in enumerate(names):
            assert (plan[name].sharding_type, plan[name].compute_kernel, plan[name].ranks) == (
                "table_wise",
                "fused",
                [rank],
            )
            assert pieces(plan[name]) == [([0, 0], [rows, 64], place(rank, device, 2))]


@pytest.mark.parametrize("device", DEVICES)
def test_row_wise_plan_is_the_documents(device):
    plan = planned(device, "row_wise")
    for names, half in ((LARGE, 2048), (SMALL, 512)):
        for name in names:
            assert plan[name].ranks == [0, 1]
            assert pieces(plan[name]) == [
                ([0, 0], [half, 64], place(0, device, 2)),
                ([half, 0], [half, 64], place(1, device, 2)),
            ]


@pytest.mark.parametrize("device", DEVICES)
def test_column_wise_plan_with_slices_of_32_columns_is_the_documents(device):
    plan = planned(device, "column_wise", min_partition=32)
    for names, rows in ((LARGE, 4096), (SMALL, 1024)):
        for name in names:
            assert plan[name].ranks == [0, 1]
            assert pieces(plan[name]) == [
                ([0, 0], [rows, 32], place(0, device, 2)),
                ([0, 32], [rows, 32], place(1, device, 2)),
            ]


def test_column_wise_without_min_partition_is_one_slice_and_says_so():
    with pytest.warns(UserWarning, match="min_partition") as caught:
        plan = planned("cpu", "column_wise")
    assert [len(plan[name].shards()) for name in NAMES] == [1, 1, 1, 1]
    assert any("large_table_0" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("device", DEVICES)
def test_data_parallel_plan_is_the_documents_with_the_kernel_that_keeps_the_optimizer(device):
    plan = planned(device, "data_parallel")
    for name in NAMES:
        entry = plan[name]
        assert (entry.sharding_type, entry.compute_kernel, entry.ranks) == (
            "data_parallel",
            "fused",
            [0, 1],
        )
        assert entry.sharding_spec is None


@pytest.mark.parametrize("device", DEVICES)
def test_table_row_wise_plan_on_two_hosts_puts_large_and_small_on_each(device):
    plan = planned(device, "table_row_wise", 4, 2)
    for names, rows in ((LARGE, 2048), (SMALL, 512)):
        for host, name in enumerate(names):
            ranks = [2 * host, 2 * host + 1]
            assert plan[name].ranks == ranks
            assert pieces(plan[name]) == [
                ([0, 0], [rows, 64], place(ranks[0], device, 2)),
                ([rows, 0], [rows, 64], place(ranks[1], device, 2)),
            ]


def test_table_column_wise_and_grid_plans_on_two_hosts_are_torchrecs():
    plan = planned("cuda", "table_column_wise", 4, 2, min_partition=32)
    assert [plan[name].ranks for name in LARGE] == [[0, 1], [2, 3]]
    assert [sizes for _, sizes, _ in pieces(plan["large_table_0"])] == [[4096, 32], [4096, 32]]
    plan = planned("cuda", "grid_shard", 4, 2, min_partition=32)
    assert plan["large_table_0"].ranks == [0, 1, 2, 3]
    assert [(offsets, sizes) for offsets, sizes, _ in pieces(plan["large_table_0"])] == [
        ([0, 0], [2048, 32]),
        ([2048, 0], [2048, 32]),
        ([0, 32], [2048, 32]),
        ([2048, 32], [2048, 32]),
    ]


@pytest.mark.parametrize(("device", "where"), [("cuda", "rank:0/cuda:0"), ("cpu", "rank:0/cpu")])
def test_introductions_plan_prints_as_the_document_prints_it(device, where):
    tables = [
        EmbeddingBagConfig(4096, 64, f"{name}_table", feature_names=[name])
        for name in ("product", "user")
    ]
    ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))
    plan = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device=device)).plan(
        ebc, [EmbeddingBagCollectionSharder()]
    )
    lines = [line.rstrip() for line in str(plan).splitlines() if line.strip()]
    assert lines[0] == "module:"
    assert [line.split("|")[0].strip() for line in lines[1:]].count("product_table") == 2
    for name in ("product_table", "user_table"):
        assert any(
            line.split(" | ") == [name.ljust(13), "table_wise   ", "fused         ", "[0]"]
            for line in lines
        ), lines
        last = [[cell.strip() for cell in line.split("|")] for line in lines]
        assert [name, "[0, 0]", "[4096, 64]", where] in last

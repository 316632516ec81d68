"""The solutions of chapter 14's exercises, against the library that they are about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from tutorec.fx.tracer import symbolic_trace
from tutorec.inference.modules import shard_quant_model
from tutorec.inference.serving import request_of, with_tensor_inputs
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.quant.embedding_modules import EmbeddingBagCollection
from tutorec.quant.packing import pack_rows
from tutorec.sparse.lists import kjt_from_lists
from tutorec.teach import check
from tutorec.types import DataType


def collection(*features: str, rows: int = 10, columns: int = 64) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(rows, columns, f"{name}_table", feature_names=[name])
        for name in features
    ]
    for table in tables:
        table.data_type = DataType.INT8
    return EmbeddingBagCollection(tables, is_weighted=False, device=torch.get_default_device())


def test_a_request_by_hand_is_that_of_the_library():
    exercise = check.find("14.1")
    for batch, features in exercise.cases:
        kjt = kjt_from_lists({name: batch[name] for name in features})
        request = request_of(with_tensor_inputs(collection(*features), [kjt]), kjt)
        values, lengths = exercise.solution(batch, features)
        assert request["values"].tolist() == values
        assert request["lengths"].tolist() == lengths


def test_a_traced_counter_stands_still():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return x * self.calls

    traced = symbolic_trace(Counting())
    assert [traced(10) for _ in range(3)] == check.find("14.2").solution


@pytest.mark.parametrize(
    ("place", "cut"),
    [(0, table_wise(rank=2)), (1, row_wise()), (2, column_wise(ranks=[0, 1, 2, 3]))],
)
def test_bytes_of_layouts_are_those_of_the_sharded_pieces(place, cut):
    ebc = collection("product", rows=1000)
    sharder = QuantEmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(ebc, {"product_table": cut}, sharder, 4, 4, "cpu")
    shard_quant_model(ebc, world_size=4, sharding_plan=ShardingPlan({"": plan}))
    pieces = [piece.shard_sizes for piece in plan["product_table"].sharding_spec.shards]
    held = sum(
        rows * pack_rows(torch.zeros(1, columns), DataType.INT8, alignment=4).shape[1]
        for rows, columns in pieces
    )
    assert held == check.find("14.3").solution[place]

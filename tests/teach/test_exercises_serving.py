"""The solutions of chapter 14's exercises, against the library that they are about."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tutorec.fx.tracer import symbolic_trace
from tutorec.inference.serving import request_of, with_tensor_inputs
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.quant.embedding_modules import EmbeddingBagCollection
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
    for (batch, features), (values, lengths) in zip(exercise.cases, exercise.right, strict=True):
        kjt = kjt_from_lists({name: batch[name] for name in features})
        request = request_of(with_tensor_inputs(collection(*features), [kjt]), kjt)
        assert request["values"].tolist() == values
        assert request["lengths"].tolist() == lengths


def test_a_traced_counter_stands_still():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return x * self.calls

    traced = symbolic_trace(Counting())
    assert [traced(10) for _ in range(3)] == check.find("14.2").right


def test_a_table_on_two_ranks_pools_as_one_process_does():
    whole = torch.cat([torch.arange(first, first + 8.0).view(4, 2) for first in (0, 100)])
    ids = torch.tensor([7, 1, 5, 5, 0, 3])
    pooled = nn.functional.embedding_bag(ids, whole, torch.tensor([0, 4, 4]), mode="sum")
    assert check.find("14.3").right == [pooled.tolist()] * 2

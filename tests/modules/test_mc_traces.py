"""Graphs of models with managed collisions, by either tracer: they learn and look up as the model
does.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quant.test_behind_mappings import BATCH, DEVICE, quantized_of, trained, values_of
from torch import nn

from tutorec.fx.tracer import Tracer
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

BATCHES = [
    KeyedJaggedTensor(["user", "item"], torch.tensor(ids), lengths=torch.tensor([1, 2, 2, 1])).to(
        DEVICE
    )
    for ids in ([5, 5, 99, 3, 7, 10**9], [8, 70, 71, 72, 73, 74], [1, 70, 5, 3, 73, 7])
]


class Model(nn.Module):
    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.rows(features)


def seen(model: nn.Module) -> list[Any]:
    """Values and rows of each batch."""
    torch.manual_seed(0)  # rows that change hands are drawn again
    found = [model(batch) for batch in BATCHES]
    return [(values_of(values).tolist(), rows.values().tolist()) for values, rows in found]


@pytest.mark.parametrize("tracer", [Tracer, torch.fx.Tracer])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["policy", "hash", "growing"])
@pytest.mark.parametrize("pooled", [True, False])
def test_a_graph_learns_and_looks_up_as_its_model(
    pooled: bool, kind: str, training: bool, tracer: Any
) -> None:
    collection = trained(pooled, kind).train(training)
    collection._return_remapped_features = True
    eager, traced = Model(collection), Model(copy.deepcopy(collection))
    graph = torch.fx.GraphModule(traced, tracer().trace(traced))
    assert seen(graph) == seen(eager)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(traced.state_dict()[name], value, rtol=0, atol=0)
    calls = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert (calls == ["rows"]) is training


@pytest.mark.parametrize("tracer", [Tracer, torch.fx.Tracer])
@pytest.mark.parametrize("kind", ["policy", "hash", "growing"])
def test_a_graph_of_a_quantized_model_looks_up_as_the_model(kind: str, tracer: Any) -> None:
    model = Model(quantized_of(trained(True, kind)))
    assert seen(torch.fx.GraphModule(model, tracer().trace(model))) == seen(model)


@pytest.mark.parametrize("kind", ["policy", "hash", "growing"])
def test_mappings_that_learn_are_not_traced_by_themselves(kind: str) -> None:
    mappings = trained(True, kind)._managed_collision_collection
    with pytest.raises(ValueError, match=r"ManagedCollisionCollection .* trace a model that holds"):
        torch.fx.symbolic_trace(mappings)
    graph = torch.fx.symbolic_trace(mappings.eval())
    assert graph(BATCH.to(DEVICE)).values().tolist() == mappings(BATCH).values().tolist()

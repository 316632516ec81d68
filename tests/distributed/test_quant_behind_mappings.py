"""Quantized collections of raw ids over devices: the results of the unsharded ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.quant_plans import sharded, words_of
from hypothesis import given
from hypothesis import strategies as st
from quant.test_behind_mappings import BATCH, DEVICE, mapping, quantized_of, trained, values_of
from torch import nn

from tutorec.fx.tracer import Tracer
from tutorec.inference.modules import shard_quant_model
from tutorec.modules.mc_modules import ManagedCollisionCollection
from tutorec.quant.embedding_collection import QuantManagedCollisionEmbeddingCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

MODELS = {
    (pooled, kind): quantized_of(trained(pooled, kind))
    for pooled in (True, False)
    for kind in ("policy", "hash", "growing")
}
IDS = st.one_of(st.sampled_from([10**9, 5, 8]), st.integers(-(2**63), -2), st.integers(0, 2**62))


@st.composite
def batches(draw: Any) -> KeyedJaggedTensor:
    """Seen and unseen ids; the features in another order, and one that no table has."""
    samples = draw(st.integers(1, 4))
    lists = draw(st.lists(st.lists(IDS, max_size=3), min_size=3 * samples, max_size=3 * samples))
    ids = torch.tensor([each for one in lists for each in one], dtype=torch.int64)
    lengths = torch.tensor([len(one) for one in lists])
    return KeyedJaggedTensor(["user", "other", "item"], ids, lengths=lengths).to(DEVICE)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(values_of(found[0]), values_of(expected[0]))
    assert found[1].keys() == expected[1].keys()
    assert found[1].values().tolist() == expected[1].values().tolist()
    assert found[1].lengths().tolist() == expected[1].lengths().tolist()


@pytest.mark.parametrize(("pooled", "kind"), MODELS)
@given(data=st.data())
def test_results_are_those_of_the_unsharded_collection(pooled: bool, kind: str, data: Any):
    quantized, devices = MODELS[pooled, kind], data.draw(st.integers(1, 3))
    model = sharded(quantized, data.draw(words_of(quantized, devices)), devices)
    batch = data.draw(batches())
    assert_same(model(batch), quantized(batch))


@pytest.mark.parametrize(("pooled", "kind"), MODELS)
def test_a_model_is_planned_sharded_loaded_and_traced(pooled: bool, kind: str):
    quantized = quantized_of(trained(pooled, kind))
    model, plan = shard_quant_model(nn.Sequential(quantized), world_size=2)
    assert {entry.sharding_type for entry in plan.plan["0"].values()} == {"table_wise"}
    assert type(model[0]).__name__ == f"Sharded{type(quantized).__name__}"
    batch = BATCH.to(DEVICE)
    assert_same(model(batch), quantized(batch))
    state = model.state_dict()
    assert state.keys() == nn.Sequential(quantized).state_dict().keys()
    other = quantized_of(trained(pooled, kind))
    nn.Sequential(other).load_state_dict(state)
    assert_same(other(batch), quantized(batch))
    for tracer in (Tracer(), torch.fx.Tracer()):
        graph = torch.fx.GraphModule(model, tracer.trace(model))
        assert_same(graph(batch), quantized(batch))


def test_what_the_unsharded_collection_refuses_is_refused():
    quantized = MODELS[True, "hash"]
    model, _ = shard_quant_model(quantized)
    wrong = KeyedJaggedTensor(["item", "user"], torch.tensor([-1, 5]), lengths=torch.tensor([1, 1]))
    for one in (quantized, model):
        with pytest.raises(ValueError, match="'item_table': an id is -1"):
            one(wrong.to(DEVICE))
        with pytest.raises(KeyError, match="lacks the features \\['user'\\]"):
            one(BATCH.permute([0]).to(DEVICE))


@pytest.mark.parametrize("kind", ["policy", "hash", "growing"])
def test_tables_and_mappings_on_meta_are_filled_by_a_loaded_state(kind: str):
    quantized, meta = MODELS[False, kind], torch.device("meta")
    tables = quantized.embedding_configs()
    mappings = ManagedCollisionCollection(
        {one.name: mapping(kind, one.num_embeddings, meta) for one in tables}, tables
    )
    on_meta = QuantManagedCollisionEmbeddingCollection(
        tables, meta, managed_collision_collection=mappings
    )
    model, _ = shard_quant_model(on_meta, world_size=2)
    model.load_state_dict(quantized.state_dict())
    assert_same(model(BATCH), quantized(BATCH))

"""Quantized rows, one for each id, over several devices of one process: bit for bit those of the
unsharded module.
"""

from __future__ import annotations

import pytest
import torch
from distributed.quant_plans import sharded, words_of
from hypothesis import given, settings
from hypothesis import strategies as st
from quant.equals import DTYPES, rows
from strategies import jagged_batches, rows_of, sequence_tables, variable_batches

from tutorec._kernels.backend import backend, use_backend
from tutorec.distributed.sharding_plan import column_wise, row_wise, table_wise
from tutorec.fx.tracer import Tracer
from tutorec.inference.scripting import script_model
from tutorec.modules.embedding_configs import EmbeddingConfig
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

BACKENDS = [
    "torch",
    pytest.param(
        "fbgemm", marks=pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
    ),
]
both = pytest.mark.parametrize("name", BACKENDS)
# A plan, a collection and an operator for each device make an example dear.
FEW_EXAMPLES = settings(max_examples=20)
TABLES = [
    EmbeddingConfig(10, 8, "things", feature_names=["item", "seen"]),
    EmbeddingConfig(3, 8, "people", feature_names=["user"]),
    EmbeddingConfig(7, 6, "shops", feature_names=["seen"]),
]


def batch(*keys: str) -> KeyedJaggedTensor:
    ids, lengths = torch.tensor([2, 1, 0] * len(keys)), torch.tensor([2, 0, 1] * len(keys))
    return KeyedJaggedTensor(list(keys), ids, lengths=lengths)


def graph_of(module):
    return torch.fx.GraphModule(module, Tracer().trace(module))


def same(found, expected):
    assert list(found) == list(expected)
    for name, lists in expected.items():
        assert torch.equal(found[name].values(), lists.values())
        assert torch.equal(found[name].lengths(), lists.lengths())
        assert torch.equal(found[name].offsets(), lists.offsets())
        assert (found[name].weights_or_none() is None) == (lists.weights_or_none() is None)


@both
@FEW_EXAMPLES
@given(data=st.data())
def test_rows_of_any_plan_are_those_of_the_unsharded_module(name, data):
    tables = data.draw(sequence_tables())
    dtypes = {one.name: data.draw(st.sampled_from(DTYPES)) for one in tables}
    drawn = data.draw(jagged_batches(rows_of(tables), weighted=None))
    features = drawn.kjt().permute(list(data.draw(st.permutations(range(len(drawn.keys))))))
    devices = data.draw(st.integers(1, 4))
    with use_backend(name):
        _, quantized = rows(tables, dtypes, need_indices=data.draw(st.booleans()))
        module = sharded(quantized, data.draw(words_of(quantized, devices)), devices)
        same(module(features), quantized(features))
        same(graph_of(module)(features), quantized(features))


@both
@FEW_EXAMPLES
@given(data=st.data())
def test_variable_batches_are_what_the_unsharded_module_makes_of_them(name, data):
    drawn = data.draw(variable_batches(max_features=3, weighted=False))
    tables = [
        EmbeddingConfig(12, 4 + place, f"t{place}", feature_names=[key])
        for place, key in enumerate(drawn.keys)
    ]
    features = drawn.kjt()
    with use_backend(name):
        _, quantized = rows(tables, torch.int8)
        module = sharded(quantized, data.draw(words_of(quantized, 2)), 2)
        same(module(features), quantized(features))


@pytest.mark.slow
@both
def test_scripted_modules_give_the_bits_of_eager_ones(name):
    words = {"things": row_wise(), "people": column_wise(ranks=[1, 0]), "shops": table_wise(rank=1)}
    with use_backend(name):
        _, quantized = rows(
            TABLES, {"things": torch.int8, "people": torch.quint4x2, "shops": torch.quint2x4}, True
        )
        module = sharded(quantized, words, 2)
        for features in (batch("item", "seen", "user"), batch("user", "other", "seen", "item")):
            same(script_model(module)(features), quantized(features))


@both
@pytest.mark.parametrize("word", [table_wise(rank=1), row_wise()])
def test_bad_ids_are_named_and_fail_in_a_graph(name, word):
    with use_backend(name):
        _, quantized = rows(TABLES, torch.int8)
        module = sharded(quantized, {one.name: word for one in TABLES}, 2)
        for bad in (7, 900, -1):
            lengths = torch.tensor([1, 1, 1])
            features = KeyedJaggedTensor(
                ["item", "seen", "user"], torch.tensor([0, bad, 0]), lengths=lengths
            )
            with pytest.raises(
                ValueError,
                match=rf"table '\w+' has \d+ rows .* feature 'seen', sample 0, holds id {bad}",
            ):
                module(features)
            with pytest.raises((ValueError, RuntimeError)):
                graph_of(module)(features)


def test_state_has_the_names_and_rows_of_the_unsharded_module():
    _, quantized = rows(TABLES, torch.quint4x2)
    words = {"things": row_wise(), "people": column_wise(ranks=[1, 0]), "shops": table_wise(rank=1)}
    module = sharded(quantized, words, 2)
    state, expected = module.state_dict(), quantized.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert module.embedding_configs() == quantized.embedding_configs()
    assert "ShardedQuantEmbeddingCollection(" in repr(module)

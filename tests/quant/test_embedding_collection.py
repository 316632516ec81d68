"""The quantized EmbeddingCollection: the rows that its packed rows stand for, one for each id."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quant.equals import DTYPES, dequantized, rows
from strategies import jagged_batches, rows_of, sequence_tables, variable_batches
from torch.testing import assert_close

from tutorec._kernels.backend import backend, use_backend
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingConfig, QuantConfig
from tutorec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import DataType

BACKENDS = [
    "torch",
    pytest.param(
        "fbgemm", marks=pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
    ),
]
both = pytest.mark.parametrize("name", BACKENDS)


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["item", "user"], torch.tensor([3, 1, 3, 2]), lengths=torch.tensor([2, 0, 1, 1])
    )


def close(found, expected):
    assert sorted(found) == sorted(expected)
    for name, rows_of_name in found.items():
        other = expected[name]
        assert_close(rows_of_name.values(), other.values(), rtol=1e-5, atol=1e-5)
        assert torch.equal(rows_of_name.lengths(), other.lengths())
        assert torch.equal(rows_of_name.offsets(), other.offsets())
        mine, theirs = rows_of_name.weights_or_none(), other.weights_or_none()
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


@both
@given(data=st.data())
def test_rows_equal_the_float_collection_of_the_dequantized_tables(name, data):
    tables = data.draw(sequence_tables())
    dtypes = {one.name: data.draw(st.sampled_from(DTYPES)) for one in tables}
    drawn = data.draw(jagged_batches(rows_of(tables)))
    features = drawn.kjt().permute(list(data.draw(st.permutations(range(len(drawn.keys))))))
    with use_backend(name):
        _, quantized = rows(tables, dtypes, need_indices=data.draw(st.booleans()))
        close(quantized(features), dequantized(quantized)(features))


@both
@given(data=st.data())
def test_variable_batches_give_the_rows_of_their_lists_or_samples(name, data):
    drawn = data.draw(variable_batches(max_features=3))
    tables = [
        EmbeddingConfig(12, 4 + index % 2, f"t{index}", feature_names=[key])
        for index, key in enumerate(drawn.ids)
    ]
    features = drawn.kjt()
    counts = [len(lists) for lists in drawn.ids.values()]
    if data.draw(st.booleans()) and min(counts):
        samples = data.draw(st.integers(1, 4))
        inverse = [
            [data.draw(st.integers(0, count - 1)) for _ in range(samples)] for count in counts
        ]
        features = drawn.kjt(inverse_indices=(drawn.keys, torch.tensor(inverse)))
    with use_backend(name):
        _, quantized = rows(tables, torch.int8)
        close(quantized(features), dequantized(quantized)(features))


@pytest.mark.parametrize("tables", [0, 1, 2])
def test_an_empty_batch_gives_no_rows(tables):
    configs = [
        EmbeddingConfig(4, 4, name, feature_names=[name]) for name in ("item", "user")[:tables]
    ]
    _, quantized = rows(configs, torch.int8)
    none = torch.empty(0, dtype=torch.int64)
    found = quantized(KeyedJaggedTensor(["item", "user"], none, lengths=none))
    assert [list(one.values().shape) for one in found.values()] == [[0, 4]] * tables


def test_what_it_was_made_of_is_told():
    ec = EmbeddingCollection(
        [EmbeddingConfig(5, 4, "t", feature_names=["item", "user"])], need_indices=True
    )
    ec.qconfig = QuantConfig(torch.float16, torch.quint4x2)
    quantized = QuantEmbeddingCollection.from_float(ec)
    assert str(quantized).startswith(
        "QuantizedEmbeddingCollection(\n  (embeddings): ModuleDict(\n    (t): Module()"
    )
    assert [name for name, _ in quantized.named_buffers()] == ["embeddings.t.weight"]
    assert quantized.embedding_configs()[0].data_type is DataType.INT4
    assert (quantized.need_indices(), quantized.embedding_dim()) == (True, 4)
    assert quantized.embedding_names_by_table() == [["item", "user"]]
    assert quantized.output_dtype() is torch.float16
    found = quantized(batch())
    assert found["item"].values().dtype is torch.float16
    assert torch.equal(found["user"].weights(), torch.tensor([3, 2]))
    again = copy.deepcopy(quantized)
    quantized.embeddings["t"].weight.zero_()
    assert quantized(batch())["item"].values().count_nonzero() == 0
    assert torch.equal(again(batch())["item"].values(), found["item"].values())


def test_ids_are_checked_by_name():
    _, quantized = rows([EmbeddingConfig(3, 4, "t", feature_names=["item", "user"])], torch.int8)
    with pytest.raises(ValueError, match=r"table 't'.*3 rows.*feature 'item', sample 0.*id 3"):
        quantized(batch())


def test_a_quantized_collection_is_not_quantized_again():
    _, quantized = rows([EmbeddingConfig(3, 4, "t", feature_names=["item"])], torch.int8)
    with pytest.raises(ValueError, match=r"EmbeddingCollection.*\(tables \['t'\]\)"):
        QuantEmbeddingCollection.from_float(quantized)

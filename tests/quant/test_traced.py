"""Quantized collections outside of Python: traced and scripted they give the same bits."""

from __future__ import annotations

import pytest
import torch
from quant.equals import bags, rows

from tutorec._kernels.backend import backend, use_backend
from tutorec.fx.tracer import Tracer
from tutorec.inference.scripting import script_model
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

BACKENDS = [
    "torch",
    pytest.param(
        "fbgemm", marks=pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
    ),
]
both = pytest.mark.parametrize("name", BACKENDS)


def scripted(module):
    return torch.fx.GraphModule(module, Tracer().trace(module)), script_model(module)


KINDS = {"t": torch.int8, "u": torch.quint4x2, "v": torch.quint2x4}


def batch(weighted: bool = False) -> KeyedJaggedTensor:
    """Features in another order than the tables', and one more."""
    weights = torch.tensor([2.0, -1.0, 0.5, 3.0, 1.0]) if weighted else None
    lengths = torch.tensor([2, 0, 1, 1, 0, 1])
    return KeyedJaggedTensor(
        ["user", "other", "item"], torch.tensor([3, 1, 3, 2, 0]), weights, lengths=lengths
    )


@both
@pytest.mark.parametrize("weighted", [False, True])
def test_traced_and_scripted_bags_give_the_bits_of_eager_ones(name, weighted):
    mean = PoolingType.SUM if weighted else PoolingType.MEAN
    tables = [
        EmbeddingBagConfig(10, 8, "t", feature_names=["item"]),
        EmbeddingBagConfig(7, 6, "u", feature_names=["user", "item"], pooling=mean),
        EmbeddingBagConfig(5, 3, "v", feature_names=["user"], pooling=PoolingType.SQRTN),
    ]
    with use_backend(name):
        _, quantized = bags(tables, KINDS, weighted)
        expected = quantized(batch(weighted))
        for module in scripted(quantized):
            found = module(batch(weighted))
            assert found.keys() == expected.keys()
            assert torch.equal(found.values(), expected.values())


@both
def test_traced_and_scripted_rows_are_the_bits_of_eager_ones(name):
    tables = [
        EmbeddingConfig(10, 8, "t", feature_names=["item"]),
        EmbeddingConfig(7, 8, "u", feature_names=["user", "item"]),
        EmbeddingConfig(5, 3, "v", feature_names=["user"]),
    ]
    with use_backend(name):
        _, quantized = rows(tables, KINDS, need_indices=True)
        expected = quantized(batch())
        for module in scripted(quantized):
            found = module(batch())
            assert sorted(found) == sorted(expected)
            for each, jagged in found.items():
                assert torch.equal(jagged.values(), expected[each].values())
                assert torch.equal(jagged.weights(), expected[each].weights())
                assert torch.equal(jagged.lengths(), expected[each].lengths())


@both
def test_graphs_refuse_bad_ids_and_missing_features(name):
    with use_backend(name):
        _, quantized = bags([EmbeddingBagConfig(4, 4, "t", feature_names=["item"])], torch.int8)
        for module in scripted(quantized):
            for id_ in (4, -1):
                with pytest.raises((RuntimeError, ValueError, torch.jit.Error)):
                    module(
                        KeyedJaggedTensor(["item"], torch.tensor([id_]), lengths=torch.tensor([1]))
                    )
            with pytest.raises((KeyError, torch.jit.Error), match="item"):
                module(KeyedJaggedTensor(["user"], torch.tensor([1]), lengths=torch.tensor([1])))

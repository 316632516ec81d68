from __future__ import annotations

from itertools import combinations

import pytest
import torch

from tutorec.datasets.random import shop
from tutorec.fx import symbolic_trace
from tutorec.models.deepfm import FMInteractionArch, SimpleDeepFMNN
from tutorec.modules.deepfm import FactorizationMachine
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed import KeyedTensor


def _collection(*widths: int) -> EmbeddingBagCollection:
    features = [["user"], ["item", "user"]]
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(500, width, f"t{i}", feature_names=features[i])
            for i, width in enumerate(widths)
        ]
    )


def test_the_factorization_machine_is_the_sum_of_all_products() -> None:
    parts = [torch.randn(5, 2, 3, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)]
    numbers = torch.cat([part.flatten(1) for part in parts], dim=1)
    expected = sum(
        numbers[:, i] * numbers[:, j] for i, j in combinations(range(numbers.shape[1]), 2)
    )
    torch.testing.assert_close(FactorizationMachine()(parts), expected[:, None])


def test_the_model_trains_and_is_the_same_traced() -> None:
    model = SimpleDeepFMNN(4, _collection(8, 8), 20, 5)
    traced = symbolic_trace(model)
    batch = next(shop().batches(16))
    found = model(batch.dense_features, batch.sparse_features)
    assert found.shape == (16, 1) and bool(((found > 0) & (found < 1)).all())
    torch.testing.assert_close(traced(batch.dense_features, batch.sparse_features), found)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_without_features_the_dense_vector_is_left() -> None:
    dense = torch.randn(3, 4)
    assert FMInteractionArch(4, [], 2)(dense, KeyedTensor([], [], torch.empty(3, 0))) is dense


def test_tables_of_different_widths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"embedding_dim is \{'t0': 8, 't1': 4\}"):
        SimpleDeepFMNN(4, _collection(8, 4), 20, 5)

import math
from typing import Any

import pytest
import torch

from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.types import DataType


def test_poolings_have_torchrecs_values() -> None:
    assert [(pooling.name, pooling.value) for pooling in PoolingType] == [
        ("SUM", "SUM"),
        ("MEAN", "MEAN"),
        ("NONE", "NONE"),
    ]


def test_a_config_has_torchrecs_defaults() -> None:
    config = EmbeddingBagConfig(num_embeddings=4096, embedding_dim=64)
    assert (config.name, config.feature_names, config.pooling) == ("", [], PoolingType.SUM)
    assert (config.data_type, config.num_features()) == (DataType.FP32, 0)
    assert config.get_weight_init_max() == -config.get_weight_init_min() == 1 / 64


def test_initial_values_can_be_given() -> None:
    config = EmbeddingConfig(100, 8, "t", weight_init_min=0.5, weight_init_max=0.75)
    weight = torch.zeros(100, 8)
    config.init_weight(weight)
    assert 0.5 <= float(weight.min()) < float(weight.max()) <= 0.75
    EmbeddingConfig(100, 8, "t", init_fn=lambda tensor: tensor.fill_(3.0)).init_weight(weight)
    assert bool((weight == 3.0).all())


def test_initial_values_are_uniform_by_default() -> None:
    weight = torch.zeros(1000, 16)
    EmbeddingBagConfig(1000, 16, "t").init_weight(weight)
    bound = math.sqrt(1 / 1000)
    assert float(weight.abs().max()) <= bound
    assert math.isclose(float(weight.std()), bound / math.sqrt(3), rel_tol=0.05)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"embedding_dim": 0}, "table 'users': embedding_dim must be positive, got 0"),
        ({"num_embeddings": -2}, "table 'users': num_embeddings must be positive, got -2"),
        ({"feature_names": ["a", "a"]}, r"feature_names \['a', 'a'\] name a feature twice"),
    ],
)
def test_a_table_that_cannot_be_is_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingBagConfig(**{"name": "users", "num_embeddings": 10, "embedding_dim": 4, **parts})


def test_position_weighted_tables_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="table 'users': need_pos is not supported"):
        EmbeddingConfig(10, 4, "users", need_pos=True)

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from tutorec.modules.compressed_collection import CompressedEmbeddingBagCollection
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    pooling_type_to_str,
)
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from tutorec.modules.growing import GrowingManagedCollisionModule
from tutorec.modules.mc_adapter import McEmbeddingBagCollectionAdapter
from tutorec.modules.mc_modules import ManagedCollisionCollection
from tutorec.quant.embedding_collection import EmbeddingCollection as QuantizedRows
from tutorec.quant.embedding_modules import EmbeddingBagCollection as QuantizedBags
from tutorec.types import DataType


def test_poolings_have_torchrecs_values_and_sqrtn() -> None:
    names = ["SUM", "MEAN", "SQRTN", "NONE"]
    assert (
        [pooling.name for pooling in PoolingType]
        == [pooling.value for pooling in PoolingType]
        == names
    )


def test_poolings_are_spelled_as_kernels_spell_them() -> None:
    kinds = (PoolingType.SUM, PoolingType.MEAN, PoolingType.SQRTN)
    assert [pooling_type_to_str(kind) for kind in kinds] == ["sum", "mean", "sqrtn"]
    for wrong in (PoolingType.NONE, "SUM"):
        with pytest.raises(ValueError, match=r"pools nothing.*SUM, MEAN or SQRTN"):
            pooling_type_to_str(wrong)  # type: ignore[arg-type]


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
        (
            {"embedding_dim": 0},
            "table 'users': embedding_dim must be a positive whole number, got 0",
        ),
        (
            {"num_embeddings": -2},
            "table 'users': num_embeddings must be a positive whole number, got -2",
        ),
        (
            {"embedding_dim": 4.0},
            "table 'users': embedding_dim must be a positive whole number, got 4.0",
        ),
        (
            {"feature_names": "item"},
            r"feature_names must be a list of names, got the string 'item'; write \['item'\]",
        ),
        ({"feature_names": ["a", "a"]}, r"feature_names \['a', 'a'\] name a feature twice"),
        (
            {"feature_names": [7]},
            r"table 'users': feature_names must be a list of names, got \[7\]",
        ),
        ({"feature_names": None}, "table 'users': feature_names must be a list of names, got None"),
    ],
)
def test_a_table_that_cannot_be_is_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingBagConfig(**{"name": "users", "num_embeddings": 10, "embedding_dim": 4, **parts})


CPU = torch.empty(0).device


def mapped(tables: list[Any]) -> Any:
    mappings = {each.name: GrowingManagedCollisionModule(each.num_embeddings) for each in tables}
    return ManagedCollisionCollection(mappings, tables)  # type: ignore[arg-type]


# Each kind of collection: the class of its configs, and how it is made.
COLLECTIONS: dict[str, tuple[Any, Callable[[list[Any]], Any]]] = {
    "bags": (EmbeddingBagConfig, EmbeddingBagCollection),
    "rows": (EmbeddingConfig, EmbeddingCollection),
    "fused bags": (
        EmbeddingBagConfig,
        lambda tables: FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.1}),
    ),
    "quantized bags": (
        EmbeddingBagConfig,
        lambda tables: QuantizedBags(tables, is_weighted=False, device=CPU),
    ),
    "quantized rows": (EmbeddingConfig, lambda tables: QuantizedRows(tables, device=CPU)),
    "compressed bags": (
        EmbeddingBagConfig,
        lambda tables: CompressedEmbeddingBagCollection(tables, {}),
    ),
    "mappings": (EmbeddingBagConfig, mapped),
    "bags with mappings": (
        EmbeddingBagConfig,
        lambda tables: McEmbeddingBagCollectionAdapter(tables, 1000, CPU, 1, zch_method="mpzch"),
    ),
}


@pytest.mark.parametrize("kind", COLLECTIONS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("_modules", "table name '_modules' is taken .*; call it '_modules_table'"),
        ("_forward_hooks", "table name '_forward_hooks' is taken .*; call it"),
        ("training", "table name 'training' is taken .*; call it"),
        ("a.b", "table name 'a.b' must not be empty or contain a dot"),
        ("", "table name '' must not be empty or contain a dot"),
        (7, "table name 7 must be a string"),
    ],
)
def test_a_name_that_no_table_can_have_is_refused_by_every_collection(
    kind: str, name: Any, message: str
) -> None:
    config, collection = COLLECTIONS[kind]
    with pytest.raises((ValueError, TypeError), match=message):
        collection([config(8, 4, name, feature_names=["f"])])


@pytest.mark.parametrize("kind", COLLECTIONS)
def test_two_results_of_one_name_are_refused_by_every_collection(kind: str) -> None:
    config, collection = COLLECTIONS[kind]
    features = {"a": ["f"], "b": ["f"], "c": ["f@b"]}
    with pytest.raises(
        ValueError,
        match=r"\['f@b'\].*\['f@a', 'f@b', 'f@b'\];.*Tables \['b', 'c'\]",
    ):
        collection([config(8, 4, name, feature_names=names) for name, names in features.items()])


@pytest.mark.parametrize("kind", [kind for kind in COLLECTIONS if kind != "mappings"])
def test_one_config_is_not_a_list_of_tables(kind: str) -> None:
    config, collection = COLLECTIONS[kind]
    with pytest.raises(TypeError, match=r"config of 't'; write \[config\]"):
        collection(config(8, 4, "t"))


def test_an_init_fn_may_return_what_it_means() -> None:
    weight = torch.zeros(3, 2)
    EmbeddingConfig(3, 2, "t", init_fn=lambda tensor: torch.full_like(tensor, 5.0)).init_weight(
        weight
    )
    assert bool((weight == 5.0).all())
    with pytest.raises(ValueError, match=r"table 't': init_fn.*\[2\].*\[3, 2\]"):
        EmbeddingConfig(3, 2, "t", init_fn=lambda tensor: torch.zeros(2)).init_weight(weight)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("need_pos", True, "pass weights with the batch"),
        ("input_dim", 5, "leave it out"),
        ("total_num_buckets", 4, "hash ids"),
        ("virtual_table_eviction_policy", "lfu", "hash ids"),
        ("enable_embedding_update", True, "write rows through the table's weight"),
        ("stash_weights", True, "leave it out"),
    ],
)
def test_a_field_that_would_have_no_effect_is_refused(
    field: str, value: object, remedy: str
) -> None:
    with pytest.raises(
        NotImplementedError, match=rf"table 'users': {field}={value!r} is not supported; .*{remedy}"
    ):
        EmbeddingConfig(10, 4, "users", **{field: value})  # type: ignore[arg-type]


def test_one_bucket_is_a_whole_table() -> None:
    assert EmbeddingConfig(10, 4, "users", total_num_buckets=1).total_num_buckets == 1


def test_fields_stand_in_torchrecs_order() -> None:
    assert [field.name for field in fields(EmbeddingBagConfig)] == (
        "num_embeddings embedding_dim name data_type feature_names weight_init_max "
        "weight_init_min num_embeddings_post_pruning init_fn need_pos input_dim total_num_buckets "
        "use_virtual_table virtual_table_eviction_policy enable_embedding_update stash_weights "
        "pooling"
    ).split()

"""Packed rows of single tables: how many are kept, and how they are read from a model and written
into another.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tutorec
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import (
    construct_module_sharding_plan,
)
from tutorec.inference.modules import (
    quantize_embeddings,
    quantize_inference_model,
    set_pruning_data,
    shard_quant_model,
)
from tutorec.inference.scripting import save_scripted, script_model
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, QuantConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.embedding_modules import EmbeddingBagCollection as QuantBags
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

BATCH = KeyedJaggedTensor(
    ["item", "user"], torch.tensor([3, 1, 2, 0]), lengths=torch.tensor([2, 0, 1, 1])
)


def bags():
    tables = [EmbeddingBagConfig(10, 8, name, feature_names=[name]) for name in ("item", "user")]
    return EmbeddingBagCollection(tables)


def rows():
    return EmbeddingCollection([EmbeddingConfig(12, 4, "seen", feature_names=["seen"])])


def of_words(quantized, word, devices=2):
    sharder = QuantEmbeddingBagCollectionSharder()
    words = {name: word for name in quantized.table_names()}
    plan = construct_module_sharding_plan(
        quantized, words, sharder, world_size=devices, device_type="cpu"
    )
    return shard_quant_model(
        nn.Sequential(quantized), devices, sharding_plan=ShardingPlan({"0": plan})
    )[0]


@pytest.mark.parametrize("way", [quantize_inference_model, tutorec.quantize])
def test_pruned_tables_keep_their_first_rows(way):
    model = nn.ModuleDict({"bags": bags(), "rows": rows()})
    first = model["bags"].embedding_bags["item"].weight[:6].detach().clone()
    assert set_pruning_data(model, {"item": 6, "seen": 5}) is model
    quantized = way(model)
    assert quantized["bags"].packed_table("item").rows == 6
    assert quantized["bags"].packed_table("user").rows == 10
    assert quantized["rows"].packed_table("seen").rows == 5
    assert [
        one.num_embeddings_post_pruning for one in quantized["bags"].embedding_bag_configs()
    ] == [6, None]
    one_each = KeyedJaggedTensor(
        ["item", "user"], torch.arange(6).repeat(2), lengths=torch.ones(12, dtype=torch.int64)
    )
    assert torch.allclose(quantized["bags"](one_each)["item"], first, atol=2e-3)
    with pytest.raises(ValueError, match=r"table 'item'.*6 rows.*id 6"):
        quantized["bags"](
            KeyedJaggedTensor(["item", "user"], torch.tensor([6]), lengths=torch.tensor([1, 0]))
        )


def test_pruned_rows_are_left_out_by_from_float_and_quantize_embeddings():
    ebc = set_pruning_data(bags(), {"user": 2})
    ebc.qconfig = QuantConfig(torch.float, torch.int8)
    assert QuantBags.from_float(ebc).packed_table("user").rows == 2
    assert quantize_embeddings(ebc, torch.int8, inplace=False).packed_table("user").rows == 2


def test_rows_that_cannot_be_left_are_named_and_nothing_is_noted():
    model = bags()
    for left in (0, 11):
        with pytest.raises(
            ValueError,
            match=r"table 'user'=.*1 to 10",
        ):
            set_pruning_data(model, {"item": 3, "user": left})
    with pytest.raises(
        KeyError,
        match=r"no tables \['shop'\].*\['item', 'user'\]",
    ):
        set_pruning_data(model, {"shop": 3})
    with pytest.raises(KeyError, match=r"no tables \['item'\]"):
        set_pruning_data(model, {"item": 3}, module_types=[EmbeddingCollection])
    assert tutorec.quantize(model).packed_table("item").rows == 10


def test_submodules_are_attributes_of_the_package():
    assert tutorec.inference.modules.set_pruning_data is set_pruning_data
    assert tutorec.quant.embedding_modules.EmbeddingBagCollection is QuantBags
    assert callable(tutorec.fx.utils.fx_marker)
    assert {"modules", "export"} <= set(dir(tutorec.inference)) and "embedding_modules" in dir(
        tutorec.quant
    )
    with pytest.raises(AttributeError, match=r"tutorec\.inference.*'nothing'"):
        tutorec.inference.nothing  # noqa: B018


def test_mappings_of_other_things_are_named():
    model = nn.Sequential(bags(), nn.Linear(2, 2))
    before = model[0].embedding_bags["item"].weight.detach().clone()
    for mapping in ({}, {torch.typename(EmbeddingCollection): QuantBags}):
        with pytest.raises(ValueError, match=r"no.*quantization_mapping"):
            quantize_inference_model(model, quantization_mapping=mapping)
    assert torch.equal(model[0].embedding_bags["item"].weight, before)
    found = quantize_inference_model(
        model, quantization_mapping={torch.typename(EmbeddingBagCollection): QuantBags}
    )
    assert type(found[0]) is QuantBags


def test_a_model_is_saved_where_there_is_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no.*nowhere'.*write 'model.pt'"):
        save_scripted(script_model(nn.Linear(2, 2).eval()), tmp_path / "nowhere" / "model.pt")

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
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from tutorec.inference.modules import (
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
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
    with pytest.raises(ValueError, match=r"table 'item' has 6 rows .* holds id 6"):
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
            match=r"rows that are left of table 'user'=.* must be a whole number, 1 to 10",
        ):
            set_pruning_data(model, {"item": 3, "user": left})
    with pytest.raises(
        KeyError,
        match=r"no tables \['shop'\] in float collections; the tables are \['item', 'user'\]",
    ):
        set_pruning_data(model, {"shop": 3})
    with pytest.raises(KeyError, match=r"no tables \['item'\]"):
        set_pruning_data(model, {"item": 3}, module_types=[EmbeddingCollection])
    assert tutorec.quantize(model).packed_table("item").rows == 10


@pytest.mark.parametrize("dtype", [torch.int8, torch.quint4x2, torch.float16])
@pytest.mark.parametrize("word", [table_wise(rank=1), row_wise(), column_wise(ranks=[0, 1])])
def test_rows_of_one_model_are_written_into_another_however_it_is_sharded(word, dtype):
    source, target = tutorec.quantize(bags(), dtype), tutorec.quantize(bags(), dtype)
    found = get_table_to_weights_from_tbe(source)
    assert list(found) == ["item", "user"] and (found["item"][1] is None) == (
        dtype is torch.float16
    )
    model = of_words(target, word)
    assert not torch.equal(model(BATCH).values(), source(BATCH).values())
    assign_weights_to_tbe(model, found)
    assert torch.allclose(model(BATCH).values(), source(BATCH).values(), atol=1e-6)
    for name, parts in get_table_to_weights_from_tbe(model).items():
        for part, expected in zip(parts, found[name], strict=True):
            assert (part is None and expected is None) or torch.equal(part, expected)


def test_tables_of_one_name_stand_under_their_paths():
    model = tutorec.quantize(nn.ModuleDict({"a": bags(), "b": bags()}))
    found = get_table_to_weights_from_tbe(model)
    assert sorted(found) == ["a.item", "a.user", "b.item", "b.user"]
    assert not torch.equal(found["a.item"][0], found["b.item"][0])


def test_rows_that_are_missing_or_of_another_layout_are_named():
    model = tutorec.quantize(bags())
    found = get_table_to_weights_from_tbe(model)
    before = model.packed_rows("item").clone()
    other = {"item": (torch.zeros_like(found["item"][0]), torch.zeros_like(found["item"][1]))}
    with pytest.raises(
        KeyError, match=r"no packed rows for the tables \['user'\]; some for \['item'\]"
    ):
        assign_weights_to_tbe(model, other)
    assert torch.equal(model.packed_rows("item"), before)
    with pytest.raises(
        ValueError, match=r"table 'item' .* packed rows are uint8 \[10, 8\] with scale and bias"
    ):
        assign_weights_to_tbe(model, found | {"item": (found["item"][0], None)})
    with pytest.raises(
        ValueError, match=r"table 'item' .* scale and bias are uint8 \[10, 4\].* got .* \[10, 2\]"
    ):
        assign_weights_to_tbe(model, found | {"item": (found["item"][0], found["item"][1][:, :2])})
    with pytest.raises(
        ValueError, match=r"EmbeddingBagCollection is not quantized: tutorec\.quantize"
    ):
        get_table_to_weights_from_tbe(bags())


def test_nothing_is_written_where_the_rows_of_a_later_table_cannot_be():
    model = tutorec.quantize(bags())
    found = get_table_to_weights_from_tbe(model)
    zeros = tuple(torch.zeros_like(part) for part in found["item"])
    before = model.packed_rows("item").clone()
    for wrong, kind, message in (
        ((found["user"][0], None), ValueError, "table 'user' .* without"),
        ((found["user"][0][:1], found["user"][1]), ValueError, "table 'user' .* got"),
    ):
        with pytest.raises(kind, match=message):
            assign_weights_to_tbe(model, {"item": zeros, "user": wrong})
        assert torch.equal(model.packed_rows("item"), before)


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
        with pytest.raises(ValueError, match="no module's class is in quantization_mapping"):
            quantize_inference_model(model, quantization_mapping=mapping)
    assert torch.equal(model[0].embedding_bags["item"].weight, before)
    found = quantize_inference_model(
        model, quantization_mapping={torch.typename(EmbeddingBagCollection): QuantBags}
    )
    assert type(found[0]) is QuantBags


def test_a_model_is_saved_where_there_is_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere' to write 'model.pt' to"):
        save_scripted(script_model(nn.Linear(2, 2).eval()), tmp_path / "nowhere" / "model.pt")

"""Quantized collections of raw ids: the mappings of the float ones in front of packed rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, QuantConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.growing import GrowingManagedCollisionModule
from tutorec.modules.hash_mc_modules import HashZchManagedCollisionModule
from tutorec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tutorec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from tutorec.quant.embedding_modules import (
    QuantManagedCollisionEmbeddingBagCollection,
    QuantManagedCollisionEmbeddingCollection,
)
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

DEVICE = torch.get_default_device()
BATCH = KeyedJaggedTensor(
    ["item", "user"], torch.tensor([10**9, 5, 10**9, 8]), lengths=torch.tensor([2, 1, 0, 1])
)
QUANTIZED = {
    ManagedCollisionEmbeddingBagCollection: QuantManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection: QuantManagedCollisionEmbeddingCollection,
}


def mapping(kind: str, rows: int, device: torch.device = DEVICE) -> ManagedCollisionModule:
    if kind == "hash":
        return HashZchManagedCollisionModule(rows, device, 1)
    if kind == "growing":
        return GrowingManagedCollisionModule(rows, device)
    return MCHManagedCollisionModule(rows, device, LFU_EvictionPolicy(), 1)


def trained(pooled: bool, mappings_of: str) -> Any:
    """A collection of two tables, both of which have seen the batch."""
    kind = EmbeddingBagConfig if pooled else EmbeddingConfig
    tables: Any = [
        kind(rows, 8, f"{name}_table", feature_names=[name])
        for name, rows in (("item", 8), ("user", 12))
    ]
    mappings = ManagedCollisionCollection(
        {table.name: mapping(mappings_of, table.num_embeddings) for table in tables}, tables
    )
    model = (
        ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables), mappings)
        if pooled
        else ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables), mappings)
    )
    model(BATCH)
    return model


def values_of(result: Any) -> torch.Tensor:
    return (
        torch.cat([each.values() for each in result.values()])
        if isinstance(result, dict)
        else result.values()
    )


def quantized_of(model: Any) -> Any:
    model.qconfig = QuantConfig(torch.float, torch.int8)
    return QUANTIZED[type(model)].from_float(model)


@pytest.mark.parametrize("mappings_of", ["policy", "hash", "growing"])
@pytest.mark.parametrize("pooled", [True, False])
def test_quantize_dynamic_keeps_the_mappings(pooled: bool, mappings_of: str):
    model = trained(pooled, mappings_of)
    quantized = quantized_of(model)
    assert model.training and not quantized.training
    expected = values_of(model.eval()(BATCH)[0])
    result, rows = quantized(BATCH)
    torch.testing.assert_close(values_of(result), expected, rtol=0, atol=2 * 2 * 8**-0.5 / 255)
    assert rows["item"].values()[0] == rows["item"].values()[2] != rows["item"].values()[1]
    state = {key: value.clone() for key, value in quantized.state_dict().items()}
    quantized(
        KeyedJaggedTensor(["item", "user"], torch.arange(90, 98), lengths=torch.tensor([4, 4]))
    )
    assert all(torch.equal(value, state[key]) for key, value in quantized.state_dict().items())
    assert any(key.startswith("_managed_collision_collection.") for key in state)


def test_mappings_of_other_tables_are_refused():
    model = trained(True, "policy")
    tables = [EmbeddingBagConfig(8, 8, "other", feature_names=["item"])]
    with pytest.raises(ValueError, match=r"tables None.*\['other'\]"):
        QuantManagedCollisionEmbeddingBagCollection(tables, False, DEVICE)
    mappings = model._managed_collision_collection
    with pytest.raises(
        ValueError,
        match=r"tables \['item_table', 'user_table'\].*\['other'\]",
    ):
        QuantManagedCollisionEmbeddingBagCollection(
            tables, False, DEVICE, managed_collision_collection=mappings
        )

"""Adapters: collections of raw ids that are built from configs and answer like plain
collections.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.hash_mc_modules import HashZchManagedCollisionModule
from tutorec.modules.mc_adapter import McEmbeddingBagCollectionAdapter, McEmbeddingCollectionAdapter
from tutorec.modules.mc_modules import MCHManagedCollisionModule
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

CPU = torch.device("cpu")
METHODS = {"sort_zch": MCHManagedCollisionModule, "mpzch": HashZchManagedCollisionModule}
BATCH = KeyedJaggedTensor(
    ["item", "user"], torch.tensor([10**9, 5, 10**9, 8]), lengths=torch.tensor([2, 1, 0, 1])
)


def build(pooled: bool, method: str, buckets: int | None = 2, probes: int | None = 100) -> Any:
    kind, adapter = (
        (EmbeddingBagConfig, McEmbeddingBagCollectionAdapter)
        if pooled
        else (EmbeddingConfig, McEmbeddingCollectionAdapter)
    )
    tables: Any = [
        kind(num_embeddings=rows, embedding_dim=4, name=f"{name}_table", feature_names=[name])
        for name, rows in (("item", 8), ("user", 12))
    ]
    return adapter(
        tables, 2**40, CPU, 1, zch_method=method, mpzch_num_buckets=buckets, mpzch_max_probe=probes
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pooled", [True, False])
def test_adapter_answers_with_the_rows_of_its_mappings(method: str, pooled: bool):
    model = build(pooled, method)
    model(BATCH)
    model.eval()
    [inner] = model.children()
    mappings = inner._managed_collision_collection
    assert {type(each) for each in mappings._managed_collision_modules.values()} == {
        METHODS[method]
    }
    weights = dict(zip(["item", "user"], model.parameters(), strict=True))
    rows, result = mappings(BATCH), model(BATCH)
    for name, weight in weights.items():
        looked_up = weight[rows[name].values()]
        if pooled:
            lengths = BATCH[name].lengths().tolist()
            expected = torch.stack([each.sum(0) for each in looked_up.split(lengths)])
            torch.testing.assert_close(result[name], expected)
        else:
            assert torch.equal(result[name].values(), looked_up)
    assert rows["item"].values()[0] == rows["item"].values()[2] != rows["item"].values()[1]
    assert [table.name for table in model.embedding_bag_configs()] == ["item_table", "user_table"]


def test_hash_mapping_probes_no_further_than_its_part_of_the_rows():
    modules = build(
        True, "mpzch", buckets=4
    ).mc_embedding_bag_collection._managed_collision_collection
    assert [each._max_probe for each in modules._managed_collision_modules.values()] == [2, 3]
    modules = build(
        True, "mpzch", buckets=None, probes=5
    ).mc_embedding_bag_collection._managed_collision_collection
    assert [each._max_probe for each in modules._managed_collision_modules.values()] == [5, 5]


def test_another_method_is_refused():
    with pytest.raises(NotImplementedError, match=r"zch_method=''.*not.*use 'mpzch'.*'sort_zch'"):
        build(True, "")

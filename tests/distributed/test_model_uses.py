"""What is done with a sharded model besides training it: looked at without memory, asked for attributes, frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.test_model_parallel import Model, data, parallel
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from tutorec.distributed import model_parallel, sharding_plan
from tutorec.distributed.types import ShardedTensor


def test_default_sharders_are_found_where_torchrec_has_them():
    assert model_parallel.get_default_sharders is sharding_plan.get_default_sharders
    kinds = sharding_plan.get_module_to_default_sharders()
    assert [sharder.module_type for sharder in sharding_plan.get_default_sharders()] == list(kinds)


def shapes_only(rank: int, world_size: int) -> dict[str, Any]:
    model = parallel(Model(), world_size)
    ghost = parallel(Model(), world_size, device=torch.device("meta"))

    def sizes(state: dict[str, Any]) -> dict[str, Any]:
        return {
            name: [shard.tensor.shape for shard in value.local_shards()]
            if isinstance(value, ShardedTensor)
            else value.shape
            for name, value in state.items()
        }

    with pytest.raises(ValueError, match=r"on the meta device: its tables .* device=torch.device\('cpu'\)"):
        ghost(*data(rank, 0))
    return {
        "same": sizes(model.state_dict()) == sizes(ghost.state_dict()),
        "tables": {p.device.type for name, p in ghost.named_parameters() if "embedding_bags" in name},
        "dense": ghost.module.get_parameter("over.weight").device.type,
    }


def test_on_the_meta_device_a_model_has_the_shapes_of_the_real_one_and_looks_nothing_up(ranks):
    for found in ranks(2).run(shapes_only):
        assert found == {"same": True, "tables": {"meta"}, "dense": "cpu"}


def attributes(rank: int, world_size: int) -> dict[str, Any]:
    model, other = parallel(Model(), world_size), parallel(Model(seed=6), world_size)
    model(*data(rank, 0)).backward()
    with pytest.raises(AttributeError, match=r"has no 'sparse', the model inside has: write \.module\.sparse"):
        _ = model.sparse
    with pytest.raises(AttributeError, match="no attribute 'spares'"):
        _ = model.spares
    with pytest.raises(AttributeError, match=r"get_model_state_dict asks for it, call state_dict\(\)"):
        get_model_state_dict(model)
    other.load_state_dict(model.state_dict())
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    return {name: torch.equal(one, two) for (name, one), (_, two) in pairs}


def test_an_attribute_of_the_model_inside_is_named_and_what_torchs_helpers_want_is_state_dict(ranks):
    for found in ranks(2).run(attributes):
        assert all(found.values()), found

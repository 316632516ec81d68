"""Helpers around sharded modules, and a lookup's description in TorchRec's words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.cases import collection
from torch import nn

from tutorec.distributed.core.cache_params import CacheAlgorithm, CacheParams
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import (
    DistributedModelParallel,
    get_module,
    get_unwrapped_module,
)
from tutorec.distributed.plan.plan import BoundsCheckMode, ParameterSharding
from tutorec.distributed.sharding_plan import (
    apply_to_all,
    construct_module_sharding_plan,
    table_wise,
)
from tutorec.distributed.utils import (
    CopyableMixin,
    add_params_from_parameter_sharding,
    add_prefix_to_state_dict,
    convert_to_fbgemm_types,
    filter_state_dict,
    get_unsharded_module_names,
    init_parameters,
    none_throws,
    optimizer_type_to_emb_opt_type,
)
from tutorec.spmd import device
from tutorec.types import DataType


def sharded() -> Any:
    ebc = collection()
    plan = construct_module_sharding_plan(ebc, apply_to_all(ebc, table_wise(0)), world_size=1)
    return EmbeddingBagCollectionSharder().shard(ebc, plan, ShardingEnv.from_local(1, 0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.ModuleDict({"tables": sharded(), "scale": nn.Linear(1, 1)})
        self.over = nn.Linear(1, 1)


def test_a_prefix_comes_and_goes_with_the_metadata():
    state: Any = nn.Linear(1, 1).state_dict()
    add_prefix_to_state_dict(state, "model.over.")
    assert sorted(state) == ["model.over.bias", "model.over.weight"]
    assert sorted(filter_state_dict(state, "model.over")) == ["bias", "weight"]


def test_unsharded_parts_are_named_at_the_top():
    assert sorted(get_unsharded_module_names(Model())) == ["over", "sparse.scale"]
    assert get_unsharded_module_names(sharded()) == []


def test_what_a_plan_says_of_a_table_goes_before_the_sharder():
    cache = CacheParams(CacheAlgorithm.LFU, load_factor=0.1, prefetch_pipeline=True)
    entry = ParameterSharding(
        "table_wise", "fused", cache_params=cache, bounds_check_mode=BoundsCheckMode.IGNORE
    )
    assert add_params_from_parameter_sharding(
        {"cache_load_factor": 0.5, "learning_rate": 0.1}, entry
    ) == {
        "cache_load_factor": 0.1,
        "learning_rate": 0.1,
        "cache_algorithm": CacheAlgorithm.LFU,
        "prefetch_pipeline": True,
        "bounds_check_mode": BoundsCheckMode.IGNORE,
    }
    assert add_params_from_parameter_sharding(None, ParameterSharding("table_wise", "fused")) == {}


def test_number_formats_become_fbgemms():
    pytest.importorskip("fbgemm_gpu")
    converted = convert_to_fbgemm_types(
        {"cache_precision": DataType.FP16, "output_dtype": DataType.FP32, "eps": 0.1}
    )
    assert [str(converted[key].name) for key in ("cache_precision", "output_dtype")] == [
        "FP16",
        "FP32",
    ]


def test_what_has_no_fused_form_or_is_none_is_refused():
    with pytest.raises(ValueError, match=r"RMSprop.*EmbOptimType.*SGD, Adagrad"):
        optimizer_type_to_emb_opt_type(torch.optim.RMSprop)
    with pytest.raises(AssertionError, match="nothing here"):
        none_throws(None, "nothing here")


def test_a_module_on_meta_is_drawn_where_it_is_wanted():
    layer = nn.Sequential(nn.Linear(4, 4, device="meta"))
    init_parameters(layer, device())
    assert layer[0].weight.abs().sum() > 0


class Layer(CopyableMixin):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


def test_a_copy_shares_nothing():
    layer = Layer()
    twin: Any = layer.copy(device())
    assert twin.inner.weight.data_ptr() != layer.inner.weight.data_ptr()
    assert torch.equal(twin.inner.weight, layer.inner.weight.to(device()))


def test_a_lookup_tells_its_groups_in_torchrecs_words():
    [lookup] = sharded()._lookups
    groups = lookup.grouped_configs
    assert [name for group in groups for name in group.table_names()] == ["t0", "t1", "t2"]
    assert [name for group in groups for name in group.feature_names()] == [
        "f0",
        "f1",
        "f1",
        "f2",
        "f3",
    ]
    assert [size for group in groups for size in group.feature_hash_sizes()] == [11, 11, 7, 7, 9]
    assert sum(group.dim_sum() for group in groups) == 8 + 8 + 4 + 4 + 6
    [first, *_] = groups[0].embedding_shard_metadata()
    assert first.shard_sizes == [11, 8] and first.placement.device() == device()


def unwrapped(rank: int, world_size: int) -> tuple[bool, bool]:
    model = nn.Sequential(nn.Linear(2, 1))
    parallel = DistributedModelParallel(model, sharders=[])
    return get_unwrapped_module(parallel) is model, get_module(
        parallel
    ) is parallel._dmp_wrapped_module


def test_wrappers_are_taken_off(ranks):
    assert ranks(2).run(unwrapped) == [(True, True)] * 2

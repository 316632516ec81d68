"""A sharded model's state on another device, and whole on rank 0."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tutorec.distributed.checkpoint import full_state_dict
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from tutorec.distributed.types import ShardedTensor, ShardingPlan
from tutorec.inference.state_dict_transform import state_dict_gather, state_dict_to_device
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

KINDS = {
    "tw": lambda: table_wise(rank=1),
    "rw": row_wise,
    "cw": lambda: column_wise(ranks=[1, 0]),
    "dp": data_parallel,
}


class Model(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name]
            )
            for rows, name in enumerate(KINDS, 5)
        ]
        self.tables = EmbeddingBagCollection(tables, device=torch.device(device))
        self.dense = nn.Linear(2, 3, device=device)


def gathered(rank: int) -> dict[str, bool]:
    torch.manual_seed(rank)
    sharder = EmbeddingBagCollectionSharder()
    kinds = {name: kind() for name, kind in KINDS.items()}
    plan = ShardingPlan({"tables": construct_module_sharding_plan(Model().tables, kinds, sharder)})
    model = DistributedModelParallel(
        Model(), plan=plan, sharders=[sharder], device=torch.device("cpu")
    )
    group = dist.new_group(backend="gloo")
    moved = state_dict_to_device(model.state_dict(), pg=group, device=torch.device("cpu"))
    sharded = [name for name, value in moved.items() if isinstance(value, ShardedTensor)]
    assert len(sharded) == 3, sharded
    assert all(moved[name]._process_group is group for name in sharded)  # type: ignore[union-attr]
    whole = Model("cpu" if rank == 0 else "meta")
    state_dict_gather(moved, whole.state_dict())
    expected = full_state_dict(model)
    return {name: torch.equal(value, whole.state_dict()[name]) for name, value in expected.items()}


def test_the_gathered_state_is_the_whole_state(ranks):
    same = ranks(2).run(gathered)[0]
    assert len(same) == 6
    assert all(same.values()), same


def test_a_name_that_the_state_lacks_is_an_error_before_anything_is_sent():
    with pytest.raises(KeyError, match=r"\['bias'\].*\['weight'\]"):
        state_dict_gather({"weight": torch.ones(1, 2)}, nn.Linear(2, 1).state_dict())

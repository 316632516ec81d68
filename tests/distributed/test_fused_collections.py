"""Fused collections over ranks train as one process does with the batches of all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tutorec.distributed.checkpoint.gathering import full_state_dict
from tutorec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from tutorec.distributed.fused_embedding import (
    FusedEmbeddingCollectionSharder,
    ShardedFusedEmbeddingCollection,
)
from tutorec.distributed.fused_embeddingbag import (
    FusedEmbeddingBagCollectionSharder,
    ShardedFusedEmbeddingBagCollection,
)
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.sharding_plan import get_default_sharders
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

SAMPLES = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        pooled = [EmbeddingBagConfig(20, 8, name, feature_names=[name]) for name in ("f", "g")]
        rows = [EmbeddingConfig(30, 8, "h", feature_names=["f"])]
        self.pooled = FusedEmbeddingBagCollection(pooled, torch.optim.Adagrad, {"lr": 0.1})
        self.rows = FusedEmbeddingCollection(rows, torch.optim.Adam, {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """One number for each sample."""
        return self.pooled(features).values().square().sum(1) + self.rows(features)[
            "f"
        ].values().square().sum(1)


def _features(step: int, samples: slice) -> KeyedJaggedTensor:
    ids = torch.randint(0, 20, (2, 2 * SAMPLES), generator=torch.Generator().manual_seed(step))[
        :, samples
    ]
    return KeyedJaggedTensor(
        ["f", "g"], ids.flatten(), lengths=torch.ones(ids.numel(), dtype=torch.long)
    )


def _trained(rank: int, world_size: int, kind: str) -> dict[str, Tensor]:
    width = 4 if kind == "column_wise" else None
    constraints = {
        name: ParameterConstraints(sharding_types=[kind], min_partition=width) for name in "fgh"
    }
    planner = EmbeddingShardingPlanner(Topology(world_size, device().type), constraints=constraints)
    model = DistributedModelParallel(
        Model(), device=device(), plan=planner.collective_plan(Model(), get_default_sharders())
    )
    assert type(model.module.pooled) is ShardedFusedEmbeddingBagCollection
    assert isinstance(model.module.pooled, ShardedEmbeddingBagCollection)
    assert type(model.module.rows) is ShardedFusedEmbeddingCollection
    for step in range(3):
        mine = slice(rank * SAMPLES, (rank + 1) * SAMPLES)
        model(_features(step, mine).to(device())).sum().backward()
    return full_state_dict(model)


def test_fused_collections_train_as_one_process_does(ranks) -> None:
    alone = Model()
    for step in range(3):
        (alone(_features(step, slice(None))).sum() / 2).backward()
    for kind in ("table_wise", "row_wise", "column_wise", "data_parallel"):
        found, _ = ranks(2).run(_trained, kind)
        torch.testing.assert_close(found, dict(alone.state_dict()))


def test_sharders_of_fused_collections_offer_no_kernel_that_leaves_the_optimizer_out() -> None:
    for sharder in (FusedEmbeddingBagCollectionSharder(), FusedEmbeddingCollectionSharder()):
        assert sharder.compute_kernels("data_parallel", "cpu") == ["fused"]
        assert "dense" not in sharder.compute_kernels("table_wise", "cpu")

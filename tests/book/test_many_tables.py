"""What chapters 12 and 12b say about the planner's plans for their 512 tables."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.planner.types import ParameterConstraints
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

SAMPLES = 65_536


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "sharding", "shards", "ms"),
    [
        (8, "table_wise", 1, 7.75),
        (64, "column_wise", 2, 5.46),
        (512, "column_wise", 2, 1.04),
    ],
)
def test_planner_returns_the_winners_of_the_chapter(ranks, sharding, shards, ms):
    bags = {f"table {n}": {0: 20, 1: 5}.get(n % 16, 1) for n in range(512)}
    tables = [EmbeddingBagConfig(2_000_000, 64, name=name, feature_names=[name]) for name in bags]
    types = ["table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard"]
    planner = EmbeddingShardingPlanner(
        topology=Topology.preset(f"8xH100x{ranks // 8}"),
        batch_size=SAMPLES // ranks,
        constraints={
            name: ParameterConstraints(
                sharding_types=types, min_partition=32, pooling_factors=[ids]
            )
            for name, ids in bags.items()
        },
    )
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    planned = planner.plan(collection, [EmbeddingBagCollectionSharder()])
    entries = planned.plan[""].values()
    found = Counter((entry.sharding_type, len(list(entry.shards()))) for entry in entries)
    assert found == {(sharding, shards): 512}
    assert planned.report is not None
    assert planned.report.cost == pytest.approx(ms, abs=0.01)

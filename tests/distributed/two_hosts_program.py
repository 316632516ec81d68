"""What every rank of the test on two machines runs: the example's model, its tables table-row-wise;
facts as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

# torchrun starts this file as a program
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from distributed.byte_formulas import StepBatches, step_traffic

from tutorec.datasets.random import shop
from tutorec.distributed.collectives.host_groups import host_groups
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding_base import ShardedEmbeddingModule
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.simulate import simulate, simulate_sync
from tutorec.distributed.traffic import Traffic, count_traffic
from tutorec.examples.dlrm import build
from tutorec.examples.running import parser
from tutorec.spmd import device, init

SAMPLES = 32
FUSED = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.1}


def main(folder: Path) -> None:
    """Train some steps and write what this rank knows of its machine, and what crossed."""
    group = init(timeout=120)
    rank, world_size = group.rank(), group.size()
    options = parser("x", "y").parse_args([])
    store = shop(users=40, items=60, rows=2000, test_rows=100)
    sharder = EmbeddingBagCollectionSharder(FUSED)
    rows = ParameterConstraints(sharding_types=["table_row_wise"])
    planner = EmbeddingShardingPlanner(constraints={"t_user": rows, "t_item": rows})
    plan = planner.collective_plan(build(store, options), [sharder], group)
    model = DistributedModelParallel(build(store, options), plan=plan, sharders=[sharder])
    batches = [each.to(device()) for each in store.batches(SAMPLES, rank, world_size)][:3]
    for batch in batches[:2]:
        model(batch)[0].backward()
    with count_traffic() as traffic:
        model(batches[2])[0].backward()
    merged = Traffic.merge(_of_all(traffic, world_size))
    sparse = _of_all(batches[2].sparse_features, world_size)
    env = ShardingEnv.from_process_group(group)
    topology = Topology(world_size, "cpu", local_world_size=env.local_size)
    sharded = next(part for part in model.modules() if isinstance(part, ShardedEmbeddingModule))
    formula = step_traffic(sharded._tables, StepBatches.of(sparse), env.local_size)
    crossing = {
        stage: sum(
            count
            for (of, a, b), count in formula.items()
            if of == stage and topology_crosses(a, b, env)
        )
        for stage in {stage for stage, _, _ in formula}
    }
    simulated = simulate(plan, topology, build(store, options), sparse)
    copies = DMPCollection(
        build(store, options), None, None, world_size, 2, group, sharders=[sharder]
    )
    with count_traffic() as averaging:
        copies.sync()
    sync = simulate_sync(copies.plan, topology, build(store, options), 2, fused_params=FUSED)
    groups = host_groups(group, env.local_size)
    facts = {
        "host": socket.gethostname(),
        "rank": rank,
        "local": [
            int(os.environ[name]) for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        ],
        "local_size": env.local_size,
        "inside": dist.get_process_group_ranks(groups.intra),
        "across": dist.get_process_group_ranks(groups.cross),
        "plan": {name: entry.ranks for _, of in plan.plan.items() for name, entry in of.items()},
        "counted": merged.by_stage(crossing=True),
        "inside_bytes": merged.total(crossing=False),
        "formula": crossing,
        "simulated": simulated.by_stage(crossing=True),
        "sync": [averaging.total(crossing=crosses) for crosses in (False, True)],
        "sync predicted": [sync.sent(crossing=crosses)[rank] for crosses in (False, True)],
    }
    (folder / f"{rank}.json").write_text(json.dumps(facts))


def _of_all(value: object, world_size: int) -> list:
    found: list = [None] * world_size
    dist.all_gather_object(found, value)
    return found


def topology_crosses(source: int, destination: int, env: ShardingEnv) -> bool:
    """Whether two ranks are on different hosts."""
    return source // env.local_size != destination // env.local_size


if __name__ == "__main__":
    made = argparse.ArgumentParser()
    made.add_argument("folder", type=Path)
    torch.set_num_threads(1)
    sys.exit(main(made.parse_args().folder))

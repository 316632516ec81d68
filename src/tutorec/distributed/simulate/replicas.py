"""Simulation of `DMPCollection.sync`: bytes and milliseconds of averaging replicas.

The bytes are those of `distributed.replicas`. Time is computed as in `simulation`: each block takes
two exchanges with one latency each, and the slower of a rank's two links counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from tutorec.distributed.core.env import sharding_groups
from tutorec.distributed.fused_params import optimizer_spec
from tutorec.distributed.plan.plan import ParameterSharding, ShardingPlan
from tutorec.distributed.replicas import REPLICA_STATES, REPLICA_WEIGHTS, sync_blocks, sync_parts
from tutorec.distributed.simulate.exchanges import bytes_on_links, link_ms
from tutorec.distributed.simulate.ids import Floats
from tutorec.distributed.simulate.work import Configs, SimulatedTable, placed_tables


@dataclass(frozen=True, eq=False)
class SyncSimulation:
    """One synchronization of replicas.

    Args:
        by_stage: Stage -> bytes that each rank sends ``[2, W]``: inside its host, and to other
            hosts.
        exchanges: Number of exchanges of the rank with the most.
        ms: Milliseconds of the slowest rank.
    """

    by_stage: Mapping[str, Floats]
    exchanges: int
    ms: float

    def sent(self, stage: str | None = None, *, crossing: bool | None = None) -> Floats:
        """Bytes that each rank sends ``[W]``; arguments as in `traffic.Traffic`."""
        chosen = [sent for name, sent in self.by_stage.items() if stage in (None, name)]
        return bytes_on_links(np.sum(chosen, axis=0), crossing)

    def total(self, stage: str | None = None, *, crossing: bool | None = None) -> float:
        """Bytes that all ranks send; arguments as in `sent`."""
        return float(self.sent(stage, crossing=crossing).sum())


def simulate_sync(
    plan: ShardingPlan | Mapping[str, ParameterSharding],
    topology: Any,
    tables: nn.Module | Configs | Mapping[str, Configs],
    sharding_group_size: int,
    *,
    fused_params: Mapping[str, Any] | None = None,
    use_inter_host_allreduce: bool = False,
    include_optimizer_state: bool = True,
) -> SyncSimulation:
    """Bytes and time of `DMPCollection.sync` on a given topology.

    Args:
        plan: Plan for the ranks of one group.
        topology: All ranks, their hosts and speeds.
        tables: As in `simulate`.
        sharding_group_size: G, ranks per group.
        fused_params: As for the sharder; defines the optimizer state that is averaged.
        use_inter_host_allreduce: As in `DMPCollection`.
        include_optimizer_state: As in its ``sync``.

    Raises:
        ValueError: The ranks cannot be grouped so, or plan, tables and topology do not match.

    Example:
        >>> from tutorec.distributed.planner.topology import Topology
        >>> from tutorec.distributed.plan.geometry import table_wise_sharding
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> item = EmbeddingBagConfig(8, 4, "item", feature_names=["item"])
        >>> plan = {"item": table_wise_sharding((8, 4), rank=0, device_type="cpu")}
        >>> sync = simulate_sync(plan, Topology(4, "cpu"), [item], sharding_group_size=2)
        >>> sync.sent().tolist()  # ranks 0 and 1 send half of 128 bytes, twice
        [128.0, 128.0, 0.0, 0.0]
    """
    groups = np.array(
        sharding_groups(topology.world_size, sharding_group_size, use_inter_host_allreduce)
    )
    placed = placed_tables(plan, tables, topology.part(groups[0].tolist()))
    local_size = topology.local_world_size
    rowwise = (
        [state.rowwise for state in optimizer_spec(fused_params).states]
        if include_optimizer_state
        else []
    )
    by_stage = {
        stage: np.zeros((2, topology.world_size)) for stage in (REPLICA_WEIGHTS, REPLICA_STATES)
    }
    exchanges = np.zeros(sharding_group_size, dtype=np.int64)
    for number in range(sharding_group_size):
        weight_shapes = _shard_shapes(placed, number)
        fused_shapes = _shard_shapes(
            [table for table in placed if not table.leaves_gradient], number
        )
        states = [
            (rows,) if by_row else (rows, columns)
            for by_row in rowwise
            for rows, columns in fused_shapes
        ]
        mates = groups[:, number]
        for stage, shapes in ((REPLICA_WEIGHTS, weight_shapes), (REPLICA_STATES, states)):
            by_stage[stage][:, mates] = _sent(sync_parts(shapes, len(mates)), mates // local_size)
            exchanges[number] += 2 * len(list(sync_blocks(shapes))) if len(mates) > 1 else 0

    wire = link_ms(topology, by_stage[REPLICA_WEIGHTS] + by_stage[REPLICA_STATES]).max(axis=0)
    waits = np.zeros(topology.world_size)
    waits[groups] = topology.latency_ms * exchanges

    return SyncSimulation(by_stage, int(exchanges.max()), float((wire + waits).max()))


def _shard_shapes(tables: list[SimulatedTable], number: int) -> list[tuple[int, ...]]:
    """Rows and columns of the shards of a rank of a group."""
    return [
        (int(end - first), int(columns))
        for table in tables
        for rank, first, end, columns in table.shards
        if rank == number
    ]


def _sent(shares: list[int], hosts: Floats) -> Floats:
    """Bytes that each replica sends inside its host and to other hosts ``[2, replicas]``."""
    link_bytes = 4.0 * np.add.outer(shares, shares)
    np.fill_diagonal(link_bytes, 0.0)
    same = hosts[:, None] == hosts
    return np.stack([(link_bytes * same).sum(axis=1), (link_bytes * ~same).sum(axis=1)])

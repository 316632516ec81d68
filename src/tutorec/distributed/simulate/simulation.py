"""Simulation of a training step of a plan: lookups, bytes on every link, milliseconds, slow ranks.

::

    plan + topology + load -> rows per rank -> bytes per link -> ms per rank, phase -> ms of a step

Time follows an alpha-beta model. An exchange takes one latency plus the bytes of the slower of a
rank's two links, divided by its bandwidth: those inside its host and those to other hosts. Lookups
and updates take their bytes divided by the memory bandwidth. A step has five phases::

    ids         send sizes, ids and weights to the ranks that hold their rows
    lookup      read and pool rows
    rows        send rows back
    gradients   send gradients; those of replicated tables to all ranks
    update      update the rows that were looked up

A phase starts when the slowest rank has finished the previous one, so the time of a step is the sum
over phases of the slowest rank's time.

TorchRec has no counterpart; the bytes are those that `traffic` counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from tutorec.distributed.collectives.kjt import IDS_STAGE, SIZES_STAGE, STRIDES_STAGE, WEIGHTS_STAGE
from tutorec.distributed.collectives.rows import ROWS_STAGE
from tutorec.distributed.plan.plan import ParameterSharding, ShardingPlan, ShardingType
from tutorec.distributed.simulate.exchanges import Exchange, link_ms
from tutorec.distributed.simulate.ids import Floats
from tutorec.distributed.simulate.loads import Load, RankLoads, most_samples, rank_loads
from tutorec.distributed.simulate.step import PARTS, PHASES, HotRow, Simulation
from tutorec.distributed.simulate.work import (
    Configs,
    RankWork,
    SimulatedTable,
    placed_tables,
    step_work,
)
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# All other stages belong to the gradients.
_PHASE_OF: dict[str, str] = dict.fromkeys(
    (SIZES_STAGE, STRIDES_STAGE, IDS_STAGE, WEIGHTS_STAGE), "ids"
)
_PHASE_OF[ROWS_STAGE] = "rows"


def simulate(
    plan: ShardingPlan | Mapping[str, ParameterSharding],
    topology: Any,
    tables: nn.Module | Configs | Mapping[str, Configs],
    load: Load | KeyedJaggedTensor | Sequence[KeyedJaggedTensor],
    *,
    weighted: bool = False,
    row_bytes: int = 4,
    gradient_bytes: int = 4,
    slow: Mapping[int, float] | None = None,
) -> Simulation:
    """Simulate a step of a plan: lookups, bytes and time per rank. No device is needed.

    The bytes equal those of real processes on the same batches, after their first step. It takes
    seconds for thousands of ranks; ranks with equal batches are computed once.

    Args:
        plan: Plan of a model, or of one collection, planned or hand-written.
        topology: The ranks, their hosts, and bandwidths in bytes per ms.
        tables: The model, the tables of its only collection, or path -> tables of each.
        load: The batches: a `Load` of expected numbers, or real batches (one per rank, or fewer,
            which are repeated).
        weighted: Whether ids carry weights, if ``tables`` is not a model.
        row_bytes: Bytes of a row element on the wire: 4, or 2 with a codec for float16 or bfloat16.
        gradient_bytes: Bytes of a gradient element on the wire, likewise.
        slow: Rank -> the factor by which its memory is slower than that of the others.

    Raises:
        ValueError: Plan, tables, load and topology do not match, or a slow rank does not exist.
        PlannerError: A compute kernel is not supported.
    """
    world_size = topology.world_size
    local_size = topology.intra_group_size
    slowness = np.ones(world_size)
    for rank, factor in (slow or {}).items():
        if not 0 <= rank < world_size or not factor > 0:
            raise ValueError(
                f"slow={{{rank}: {factor}}} for {world_size} ranks: give a rank from 0 to "
                f"{world_size - 1}, and a factor above 0"
            )
        slowness[rank] = factor

    placed = placed_tables(plan, tables, topology, weighted)
    loads = rank_loads(load, world_size)
    work, exchanges = step_work(placed, loads, local_size, (row_bytes, gradient_bytes))
    features = [feature for table in placed for feature in table.features]

    return Simulation(
        world_size=world_size,
        local_size=local_size,
        tables=placed,
        samples=most_samples(loads, features)[loads.classes],
        work=work,
        exchanges=exchanges,
        components=_components(work, exchanges, topology, slowness),
        hot_rows=_hot_rows(placed, loads, work),
    )


def _components(
    work: RankWork, exchanges: Sequence[Exchange], topology: Any, slowness: Floats
) -> dict[str, dict[str, Floats]]:
    """Milliseconds of each rank in each phase, by component."""
    world_size = len(work.lookups)
    components = {
        phase: {component: np.zeros(world_size) for component in PARTS} for phase in PHASES
    }
    components["lookup"]["memory"] += slowness * work.lookup_ms
    components["update"]["memory"] += slowness * work.update_ms
    for exchange in exchanges:
        phase = _PHASE_OF.get(exchange.stage, "gradients")
        # Links are full duplex, and a rank's two links work in parallel: the slower one counts.
        inside, across = link_ms(topology, np.maximum(exchange.sent, exchange.received))
        components[phase]["latency"] += topology.latency_ms
        components[phase]["inside hosts"] += np.where(inside > across, inside, 0.0)
        components[phase]["across hosts"] += np.where(inside > across, 0.0, across)

    return components


def _hot_rows(
    tables: Sequence[SimulatedTable], loads: RankLoads, work: RankWork, most: int = 10
) -> list[HotRow]:
    """The most frequent rows of all tables."""
    candidates = [
        (table, row, reads)
        for table in tables
        for row, reads in loads.hottest(table.features, table.rows, most)
    ]
    hottest = sorted(candidates, key=lambda candidate: -candidate[2])[:most]
    return [_hot_row(table, row, reads, loads, work) for table, row, reads in hottest]


def _hot_row(
    table: SimulatedTable, row: int, reads: float, loads: RankLoads, work: RankWork
) -> HotRow:
    """A row with its shares of the ids of its table, and of the lookups of its ranks."""
    all_rows = np.array([0]), np.array([table.rows])
    ids = sum(
        float(loads.members @ loads.ids(f, table.rows, *all_rows)[:, 0]) for f in table.features
    )
    holds = (table.shards[:, 1] <= row) & (row < table.shards[:, 2])
    ranks = np.unique(table.shards[holds, 0])
    if table.sharding_type is ShardingType.DATA_PARALLEL:
        rank_share = reads / work.lookups.sum()
    else:  # A rank may hold several column shards of a row, and looks each of them up.
        rank_share = reads * (table.shards[holds, 0] == ranks[0]).sum() / work.lookups[ranks[0]]

    return HotRow(table.name, row, reads, reads / ids, tuple(ranks.tolist()), float(rank_share))

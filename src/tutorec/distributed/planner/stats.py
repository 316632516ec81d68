"""Statistics of a plan in the log: a line for each rank, and for each table.

Lines go to the logger of this module, at level INFO, which Python shows after
``logging.basicConfig(level=logging.INFO)``. ``plan.explain()`` prints the same with the reasons.

Corresponds to TorchRec's ``torchrec.distributed.planner.stats``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from tutorec._text import TextTable, bytes_text, ms_text, ranks_text, several
from tutorec.distributed.plan import ShardingPlan
from tutorec.distributed.planner.interfaces import Constraints, Enumerator, Stats, StorageReservation
from tutorec.distributed.planner.options import PERF_FIELDS, Floats, Ints, ShardingOption
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.sharded_module import ModuleSharder

logger: logging.Logger = logging.getLogger(__name__)

_SHORT = {
    "data_parallel": "DP",
    "table_wise": "TW",
    "column_wise": "CW",
    "row_wise": "RW",
    "table_row_wise": "TWRW",
    "table_column_wise": "TWCW",
    "grid_shard": "GS",
}


class EmbeddingStats(Stats):
    """Logs memory, time and shards of every rank, and with ``debug`` of every table.

    Source:
        TorchRec's ``EmbeddingStats``. Its table has a frame, and stands in the output of every program that sets the
        level of its root logger.
    """

    def log(
        self,
        sharding_plan: ShardingPlan,
        topology: Topology,
        batch_size: int,
        storage_reservation: StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: Constraints | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = True,
    ) -> None:
        """Log, if the logger is enabled.

        Args:
            sharding_plan: The plan.
            topology: The machines.
            batch_size: B of a rank.
            storage_reservation: What was left for other things than tables.
            num_proposals: Proposals that were tried.
            num_plans: Those of them that could be placed.
            run_time: Seconds of the search.
            best_plan: The options of the plan, placed.
            constraints: Of the tables.
            sharders: Those that will shard the model.
            enumerator: What listed the options.
            debug: Whether to log every table.
        """
        if not logger.isEnabledFor(logging.INFO):
            return
        tried = f", {several(num_proposals, 'proposal')}, {num_plans:,} of them placed" if num_proposals else ""
        of = f"{several(len(best_plan), 'table')} on {several(topology.world_size, 'rank')}, batch size {batch_size}"
        lines = [
            f"--- Planner Statistics: {of}, {run_time:.2f} s{tried} ---",
            f"reserved by {storage_reservation!r}; speeds: {topology.source}",
        ]
        if best_plan:
            lines += str(_ranks_table(best_plan, topology)).splitlines()
        if best_plan and debug:
            lines += ["", *str(_tables_table(best_plan, topology)).splitlines()]
        for line in lines:
            logger.info(line)


class NoopEmbeddingStats(Stats):
    """Logs nothing.

    Source:
        TorchRec's ``NoopEmbeddingStats``.
    """

    def log(
        self,
        sharding_plan: ShardingPlan,
        topology: Topology,
        batch_size: int,
        storage_reservation: StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: Constraints | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = True,
    ) -> None:
        """Log nothing."""


def _placed(option: ShardingOption, world_size: int) -> tuple[Ints, Floats, Ints]:
    """Rank, time by kind and bytes of each shard; without estimates zeros.

    Raises:
        PlannerError: A shard lies on no rank.
    """
    pieces, ranks = option.pieces(), option.placed_ranks(world_size)
    perf = pieces.perf if pieces.perf is not None else np.zeros((len(pieces), len(PERF_FIELDS)))
    storage = pieces.storage if pieces.storage is not None else np.zeros((len(pieces), 3), dtype=np.int64)
    return ranks, perf, storage


def _ranks_table(best_plan: Sequence[ShardingOption], topology: Topology) -> TextTable:
    world_size = topology.world_size
    perf, held = np.zeros((world_size, len(PERF_FIELDS))), np.zeros((world_size, 3), dtype=np.int64)
    shards: list[Counter[str]] = [Counter() for _ in range(world_size)]
    for option in best_plan:
        ranks, times, storage = _placed(option, topology.world_size)
        np.add.at(perf, ranks, times)
        np.add.at(held, ranks, storage)
        for rank in ranks.tolist():
            shards[rank][_SHORT.get(option.sharding_type, option.sharding_type)] += 1
    rows = []
    for rank, device in enumerate(topology.devices):
        room = device.storage
        memory = [_memory(int(held[rank, kind]), (room.hbm, room.ddr)[kind]) for kind in (0, 1)]
        parts = " ".join(ms_text(ms) for ms in perf[rank].tolist())
        counts = " ".join(f"{kind}: {count}" for kind, count in sorted(shards[rank].items()))
        rows.append([str(rank), *memory, ms_text(perf[rank].sum()), parts, counts])
    head = ["Rank", "HBM", "DDR", "Perf (ms)", "(" + ", ".join(PERF_FIELDS) + ")", "Shards"]
    return TextTable(head, rows, right=[0, 1, 2, 3])


def _memory(held: int, room: int) -> str:
    return f"{bytes_text(held)} ({held / room:.0%})" if room else bytes_text(held)


def _tables_table(best_plan: Sequence[ShardingOption], topology: Topology) -> TextTable:
    rows = []
    for option in best_plan:
        ranks, perf, storage = _placed(option, topology.world_size)
        hbm, ddr, _ = storage.sum(axis=0).tolist()
        pooled = "pooled" if option.is_pooled else "sequence"
        rows.append(
            [
                option.fqn.strip("."),
                _SHORT.get(option.sharding_type, option.sharding_type),
                option.compute_kernel,
                ms_text(perf.sum()),
                bytes_text(hbm),
                bytes_text(ddr),
                f"{sum(option.input_lengths):g}",
                pooled,
                f"{option.tensor.shape[0]:,} x {option.tensor.shape[1]}",
                ranks_text(ranks),
            ]
        )
    head = "FQN, Sharding, Compute Kernel, Perf (ms), HBM, DDR, Pooling Factor, Output, Size, Ranks".split(", ")
    return TextTable(head, rows, right=[3, 4, 5, 6, 8])

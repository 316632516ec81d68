"""Statistics of a plan in the log: the text of ``plan.explain()``, and how the plan was found.

Lines go to the logger ``tutorec.distributed`` at level INFO;
``logging.basicConfig(level=logging.INFO)`` shows them.

Corresponds to TorchRec's ``torchrec.distributed.planner.stats``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tutorec._text import several
from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.planner.options import Constraints, ShardingOption
from tutorec.distributed.planner.report import explain_plan
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.planner.types import Enumerator, Stats, StorageReservation

logger = logging.getLogger("tutorec.distributed")


class EmbeddingStats(Stats):
    """Logs memory, time and shards of every rank, and with ``debug`` of every table.

    Source:
        TorchRec's ``EmbeddingStats``. It prints a framed table whenever the level of the root
        logger is set.
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
        """Log the plan, if the logger is enabled.

        Args:
            sharding_plan: The plan.
            topology: The machines.
            batch_size: B per rank.
            storage_reservation: The storage reservation.
            num_proposals: Number of proposals tried.
            num_plans: Number of proposals that could be placed.
            run_time: Seconds of the search.
            best_plan: The placed options of the plan.
            constraints: Constraints of the tables.
            sharders: The sharders of the model.
            enumerator: The enumerator.
            debug: Whether to log every table.
        """
        if not logger.isEnabledFor(logging.INFO):
            return

        tried = (
            f", {several(num_proposals, 'proposal')}, {num_plans:,} of them placed"
            if num_proposals
            else ""
        )
        of = (
            f"{several(len(best_plan), 'table')} on {several(topology.world_size, 'rank')}, batch "
            f"size {batch_size}"
        )
        lines = [
            f"--- Planner Statistics: {of}, {run_time:.2f} s{tried} ---",
            f"reserved by {storage_reservation!r}; speeds: {topology.source}",
        ]
        report = getattr(sharding_plan, "report", None)
        if report is not None:
            lines += str(explain_plan(report, tables=debug)).splitlines()

        for line in lines:
            logger.info(line)


class NoopEmbeddingStats(Stats):
    """Logs nothing.

    Source:
        TorchRec's ``NoopEmbeddingStats``.
    """

    def log(self, *arguments: Any, **named: Any) -> None:
        """Log nothing."""

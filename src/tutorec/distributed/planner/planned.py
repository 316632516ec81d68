"""A plan that knows why it is as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tutorec.distributed.plan import EmbeddingModuleShardingPlan, ShardingPlan
from tutorec.distributed.planner.charts import plan_figure
from tutorec.distributed.planner.explain import plan_story
from tutorec.distributed.planner.explanation import Explanation
from tutorec.distributed.planner.report import PlanReport
from tutorec.distributed.planner.table_story import table_story
from tutorec.errors import PlannerError


@dataclass(eq=False)
class PlannedSharding(ShardingPlan):
    """The plan of a planner, with its reasons; everywhere else a `ShardingPlan` like any other.

    It is equal to a plan that says the same, whoever wrote that. `save` writes the plan, not the reasons.

    Args:
        report: What the planner knew; None where that has been lost.

    Example:
        >>> PlannedSharding() == ShardingPlan() and ShardingPlan() == PlannedSharding()
        True
    """

    # The page of this class resolves the inherited annotation here.
    plan: dict[str, EmbeddingModuleShardingPlan] = field(default_factory=dict)
    report: PlanReport | None = field(default=None, repr=False)

    def explain(self, table: str | None = None) -> Explanation:
        """Why the plan is as it is, or why one table is sharded as it is; printed, or shown by a notebook.

        Args:
            table: Its name, or path and name.

        Raises:
            KeyError: There is no such table.
            PlannerError: The plan has no report.
        """
        return plan_story(self._reported()) if table is None else table_story(self._reported(), table)

    def plot(self, claim: str | None = None) -> Any:
        """Memory and time of each rank as a matplotlib figure.

        Raises:
            PlannerError: The plan has no report.
        """
        return plan_figure(self._reported(), claim)

    def _reported(self) -> PlanReport:
        if not self.plan:
            raise PlannerError(
                "there is nothing to explain: the model has no table that a sharder shards; plan the model that holds "
                "the collections, with a sharder for each class of them"
            )
        if self.report is None:
            raise PlannerError(
                "this plan came without the report of its planner, which explains and plots it: ask the plan that "
                "EmbeddingShardingPlanner.plan returned"
            )
        return self.report

    def __eq__(self, other: object) -> bool:
        return self.plan == other.plan if isinstance(other, ShardingPlan) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return super().__str__()

"""The planner chooses a sharding type for each table and the ranks of its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutorec._lazy import lazy_package

if TYPE_CHECKING:
    from tutorec.distributed.planner.comparison import ComparedPlan, PlanComparison, compare
    from tutorec.distributed.planner.options import ParameterConstraints
    from tutorec.distributed.planner.planners import EmbeddingShardingPlanner, OptimalPlanner
    from tutorec.distributed.planner.topology import Topology
    from tutorec.distributed.planner.utils import bytes_to_gb, sharder_name

_DEFINED_IN = {
    "ComparedPlan": ".comparison",
    "EmbeddingShardingPlanner": ".planners",
    "OptimalPlanner": ".planners",
    "ParameterConstraints": ".options",
    "PlanComparison": ".comparison",
    "Topology": ".topology",
    "bytes_to_gb": ".utils",
    "compare": ".comparison",
    "sharder_name": ".utils",
}

__all__ = [
    "ComparedPlan",
    "EmbeddingShardingPlanner",
    "OptimalPlanner",
    "ParameterConstraints",
    "PlanComparison",
    "Topology",
    "bytes_to_gb",
    "compare",
    "sharder_name",
]

__getattr__, __dir__ = lazy_package(__name__, _DEFINED_IN)

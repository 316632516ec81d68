"""The planner: which way each table is cut, and where its pieces lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutorec.distributed.planner.constraints import ParameterConstraints
    from tutorec.distributed.planner.planners import EmbeddingShardingPlanner, OptimalPlanner
    from tutorec.distributed.planner.topology import Topology
    from tutorec.distributed.planner.utils import bytes_to_gb, sharder_name

_LAZY = {
    "EmbeddingShardingPlanner": "tutorec.distributed.planner.planners",
    "OptimalPlanner": "tutorec.distributed.planner.planners",
    "ParameterConstraints": "tutorec.distributed.planner.constraints",
    "Topology": "tutorec.distributed.planner.topology",
    "bytes_to_gb": "tutorec.distributed.planner.utils",
    "sharder_name": "tutorec.distributed.planner.utils",
}

__all__ = [
    "EmbeddingShardingPlanner",
    "OptimalPlanner",
    "ParameterConstraints",
    "Topology",
    "bytes_to_gb",
    "sharder_name",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

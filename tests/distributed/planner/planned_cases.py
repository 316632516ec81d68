"""Plans of small models without a planner object: what explanations, figures and remedies are
tested on.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner, to_sharding_plan
from tutorec.distributed.planner.problem import place_options
from tutorec.distributed.planner.report import PlanInputs, PlannedSharding, PlanReport
from tutorec.distributed.planner.search import search
from tutorec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from tutorec.distributed.planner.topology import Topology
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

GIB = 1024**3
#: Tables by name: rows and columns.
SHOP = {
    "item": (1_000_000, 128),
    "user": (200_000, 64),
    "word": (10_000, 256),
    "city": (500, 64),
    "day": (7, 64),
}


def inputs_of(
    tables: Mapping[str, tuple[int, int]],
    topology: Topology,
    *,
    batch_size: int = 512,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    percentage: float = 0.0,
) -> PlanInputs:
    """The inputs of a plan for a collection with a feature of each table's name."""
    module = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(rows, columns, name, feature_names=[name])
            for name, (rows, columns) in tables.items()
        ],
        device=torch.device("meta"),
    )
    reservation = FixedPercentageStorageReservation(percentage)
    planner = EmbeddingShardingPlanner(
        topology, batch_size, storage_reservation=reservation, constraints=dict(constraints or {})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return planner._inputs(module, [EmbeddingBagCollectionSharder()])


def planned(inputs: PlanInputs, seconds: float = 0.0) -> PlannedSharding:
    """The plan that the search finds for them."""
    problem = inputs.problem
    placement = search(problem)
    assert placement is not None, "the case is meant to fit"
    report = PlanReport(inputs, placement, seconds, "local search")
    return PlannedSharding(
        to_sharding_plan(place_options(problem, placement), inputs.topology).plan, report
    )


def report_of(plan: PlannedSharding) -> PlanReport:
    """Its report, which it has."""
    assert plan.report is not None, "made by `planned`"
    return plan.report

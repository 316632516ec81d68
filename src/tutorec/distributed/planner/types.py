"""Base classes of the parts of a planner, which can be replaced by other implementations.

TorchRec's import path ``torchrec.distributed.planner.types``: it has the other names, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tutorec.distributed.core.cache_params import CacheParams, KeyValueParams
from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.plan.plan import BoundsCheckMode, EmbeddingComputeKernel, ShardingPlan
from tutorec.distributed.planner.constants import BATCH_SIZE
from tutorec.distributed.planner.options import (
    Constraints,
    ParameterConstraints,
    PartitionByType,
    Shard,
    ShardingOption,
)
from tutorec.distributed.planner.topology import (
    BasicCommsBandwidths,
    CollectiveType,
    CustomTopologyData,
    DeviceHardware,
    GeneralizedCommsBandwidth,
    Perf,
    Storage,
    Topology,
)
from tutorec.errors import PlannerError, PlannerErrorType

__all__ = [
    "BasicCommsBandwidths",
    "BoundsCheckMode",
    "CacheParams",
    "CollectiveType",
    "CustomTopologyData",
    "DeviceHardware",
    "EmbeddingComputeKernel",
    "Enumerator",
    "GeneralizedCommsBandwidth",
    "KeyValueParams",
    "ModuleSharder",
    "ParameterConstraints",
    "PartitionByType",
    "Partitioner",
    "Perf",
    "PerfModel",
    "PlannerError",
    "PlannerErrorType",
    "Proposer",
    "Shard",
    "ShardEstimator",
    "ShardingOption",
    "ShardingPlan",
    "Stats",
    "Storage",
    "StorageReservation",
    "Topology",
]


class ShardEstimator(ABC):
    """Writes the cost of shards into options: time or storage.

    Args:
        topology: The machines.
        constraints: Constraints of the tables.
    """

    def __init__(self, topology: Topology, constraints: Constraints | None = None) -> None:
        """Do nothing; subclasses may call it with TorchRec's arguments."""
        super().__init__()

    @abstractmethod
    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_data_map: Mapping[str, ModuleSharder[Any]] | None = None,
    ) -> None:
        """Write ``perf`` or ``storage`` of every shard.

        Args:
            sharding_options: Options without estimates; changed in place.
            sharder_data_map: Full class name of a module -> its sharder; in TorchRec data read from
                the sharder.
        """


class Enumerator(ABC):
    """Lists the ways to shard each table of a model.

    Args:
        topology: The machines.
        batch_size: B per rank.
        constraints: Constraints of the tables.
        estimator: The estimators of the options.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = BATCH_SIZE,
        constraints: Constraints | None = None,
        estimator: ShardEstimator | Sequence[ShardEstimator] | None = None,
    ) -> None:
        """Do nothing; subclasses may call it with TorchRec's arguments."""
        super().__init__()

    @abstractmethod
    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> list[ShardingOption]:
        """Every legal option of every table, with estimates."""

    @abstractmethod
    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimate options again."""


class StorageReservation(ABC):
    """Reserves memory of a topology for everything but tables."""

    @abstractmethod
    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        constraints: Constraints | None = None,
    ) -> Topology:
        """The topology with the storage available to tables.

        Args:
            topology: The machines; not changed.
            batch_size: B per rank.
            module: The model.
            sharders: The sharders of the model.
            constraints: Constraints of its tables.
        """


class PerfModel(ABC):
    """Rates a plan."""

    @abstractmethod
    def rate(self, plan: list[ShardingOption]) -> float:
        """The rating; smaller is better."""


class Proposer(ABC):
    """Proposes an option for each table, gets feedback, and proposes again."""

    @abstractmethod
    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Start with these options."""

    @abstractmethod
    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Receive the result of the last proposal.

        Args:
            partitionable: Whether it could be placed.
            plan: The placed proposal.
            perf_rating: Its rating.
            storage_constraint: The available storage.
        """

    @abstractmethod
    def propose(self) -> list[ShardingOption] | None:
        """An option for each table, or None at the end."""


class Partitioner(ABC):
    """Places the shards of a proposal on ranks."""

    @abstractmethod
    def partition(
        self,
        proposal: list[ShardingOption],
        storage_constraint: Topology,
        hbm_per_device: int | None = None,
    ) -> list[ShardingOption]:
        """Return the proposal with a rank for each shard.

        Raises:
            PlannerError: It does not fit.
        """


class Stats(ABC):
    """Reports how a planner found its plan."""

    @abstractmethod
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
        """Report the plan.

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
            debug: Whether to report details.
        """

"""What the parts of a planner answer to, so that each can be replaced by another.

Corresponds to the abstract classes of TorchRec's ``torchrec.distributed.planner.types``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from tutorec.distributed.plan import ShardingPlan
from tutorec.distributed.planner.constants import BATCH_SIZE
from tutorec.distributed.planner.constraints import ParameterConstraints
from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.sharded_module import ModuleSharder

if TYPE_CHECKING:
    from tutorec.distributed.planner.topology import Topology

Constraints = Mapping[str, ParameterConstraints]


class ShardEstimator(ABC):
    """Writes into options what their shards cost: time or storage.

    Args:
        topology: The machines.
        constraints: Of the tables.
    """

    def __init__(self, topology: Topology, constraints: Constraints | None = None) -> None:
        """Nothing is kept; subclasses may pass on what TorchRec's take."""
        super().__init__()

    @abstractmethod
    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: Mapping[str, ModuleSharder[Any]] | None = None
    ) -> None:
        """Fill ``perf`` or ``storage`` of every shard.

        Args:
            sharding_options: Ways to shard the tables, without estimates; they are written to.
            sharder_data_map: Full name of a class of modules -> its sharder; in TorchRec what is read from the sharder.
        """


class Enumerator(ABC):
    """Lists the ways to shard each table of a model.

    Args:
        topology: The machines.
        batch_size: B of a rank.
        constraints: Of the tables.
        estimator: What estimates the options.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = BATCH_SIZE,
        constraints: Constraints | None = None,
        estimator: ShardEstimator | Sequence[ShardEstimator] | None = None,
    ) -> None:
        """Nothing is kept; subclasses may pass on what TorchRec's take."""
        super().__init__()

    @abstractmethod
    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> list[ShardingOption]:
        """Every legal option of every table, estimated."""

    @abstractmethod
    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimate options anew."""


class StorageReservation(ABC):
    """Takes from a topology what must be left for other things than tables."""

    @abstractmethod
    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        constraints: Constraints | None = None,
    ) -> Topology:
        """A topology with as much storage as the tables may use.

        Args:
            topology: The machines as they are; not changed.
            batch_size: B of a rank.
            module: The model.
            sharders: Those that would shard it.
            constraints: Of its tables.
        """


class PerfModel(ABC):
    """Rates a plan."""

    @abstractmethod
    def rate(self, plan: list[ShardingOption]) -> float:
        """The smaller, the better."""


class Proposer(ABC):
    """Proposes an option for each table, learns how it went, proposes again."""

    @abstractmethod
    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Begin with these options."""

    @abstractmethod
    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """How the last proposal went.

        Args:
            partitionable: Whether it could be placed.
            plan: The proposal as it was placed.
            perf_rating: What it was rated.
            storage_constraint: The storage that there is.
        """

    @abstractmethod
    def propose(self) -> list[ShardingOption] | None:
        """An option for each table, or None where there is nothing more to propose."""


class Partitioner(ABC):
    """Places the shards of a proposal on ranks."""

    @abstractmethod
    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology, hbm_per_device: int | None = None
    ) -> list[ShardingOption]:
        """The proposal with a rank for each shard.

        Raises:
            PlannerError: There is no room.
        """


class Stats(ABC):
    """Reports how a planner came to its plan."""

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
        """Report.

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
            debug: Whether to report at length.
        """

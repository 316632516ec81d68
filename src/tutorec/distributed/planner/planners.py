"""Planners: from a model and a topology to a plan.

::

    enumerate    every way to shard each table                  enumerators
    estimate     milliseconds and bytes of every shard          shard_estimators, cost, storage
    reserve      reserve memory for everything but tables       storage_reservations
    search       one option per table, one rank per shard  search, proposers + partitioners, or milp
    report       why this plan                                  report

Corresponds to TorchRec's ``torchrec.distributed.planner.planners``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from tutorec._check import require_finite
from tutorec.distributed import comm
from tutorec.distributed.core.env import local_world_size
from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.plan.geometry import TableShard, sharding_spec
from tutorec.distributed.plan.plan import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tutorec.distributed.planner.constants import BATCH_SIZE
from tutorec.distributed.planner.cost import fixed_cost, kernel_model
from tutorec.distributed.planner.enumerators import EmbeddingEnumerator
from tutorec.distributed.planner.milp import solve
from tutorec.distributed.planner.options import (
    Constraints,
    ShardingOption,
    check_tables_are_distinct,
)
from tutorec.distributed.planner.placements import options_placement, plan_placement
from tutorec.distributed.planner.problem import (
    Placement,
    PlanningProblem,
    in_rank_order,
    place_options,
)
from tutorec.distributed.planner.proposers import best_proposal
from tutorec.distributed.planner.remedies import why_infeasible
from tutorec.distributed.planner.report import PlanInputs, PlannedSharding, PlanReport
from tutorec.distributed.planner.search import search
from tutorec.distributed.planner.stats import EmbeddingStats, logger
from tutorec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from tutorec.distributed.planner.topology import Topology, this_machine
from tutorec.distributed.planner.types import (
    Enumerator,
    Partitioner,
    PerfModel,
    Proposer,
    Stats,
    StorageReservation,
)
from tutorec.distributed.sharding_plan import get_default_sharders
from tutorec.errors import bad_input
from tutorec.spmd.rank import device as own_device

_STAGE = "plan"


class EmbeddingShardingPlanner:
    """Makes a plan for a model: the sharding type of each table and the ranks of its shards.

    The planner enumerates and estimates options, and searches for the best choice and placement. By
    default it uses tutorec's search, which considers all tables at once. With proposers or a
    partitioner it tries proposals one by one, as TorchRec does.

    Args:
        topology: The machines. By default the ranks of the default process group with this
            process's device type; `collective_plan` then uses the speeds measured by ``tutorec
            calibrate`` if all ranks are on one host.
        batch_size: B per rank; 512 by default.
        enumerator: Lists the options; `EmbeddingEnumerator` by default.
        storage_reservation: Reserves memory for everything but tables; by default 15 % of each
            rank's memory, six times the dense parameters, and the batches.
        proposer: One or several, tried in order.
        partitioner: Places the proposals; `GreedyPerfPartitioner` by default.
        performance_model: Rates placed proposals; by default by the milliseconds of the slowest
            rank.
        stats: Receives the results of the search; a log by default.
        constraints: Table name -> its constraints.
        debug: Whether the log is detailed.
        callbacks: Each gets the placed options of the plan and returns the options to use.
        timeout_seconds: Time after which the search returns the best plan so far.

    Raises:
        PlannerError: There is no topology and no process group, or the constraints contradict it.

    Source:
        TorchRec's ``torchrec.distributed.planner.EmbeddingShardingPlanner``.

    Example:
        >>> from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        >>> from tutorec.distributed.planner.options import ParameterConstraints
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [
        ...     EmbeddingBagConfig(8, 4, name, feature_names=[name])
        ...     for name in ("item", "user")
        ... ]
        >>> constraints = {
        ...     name: ParameterConstraints(sharding_types=["table_wise"])
        ...     for name in ("item", "user")
        ... }
        >>> planner = EmbeddingShardingPlanner(
        ...     Topology(2, "cpu"), batch_size=2, constraints=constraints
        ... )
        >>> plan = planner.plan(
        ...     EmbeddingBagCollection(tables), [EmbeddingBagCollectionSharder()]
        ... )
        >>> {name: entry.ranks for name, entry in plan.plan[""].items()}
        {'item': [0], 'user': [1]}
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: Constraints | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        self._topology = topology if topology is not None else _topology_of_process_group()
        self._default_topology = topology is None
        self._batch_size = BATCH_SIZE if batch_size is None else batch_size
        self._constraints = dict(constraints or {})
        self._enumerator = enumerator or EmbeddingEnumerator(
            self._topology, self._batch_size, self._constraints
        )
        self._own_enumerator = enumerator is None
        self._storage_reservation = storage_reservation or HeuristicalStorageReservation(
            percentage=0.15
        )
        self._proposers: list[Proposer] = (
            proposer if isinstance(proposer, list) else [proposer] if proposer else []
        )
        self._partitioner = partitioner
        self._perf_model = performance_model
        self._stats = stats if isinstance(stats, list) or stats is None else [stats]
        self._debug = debug
        self._callbacks = list(callbacks or [])
        if timeout_seconds is not None and timeout_seconds != math.inf:
            require_finite("timeout_seconds", timeout_seconds, positive=True, error=bad_input)

        self._timeout_seconds = timeout_seconds
        self._num_proposals = 0
        self._num_plans = 0

    def plan(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]] | None = None
    ) -> PlannedSharding:
        """Make a plan for a model in this process alone.

        Args:
            module: The model, or a collection of tables.
            sharders: One sharder per class of modules to shard; those of both collections by
                default.

        Raises:
            PlannerError: No plan fits, or the constraints contradict the model or each other.
        """
        start = time.perf_counter()
        sharders = list(get_default_sharders() if sharders is None else sharders)
        inputs = self._inputs(module, sharders)
        problem = inputs.problem
        if not inputs.options:
            return PlannedSharding({}, None)

        placement, searched, gap = self._find(inputs)
        placement = in_rank_order(problem, placement)
        model_order = {option.fqn: index for index, option in enumerate(inputs.options)}
        placed = place_options(problem, placement)
        placed.sort(key=lambda option: model_order[option.fqn])
        if self._callbacks:
            for callback in self._callbacks:
                placed = callback(placed)
            placement = options_placement(problem, placed, "what the callbacks returned")

        seconds = time.perf_counter() - start
        report = PlanReport(inputs, placement, seconds, searched, gap)
        plan = PlannedSharding(to_sharding_plan(placed, self._topology).plan, report)
        stats = self._stats
        if stats is None:  # the log, if someone reads it
            stats = [EmbeddingStats()] if logger.isEnabledFor(logging.INFO) else []
        if stats:
            self._log(stats, plan, placed, seconds, sharders)
        return plan

    def _log(
        self,
        stats: Sequence[Stats],
        plan: PlannedSharding,
        placed: list[ShardingOption],
        seconds: float,
        sharders: Sequence[ModuleSharder[Any]],
    ) -> None:
        """Pass a plan to the loggers of statistics."""
        for stats_logger in stats:
            stats_logger.log(
                sharding_plan=plan,
                topology=self._topology,
                batch_size=self._batch_size,
                storage_reservation=self._storage_reservation,
                num_proposals=self._num_proposals,
                num_plans=self._num_plans,
                run_time=seconds,
                best_plan=placed,
                constraints=self._constraints,
                sharders=sharders,
                enumerator=self._enumerator,
                debug=self._debug,
            )

    def estimate(
        self,
        plan: ShardingPlan,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
    ) -> PlannedSharding:
        """Estimate a plan for this planner's machine, batch and constraints; nothing is searched.

        The plan may have been made for others, loaded from a file, or written by hand.

        Args:
            plan: An entry for each table.
            module: As for `plan`.
            sharders: As for `plan`.

        Returns:
            The same plan with a report.

        Raises:
            PlannerError: A table has no entry, is sharded in a way that the constraints rule out,
                or does not fit.
        """
        start = time.perf_counter()
        inputs = self._inputs(
            module, list(get_default_sharders() if sharders is None else sharders)
        )
        placement = plan_placement(inputs, plan)
        seconds = time.perf_counter() - start
        report = PlanReport(inputs, placement, seconds, "the plan was given")

        return PlannedSharding(plan.plan, report)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> PlannedSharding:
        """Make a plan on rank 0 and send it to all ranks; every rank of the group calls this.

        Args:
            module: The model; rank 0 plans for its own.
            sharders: As for `plan`.
            pg: The ranks; those of the default process group by default.

        Raises:
            PlannerError: There is no process group, or rank 0 found no plan; then every rank raises
                the same error.
        """
        group = pg if pg is not None else comm.default_group()
        if group is None:
            raise bad_input(
                "collective_plan needs a process group, and none has been started: call "
                "plan(module, sharders), which needs none, or start one with tutorec.spmd.init()"
            )

        result: PlannedSharding | Exception | None = None
        if group.rank() == 0:
            try:
                result = self._with_measured_speeds().plan(module, sharders)
            except Exception as error:
                result = error

        result = comm.broadcast_object(result, 0, group, _STAGE)
        if isinstance(result, Exception):
            raise result

        assert result is not None, "rank 0 sends a plan or an error"
        return result

    def _with_measured_speeds(self) -> EmbeddingShardingPlanner:
        """This planner with this machine's measured speeds, if no topology was given; for rank 0.

        A rank that plans for itself does not use them: ranks with different calibration files would
        make different plans.
        """
        if not self._default_topology:
            return self

        planner = copy(self)
        usual = self._topology
        planner._topology = this_machine(
            usual.world_size, usual.compute_device, usual.local_world_size
        )
        if self._own_enumerator:
            planner._enumerator = EmbeddingEnumerator(
                planner._topology, self._batch_size, self._constraints
            )

        return planner

    def _inputs(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> PlanInputs:
        """The options of every table of a model, and the memory available for them."""
        topology = self._topology
        constraints = self._constraints

        def remake(**changes: Any) -> PlanInputs:
            arguments = {"topology": topology, "batch_size": self._batch_size, **changes}
            arguments["constraints"] = {**constraints, **changes.get("constraints", {})}
            return EmbeddingShardingPlanner(
                **arguments, storage_reservation=self._storage_reservation
            )._inputs(module, sharders)

        options = self._enumerator.enumerate(module, sharders)
        reserved = self._storage_reservation.reserve(
            topology, self._batch_size, module, sharders, constraints
        )

        def fixed(option: ShardingOption) -> float:
            # Inference has no exchange with other ranks.
            if kernel_model(option.compute_kernel).serves:
                return 0.0
            return fixed_cost(topology, option.sharding_type, option.profile.pooled)

        return PlanInputs(
            options=options,
            problem=PlanningProblem.of(options, reserved, constraints, fixed),
            topology=topology,
            reserved=reserved,
            batch_size=self._batch_size,
            constraints=constraints,
            refusals=tuple(getattr(self._enumerator, "refusals", ())),
            # A custom enumerator cannot be rebuilt for another topology.
            remake=remake if self._own_enumerator else None,
        )

    def _find(self, inputs: PlanInputs) -> tuple[Placement, str, float | None]:
        """The placement, how it was found, and its gap to a proven bound if there is one."""
        if self._proposers or self._partitioner or self._perf_model:
            return self._try_proposals(inputs)

        placement = search(inputs.problem, self._timeout_seconds)
        if placement is None:
            raise why_infeasible(inputs)
        return placement, "local search over options and places", None

    def _try_proposals(self, inputs: PlanInputs) -> tuple[Placement, str, float | None]:
        """The best placed proposal, as TorchRec's planner finds it."""
        placement, self._num_proposals, self._num_plans = best_proposal(
            inputs,
            self._enumerator,
            self._proposers,
            self._partitioner,
            self._perf_model,
            self._timeout_seconds,
        )
        searched = f"{self._num_proposals} proposals, {self._num_plans} of them placed"
        return placement, searched, None


class OptimalPlanner(EmbeddingShardingPlanner):
    """A planner with a proven gap: a mixed-integer program, solved by HiGHS.

    The search of `EmbeddingShardingPlanner` gives the first plan. The solver looks for better plans
    and raises a lower bound on the time of every plan, until both meet or the time limit is
    reached. The plan's report shows the bound and the gap. For up to 10 tables on 4 ranks the gap
    is at most 2 % after a few seconds; for larger models it may be larger. In a collective call the
    other ranks wait meanwhile.

    Args:
        topology: The machines.
        batch_size: B per rank; 512 by default.
        constraints: Table name -> its constraints.
        time_limit: Maximum seconds of the solver.
        enumerator: Lists the options.
        storage_reservation: Reserves memory for everything but tables.
        stats: Receives the results.

    Raises:
        PlannerError: There is no topology and no process group, or the constraints contradict it.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        constraints: Constraints | None = None,
        time_limit: float = 30.0,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        stats: Stats | list[Stats] | None = None,
    ) -> None:
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            stats=stats,
            constraints=constraints,
            timeout_seconds=time_limit,
        )
        self._time_limit = time_limit

    def _find(self, inputs: PlanInputs) -> tuple[Placement, str, float | None]:
        """The best placement that the solver finds, and its gap."""
        result = solve(inputs.problem, self._time_limit, search(inputs.problem))
        if result.placement is None:
            raise why_infeasible(inputs)
        return result.placement, f"mixed-integer program ({result.status})", result.gap


def to_sharding_plan(
    sharding_options: Sequence[ShardingOption], topology: Topology
) -> ShardingPlan:
    """Convert placed options to a plan.

    Args:
        sharding_options: One per table, in the order of the model's tables.
        topology: Gives device types and ranks per host.

    Raises:
        PlannerError: Not an option, two options of one table, or a shard without a valid rank.

    Source:
        TorchRec's ``to_sharding_plan``.
    """
    check_tables_are_distinct("sharding_options", sharding_options)
    plan: dict[str, EmbeddingModuleShardingPlan] = {}
    for option in sharding_options:
        plan.setdefault(option.path, EmbeddingModuleShardingPlan())[option.name] = _entry(
            option, topology
        )

    return ShardingPlan(plan)


def _entry(option: ShardingOption, topology: Topology) -> ParameterSharding:
    shards = option.shard_arrays()
    ranks = option.placed_ranks(topology.world_size).tolist()
    spec = None
    if option.sharding_type != ShardingType.DATA_PARALLEL.value:
        lines = zip(ranks, shards.offsets.tolist(), shards.sizes.tolist(), strict=True)
        spec = sharding_spec(
            [TableShard(rank, *offset, *size) for rank, offset, size in lines],
            topology.compute_device,
            topology.local_world_size,
        )

    rows, columns = option.tensor.shape
    return ParameterSharding(
        sharding_type=option.sharding_type,
        compute_kernel=option.compute_kernel,
        ranks=ranks,
        sharding_spec=spec,
        cache_params=option.cache_params and replace(option.cache_params, stats=None),
        enforce_hbm=option.enforce_hbm,
        stochastic_rounding=option.stochastic_rounding,
        bounds_check_mode=option.bounds_check_mode,
        key_value_params=option.key_value_params,
        shape=(rows, columns),
    )


def _topology_of_process_group() -> Topology:
    group = comm.default_group()
    if group is None:
        raise bad_input(
            "a planner needs a topology, and there is no process group to derive it from: pass "
            "topology=Topology(world_size=2, compute_device='cpu'), or start one with "
            "tutorec.spmd.init()"
        )

    world_size = group.size()
    on_host = local_world_size()
    return Topology(
        world_size=world_size,
        compute_device=own_device().type,
        local_world_size=None if on_host is None or world_size % on_host else on_host,
    )

"""Planners: from a model and a topology to a plan.

::

    enumerate    every way to shard each table                  enumerators
    estimate     milliseconds and bytes of every shard          shard_estimators, cost, storage
    reserve      reserve memory for everything but tables       storage_reservations
    search       one option per table, one rank per shard  search, proposers + partitioners, or milp
    report       why this plan                                  explain

Corresponds to TorchRec's ``torchrec.distributed.planner.planners``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from tutorec._check import require_finite
from tutorec._text import several
from tutorec.distributed import comm
from tutorec.distributed.env import local_world_size
from tutorec.distributed.plan import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tutorec.distributed.planner.bounds import lower_bound
from tutorec.distributed.planner.constants import BATCH_SIZE
from tutorec.distributed.planner.constraints import ParameterConstraints
from tutorec.distributed.planner.enumerators import EmbeddingEnumerator
from tutorec.distributed.planner.explain import PlannedSharding
from tutorec.distributed.planner.interfaces import (
    Constraints,
    Enumerator,
    Partitioner,
    PerfModel,
    Proposer,
    Stats,
    StorageReservation,
)
from tutorec.distributed.planner.options import ShardingOption, check_one_each
from tutorec.distributed.planner.placements import in_rank_order, place_options, placement_of
from tutorec.distributed.planner.problem import Placement, PlanningProblem, broken_rules
from tutorec.distributed.planner.remedies import why_infeasible
from tutorec.distributed.planner.report import PlanInputs, PlanReport
from tutorec.distributed.planner.search import search
from tutorec.distributed.planner.stats import EmbeddingStats
from tutorec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from tutorec.distributed.planner.topology import Topology, this_machine
from tutorec.distributed.shard_geometry import ShardPiece, sharding_spec
from tutorec.distributed.sharded_module import ModuleSharder
from tutorec.distributed.sharding_plan import get_default_sharders
from tutorec.errors import PlannerError, PlannerErrorType, bad_input
from tutorec.spmd.devices import device as own_device

_STAGE = "plan"

Progress = Callable[[float], None]


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
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [
        ...     EmbeddingBagConfig(8, 4, name, feature_names=[name]) for name in ("item", "user")
        ... ]
        >>> words = {
        ...     name: ParameterConstraints(sharding_types=["table_wise"])
        ...     for name in ("item", "user")
        ... }
        >>> planner = EmbeddingShardingPlanner(Topology(2, "cpu"), batch_size=2, constraints=words)
        >>> plan = planner.plan(EmbeddingBagCollection(tables), [EmbeddingBagCollectionSharder()])
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
        constraints: Mapping[str, ParameterConstraints] | None = None,
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
        self._partitioner, self._perf_model = partitioner, performance_model
        self._stats: list[Stats] = (
            [EmbeddingStats()] if stats is None else stats if isinstance(stats, list) else [stats]
        )
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
        sharders = get_default_sharders() if sharders is None else sharders
        sharders = list(sharders)
        inputs = self._inputs(module, sharders)
        if not inputs.options:
            return PlannedSharding({}, None)
        with _progress_bar() as progress:
            placement, searched, gap = self._find(inputs, progress)
        placement = in_rank_order(inputs.problem, placement)
        broken = broken_rules(inputs.problem, placement)
        assert not broken, f"the search returned a plan that breaks rules: {broken[:3]}"
        return self._planned(inputs, placement, searched, gap, sharders, start)

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
        found: PlannedSharding | Exception | None = None
        if group.rank() == 0:
            try:
                found = self._with_measured_speeds().plan(module, sharders)
            except Exception as error:
                found = error
        found = comm.broadcast_object(found, 0, group, _STAGE)
        if isinstance(found, Exception):
            raise found
        assert found is not None, "rank 0 sends a plan or an error"
        return found

    def _with_measured_speeds(self) -> EmbeddingShardingPlanner:
        """This planner with this machine's measured speeds, if no topology was given; for rank 0.

        A rank that plans for itself does not use them: ranks with different calibration files would
        make different plans.
        """
        if not self._default_topology:
            return self
        planner, usual = copy(self), self._topology
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

        def remake(
            constraints: Constraints | None = None,
            topology: Topology | None = None,
            batch_size: int | None = None,
        ) -> PlanInputs:
            return EmbeddingShardingPlanner(
                topology or self._topology,
                batch_size or self._batch_size,
                storage_reservation=self._storage_reservation,
                constraints={**self._constraints, **(constraints or {})},
            )._inputs(module, sharders)

        options = self._enumerator.enumerate(module, sharders)
        reserved = self._storage_reservation.reserve(
            self._topology, self._batch_size, module, sharders, self._constraints
        )
        return PlanInputs(
            options=options,
            topology=self._topology,
            reserved=reserved,
            batch_size=self._batch_size,
            constraints=self._constraints,
            refusals=tuple(getattr(self._enumerator, "refusals", ())),
            # A custom enumerator cannot be rebuilt for another topology.
            remake=remake if self._own_enumerator else None,
        )

    def _find(self, inputs: PlanInputs, progress: Progress) -> tuple[Placement, str, float | None]:
        """The placement, how it was found, and its gap to a proven bound if there is one."""
        if self._proposers or self._partitioner or self._perf_model:
            placement = self._try_proposals(inputs)
            return (
                placement,
                f"{self._num_proposals} proposals, {self._num_plans} of them placed",
                None,
            )
        placement = search(inputs.problem, self._timeout_seconds, progress)
        if placement is None:
            raise why_infeasible(inputs)
        return placement, "local search over options and places", None

    def _try_proposals(self, inputs: PlanInputs) -> Placement:
        """The best proposal that can be placed; proposers and partitioner default to TorchRec's."""
        from tutorec.distributed.planner.partitioners import GreedyPerfPartitioner
        from tutorec.distributed.planner.perf_models import NoopPerfModel
        from tutorec.distributed.planner.proposers import default_proposers

        partitioner = self._partitioner or GreedyPerfPartitioner()
        perf_model = self._perf_model or NoopPerfModel(self._topology)
        self._num_proposals = self._num_plans = 0
        deadline = time.perf_counter() + (self._timeout_seconds or math.inf)
        best: list[ShardingOption] | None = None
        best_rating = math.inf
        for proposer in self._proposers or default_proposers():
            proposer.load(list(inputs.options), self._enumerator)
            while (proposal := proposer.propose()) is not None and time.perf_counter() < deadline:
                self._num_proposals += 1
                check_one_each(f"what {type(proposer).__name__} proposed", proposal)
                try:
                    placed = partitioner.partition(deepcopy(proposal), inputs.reserved)
                except PlannerError:
                    proposer.feedback(False, proposal, storage_constraint=inputs.reserved)
                    continue
                self._num_plans += 1
                rating = perf_model.rate(placed)
                if best is None or rating < best_rating:
                    best, best_rating = placed, rating
                proposer.feedback(True, placed, rating, inputs.reserved)
        if best is None and time.perf_counter() >= deadline:
            raise PlannerError(
                f"timeout_seconds={self._timeout_seconds:g} ended after "
                f"{several(self._num_proposals, 'proposal')}, of which none could be placed: allow "
                "more time, or leave proposer, partitioner and performance_model out, and the "
                "planner searches for itself",
                PlannerErrorType.PARTITION,
            )
        if best is None:
            raise why_infeasible(inputs, proposed=True)
        return _legal(inputs.problem, best, f"what {type(partitioner).__name__} placed")

    def _planned(
        self,
        inputs: PlanInputs,
        placement: Placement,
        searched: str,
        gap: float | None,
        sharders: list[ModuleSharder[Any]],
        start: float,
    ) -> PlannedSharding:
        """The plan of a placement with its report, passed to the statistics."""
        order = {fqn: index for index, fqn in enumerate(inputs.by_table)}
        placed = sorted(
            place_options(inputs.problem, placement), key=lambda option: order[option.fqn]
        )
        for callback in self._callbacks:
            placed = callback(placed)
        if self._callbacks:
            placement = _legal(inputs.problem, placed, "what the callbacks returned")
        bound = lower_bound(inputs.problem)
        seconds = time.perf_counter() - start
        report = PlanReport(inputs, placement, bound, seconds, searched, gap)
        plan = PlannedSharding(to_sharding_plan(placed, self._topology).plan, report)
        for stats in self._stats:
            stats.log(
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
        return plan


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
        constraints: Mapping[str, ParameterConstraints] | None = None,
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

    def _find(self, inputs: PlanInputs, progress: Progress) -> tuple[Placement, str, float | None]:
        """The best placement that the solver finds, and its gap."""
        from tutorec.distributed.planner.milp import solve  # imports scipy

        first = search(inputs.problem)
        result = solve(inputs.problem, self._time_limit, first, progress)
        placement = result.placement if result.placement is not None else first
        if placement is None:
            raise why_infeasible(inputs)
        return placement, f"mixed-integer program ({result.status})", result.gap


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
    check_one_each("sharding_options", sharding_options)
    plan: dict[str, EmbeddingModuleShardingPlan] = {}
    for option in sharding_options:
        plan.setdefault(option.path, EmbeddingModuleShardingPlan())[option.name] = _entry(
            option, topology
        )
    return ShardingPlan(plan)


def _entry(option: ShardingOption, topology: Topology) -> ParameterSharding:
    pieces, ranks = option.pieces(), option.placed_ranks(topology.world_size).tolist()
    replicated = option.sharding_type == ShardingType.DATA_PARALLEL.value
    spec = None
    if not replicated:
        lines = zip(ranks, pieces.offsets.tolist(), pieces.sizes.tolist(), strict=True)
        spec = sharding_spec(
            [ShardPiece(rank, *offset, *size) for rank, offset, size in lines],
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
        shape=(int(rows), int(columns)),
    )


def _legal(problem: PlanningProblem, placed: Sequence[ShardingOption], whose: str) -> Placement:
    """The placement of options from a partitioner or a callback.

    Args:
        problem: The planning problem.
        placed: An option for each table.
        whose: Who placed them, for the message.

    Raises:
        PlannerError: A table has no option, or its shards are on ranks that its sharding type does
            not allow.
    """
    try:
        placement = placement_of(problem, placed)
    except KeyError as error:
        raise PlannerError(f"{whose} is not a plan: {error.args[0]}") from None
    if broken := broken_rules(problem, placement):
        pinned = (
            "; pin and colocate are kept by the planner's own search: leave proposer and "
            "partitioner out"
        )
        hint = pinned if any("allowed" in each for each in broken) else ""
        raise PlannerError(f"{whose} is not a plan: {'; '.join(broken[:3])}{hint}")
    return placement


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
        local_world_size=on_host
        if on_host is not None and world_size % on_host == 0
        else world_size,
    )


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """A progress bar on a terminal, shown after two seconds, and its update function (0 to 1)."""
    from tqdm import tqdm

    words: dict[str, Any] = {
        "delay": 2.0,
        "leave": False,
        "bar_format": "{desc}: {percentage:3.0f}%|{bar}|",
    }
    # disable=None hides it if standard error is not a terminal
    with tqdm(total=1.0, desc="planning", disable=None, **words) as bar:
        yield lambda done: (bar.update(max(0.0, done - bar.n)), None)[1]

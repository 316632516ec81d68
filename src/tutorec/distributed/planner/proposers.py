"""Proposers: the order in which plans are tried. A proposal has one unplaced option per table.

Corresponds to TorchRec's ``torchrec.distributed.planner.proposers``, whose planner tries these
proposers one after the other. The planner's default here is `search`, which chooses options and
ranks at the same time.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Generator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutorec._text import several
from tutorec.distributed.planner.options import ShardingOption, check_tables_are_distinct
from tutorec.distributed.planner.partitioners import GreedyPerfPartitioner
from tutorec.distributed.planner.perf_models import NoopPerfModel
from tutorec.distributed.planner.placements import options_placement
from tutorec.distributed.planner.problem import Placement
from tutorec.distributed.planner.remedies import why_infeasible
from tutorec.distributed.planner.report import PlanInputs
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.planner.types import Enumerator, Partitioner, PerfModel, Proposer
from tutorec.errors import PlannerError, PlannerErrorType

# They receive the rating of the last proposal, if it could be placed, and the available storage.
_Proposals = Generator[Sequence[ShardingOption], tuple[float | None, Topology | None], None]
_Indices = NDArray[np.int32]
logger = logging.getLogger("tutorec.distributed")

MAX_PROPOSALS = 10_000
"""A grid with more proposals is not searched."""


def _score(option: ShardingOption, use_depth: bool) -> float:
    """Sort key of a table's options: the time of the slowest shard, or of all shards."""
    times = option.times()
    return float(times.max(initial=0.0) if use_depth else times.sum())


def _needed(option: ShardingOption) -> tuple[int, ...]:
    """Bytes of the largest shard and of all, HBM first."""
    hbm, ddr, _ = option.memory().T
    return int(hbm.max()), int(hbm.sum()), int(ddr.max()), int(ddr.sum())


def _by_table(options: Sequence[ShardingOption]) -> dict[str, list[ShardingOption]]:
    """The options of each table, tables in the order of their first option."""
    tables: dict[str, list[ShardingOption]] = {}
    for option in options:
        tables.setdefault(option.fqn, []).append(option)
    return tables


class _GeneratedProposer(Proposer):
    """Proposes what a generator of the subclass yields, which receives the feedback."""

    _proposals: _Proposals
    _current: Sequence[ShardingOption] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A generator cannot be pickled; the planner that gets the copy loads it before it asks.
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_proposals", "_current")
        }

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Start with these options, which must have estimates."""
        self._proposals = self._proposed(search_space)
        self._current = next(self._proposals, None) if search_space else None

    @abstractmethod
    def _proposed(self, search_space: list[ShardingOption]) -> _Proposals:
        """The proposals for some options."""

    def propose(self) -> list[ShardingOption] | None:
        """The current option of each table; None at the end."""
        return None if self._current is None else list(self._current)

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Go on to the next proposal."""
        if self._current is not None:
            try:
                self._current = self._proposals.send((perf_rating, storage_constraint))
            except StopIteration:
                self._current = None


class GreedyProposer(_GeneratedProposer):
    """Starts with the fastest options; moves the table with most memory to its next option.

    Args:
        use_depth: Whether options are sorted by their slowest shard; otherwise by the sum of their
            shards.
        threshold: Stop after this many proposals in a row that are not better than the best; None
            for no limit.

    Example:
        The fast option needs 9 bytes; where that is too much, the next proposal takes the slow one:

        >>> from tutorec.distributed.planner.options import Shard, ShardingOption
        >>> from tutorec.distributed.planner.topology import Perf, Storage
        >>> import torch
        >>> def option(kind, ms, hbm):
        ...     shard = Shard([8, 4], [0, 0], Storage(hbm, 0), Perf(ms, 0, 0, 0))
        ...     module = ("", torch.nn.Identity())
        ...     return ShardingOption(
        ...         "item",
        ...         torch.empty(8, 4),
        ...         module,
        ...         [1.0],
        ...         2,
        ...         kind,
        ...         "device",
        ...         "fused",
        ...         [shard],
        ...     )
        >>> proposer = GreedyProposer()
        >>> proposer.load([option("row_wise", 5.0, 2), option("table_wise", 1.0, 9)])
        >>> tried = []
        >>> while (proposal := proposer.propose()) is not None:
        ...     tried.append(proposal[0].sharding_type)
        ...     proposer.feedback(partitionable=False)
        >>> tried
        ['table_wise', 'row_wise']

    Source:
        TorchRec's ``GreedyProposer``.
    """

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._use_depth = use_depth
        self._threshold = threshold or math.inf

    def _proposed(self, search_space: list[ShardingOption]) -> _Proposals:
        tables = [
            sorted(options, key=lambda option: _score(option, self._use_depth))
            for options in _by_table(search_space).values()
        ]
        needs = [[_needed(option) for option in options] for options in tables]
        current = [0] * len(tables)
        best_rating = math.inf
        worse_in_a_row = 0
        while True:
            rating, _ = yield [
                options[number] for options, number in zip(tables, current, strict=True)
            ]
            if rating:
                worse_in_a_row += 1
                if rating < best_rating:
                    best_rating = rating
                    worse_in_a_row = 0

            movable = [
                (table_needs[number], -table)
                for table, (table_needs, number) in enumerate(zip(needs, current, strict=True))
                if number + 1 < len(table_needs) and any(table_needs[number])
            ]
            if worse_in_a_row > self._threshold or not movable:
                return

            current[-max(movable)[1]] += 1


class UniformProposer(_GeneratedProposer):
    """Proposes plans in which all tables have the same sharding type, for each type that all allow.

    Args:
        use_depth: Whether a table's fastest option of a type is that with the fastest slowest
            shard; otherwise that with the smallest sum.

    Source:
        TorchRec's ``UniformProposer``.
    """

    def __init__(self, use_depth: bool = True) -> None:
        self._use_depth = use_depth

    def _proposed(self, search_space: list[ShardingOption]) -> _Proposals:
        tables = _by_table(search_space).values()
        sharding_types = dict.fromkeys(
            option.sharding_type for options in tables for option in options
        )
        for sharding_type in sharding_types:
            same_type = [
                [option for option in options if option.sharding_type == sharding_type]
                for options in tables
            ]
            if all(same_type):
                yield [
                    min(options, key=lambda option: _score(option, self._use_depth))
                    for options in same_type
                ]


class GridSearchProposer(_GeneratedProposer):
    """Proposes every combination of options, or none if there are more than `max_proposals`.

    Args:
        max_proposals: Maximum number of combinations.

    Source:
        TorchRec's ``GridSearchProposer``.
    """

    def __init__(self, max_proposals: int = MAX_PROPOSALS) -> None:
        self._max_proposals = max_proposals

    def _proposed(self, search_space: list[ShardingOption]) -> _Proposals:
        tables = _by_table(search_space).values()
        total = math.prod(len(options) for options in tables)
        if total > self._max_proposals:
            logger.info(
                "the grid of %s combinations of %d tables is not searched: max_proposals=%d",
                f"{total:,}" if total <= 10**6 else f"10**{len(str(total)) - 1}",
                len(tables),
                self._max_proposals,
            )
            return

        fastest_first = (
            sorted(options, key=lambda option: _score(option, True)) for options in tables
        )
        for proposal in itertools.product(*fastest_first):
            yield list(proposal)


def default_proposers() -> list[Proposer]:
    """The proposers of TorchRec's planner, in its order."""
    return [
        GridSearchProposer(),
        GreedyProposer(),
        GreedyProposer(use_depth=False),
        UniformProposer(),
    ]


def best_proposal(
    inputs: PlanInputs,
    enumerator: Enumerator,
    proposers: Sequence[Proposer],
    partitioner: Partitioner | None,
    perf_model: PerfModel | None,
    seconds: float | None,
) -> tuple[Placement, int, int]:
    """Try proposals one by one, as TorchRec's planner does.

    Args:
        inputs: The inputs of the plan.
        enumerator: The enumerator of its options.
        proposers: Tried in order; `default_proposers` if there are none.
        partitioner: Places the proposals; `GreedyPerfPartitioner` by default.
        perf_model: Rates placed proposals; `NoopPerfModel` by default.
        seconds: Time limit.

    Returns:
        The best placement, the number of proposals tried, and how many of them could be placed.

    Raises:
        PlannerError: No proposal can be placed, or the time is over before one has been.
    """
    partitioner = partitioner or GreedyPerfPartitioner()
    perf_model = perf_model or NoopPerfModel(inputs.topology)
    deadline = time.perf_counter() + (seconds or math.inf)
    proposals = 0
    placed_proposals = 0
    best = None
    best_rating = math.inf
    for proposer in proposers or default_proposers():
        proposer.load(list(inputs.options), enumerator)
        while (proposal := proposer.propose()) is not None and time.perf_counter() < deadline:
            proposals += 1
            check_tables_are_distinct(f"what {type(proposer).__name__} proposed", proposal)
            try:
                placed = partitioner.partition(deepcopy(proposal), inputs.reserved)
            except PlannerError:
                proposer.feedback(False, proposal, storage_constraint=inputs.reserved)
                continue

            placed_proposals += 1
            rating = perf_model.rate(placed)
            if best is None or rating < best_rating:
                best = placed
                best_rating = rating

            proposer.feedback(True, placed, rating, inputs.reserved)

    if best is None and time.perf_counter() >= deadline:
        raise PlannerError(
            f"timeout_seconds={seconds:g} ended after {several(proposals, 'proposal')}, of which "
            "none could be placed: allow more time, or leave proposer, partitioner and "
            "performance_model out, and the planner searches for itself",
            PlannerErrorType.PARTITION,
        )
    if best is None:
        raise why_infeasible(inputs, proposed=True)

    source = f"what {type(partitioner).__name__} placed"
    return options_placement(inputs.problem, best, source), proposals, placed_proposals

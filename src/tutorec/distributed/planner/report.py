"""Inputs and results of planning: the numbers behind explanations, figures and statistics."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import numpy as np

from tutorec.distributed.planner.bounds import Bound, lower_bound
from tutorec.distributed.planner.constraints import Constraints, ParameterConstraints
from tutorec.distributed.planner.enumerators import Refusal
from tutorec.distributed.planner.options import PERF_FIELDS, ShardingOption
from tutorec.distributed.planner.problem import (
    Choice,
    Floats,
    Ints,
    Placement,
    PlanningProblem,
    cost,
    rank_memory,
)
from tutorec.distributed.planner.topology import Topology, memory_of
from tutorec.errors import PlannerError

MEMORIES = ("HBM", "DDR")
_COMPUTE = [PERF_FIELDS.index(name) for name in ("fwd_compute", "bwd_compute", "prefetch_compute")]


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of a plan: the options of every table, the machines, and the constraints.

    Args:
        options: Every legal option of every table, with estimates, in the order of the model's
            tables.
        problem: The same as numbers, for the search.
        topology: The machines.
        reserved: The machines with the storage available to tables.
        batch_size: B per rank.
        constraints: Table name -> its constraints.
        refusals: Ways to shard a table that are not options, and why.
        remake: Returns the inputs with other ``constraints`` of some tables, ``topology`` or
            ``batch_size``, enumerated, estimated and reserved again. None in other processes than
            the planner's, which do not have the model.
    """

    options: Sequence[ShardingOption]
    problem: PlanningProblem
    topology: Topology
    reserved: Topology
    batch_size: int
    constraints: Constraints = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    remake: Callable[..., PlanInputs] | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "remake": None}

    def constraint(self, table: str) -> ParameterConstraints:
        """The constraints of a table; empty ones if it has none."""
        return self.constraints.get(table) or ParameterConstraints()

    def remade(self, **changes: Any) -> PlanInputs | None:
        """The inputs after a change; None if the model is missing or contradicts the change."""
        if self.remake is None:
            return None
        try:
            with warnings.catch_warnings():
                # about constraints: the caller has been warned already
                warnings.simplefilter("ignore")
                return self.remake(**changes)
        except PlannerError:
            return None


@dataclass(frozen=True, eq=False)
class PlanReport:
    """The result of planning.

    Args:
        inputs: The inputs.
        placement: The choice of each table and the ranks of its shards.
        seconds: Planning time.
        searched: Name of the search.
        gap: The relative gap between cost and bound, if a solver has proven it.
    """

    inputs: PlanInputs
    placement: Placement
    seconds: float = 0.0
    searched: str = ""
    gap: float | None = None

    @property
    def problem(self) -> PlanningProblem:
        """The problem that was solved."""
        return self.inputs.problem

    @cached_property
    def bound(self) -> Bound:
        """A lower bound on the time of every plan for these inputs."""
        return lower_bound(self.problem)

    @cached_property
    def cost(self) -> float:
        """Milliseconds of a step."""
        return cost(self.problem, self.placement)

    @cached_property
    def taken(self) -> list[Choice]:
        """The choice of each table."""
        return self.placement.taken(self.problem)

    @cached_property
    def rank_parts(self) -> Floats:
        """``[W, 2]`` ms of each rank: memory work, and exchanges."""
        parts = np.zeros((self.problem.world_size, 2))
        for choice, ranks in zip(self.taken, self.placement.ranks, strict=True):
            np.add.at(parts, ranks, choice_parts(choice))
        return parts

    @cached_property
    def rank_memory(self) -> Ints:
        """``[W, 2]`` bytes of tables on each rank: HBM, DDR."""
        return rank_memory(self.problem, self.placement)

    @cached_property
    def whole_memory(self) -> Ints:
        """``[W, 2]`` bytes of each rank's memory, including what is reserved."""
        return memory_of(self.inputs.topology)[:, :2]

    @property
    def memory(self) -> int:
        """Index of the memory that tables fill most: 0 HBM, 1 DDR."""
        room = np.maximum(self.problem.capacity, 1)
        return int((self.rank_memory / room).max(axis=0, initial=0.0).argmax())


def choice_parts(choice: Choice) -> Floats:
    """``[P, 2]`` ms of each shard: memory work, and exchanges."""
    perf = np.sum([option_perf(option) for option in choice.options], axis=0)
    compute = perf[:, _COMPUTE].sum(axis=1)
    return np.stack([compute, perf.sum(axis=1) - compute], axis=1)


def option_perf(option: ShardingOption) -> Floats:
    """``[P, 6]`` ms of the shards of an option, in the order of `Perf`."""
    perf = option.pieces().perf
    assert perf is not None, f"table {option.name!r} was planned without an estimate of its time"
    return perf


def names_of(choice: Choice) -> str:
    """The table of a choice; all tables of a colocated group."""
    return " + ".join(option.name for option in choice.options)


def type_of(choice: Choice) -> str:
    """Sharding type, an unusual kernel, and the fraction of cached rows."""
    option = choice.options[0]
    if option.cache_load_factor is not None:
        return f"{option.sharding_type} {100 * option.cache_load_factor:g} % cached"
    return (
        option.sharding_type
        if option.compute_kernel == "fused"
        else f"{option.sharding_type} {option.compute_kernel}"
    )


def find_table(report: PlanReport, name: str) -> int:
    """Index of a table in the problem.

    Args:
        report: The planner's report.
        name: Name of the table, or path and name.

    Raises:
        KeyError: No table has that name, or several modules have one.
    """
    known = {
        option.fqn.strip("."): number
        for number, choices in enumerate(report.problem.choices)
        for option in choices[0].options
    }
    wanted = str(name).strip(".")
    matches = [fqn for fqn in known if fqn == wanted] or [
        fqn for fqn in known if fqn.rpartition(".")[2] == wanted
    ]
    if len(matches) == 1:
        return known[matches[0]]
    if matches:
        raise KeyError(
            f"table {name!r} is in several modules, {', '.join(matches)}: give path and name"
        )
    near = get_close_matches(wanted, known, n=3) or list(known)[:5]
    raise KeyError(f"the plan has no table {name!r}; see {', '.join(map(repr, near))}")

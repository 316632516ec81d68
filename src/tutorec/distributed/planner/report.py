"""What a planner knew when it decided: what explanations, figures and statistics of a plan are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tutorec.distributed.planner.inputs import PlanInputs
from tutorec.distributed.planner.options import PERF_FIELDS, ShardingOption
from tutorec.distributed.planner.problem import Choice, Placement, PlanningProblem, cost, rank_memory

if TYPE_CHECKING:
    from tutorec.distributed.planner.bounds import Bound

MEMORIES = ("HBM", "DDR")
_COMPUTE = [PERF_FIELDS.index(name) for name in ("fwd_compute", "bwd_compute", "prefetch_compute")]


@dataclass(frozen=True, eq=False)
class PlanReport:
    """What a planner knew when it decided.

    Args:
        inputs: What the plan was made from.
        placement: The choice of each table and the ranks of its pieces.
        bound: A time that no plan for these inputs can be faster than.
        seconds: What the search took.
        searched: How it was found, in words.
        gap: How far the plan is from the best one at most, as a part of it, where a solver says so.
    """

    inputs: PlanInputs
    placement: Placement
    bound: Bound | None = None
    seconds: float = 0.0
    searched: str = ""
    gap: float | None = None

    @property
    def problem(self) -> PlanningProblem:
        """The numbers that were searched."""
        return self.inputs.problem

    @cached_property
    def cost(self) -> float:
        """Milliseconds of a step."""
        return cost(self.problem, self.placement)

    @cached_property
    def taken(self) -> list[Choice]:
        """The choice of each table."""
        return self.placement.taken(self.problem)

    @cached_property
    def rank_parts(self) -> NDArray[np.float64]:
        """``[W, 2]`` ms of each rank: looking up and updating, exchanging."""
        parts = np.zeros((self.problem.world_size, 2))
        for choice, ranks in zip(self.taken, self.placement.ranks, strict=True):
            np.add.at(parts, ranks, choice_parts(choice))
        return parts

    @cached_property
    def rank_memory(self) -> NDArray[np.int64]:
        """``[W, 2]`` bytes of tables on each rank: HBM, DDR."""
        return rank_memory(self.problem, self.placement)

    @cached_property
    def whole_memory(self) -> NDArray[np.int64]:
        """``[W, 2]`` bytes that each rank has, tables or not."""
        devices = self.inputs.topology.devices
        return np.array([[device.storage.hbm, device.storage.ddr] for device in devices], dtype=np.int64)

    @property
    def memory(self) -> int:
        """The number of the memory that tables fill most: 0 HBM, 1 DDR."""
        room = np.maximum(self.problem.capacity, 1)
        return int((self.rank_memory / room).max(axis=0, initial=0.0).argmax())

    def __getstate__(self) -> dict[str, Any]:
        # Without the function that plans again, which holds the model; what is computed is computed again.
        names = ("placement", "bound", "seconds", "searched", "gap")
        return {"inputs": replace(self.inputs, remake=None), **{name: getattr(self, name) for name in names}}


def choice_parts(choice: Choice) -> NDArray[np.float64]:
    """``[P, 2]`` ms of each piece: looking up and updating, exchanging."""
    perf = np.sum([option_perf(option) for option in choice.options], axis=0)
    compute = perf[:, _COMPUTE].sum(axis=1)
    return np.stack([compute, perf.sum(axis=1) - compute], axis=1)


def option_perf(option: ShardingOption) -> NDArray[np.float64]:
    """``[P, 6]`` ms of the pieces of an option, columns as the fields of `Perf`."""
    perf = option.pieces().perf
    assert perf is not None, f"table {option.name!r} was planned without an estimate of its time"
    return perf


def names_of(choice: Choice) -> str:
    """The table of a choice; of tables that lie together, all."""
    return " + ".join(option.name for option in choice.options)


def type_of(choice: Choice) -> str:
    """Sharding type, and the kernel where it is not the usual one, with the part of the rows in its cache."""
    option = choice.options[0]
    if option.cache_load_factor is not None:
        return f"{option.sharding_type} {100 * option.cache_load_factor:g} % cached"
    return (
        option.sharding_type if option.compute_kernel == "fused" else f"{option.sharding_type} {option.compute_kernel}"
    )


def find_table(report: PlanReport, name: str) -> int:
    """The number of a table in the problem.

    Args:
        report: Of the planner.
        name: Of the table, or path and name.

    Raises:
        KeyError: None has that name, or several modules have one.
    """
    known = {
        option.fqn.strip("."): number
        for number, choices in enumerate(report.problem.choices)
        for option in choices[0].options
    }
    name = str(name)
    wanted = name.strip(".")
    found = [fqn for fqn in known if fqn == wanted] or [fqn for fqn in known if fqn.rpartition(".")[2] == wanted]
    if len(found) == 1:
        return known[found[0]]
    if found:
        raise KeyError(f"table {name!r} is in several modules, {', '.join(found)}: give path and name")
    raise KeyError(f"the plan has no table {name!r}; {_close(name, list(known))}")


def _close(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=3) or list(known[:5])
    return f"see {', '.join(map(repr, near))}" if near else "it has none"

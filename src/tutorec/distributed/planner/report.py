"""Inputs and results of planning: the numbers behind explanations and statistics, and their figure.

In the figure a rank has the color that it has on every page of the book, light or dark. Within a
bar, the strong part is memory work and the light part exchanges. Matplotlib is imported when a
figure is made; its global state is not changed.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tutorec._style import INK, STYLE, rank_color
from tutorec._text import byte_unit, bytes_text, ms_text, spaced_percents
from tutorec.distributed.planner.constraints import Constraints, ParameterConstraints
from tutorec.distributed.planner.enumerators import Refusal
from tutorec.distributed.planner.options import PERF_FIELDS, ShardingOption
from tutorec.distributed.planner.problem import (
    MEMORIES,
    Bound,
    Choice,
    Floats,
    Ints,
    Placement,
    PlanningProblem,
    cost,
    lower_bound,
    rank_memory,
)
from tutorec.distributed.planner.topology import Topology
from tutorec.errors import PlannerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COMPUTE = [PERF_FIELDS.index(name) for name in ("fwd_compute", "bwd_compute", "prefetch_compute")]
# With more ranks the bars have no labels, and the figure does not become higher.
_BARS = 32


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
        for choice, ranks in self.placement.placed(self.problem):
            perf = choice_perf(choice)
            compute = perf[:, _COMPUTE].sum(axis=1)
            np.add.at(parts, ranks, np.stack([compute, perf.sum(axis=1) - compute], axis=1))
        return parts

    @cached_property
    def rank_times(self) -> Floats:
        """``[W]`` ms of each rank."""
        return self.rank_parts.sum(axis=1)

    @cached_property
    def rank_memory(self) -> Ints:
        """``[W, 2]`` bytes of tables on each rank: HBM, DDR."""
        return rank_memory(self.problem, self.placement)

    @cached_property
    def fullness(self) -> Floats:
        """``[W, 2]``: the filled fraction of each rank's memory for tables."""
        return self.rank_memory / np.maximum(self.problem.capacity, 1)

    @property
    def memory(self) -> int:
        """Index of the memory that tables fill most: 0 HBM, 1 DDR."""
        return int(self.fullness.max(axis=0, initial=0.0).argmax())


def choice_perf(choice: Choice) -> Floats:
    """``[P, 6]`` ms of the shards of a choice, in the order of `Perf`."""
    # Options without estimates do not reach a problem: `ShardingOption.times` refuses them.
    estimates: Any = [option.pieces().perf for option in choice.options]
    return np.sum(estimates, axis=0)


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


# --- figure


def plan_figure(report: PlanReport, claim: str | None = None) -> Figure:
    """Two panels with a bar per rank: milliseconds of a step, and bytes of tables with their limit.

    Args:
        report: The planner's report.
        claim: Title; may use {slowest}, {step}, {over} (slowest rank relative to the mean),
            {fullest}, {full} (filled fraction of its memory), {memory}. The default title states
            what the figure shows.

    Raises:
        KeyError: The claim uses another name.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    facts = figure_facts(report)
    wanted = claim or (
        "Rank {slowest} takes {step} ms, {over:.0%} above the mean; rank {fullest} is "
        "{full:.0%} full"
    )
    try:
        title = spaced_percents(wanted.format(**facts))
    except KeyError as error:
        raise KeyError(
            f"claim {wanted!r} asks for {error}; this figure knows {', '.join(sorted(facts))}"
        ) from None
    world = report.problem.world_size
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 1.6 + 0.34 * min(world, _BARS)), layout="constrained")
        FigureCanvasAgg(figure)
        time_axes, memory_axes = figure.subplots(1, 2, sharey=True)
        _bars(time_axes, memory_axes, report)
        figure.suptitle("\n".join(textwrap.wrap(title, 70)), x=0.012, ha="left", fontsize=13)
    return figure


def figure_facts(report: PlanReport) -> dict[str, Any]:
    """The values that the title of a figure may use."""
    times, full = report.rank_times, report.fullness[:, report.memory]
    mean = float(times.mean())
    return {
        "slowest": int(times.argmax()),
        "step": ms_text(float(times.max())),
        "over": float(times.max()) / mean - 1 if mean else 0.0,
        "fullest": int(full.argmax()),
        "full": float(full.max()),
        "memory": MEMORIES[report.memory],
    }


def _bars(time_axes: Axes, memory_axes: Axes, report: PlanReport) -> None:
    ranks, kind = np.arange(report.problem.world_size), report.memory
    colors = [rank_color(rank) for rank in ranks.tolist()]
    lookup, exchange = report.rank_parts.T
    bar: dict[str, Any] = {"color": colors, "height": 0.62}
    time_axes.barh(ranks, lookup, **bar)
    hatched: dict[str, Any] = {"hatch": "///", "edgecolor": "white", "linewidth": 0.0}
    exchanges = time_axes.barh(ranks, exchange, left=lookup, **bar, **hatched)
    time_axes.set_xlabel("ms of a step (hatched: exchange)")
    time_axes.invert_yaxis()
    time_axes.margins(x=0.2)

    held, room = report.rank_memory[:, kind], report.problem.capacity[:, kind]
    scale, unit = byte_unit(float(room.max()))
    few = len(ranks) <= _BARS
    outline: dict[str, Any] = (
        {"color": "none", "edgecolor": INK, "linewidth": 1.2} if few else {"color": "0.85"}
    )
    rooms = memory_axes.barh(ranks, room / scale, **bar | outline)
    memory_axes.barh(ranks, held / scale, **bar)
    memory_axes.set_xlabel(
        f"{unit} of {MEMORIES[kind]} ({'outline' if few else 'gray'}: room for tables)"
    )
    memory_axes.margins(x=0.28)
    if not few:
        time_axes.set_ylabel("rank")
        return
    time_axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks.tolist()])
    time_axes.bar_label(exchanges, [*map(ms_text, report.rank_times)], padding=4, fontsize=10)
    memory_axes.bar_label(rooms, [*map(bytes_text, held)], padding=4, fontsize=10)

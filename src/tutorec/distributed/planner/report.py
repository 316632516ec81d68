"""Results of planning: a plan with its inputs, and its explanation.

`PlannedSharding` is the plan, with the `PlanReport` of its planner. Explanations and figures are
made of the report: time and memory of each rank, and why each table is sharded as it is. The cost
of an alternative for one table is computed with all other tables unchanged; no search is run.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import numpy as np

from tutorec._text import (
    WIDTH,
    Explanation,
    Facts,
    TextTable,
    bytes_text,
    ms_text,
    ranks_text,
    several,
)
from tutorec.distributed.plan.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tutorec.distributed.planner.enumerators import Refusal
from tutorec.distributed.planner.figure import plan_figure
from tutorec.distributed.planner.options import Constraints, ParameterConstraints, ShardingOption
from tutorec.distributed.planner.problem import (
    MEMORIES,
    Bound,
    Choice,
    Floats,
    Ints,
    Placement,
    PlacementRule,
    PlanningProblem,
    cost,
    fixed_time,
    lower_bound,
    rank_memory,
    rank_sums,
)
from tutorec.distributed.planner.search import with_choice
from tutorec.distributed.planner.shard_estimators import StoredBytes, stored_bytes
from tutorec.distributed.planner.topology import PERF_FIELDS, Topology, device_memory
from tutorec.errors import PlannerError

_COMPUTE = [PERF_FIELDS.index(name) for name in ("fwd_compute", "bwd_compute", "prefetch_compute")]
# Maximum number of ranks or tables shown.
_RANKS_SHOWN = 16
_TABLES_SHOWN = 24
_BAR = 12
_STEP_NOTE = (
    "step: milliseconds of the whole step if the table had to be sharded so and the other "
    "tables stayed where they are."
)
# In the order of the fields of `Perf`.
_PERF_NAMES = ("lookup", "pooled rows", "update", "gradients", "ids", "prefetch")


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
    def choices(self) -> list[Choice]:
        """The choice of each table."""
        return self.placement.choices(self.problem)

    @cached_property
    def rank_parts(self) -> Floats:
        """``[W, 2]`` ms of each rank: memory work, and exchanges."""

        def parts(choice: Choice) -> Floats:
            perf = choice_perf(choice)
            compute = perf[:, _COMPUTE].sum(axis=1)
            return np.stack([compute, perf.sum(axis=1) - compute], axis=1)

        return rank_sums(self.problem, self.placement, parts)

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

    @cached_property
    def step_parts(self) -> dict[str, float]:
        """Milliseconds of the slowest rank by activity, and the latency; their sum is `cost`.

        The latency is that of all exchanges, however few bytes they carry.
        """
        memory_work, exchanges = self.rank_parts[int(self.rank_times.argmax())].tolist()
        latency = fixed_time(self.problem, self.choices)
        return {
            "lookup and update": memory_work,
            "bytes on the wire": exchanges,
            "latency": latency,
        }

    @property
    def weight_bytes(self) -> list[int]:
        """Bytes of weights on each rank, in memory or in a file; without optimizer state."""
        return self._stored(lambda stored: stored.weights)

    @property
    def held_bytes(self) -> list[int]:
        """Bytes of weights and optimizer state on each rank, without buffers and caches.

        `tutorec.spmd.held_bytes` gives the bytes that a rank holds of a model.
        """
        return self._stored(lambda stored: stored.weights + stored.state)

    def _stored(self, component: Callable[[StoredBytes], Ints]) -> list[int]:
        """The sum on each rank of some bytes of its shards."""
        topology = self.inputs.topology

        def choice_bytes(choice: Choice) -> Ints:
            stored = [
                stored_bytes(
                    option.profile,
                    ShardingType(option.sharding_type),
                    option.compute_kernel,
                    option.shard_arrays().sizes,
                    topology,
                )
                for option in choice.options
            ]
            return np.sum([component(option_bytes) for option_bytes in stored], axis=0)

        return rank_sums(self.problem, self.placement, choice_bytes).tolist()


def choice_perf(choice: Choice) -> Floats:
    """``[P, 6]`` ms of the shards of a choice, in the order of `Perf`."""
    # Options without estimates do not reach a problem: `ShardingOption.times` refuses them.
    estimates: Any = [option.shard_arrays().perf for option in choice.options]
    return np.sum(estimates, axis=0)


def table_names(choice: Choice) -> str:
    """The table of a choice; all tables of a colocated group."""
    return " + ".join(option.name for option in choice.options)


def sharding_text(choice: Choice) -> str:
    """Sharding type, an unusual kernel, and the fraction of cached rows."""
    option = choice.options[0]
    if option.cache_load_factor is not None:
        return f"{option.sharding_type} {100 * option.cache_load_factor:g} % cached"

    return (
        option.sharding_type
        if option.compute_kernel == "fused"
        else f"{option.sharding_type} {option.compute_kernel}"
    )


@dataclass(eq=False)
class PlannedSharding(ShardingPlan):
    """A plan with the report of its planner.

    It is a `ShardingPlan`, and equals every plan with the same entries. `save` writes the plan
    without the report.

    Args:
        report: The planner's report; None if it is not available.

    Example:
        >>> PlannedSharding() == ShardingPlan() and ShardingPlan() == PlannedSharding()
        True
    """

    # The documentation of this class resolves the inherited annotation here.
    plan: dict[str, EmbeddingModuleShardingPlan] = field(default_factory=dict)
    report: PlanReport | None = field(default=None, repr=False)

    def explain(self, table: str | None = None) -> Explanation:
        """Explain the plan, or the sharding of one table; prints as text, in a notebook as HTML.

        Args:
            table: Name of the table, or path and name.

        Raises:
            KeyError: There is no such table.
            PlannerError: The plan has no report.
        """
        report = self._reported()
        return explain_plan(report) if table is None else explain_table(report, table)

    def plot(self, claim: str | None = None) -> Any:
        """Memory and time of each rank as a matplotlib figure.

        Raises:
            PlannerError: The plan has no report.
        """
        report = self._reported()
        memory = report.memory
        return plan_figure(
            report.rank_parts,
            used=report.rank_memory[:, memory],
            room=report.problem.capacity[:, memory],
            memory=MEMORIES[memory],
            claim=claim,
        )

    def load_factors(self) -> dict[str, float]:
        """The fraction of the rows of each table that its rank keeps in fast memory.

        It is that of the cache of a cached table, 0 for another table in a file or in the memory
        of the host, and 1 for every other table. A table's key is its name, with the path of its
        collection if several tables have that name.

        Example:
            >>> PlannedSharding().load_factors()
            {}
        """
        return {name: _load_factor(entry) for name, entry in named_entries(self).items()}

    def _reported(self) -> PlanReport:
        if not self.plan:
            raise PlannerError(
                "there is nothing to explain: the model has no table that a sharder shards; plan "
                "the model that holds the collections, with a sharder for each class of them"
            )
        if self.report is None:
            raise PlannerError(
                "this plan came without the report of its planner, which explains and plots it: "
                "ask the plan that EmbeddingShardingPlanner.plan returned"
            )

        return self.report

    def __eq__(self, other: object) -> bool:
        return self.plan == other.plan if isinstance(other, ShardingPlan) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def named_entries(plan: ShardingPlan) -> dict[str, ParameterSharding]:
    """The entry of each table; its key has the path where several tables have the same name."""
    entries = [
        (path, name, entry) for path, tables in plan.plan.items() for name, entry in tables.items()
    ]
    counts = Counter(name for _, name, _ in entries)
    return {
        name if counts[name] == 1 else f"{path}.{name}".strip("."): entry
        for path, name, entry in entries
    }


def _load_factor(entry: ParameterSharding) -> float:
    if entry.compute_kernel == EmbeddingComputeKernel.FUSED_UVM.value:
        return 0.0
    factor = getattr(entry.cache_params, "load_factor", None)
    return 1.0 if factor is None else factor


# --- the whole plan


def explain_plan(report: PlanReport, tables: bool = True) -> Explanation:
    """Time and memory of each rank, and the bound; with ``tables`` also each table."""
    problem = report.problem
    topology = report.inputs.topology
    hosts = problem.world_size // topology.local_world_size
    local_size = topology.local_world_size
    machines = f" ({hosts} hosts of {local_size})" if hosts > 1 else ""
    count = several(sum(len(choices[0].options) for choices in problem.choices), "table")
    title = (
        f"A plan for {count} on "
        f"{several(problem.world_size, f'{topology.compute_device} rank')}{machines}, with "
        f"{several(report.inputs.batch_size, 'sample')} on each rank."
    )
    options = several(sum(len(choices) for choices in problem.choices), "option")
    refused = len(report.inputs.refusals)
    others = f", {several(refused, 'other')} refused" if refused else ""
    how = f"; {report.searched}" if report.searched else ""
    lines = [
        *_step_facts(report),
        *_memory_facts(report),
        ("search", f"{options} in {report.seconds:.2f} s{others}{how}."),
        ("speeds", f"{topology.source}."),
    ]
    table_blocks = _tables_blocks(report) if tables else ()

    return Explanation([title, Facts(lines), *_ranks_blocks(report), *table_blocks])


def _step_facts(report: PlanReport) -> Iterable[tuple[str, str]]:
    times = report.rank_times
    fixed = fixed_time(report.problem, report.choices)
    slowest = int(times.argmax())
    groups = several(
        len({group for choice in report.choices for group in choice.groups}), "sharding type"
    )
    latency = (
        f" and {ms_text(fixed)} ms for the exchanges of {groups}, however little they carry"
        if fixed
        else ""
    )
    text = (
        f"{ms_text(report.cost)} ms expected: {ms_text(times[slowest])} ms on rank {slowest}, "
        f"which has the most to do,{latency}. The mean of all ranks is {ms_text(times.mean())} ms."
    )
    yield "step", text
    if report.bound.ms > 0:
        over = max(report.cost / report.bound.ms - 1, 0.0)
        near = "among the best" if over < 5e-4 else f"at most {100 * over:.1f} % above the best"
        yield (
            "bound",
            (
                f"no plan takes less than {ms_text(report.bound.ms)} ms ({report.bound.reason}): "
                f"this one is {near}."
            ),
        )

    if report.gap is not None:
        yield (
            "gap",
            f"the solver leaves {100 * report.gap:.2f} % between this plan and the best one.",
        )

    shards, largest, _ = _on_ranks(report)
    if shards[slowest] == 1 and report.problem.world_size > 1:
        text = (
            f"rank {slowest} has a single shard, of table {largest[slowest]!r}: no other place "
            "for tables makes the step shorter, only another cut of this one."
        )
        yield "limit", text


def _memory_facts(report: PlanReport) -> Iterable[tuple[str, str]]:
    installed = device_memory(report.inputs.topology)
    for memory, name in enumerate(MEMORIES):
        used = report.rank_memory[:, memory]
        room = report.problem.capacity[:, memory]
        if not used.any():
            continue

        full = report.fullness[:, memory]
        fullest = int(full.argmax())
        has = installed[fullest, memory]
        reserved_text = (
            f"; {bytes_text(has - room[fullest])} of its {bytes_text(has)} are kept for "
        )
        reserved = f"{reserved_text}everything else" if has > room[fullest] else ""
        text = (
            f"{bytes_text(used.sum())} in all; rank {fullest} is the fullest with "
            f"{bytes_text(used[fullest])} of {bytes_text(room[fullest])} "
            f"({100 * full[fullest]:.1f} %){reserved}."
        )
        yield name, text

    files = sum(
        int(option.total_storage.ssd) for choice in report.choices for option in choice.options
    )
    if files:
        yield "SSD", f"{bytes_text(files)} in files."


def _table(rows: Sequence[Mapping[str, str]], text_columns: Collection[str]) -> TextTable:
    """A table of rows (column -> cell); columns of text are aligned left."""
    head = list(rows[0])
    right = [number for number, name in enumerate(head) if name not in text_columns]
    return TextTable(head, [list(row.values()) for row in rows], right, WIDTH)


def _ranks_blocks(report: PlanReport) -> Iterable[TextTable | str]:
    """A row per rank; in a large world for the slowest, the fullest and the fastest only."""
    memory = report.memory
    times = report.rank_times
    used = report.rank_memory[:, memory]
    full = report.fullness[:, memory]
    shards, largest, largest_ms = _on_ranks(report)
    rows_shown = list(range(len(times)))
    if len(rows_shown) > _RANKS_SHOWN:
        slowest_first = np.argsort(-times, kind="stable").tolist()
        fullest = int(used.argmax())
        rows_shown = sorted(
            {*slowest_first[:8], fullest, *slowest_first[-3:]}, key=slowest_first.index
        )

    rows = [
        {
            "rank": f"{rank}",
            "ms": ms_text(times[rank]),
            "": "#" * round(_BAR * times[rank] / (times.max() or 1.0)),
            "lookup": ms_text(report.rank_parts[rank, 0]),
            "exchange": ms_text(report.rank_parts[rank, 1]),
            MEMORIES[memory]: bytes_text(used[rank]),
            "full": f"{100 * full[rank]:.0f} %",
            "shards": f"{shards[rank]}",
            "largest part": f"{largest[rank]} {100 * largest_ms[rank] / times[rank]:.0f} %"
            if times[rank]
            else "",
        }
        for rank in rows_shown
    ]
    yield _table(rows, ("", "largest part"))
    hidden = np.setdiff1d(np.arange(len(times)), rows_shown)
    if len(hidden):
        takes, holds = ("takes", "holds") if len(hidden) == 1 else ("take", "hold")
        times = times[hidden]
        used = used[hidden]
        yield (
            f"{several(len(hidden), 'other rank')} {takes} {ms_text(times.min())} to "
            f"{ms_text(times.max())} ms and {holds} {bytes_text(used.min())} to "
            f"{bytes_text(used.max())}."
        )


def _on_ranks(report: PlanReport) -> tuple[Ints, list[str], Floats]:
    """Number of shards per rank, and the table with most of its time, with that time."""
    problem = report.problem
    placement = report.placement
    shards = rank_sums(
        problem, placement, lambda choice: np.full(len(choice.time), len(choice.options))
    )
    times = np.zeros((len(report.choices), problem.world_size))
    for (choice, ranks), table_times in zip(
        placement.choices_and_ranks(problem), times, strict=True
    ):
        np.add.at(table_times, ranks, choice.time)

    names = [table_names(report.choices[table]) for table in times.argmax(axis=0).tolist()]
    return shards, names, times.max(axis=0)


def _tables_blocks(report: PlanReport) -> Iterable[TextTable | str]:
    """A row per table, those with the most work first."""
    rows = []
    heaviest = np.argsort([-choice.time.sum() for choice in report.choices], kind="stable").tolist()
    for table in heaviest[:_TABLES_SHOWN]:
        choice = report.choices[table]
        ranks = report.placement.ranks[table]
        everywhere = len(set(ranks.tolist())) == report.problem.world_size > 1
        steps = steps_of_choices(report, table)
        del steps[int(report.placement.chosen[table])]
        other = min(steps, key=steps.__getitem__, default=-1)
        fits = np.isfinite(steps.get(other, np.inf))
        rows.append(
            {
                "table": table_names(choice),
                "sharding": sharding_text(choice),
                "ranks": "all" if everywhere else ranks_text(ranks),
                "ms": ms_text(choice.longest),
                MEMORIES[report.memory]: bytes_text(int(choice.memory[:, report.memory].sum())),
                "otherwise": sharding_text(report.problem.choices[table][other])
                if fits
                else "nothing",
                "step": ms_text(steps[other]) if fits else "",
            }
        )

    yield _table(rows, ("table", "sharding", "ranks", "otherwise"))
    hidden = Counter(sharding_text(report.choices[table]) for table in heaviest[_TABLES_SHOWN:])
    shardings = ", ".join(f"{count:,} {sharding}" for sharding, count in hidden.most_common())
    rest = (
        f"{several(hidden.total(), 'table')} that take less time: {shardings}. " if hidden else ""
    )
    yield (
        f"{rest}ms: of the table's longest shard. otherwise: the best other way to shard the "
        "table, and what the step would take if the other tables stayed where they are; "
        "explain('table') tells more."
    )


def steps_of_choices(report: PlanReport, table: int) -> dict[int, float]:
    """Ms of a step for each choice of a table, others unchanged; infinite if it does not fit."""
    steps = {}
    for number in range(len(report.problem.choices[table])):
        placement = report.placement
        if number != placement.chosen[table]:
            placement = with_choice(report.problem, placement, table, number)
        steps[number] = np.inf if placement is None else cost(report.problem, placement)

    return steps


# --- one table


def find_table(report: PlanReport, name: str) -> tuple[int, ShardingOption]:
    """Index of a table in the problem, and its option in the plan.

    Args:
        report: The planner's report.
        name: Name of the table, or path and name.

    Raises:
        KeyError: No table has that name, or several modules have one.
    """
    known = {
        option.fqn.strip("."): (number, option)
        for number, choice in enumerate(report.choices)
        for option in choice.options
    }
    path = str(name).strip(".")
    named = [path] if path in known else [fqn for fqn in known if fqn.endswith(f".{path}")]
    if len(named) == 1:
        return known[named[0]]
    if named:
        raise KeyError(
            f"table {name!r} is in several modules, {', '.join(named)}: give path and name"
        )

    near = get_close_matches(path, known, n=3) or list(known)[:5]
    raise KeyError(f"the plan has no table {name!r}; see {', '.join(map(repr, near))}")


def explain_table(report: PlanReport, name: str) -> Explanation:
    """The choice for one table, its alternatives, and the refused ones.

    Raises:
        KeyError: There is no such table.
    """
    table, option = find_table(report, name)
    profile = option.profile
    size = bytes_text(profile.rows * profile.row_bytes(profile.columns))
    module = f" of module {profile.path!r}" if profile.path else ""
    blocks = [
        (
            f"Table {profile.name!r}{module}: {profile.rows:,} rows of {profile.columns} columns, "
            f"{size}."
        ),
        Facts(list(_table_facts(report, table, option))),
        _options_table(report, table),
        _STEP_NOTE,
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for refusal in report.inputs.refusals:
        if (refusal.path, refusal.table) == (profile.path, option.name):
            reasons.setdefault((refusal.compute_kernel, refusal.reason), []).append(
                refusal.sharding_type
            )

    if reasons:
        lines = [
            ("", f"{', '.join(sharding_types)}{kernel and ' '}{kernel}: {reason}")
            for (kernel, reason), sharding_types in reasons.items()
        ]
        blocks.append(Facts(lines, "not considered"))

    return Explanation(blocks)


def _table_facts(
    report: PlanReport, table: int, option: ShardingOption
) -> Iterable[tuple[str, str]]:
    choice = report.choices[table]
    ranks = report.placement.ranks[table]
    profile = option.profile
    bags = "bags" if profile.pooled else "lists"
    ids = f"{profile.total_ids:,.0f} ids in {profile.total_samples:,.0f} {bags} of a rank's batch"
    yield "read by", f"{', '.join(profile.features) or 'no feature'}: {ids}"
    others = [other.name for other in choice.options if other is not option]
    if others:
        yield (
            "colocated with",
            f"{', '.join(others)}, as its constraint says; times and bytes are of all of them",
        )

    kernel = f"kernel {option.compute_kernel}, {several(len(ranks), 'shard')}"
    yield "chosen", f"{sharding_text(choice)}, {kernel}, on {_where(report, ranks)}"
    longest = int(choice.time.argmax())
    busiest = int(ranks[longest])
    perf = choice_perf(choice)[longest].tolist()
    perf_texts = [
        f"{name} {ms_text(ms)}" for name, ms in zip(_PERF_NAMES, perf, strict=True) if ms > 0
    ]
    rank_ms = ms_text(float(report.rank_times[busiest]))
    yield (
        "time",
        (
            f"{ms_text(choice.time[longest])} ms of rank {busiest}'s {rank_ms} ms: "
            f"{', '.join(perf_texts) or 'nothing'}"
        ),
    )
    for index, memory in enumerate(MEMORIES):
        used = choice.memory[:, index]
        if used.any():
            most = f", {bytes_text(used.max())} in the largest shard" if len(used) > 1 else ""
            yield memory, f"{bytes_text(used.sum())}{most}"


def _where(report: PlanReport, ranks: Ints) -> str:
    distinct = set(ranks.tolist())
    if len(distinct) == report.problem.world_size > 1:
        return "every rank"
    return f"{'rank' if len(distinct) == 1 else 'ranks'} {ranks_text(distinct)}"


def _options_table(report: PlanReport, table: int) -> TextTable:
    choices = report.problem.choices[table]
    steps = steps_of_choices(report, table)
    has_caches = any(choice.options[0].cache_load_factor is not None for choice in choices)
    memory_name = MEMORIES[report.memory]
    rows = []
    for number in sorted(steps, key=lambda number: (steps[number], choices[number].preference)):
        choice = choices[number]
        step = steps[number]
        memory = choice.memory[:, report.memory]
        factor = choice.options[0].cache_load_factor

        # The cache has its own column: in a long row names are shortened, numbers are not.
        cached = {"cached": "" if factor is None else f"{100 * factor:g} %"}
        chosen = number == report.placement.chosen[table]
        rows.append(
            {
                "option": sharding_text(choice)
                if factor is None
                else choice.options[0].sharding_type,
                **(cached if has_caches else {}),
                "shards": f"{len(choice.time)}",
                "ms largest": ms_text(choice.longest),
                "ms all": ms_text(choice.time.sum()),
                f"{memory_name} largest": bytes_text(memory.max(initial=0)),
                f"{memory_name} all": bytes_text(memory.sum()),
                "step": ms_text(step) if np.isfinite(step) else "-",
                "": "chosen" if chosen else _verdict(report, choice, step),
            }
        )

    return _table(rows, ("option", ""))


def _verdict(report: PlanReport, choice: Choice, step: float) -> str:
    if np.isfinite(step):
        over = step / report.cost - 1 if report.cost else 0.0
        return "no better" if abs(over) < 5e-4 else f"{100 * over:+.1f} %"
    if (
        choice.allowed is not None
        and choice.rule is PlacementRule.EVERY_RANK
        and not choice.allowed.all()
    ):
        return "its pin leaves ranks out"

    lacking = int((choice.memory.max(axis=0) - report.problem.capacity.max(axis=0)).max())
    return f"over by {bytes_text(lacking)}" if lacking > 0 else "no room with others"

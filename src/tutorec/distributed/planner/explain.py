"""Explanations of a plan: time and memory of each rank, and why each table is sharded as it is.

Everything is taken from the planner's report. The cost of an alternative for one table is computed
with all other tables unchanged; no search is run.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

from tutorec._style import INK, STYLE, rank_color
from tutorec._text import (
    WIDTH,
    Explanation,
    Facts,
    TextTable,
    byte_unit,
    bytes_text,
    ms_text,
    ranks_text,
    several,
    spaced_percents,
)
from tutorec.distributed.plan.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.planner.placements import Packing
from tutorec.distributed.planner.problem import (
    MEMORIES,
    Choice,
    Floats,
    Ints,
    Placement,
    PlanningProblem,
    Spread,
    cost,
    fixed_time,
    rank_memory,
    rank_sums,
    rank_time,
)
from tutorec.distributed.planner.report import PlanReport, choice_perf, names_of, type_of
from tutorec.distributed.planner.topology import memory_of
from tutorec.errors import PlannerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Sharpness of the potential with which a table is placed anew where the slowest rank is fastest.
_SHARPEST = 100.0
# Maximum number of ranks or tables shown.
_RANKS_SHOWN, _TABLES_SHOWN = 16, 24
_BAR = 12
_STEP_NOTE = (
    "step: milliseconds of the whole step if the table had to be sharded so and the other "
    "tables stayed where they are."
)
# In the order of the fields of `Perf`.
_PERF_NAMES = ("lookup", "pooled rows", "update", "gradients", "ids", "prefetch")
# With more ranks the bars of the figure have no labels, and it does not become higher.
_BARS = 32


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
        return plan_figure(self._reported(), claim)

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
    problem, topology = report.problem, report.inputs.topology
    hosts, local_size = problem.world_size // topology.local_world_size, topology.local_world_size
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
    facts = [
        *_step_facts(report),
        *_memory_facts(report),
        ("search", f"{options} in {report.seconds:.2f} s{others}{how}."),
        ("speeds", f"{topology.source}."),
    ]
    of_tables = _tables_blocks(report) if tables else ()
    return Explanation([title, Facts(facts), *_ranks_blocks(report), *of_tables])


def _step_facts(report: PlanReport) -> Iterable[tuple[str, str]]:
    times, fixed = report.rank_times, fixed_time(report.problem, report.taken)
    slowest = int(times.argmax())
    groups = several(
        len({group for choice in report.taken for group in choice.groups}), "sharding type"
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
    whole = memory_of(report.inputs.topology)
    for kind, name in enumerate(MEMORIES):
        held, room = report.rank_memory[:, kind], report.problem.capacity[:, kind]
        if not held.any():
            continue
        full = report.fullness[:, kind]
        fullest = int(full.argmax())
        has = whole[fullest, kind]
        kept = f"; {bytes_text(has - room[fullest])} of its {bytes_text(has)} are kept for "
        reserved = f"{kept}everything else" if has > room[fullest] else ""
        text = (
            f"{bytes_text(held.sum())} in all; rank {fullest} is the fullest with "
            f"{bytes_text(held[fullest])} of {bytes_text(room[fullest])} "
            f"({100 * full[fullest]:.1f} %){reserved}."
        )
        yield name, text
    files = sum(
        int(option.total_storage.ssd) for choice in report.taken for option in choice.options
    )
    if files:
        yield "SSD", f"{bytes_text(files)} in files."


def _table(rows: Sequence[Mapping[str, str]], words: Collection[str]) -> TextTable:
    """A table of rows (column -> cell); the columns of words are aligned left."""
    head = list(rows[0])
    right = [number for number, name in enumerate(head) if name not in words]
    return TextTable(head, [list(row.values()) for row in rows], right, WIDTH)


def _ranks_blocks(report: PlanReport) -> Iterable[TextTable | str]:
    """A row per rank; in a large world for the slowest, the fullest and the fastest only."""
    memory, times = report.memory, report.rank_times
    held, full = report.rank_memory[:, memory], report.fullness[:, memory]
    shards, largest, part = _on_ranks(report)
    shown = list(range(len(times)))
    if len(shown) > _RANKS_SHOWN:
        slowest_first = np.argsort(-times, kind="stable").tolist()
        fullest = int(held.argmax())
        shown = sorted({*slowest_first[:8], fullest, *slowest_first[-3:]}, key=slowest_first.index)
    rows = [
        {
            "rank": f"{rank}",
            "ms": ms_text(times[rank]),
            "": "#" * round(_BAR * times[rank] / (times.max() or 1.0)),
            "lookup": ms_text(report.rank_parts[rank, 0]),
            "exchange": ms_text(report.rank_parts[rank, 1]),
            MEMORIES[memory]: bytes_text(held[rank]),
            "full": f"{100 * full[rank]:.0f} %",
            "shards": f"{shards[rank]}",
            "largest part": f"{largest[rank]} {100 * part[rank] / times[rank]:.0f} %"
            if times[rank]
            else "",
        }
        for rank in shown
    ]
    yield _table(rows, ("", "largest part"))
    hidden = np.setdiff1d(np.arange(len(times)), shown)
    if len(hidden):
        takes, holds = ("takes", "holds") if len(hidden) == 1 else ("take", "hold")
        times, held = times[hidden], held[hidden]
        yield (
            f"{several(len(hidden), 'other rank')} {takes} {ms_text(times.min())} to "
            f"{ms_text(times.max())} ms and {holds} {bytes_text(held.min())} to "
            f"{bytes_text(held.max())}."
        )


def _on_ranks(report: PlanReport) -> tuple[Ints, list[str], Floats]:
    """Number of shards per rank, and the table with most of its time, with that time."""
    problem, placement = report.problem, report.placement
    shards = rank_sums(problem, placement, lambda each: np.full(len(each.time), len(each.options)))
    times = np.zeros((len(report.taken), problem.world_size))
    for (choice, ranks), of_table in zip(placement.placed(problem), times, strict=True):
        np.add.at(of_table, ranks, choice.time)
    names = [names_of(report.taken[table]) for table in times.argmax(axis=0).tolist()]
    return shards, names, times.max(axis=0)


def _tables_blocks(report: PlanReport) -> Iterable[TextTable | str]:
    """A row per table, those with the most work first."""
    rows = []
    heaviest = np.argsort([-choice.time.sum() for choice in report.taken], kind="stable").tolist()
    for table in heaviest[:_TABLES_SHOWN]:
        choice, ranks = report.taken[table], report.placement.ranks[table]
        everywhere = len(set(ranks.tolist())) == report.problem.world_size > 1
        steps = steps_of_choices(report, table)
        del steps[int(report.placement.chosen[table])]
        other = min(steps, key=steps.__getitem__, default=-1)
        fits = np.isfinite(steps.get(other, np.inf))
        rows.append(
            {
                "table": names_of(choice),
                "sharding": type_of(choice),
                "ranks": "all" if everywhere else ranks_text(ranks),
                "ms": ms_text(choice.longest),
                MEMORIES[report.memory]: bytes_text(int(choice.memory[:, report.memory].sum())),
                "otherwise": type_of(report.problem.choices[table][other]) if fits else "nothing",
                "step": ms_text(steps[other]) if fits else "",
            }
        )
    yield _table(rows, ("table", "sharding", "ranks", "otherwise"))
    hidden = Counter(type_of(report.taken[table]) for table in heaviest[_TABLES_SHOWN:])
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in hidden.most_common())
    rest = f"{several(hidden.total(), 'table')} that take less time: {kinds}. " if hidden else ""
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


def with_choice(
    problem: PlanningProblem, placement: Placement, table: int, choice: int
) -> Placement | None:
    """The placement with another choice for one table; None if it does not fit.

    The other tables are not moved. Shards are placed longest first, where the slowest rank remains
    fastest.

    Args:
        problem: The problem.
        placement: A placement that fits.
        table: Index of the table.
        choice: Index of the new choice.

    Example:
        >>> whole = Choice(np.array([2.0]), np.array([[0, 8]]), Spread.ANY)
        >>> halves = Choice(np.array([1.0, 1.0]), np.array([[0, 4], [0, 4]]), Spread.ALL)
        >>> problem = PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((whole, halves),))
        >>> placed = Placement(np.array([0]), [np.array([0])])
        >>> with_choice(problem, placed, 0, 1).ranks[0].tolist()
        [0, 1]
    """
    wanted = problem.choices[table][choice]
    load, held = rank_time(problem, placement), rank_memory(problem, placement)
    taken = problem.choices[table][int(placement.chosen[table])]
    np.subtract.at(load, placement.ranks[table], taken.time)
    np.subtract.at(held, placement.ranks[table], taken.memory)
    packing = Packing(replace(problem, capacity=problem.capacity - held, choices=((wanted,),)))
    packing.filled[:, 0] = load
    packing.sharpen(_SHARPEST, float(load.max()))
    position = packing.best(0)
    if position is None:
        return None
    chosen, everyone = placement.chosen.copy(), list(placement.ranks)
    chosen[table], everyone[table] = choice, position.ranks
    return Placement(chosen, everyone)


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
        for number, choice in enumerate(report.taken)
        for option in choice.options
    }
    wanted = str(name).strip(".")
    named = [wanted] if wanted in known else [fqn for fqn in known if fqn.endswith(f".{wanted}")]
    if len(named) == 1:
        return known[named[0]]
    if named:
        raise KeyError(
            f"table {name!r} is in several modules, {', '.join(named)}: give path and name"
        )
    near = get_close_matches(wanted, known, n=3) or list(known)[:5]
    raise KeyError(f"the plan has no table {name!r}; see {', '.join(map(repr, near))}")


def explain_table(report: PlanReport, name: str) -> Explanation:
    """What was chosen for one table, the alternatives, and what is not an option.

    Raises:
        KeyError: There is no such table.
    """
    table, option = find_table(report, name)
    facts = option.facts
    size = bytes_text(facts.rows * facts.row_bytes(facts.columns))
    module = f" of module {facts.path!r}" if facts.path else ""
    blocks = [
        f"Table {facts.name!r}{module}: {facts.rows:,} rows of {facts.columns} columns, {size}.",
        Facts(list(_table_facts(report, table, option))),
        _options_table(report, table),
        _STEP_NOTE,
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for refusal in report.inputs.refusals:
        if (refusal.path, refusal.table) == (facts.path, option.name):
            reasons.setdefault((refusal.compute_kernel, refusal.reason), []).append(
                refusal.sharding_type
            )
    if reasons:
        lines = [
            ("", f"{', '.join(kinds)}{kernel and ' '}{kernel}: {why}")
            for (kernel, why), kinds in reasons.items()
        ]
        blocks.append(Facts(lines, "not considered"))
    return Explanation(blocks)


def _table_facts(
    report: PlanReport, table: int, option: ShardingOption
) -> Iterable[tuple[str, str]]:
    choice, ranks, facts = report.taken[table], report.placement.ranks[table], option.facts
    what = "bags" if facts.pooled else "lists"
    ids = f"{facts.total_ids:,.0f} ids in {facts.total_samples:,.0f} {what} of a rank's batch"
    yield "read by", f"{', '.join(facts.features) or 'no feature'}: {ids}"
    others = [other.name for other in choice.options if other is not option]
    if others:
        yield (
            "lies with",
            f"{', '.join(others)}, as colocate asks; times and bytes are of all of them",
        )
    kernel = f"kernel {option.compute_kernel}, {several(len(ranks), 'shard')}"
    yield "chosen", f"{type_of(choice)}, {kernel}, on {_where(report, ranks)}"
    longest = int(choice.time.argmax())
    busiest = int(ranks[longest])
    perf = choice_perf(choice)[longest].tolist()
    parts = [f"{name} {ms_text(ms)}" for name, ms in zip(_PERF_NAMES, perf, strict=True) if ms > 0]
    rank_ms = ms_text(float(report.rank_times[busiest]))
    yield (
        "time",
        (
            f"{ms_text(choice.time[longest])} ms of rank {busiest}'s {rank_ms} ms: "
            f"{', '.join(parts) or 'nothing'}"
        ),
    )
    for kind, memory in enumerate(MEMORIES):
        held = choice.memory[:, kind]
        if held.any():
            most = f", {bytes_text(held.max())} in the largest shard" if len(held) > 1 else ""
            yield memory, f"{bytes_text(held.sum())}{most}"


def _where(report: PlanReport, ranks: Ints) -> str:
    held = set(ranks.tolist())
    if len(held) == report.problem.world_size > 1:
        return "every rank"
    return f"{'rank' if len(held) == 1 else 'ranks'} {ranks_text(held)}"


def _options_table(report: PlanReport, table: int) -> TextTable:
    choices, steps = report.problem.choices[table], steps_of_choices(report, table)
    has_caches = any(choice.options[0].cache_load_factor is not None for choice in choices)
    kind = MEMORIES[report.memory]
    rows = []
    for number in sorted(steps, key=lambda number: (steps[number], choices[number].preference)):
        choice, step = choices[number], steps[number]
        memory, factor = choice.memory[:, report.memory], choice.options[0].cache_load_factor
        # The cache has its own column: in a long row names are shortened, numbers are not.
        cached = {"cached": "" if factor is None else f"{100 * factor:g} %"}
        chosen = number == report.placement.chosen[table]
        rows.append(
            {
                "option": type_of(choice) if factor is None else choice.options[0].sharding_type,
                **(cached if has_caches else {}),
                "shards": f"{len(choice.time)}",
                "ms largest": ms_text(choice.longest),
                "ms all": ms_text(choice.time.sum()),
                f"{kind} largest": bytes_text(memory.max(initial=0)),
                f"{kind} all": bytes_text(memory.sum()),
                "step": ms_text(step) if np.isfinite(step) else "-",
                "": "chosen" if chosen else _verdict(report, choice, step),
            }
        )
    return _table(rows, ("option", ""))


def _verdict(report: PlanReport, choice: Choice, step: float) -> str:
    if np.isfinite(step):
        over = step / report.cost - 1 if report.cost else 0.0
        return "no better" if abs(over) < 5e-4 else f"{100 * over:+.1f} %"
    if choice.allowed is not None and choice.spread is Spread.ALL and not choice.allowed.all():
        return "its pin leaves ranks out"
    lacking = int((choice.memory.max(axis=0) - report.problem.capacity.max(axis=0)).max())
    return f"over by {bytes_text(lacking)}" if lacking > 0 else "no room with others"


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

    times, memory = report.rank_times, report.memory
    full, mean = report.fullness[:, memory], float(times.mean())
    facts: dict[str, Any] = {
        "slowest": int(times.argmax()),
        "step": ms_text(float(times.max())),
        "over": float(times.max()) / mean - 1 if mean else 0.0,
        "fullest": int(full.argmax()),
        "full": float(full.max()),
        "memory": MEMORIES[memory],
    }
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

"""Explanations of a plan: time and memory of each rank, and why each table is sharded as it is.

Everything is taken from the planner's report. The cost of an alternative for one table is computed
with all other tables unchanged; no search is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
from tutorec.distributed.plan.plan import EmbeddingModuleShardingPlan, ShardingPlan
from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.planner.placements import Packing
from tutorec.distributed.planner.problem import (
    MEMORIES,
    Choice,
    Ints,
    Placement,
    PlanningProblem,
    Spread,
    cost,
    fixed_time,
    rank_memory,
    rank_time,
)
from tutorec.distributed.planner.report import (
    PlanReport,
    choice_perf,
    find_table,
    names_of,
    plan_figure,
    type_of,
)
from tutorec.distributed.planner.topology import memory_of
from tutorec.errors import PlannerError

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
        return (
            explain_plan(self._reported())
            if table is None
            else explain_table(self._reported(), table)
        )

    def plot(self, claim: str | None = None) -> Any:
        """Memory and time of each rank as a matplotlib figure.

        Raises:
            PlannerError: The plan has no report.
        """
        return plan_figure(self._reported(), claim)

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
    if not problem.choices:
        return Explanation([title])
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
    shards, largest = _on_ranks(report)
    if shards[slowest] == 1 and report.problem.world_size > 1:
        text = (
            f"rank {slowest} has a single shard, of table {largest[slowest][0]!r}: no other place "
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


def _ranks_blocks(report: PlanReport) -> Iterable[TextTable | str]:
    """A row per rank; in a large world for the slowest, the fullest and the fastest only."""
    kind, times = report.memory, report.rank_times
    held, full = report.rank_memory[:, kind], report.fullness[:, kind]
    shards, largest = _on_ranks(report)
    shown = list(range(len(times)))
    if len(shown) > _RANKS_SHOWN:
        slowest_first = np.argsort(-times, kind="stable").tolist()
        fullest = int(held.argmax())
        shown = sorted({*slowest_first[:8], fullest, *slowest_first[-3:]}, key=slowest_first.index)
    rows = []
    for rank in shown:
        bar = "#" * round(_BAR * times[rank] / times.max()) if times.max() > 0 else ""
        share = (
            f"{largest[rank][0]} {100 * largest[rank][1] / times[rank]:.0f} %"
            if times[rank] > 0
            else ""
        )
        memory = bytes_text(held[rank]), f"{100 * full[rank]:.0f} %"
        rows.append(
            [
                f"{rank}",
                ms_text(times[rank]),
                bar,
                *map(ms_text, report.rank_parts[rank]),
                *memory,
                f"{shards[rank]}",
                share,
            ]
        )
    head = [
        "rank",
        "ms",
        "",
        "lookup",
        "exchange",
        MEMORIES[kind],
        "full",
        "shards",
        "largest part",
    ]
    yield TextTable(head, rows, right=[0, 1, 3, 4, 5, 6, 7], width=WIDTH)
    hidden = np.setdiff1d(np.arange(len(times)), shown)
    if len(hidden):
        takes, holds = ("takes", "holds") if len(hidden) == 1 else ("take", "hold")
        times, held = times[hidden], held[hidden]
        yield (
            f"{several(len(hidden), 'other rank')} {takes} {ms_text(times.min())} to "
            f"{ms_text(times.max())} ms and {holds} {bytes_text(held.min())} to "
            f"{bytes_text(held.max())}."
        )


def _on_ranks(report: PlanReport) -> tuple[Ints, list[tuple[str, float]]]:
    """Number of shards per rank, and the table with most of its time, with that time."""
    world_size = report.problem.world_size
    shards, times = np.zeros(world_size, np.int64), np.zeros((len(report.taken), world_size))
    for choice, ranks, of_table in zip(report.taken, report.placement.ranks, times, strict=True):
        np.add.at(shards, ranks, len(choice.options))
        np.add.at(of_table, ranks, choice.time)
    largest = zip(times.argmax(axis=0).tolist(), times.max(axis=0).tolist(), strict=True)
    return shards, [(names_of(report.taken[table]), time) for table, time in largest]


def _tables_blocks(report: PlanReport) -> Iterable[TextTable | str]:
    """A row per table, those with the most work first."""
    rows = []
    heaviest = np.argsort([-choice.time.sum() for choice in report.taken], kind="stable").tolist()
    for table in heaviest[:_TABLES_SHOWN]:
        choice, ranks = report.taken[table], report.placement.ranks[table]
        where = (
            "all"
            if len(set(ranks.tolist())) == report.problem.world_size > 1
            else ranks_text(ranks)
        )
        memory = bytes_text(int(choice.memory[:, report.memory].sum()))
        steps = steps_of_choices(report, table)
        del steps[int(report.placement.chosen[table])]
        best = min(steps, key=steps.__getitem__, default=None)
        other = ["nothing", ""]
        if best is not None and np.isfinite(steps[best]):
            other = [type_of(report.problem.choices[table][best]), ms_text(steps[best])]
        rows.append(
            [
                names_of(choice),
                type_of(choice),
                where,
                ms_text(choice.longest),
                memory,
                *other,
            ]
        )
    head = ["table", "sharding", "ranks", "ms", MEMORIES[report.memory], "otherwise", "step"]
    yield TextTable(head, rows, right=[3, 4, 6], width=WIDTH)
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


def explain_table(report: PlanReport, name: str) -> Explanation:
    """What was chosen for one table, the alternatives, and what is not an option.

    Raises:
        KeyError: There is no such table.
    """
    table = find_table(report, name)
    wanted = name.strip(".").rpartition(".")[2]
    option = next(each for each in report.taken[table].options if each.name == wanted)
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
    kind, choices, steps = (
        report.memory,
        report.problem.choices[table],
        steps_of_choices(report, table),
    )
    has_caches = any(choice.options[0].cache_load_factor is not None for choice in choices)
    rows = []
    for number in sorted(steps, key=lambda number: (steps[number], choices[number].preference)):
        choice, step = choices[number], steps[number]
        memory, factor = choice.memory[:, kind], choice.options[0].cache_load_factor
        # The cache has its own column: in a long row names are shortened, numbers are not.
        cached = ["" if factor is None else f"{100 * factor:g} %"] if has_caches else []
        rows.append(
            [
                type_of(choice) if factor is None else choice.options[0].sharding_type,
                *cached,
                f"{len(choice.time)}",
                ms_text(choice.longest),
                ms_text(choice.time.sum()),
                bytes_text(memory.max(initial=0)),
                bytes_text(memory.sum()),
                ms_text(step) if np.isfinite(step) else "-",
                "chosen"
                if number == report.placement.chosen[table]
                else _verdict(report, choice, step),
            ]
        )
    memory = MEMORIES[kind]
    cached = ["cached"] if has_caches else []
    head = [
        "option",
        *cached,
        "shards",
        "ms largest",
        "ms all",
        f"{memory} largest",
        f"{memory} all",
        "step",
        "",
    ]
    return TextTable(head, rows, right=range(1, len(head) - 1), width=WIDTH)


def _verdict(report: PlanReport, choice: Choice, step: float) -> str:
    if np.isfinite(step):
        over = step / report.cost - 1 if report.cost else 0.0
        return "no better" if abs(over) < 5e-4 else f"{100 * over:+.1f} %"
    if choice.allowed is not None and choice.spread is Spread.ALL and not choice.allowed.all():
        return "its pin leaves ranks out"
    lacking = int((choice.memory.max(axis=0) - report.problem.capacity.max(axis=0)).max())
    return f"over by {bytes_text(lacking)}" if lacking > 0 else "no room with others"

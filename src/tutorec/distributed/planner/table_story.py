"""Why one table is sharded as it is: what it costs, what else there was, and what would change it.

Every sentence of the kind "with ... it would be row_wise" has been planned before it is said.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tutorec.distributed.planner.changes import Change, found_plan, with_capacity, with_choice, with_only
from tutorec.distributed.planner.constraints import ParameterConstraints
from tutorec.distributed.planner.explanation import WIDTH, Explanation, Facts
from tutorec.distributed.planner.options import PERF_FIELDS, ShardingOption
from tutorec.distributed.planner.problem import Choice, Placement, PlanningProblem, Spread, cost
from tutorec.distributed.planner.report import MEMORIES, PlanReport, find_table, option_perf, type_of
from tutorec.distributed.text_table import TextTable, bytes_text, ms_text, ranks_text, several

# Seconds that planning again may take, about. What does not fit into them is not said.
PATIENCE = 10.0
_FACTORS = (2, 4, 8, 16)
_WORDS = {
    "fwd_compute": "lookup",
    "fwd_comms": "rows home",
    "bwd_compute": "update",
    "bwd_comms": "gradients back",
    "input_dist_comms": "ids",
    "prefetch_compute": "prefetch",
}

# What was different, and the change or the memory of each rank.
_Series = Sequence[tuple[str, Change | np.ndarray]]


@dataclass(frozen=True)
class WhatIf:
    """What was planned with something different.

    Args:
        words: What was different: "with 1,024 samples on a rank".
        choice: What the table then is.
        step: Milliseconds of a step of that plan.
    """

    words: str
    choice: Choice
    step: float


def table_story(report: PlanReport, name: str) -> Explanation:
    """What was chosen for one table, what else there was, and what would change it.

    Args:
        report: Of the planner.
        name: Of the table, or path and name.

    Raises:
        KeyError: There is no such table.
    """
    table = find_table(report, name)
    wanted = name.strip(".").rpartition(".")[2]
    option = next(each for each in report.taken[table].options if each.name == wanted)
    blocks: list[str | Facts | TextTable] = [_headline(option), Facts(_facts(report, table, option))]
    steps, again = _steps(report, table)
    blocks.append(_options_table(report, table, steps))
    blocks.append(_options_note(again))
    refused = _refused(report, option)
    if refused:
        blocks.append(Facts(refused, "not considered"))
    changes = _what_would_change(report, table, option) if again else []
    if changes:
        blocks.append(Facts([("", line) for line in changes], "what would change it (each was planned again)"))
    return Explanation(blocks)


def _headline(option: ShardingOption) -> str:
    facts = option.facts
    place = f" of module {facts.path!r}" if facts.path else ""
    size = bytes_text(facts.rows * facts.row_bytes(facts.columns))
    return f"Table {facts.name!r}{place}: {facts.rows:,} rows of {facts.columns} columns, {size}."


def _facts(report: PlanReport, table: int, option: ShardingOption) -> list[tuple[str, str]]:
    choice, ranks = report.taken[table], report.placement.ranks[table]
    facts = option.facts
    read = ", ".join(facts.features) or "no feature"
    what = "bags" if facts.pooled else "lists"
    lines = [("read by", f"{read}: {facts.total_ids:,.0f} ids in {facts.total_samples:,.0f} {what} of a rank's batch")]
    others = [other.name for other in choice.options if other is not option]
    if others:
        lines.append(("lies with", f"{', '.join(others)}, as colocate asks; times and bytes are of all of them"))
    pieces = several(len(ranks), "piece")
    share = f" of rank {_busiest(report, table)}'s {ms_text(_busiest_time(report, table))} ms"
    lines.append(("chosen", f"{type_of(choice)}, kernel {option.compute_kernel}, {pieces}, on {_where(report, ranks)}"))
    perf = np.sum([option_perf(each) for each in choice.options], axis=0)
    longest = int(choice.time.argmax())
    parts = [
        f"{_WORDS[name]} {ms_text(ms)}" for name, ms in zip(PERF_FIELDS, perf[longest].tolist(), strict=True) if ms > 0
    ]
    lines.append(("time", f"{ms_text(choice.time[longest])} ms{share}: {', '.join(parts) or 'nothing'}"))
    for kind, memory in enumerate(MEMORIES):
        held = choice.memory[:, kind]
        if held.any():
            most = f", {bytes_text(held.max())} in the largest piece" if len(held) > 1 else ""
            lines.append((memory, f"{bytes_text(held.sum())}{most}"))
    return lines


def _where(report: PlanReport, ranks: np.ndarray) -> str:
    held = set(ranks.tolist())
    if len(held) == report.problem.world_size > 1:
        return "every rank"
    return f"{'rank' if len(held) == 1 else 'ranks'} {ranks_text(held)}"


def _busiest(report: PlanReport, table: int) -> int:
    """The rank of the longest piece."""
    return int(report.placement.ranks[table][report.taken[table].time.argmax()])


def _busiest_time(report: PlanReport, table: int) -> float:
    return float(report.rank_parts[_busiest(report, table)].sum())


def _steps(report: PlanReport, table: int) -> tuple[dict[int, float], bool]:
    """For each choice the step in ms if it had to be taken, None where it does not fit; whether all was planned again.

    The others stay where they are, or everything is searched again, whichever comes out better.
    """
    problem, choices = report.problem, report.problem.choices[table]
    again = report.seconds * len(choices) <= PATIENCE
    steps: dict[int, float] = {}
    for index in range(len(choices)):
        if index == report.placement.chosen[table]:
            steps[index] = report.cost
            continue
        found = [with_choice(problem, report.placement, table, index)]
        if again:
            found.append(found_plan(with_only(problem, table, index)))
        steps[index] = min((cost_of(problem, table, index, each) for each in found if each), default=np.inf)
    return steps, again


def cost_of(problem: PlanningProblem, table: int, choice: int, placement: Placement) -> float:
    """Milliseconds of a step where one table has this choice, whether the placement numbers it among one or all.

    Args:
        problem: All choices.
        table: Its number.
        choice: The number of its choice among all of them.
        placement: An answer to the problem, or to the one in which the table has this choice only.
    """
    chosen = placement.chosen.copy()
    chosen[table] = choice
    return cost(problem, Placement(chosen, placement.ranks))


def _options_table(report: PlanReport, table: int, steps: dict[int, float]) -> TextTable:
    kind = report.memory
    rows = []
    choices = report.problem.choices[table]
    has_caches = any(choice.options[0].cache_load_factor is not None for choice in choices)
    for index in sorted(steps, key=lambda index: (steps[index], choices[index].preference)):
        choice, step = choices[index], steps[index]
        memory = choice.memory[:, kind]
        verdict = "chosen" if index == report.placement.chosen[table] else _verdict(report, table, index, step)
        factor = choice.options[0].cache_load_factor
        # In a column of its own: where a line is too long, names are cut and numbers are not.
        cached = ["" if factor is None else f"{100 * factor:g} %"] if has_caches else []
        rows.append(
            [
                type_of(choice) if factor is None else choice.options[0].sharding_type,
                *cached,
                f"{len(choice.time)}",
                ms_text(choice.time.max(initial=0.0)),
                ms_text(choice.time.sum()),
                bytes_text(memory.max(initial=0)),
                bytes_text(memory.sum()),
                ms_text(step) if np.isfinite(step) else "-",
                verdict,
            ]
        )
    name = MEMORIES[kind]
    cached = ["cached"] if has_caches else []
    head = ["option", *cached, "pieces", "ms largest", "ms all", f"{name} largest", f"{name} all", "step", ""]
    return TextTable(head, rows, right=range(1, len(head) - 1), width=WIDTH)


def _verdict(report: PlanReport, table: int, index: int, step: float) -> str:
    if np.isfinite(step):
        over = step / report.cost - 1 if report.cost else 0.0
        return "no better" if abs(over) < 5e-4 else f"{over:+.1%}"
    choice, capacity = report.problem.choices[table][index], report.problem.capacity
    if choice.allowed is not None and (choice.spread is Spread.ALL and not choice.allowed.all()):
        return "its pin leaves ranks out"
    lacking = choice.memory.max(axis=0) - capacity.max(axis=0)
    kind = int(lacking.argmax())
    return f"over by {bytes_text(lacking[kind])}" if lacking[kind] > 0 else "no room with others"


def _options_note(again: bool) -> str:
    rest = (
        "everything else was placed anew"
        if again
        else "the other tables stayed where they are; to plan all of it again, for each, would take too long here"
    )
    return f"step: milliseconds of the whole step if the table had to be sharded so and {rest}."


def _refused(report: PlanReport, option: ShardingOption) -> list[tuple[str, str]]:
    """Ways to shard the table, and the reason for which they are no options; ways of one reason in one line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for refusal in report.inputs.refusals:
        if (refusal.path, refusal.table) == (option.facts.path, option.name):
            reasons.setdefault((refusal.compute_kernel, refusal.reason), []).append(refusal.sharding_type)
    return [
        ("", f"{', '.join(kinds)}{kernel and ' '}{kernel}: {reason}") for (kernel, reason), kinds in reasons.items()
    ]


def _what_would_change(report: PlanReport, table: int, option: ShardingOption) -> list[str]:
    chosen, until = report.taken[table], time.monotonic() + PATIENCE
    changing, staying = [], []
    for series in _series(report, option):
        if time.monotonic() > until:
            break
        last, largest = next(_that_fit(report, option, series, until), (0, None))
        if largest is None:
            continue
        if _kind(largest.choice) == _kind(chosen):
            staying.append(largest.words)
            continue
        # The smallest change that does it, unless small and large ones take turns.
        found = (_what_if(report, option, *each) for each in series[:last] if time.monotonic() < until)
        smallest = next((each for each in found if each is not None and _kind(each.choice) != _kind(chosen)), largest)
        changing.append(f"{smallest.words} it is {type_of(smallest.choice)}: a step of {ms_text(smallest.step)} ms.")
    if staying:
        changing.append(f"it stays {type_of(chosen)} even {', or '.join(staying)}.")
    return changing


def _that_fit(
    report: PlanReport, option: ShardingOption, series: _Series, until: float
) -> Iterator[tuple[int, WhatIf]]:
    """Changes of a series with which everything fits, with their numbers, from large to small."""
    for number in reversed(range(len(series))):
        found = _what_if(report, option, *series[number]) if time.monotonic() < until else None
        if found is not None:
            yield number, found


def _kind(choice: Choice) -> tuple[str, str]:
    return choice.options[0].sharding_type, choice.options[0].compute_kernel


def _series(report: PlanReport, option: ShardingOption) -> list[_Series]:
    """Series of changes, each from small to large."""
    inputs, capacity = report.inputs, report.problem.capacity
    found: list[_Series] = []
    if report.rank_memory.any():
        factors = (1.25, 1.5, *_FACTORS)
        found.append([(f"with {k:g} times the memory for tables", capacity * k) for k in factors])
    if inputs.remake is None:
        return found
    name, constraint, size = option.name, inputs.constraint(option.name), inputs.batch_size
    if _narrowed(constraint):
        found.append([("without its constraints", _widened(name, constraint))])
    sizes = [size * k for k in _FACTORS], [size // k for k in _FACTORS if size >= k]
    found += [
        [(f"with {several(n, 'sample')} on a rank", Change(batch_size=n)) for n in each] for each in sizes if each
    ]
    longer = [[factor * k for factor in constraint.pooling_factors] for k in _FACTORS]
    words = [f"with {k} times as many ids in a bag" for k in _FACTORS]
    changes = [Change({name: replace(constraint, pooling_factors=factors)}) for factors in longer]
    return [*found, list(zip(words, changes, strict=True))]


def _what_if(report: PlanReport, option: ShardingOption, words: str, change: Change | np.ndarray) -> WhatIf | None:
    """What the table is after a change of the inputs or of the memory; None where nothing fits."""
    if isinstance(change, Change):
        remade = report.inputs.remade(change)
        problem = None if remade is None else remade.problem
    else:
        problem = with_capacity(report.problem, change)
    placement = None if problem is None else found_plan(problem)
    if problem is None or placement is None:
        return None
    return WhatIf(words, placement.taken(problem)[_number(problem, option)], cost(problem, placement))


def _number(problem: PlanningProblem, option: ShardingOption) -> int:
    return next(
        number
        for number, choices in enumerate(problem.choices)
        for each in choices[0].options
        if each.fqn == option.fqn
    )


def _narrowed(constraint: ParameterConstraints) -> bool:
    free = ParameterConstraints()
    return any(getattr(constraint, name) != getattr(free, name) for name in _NARROWING)


def _widened(table: str, constraint: ParameterConstraints) -> Change:
    free = ParameterConstraints()
    return Change({table: replace(constraint, **{name: getattr(free, name) for name in _NARROWING})})


_NARROWING = ("sharding_types", "compute_kernels", "min_partition", "pin", "colocate")

"""Why a plan is as it is: what the step costs on each rank, which table causes it, and how far it is from the best.

Of one table tells `table_story`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from tutorec.distributed.planner.changes import with_choice
from tutorec.distributed.planner.explanation import WIDTH, Explanation, Facts
from tutorec.distributed.planner.problem import Choice, PlanningProblem, cost, fixed_time
from tutorec.distributed.planner.report import MEMORIES, PlanReport, names_of, type_of
from tutorec.distributed.text_table import TextTable, bytes_text, ms_text, ranks_text, several

# Of more ranks or tables the ends are shown.
_RANKS_SHOWN, _TABLES_SHOWN = 16, 24
_BAR = 12


def plan_story(report: PlanReport) -> Explanation:
    """The whole plan in words and two tables.

    Args:
        report: Of the planner.
    """
    problem, topology = report.problem, report.inputs.topology
    hosts, on_host = problem.world_size // topology.local_world_size, topology.local_world_size
    machines = f" ({hosts} hosts of {on_host})" if hosts > 1 else ""
    ranks = several(problem.world_size, f"{topology.compute_device} rank")
    title = (
        f"A plan for {several(_count_tables(problem), 'table')} on {ranks}{machines}, with "
        f"{several(report.inputs.batch_size, 'sample')} on each rank."
    )
    if not problem.choices:
        return Explanation([title])
    speeds = ("speeds", f"{topology.source}.")
    facts = Facts([*_step_facts(report), *_limit_facts(report), *_memory_facts(report), *_search_facts(report), speeds])
    blocks: list[str | Facts | TextTable] = [title, facts, _ranks_table(report)]
    hidden = _hidden_ranks(report)
    if hidden:
        blocks.append(hidden)
    blocks.append(_tables_table(report))
    return Explanation([*blocks, _tables_note(report)])


def _count_tables(problem: PlanningProblem) -> int:
    return sum(len(choices[0].options) for choices in problem.choices)


def _step_facts(report: PlanReport) -> list[tuple[str, str]]:
    times = report.rank_parts.sum(axis=1)
    slowest, shared = int(times.argmax()), fixed_time(report.problem, report.placement)
    groups = {group for choice in report.taken for group in choice.groups}
    latency = (
        f" and {ms_text(shared)} ms for the exchanges of {several(len(groups), 'sharding type')}, however little they "
        "carry"
        if shared
        else ""
    )
    step = (
        f"{ms_text(report.cost)} ms expected: {ms_text(times[slowest])} ms on rank {slowest}, which has the most to do,"
        f"{latency}. The mean of all ranks is {ms_text(times.mean())} ms."
    )
    lines = [("step", step)]
    if report.bound is not None and report.bound.ms > 0:
        over = max(report.cost / report.bound.ms - 1, 0.0)
        near = "this one is among the best" if over < 5e-4 else f"this one is at most {over:.1%} above the best"
        lines.append(
            ("bound", f"no plan takes less than {ms_text(report.bound.ms)} ms ({report.bound.reason}): {near}.")
        )
    if report.gap is not None:
        lines.append(("gap", f"the solver leaves {report.gap:.2%} between the plan and the best that there may be."))
    return lines


def _limit_facts(report: PlanReport) -> list[tuple[str, str]]:
    """Where one piece is all that the slowest rank has to do."""
    slowest = int(report.rank_parts.sum(axis=1).argmax())
    pieces, most = _on_ranks(report)
    if pieces[slowest] != 1 or report.problem.world_size == 1:
        return []
    words = (
        f"rank {slowest} has a single piece, of table {most[slowest][0]!r}: no other place for tables makes the step "
        "shorter, only another cut of this one."
    )
    return [("limit", words)]


def _memory_facts(report: PlanReport) -> list[tuple[str, str]]:
    lines = []
    for kind, name in enumerate(MEMORIES):
        held, room, whole = (of[:, kind] for of in (report.rank_memory, report.problem.capacity, report.whole_memory))
        if not held.any():
            continue
        fullest = int((held / np.maximum(room, 1)).argmax())
        kept = int(whole[fullest] - room[fullest])
        reserved = (
            f"; {bytes_text(kept)} of its {bytes_text(whole[fullest])} are kept for everything else" if kept else ""
        )
        words = (
            f"{bytes_text(held.sum())} in all; rank {fullest} is the fullest with {bytes_text(held[fullest])} of "
            f"{bytes_text(room[fullest])} ({held[fullest] / max(room[fullest], 1):.1%}){reserved}."
        )
        lines.append((name, words))
    files = sum(int(option.total_storage.ssd) for choice in report.taken for option in choice.options)
    return [*lines, ("SSD", f"{bytes_text(files)} in files.")] if files else lines


def _search_facts(report: PlanReport) -> list[tuple[str, str]]:
    options = sum(len(choices) for choices in report.problem.choices)
    refused = len(report.inputs.refusals)
    words = f", {several(refused, 'other')} refused" if refused else ""
    how = f"; {report.searched}" if report.searched else ""
    return [("search", f"{several(options, 'option')} in {report.seconds:.2f} s{words}{how}.")]


def _shown_ranks(report: PlanReport) -> list[int]:
    """All ranks of a small world; else the slowest, the fullest and the quickest."""
    times = report.rank_parts.sum(axis=1)
    if len(times) <= _RANKS_SHOWN:
        return list(range(len(times)))
    order = np.argsort(-times, kind="stable").tolist()
    fullest = int(report.rank_memory[:, report.memory].argmax())
    return sorted({*order[:8], fullest, *order[-3:]}, key=order.index)


def _ranks_table(report: PlanReport) -> TextTable:
    parts, kind = report.rank_parts, report.memory
    longest = parts.sum(axis=1).max()
    held, room = report.rank_memory[:, kind], report.problem.capacity[:, kind]
    pieces, most = _on_ranks(report)
    rows = []
    for rank in _shown_ranks(report):
        total = parts[rank].sum()
        bar = "#" * round(_BAR * total / longest) if longest > 0 else ""
        share = f"{most[rank][0]} {most[rank][1] / total:.0%}" if rank in most and total > 0 else ""
        memory = f"{bytes_text(held[rank])}", f"{held[rank] / max(room[rank], 1):.0%}"
        rows.append([str(rank), ms_text(total), bar, *map(ms_text, parts[rank]), *memory, f"{pieces[rank]}", share])
    head = ["rank", "ms", "", "lookup", "exchange", MEMORIES[kind], "full", "pieces", "largest part"]
    return TextTable(head, rows, right=[0, 1, 3, 4, 5, 6, 7], width=WIDTH)


def _on_ranks(report: PlanReport) -> tuple[Counter[int], dict[int, tuple[str, float]]]:
    """How many pieces each rank holds, and the table that takes most of its time, with the time."""
    pieces: Counter[int] = Counter()
    most: dict[int, tuple[str, float]] = {}
    for choice, ranks in zip(report.taken, report.placement.ranks, strict=True):
        mine: Counter[int] = Counter()
        for rank, time in zip(ranks.tolist(), choice.time.tolist(), strict=True):
            pieces[rank] += len(choice.options)
            mine[rank] += time
        for rank, time in mine.items():
            if rank not in most or time > most[rank][1]:
                most[rank] = names_of(choice), time
    return pieces, most


def _hidden_ranks(report: PlanReport) -> str:
    shown = set(_shown_ranks(report))
    hidden = [rank for rank in range(report.problem.world_size) if rank not in shown]
    if not hidden:
        return ""
    times, held = report.rank_parts.sum(axis=1)[hidden], report.rank_memory[hidden, report.memory]
    return (
        f"{several(len(hidden), 'other rank')} {'takes' if len(hidden) == 1 else 'take'} {ms_text(times.min())} to "
        f"{ms_text(times.max())} ms and {'holds' if len(hidden) == 1 else 'hold'} {bytes_text(held.min())} to "
        f"{bytes_text(held.max())}."
    )


def _heaviest(report: PlanReport) -> list[int]:
    """Tables by the time of all their pieces, longest first."""
    totals = np.array([choice.time.sum() for choice in report.taken])
    return np.argsort(-totals, kind="stable").tolist()


def _tables_table(report: PlanReport) -> TextTable:
    rows = []
    for table in _heaviest(report)[:_TABLES_SHOWN]:
        choice, ranks = report.taken[table], report.placement.ranks[table]
        where = "all" if len(set(ranks.tolist())) == report.problem.world_size > 1 else ranks_text(ranks)
        memory = int(choice.memory.sum(axis=0)[report.memory])
        other = best_other(report, table)
        rest = (type_of(other[0]), ms_text(other[1])) if other is not None else ("nothing", "")
        longest = ms_text(choice.time.max(initial=0.0))
        rows.append([names_of(choice), type_of(choice), where, longest, bytes_text(memory), *rest])
    head = ["table", "sharding", "ranks", "ms", MEMORIES[report.memory], "otherwise", "step"]
    return TextTable(head, rows, right=[3, 4, 6], width=WIDTH)


def _tables_note(report: PlanReport) -> str:
    words = (
        "ms: of the table's longest piece. otherwise: the best other way to shard the table, and what the step would "
        "take if the other tables stayed where they are; explain('table') tells more."
    )
    rest = [type_of(report.taken[table]) for table in _heaviest(report)[_TABLES_SHOWN:]]
    if not rest:
        return words
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in Counter(rest).most_common())
    return f"{several(len(rest), 'table')} that take less time: {kinds}. {words}"


def best_other(report: PlanReport, table: int) -> tuple[Choice, float] | None:
    """The best choice for a table beside the one taken, the other tables staying: it and the step in ms.

    Args:
        report: Of the planner.
        table: Its number in the problem.
    """
    found = None
    for index, choice in enumerate(report.problem.choices[table]):
        if index == report.placement.chosen[table]:
            continue
        placement = with_choice(report.problem, report.placement, table, index)
        if placement is None:
            continue
        ms = cost(report.problem, placement)
        if found is None or ms < found[1]:
            found = choice, ms
    return found

"""Why nothing fits, with the numbers, and the smallest changes that make it fit: each has been planned.

no sharding plan fits: table 'item' needs 24.2 GiB of HBM on one rank, and each rank has 16.0 GiB for tables ...
  weights 100,000,000 x 64 x 4 B = 23.8 GiB, optimizer state 0.4 GiB; allowed sharding: table_wise
  row_wise needs 12.1 GiB on a rank: ParameterConstraints(sharding_types=['row_wise']) for table 'item'
"""

from __future__ import annotations

from tutorec.distributed.plan import ShardingType
from tutorec.distributed.planner.changes import found_plan
from tutorec.distributed.planner.inputs import PlanInputs
from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.planner.problem import Choice, PlanningProblem
from tutorec.distributed.planner.remedy_search import RemedySearch, narrowed
from tutorec.distributed.planner.report import MEMORIES, names_of, type_of
from tutorec.distributed.planner.shortage import Shortage, find_shortage, fullness, least_bytes
from tutorec.distributed.planner.storage import stored_bytes
from tutorec.distributed.text_table import bytes_text, ranks_text, several
from tutorec.errors import PlannerError, PlannerErrorType

_NAMED = 3


def why_infeasible(inputs: PlanInputs) -> PlannerError:
    """The error for inputs that no plan was found for: what is short, by how much, and what would do.

    Args:
        inputs: What was to be planned.
    """
    problem = inputs.problem
    shortage = find_shortage(problem)
    if not shortage.proves and found_plan(problem) is not None:
        return PlannerError(
            f"none of the proposals could be placed, though {several(len(problem.choices), 'table')} fit on "
            f"{several(problem.world_size, 'rank')}: leave proposer, partitioner and performance_model out, and the "
            "planner searches for itself",
            PlannerErrorType.PARTITION,
        )
    free = not any(narrowed(inputs.constraint(option.name)) for option in _first_options(problem))
    if shortage.alone:
        lines = _table_lines(inputs, shortage)
        kind = PlannerErrorType.INSUFFICIENT_STORAGE if free else PlannerErrorType.STRICT_CONSTRAINTS
    else:
        lines = _sum_lines(inputs, shortage)
        kind = PlannerErrorType.PARTITION if free else PlannerErrorType.STRICT_CONSTRAINTS
        if shortage.needed > shortage.room and len(shortage.ranks) == problem.world_size:
            kind = PlannerErrorType.INSUFFICIENT_STORAGE
    remedies = RemedySearch(inputs, shortage.alone, shortage.kind).lines()
    lines += remedies or ["no single change was found that makes it fit: give it more ranks and more memory"]
    return PlannerError("\n  ".join(lines), kind)


def _first_options(problem: PlanningProblem) -> list[ShardingOption]:
    return [option for choices in problem.choices for option in choices[0].options]


def _table_lines(inputs: PlanInputs, shortage: Shortage) -> list[str]:
    """The case of a table that fits on no rank."""
    problem, table, kind = inputs.problem, shortage.alone[0], shortage.kind
    choices = problem.choices[table]
    room = problem.capacity.max(axis=0)
    least = min(choices, key=lambda choice: fullness(choice.memory.max(axis=0), room))
    names = names_of(least)
    tables = f"table {names!r} needs" if len(least.options) == 1 else f"tables {names} together need"
    memory = MEMORIES[kind]
    capacity = problem.capacity[:, kind]
    most = int(capacity.argmax())
    each = (
        f"each rank has {bytes_text(shortage.room)}"
        if (capacity == capacity[0]).all()
        else (f"rank {most}, which has the most, has {bytes_text(shortage.room)}")
    )
    if shortage.needed <= shortage.room:
        head = (
            f"no sharding plan fits: {tables} {bytes_text(shortage.needed)} of {memory} on a rank, and the ranks that "
            f"it may lie on have no room for it (world_size={problem.world_size})"
        )
    else:
        head = (
            f"no sharding plan fits: {tables} {bytes_text(shortage.needed)} of {memory} on one rank, and {each} for "
            f"tables (world_size={problem.world_size})"
        )
    lines = [head, _contents(inputs, least, choices)]
    others = shortage.alone[1:]
    if others:
        shown = ", ".join(repr(names_of(problem.choices[other][0])) for other in others[:_NAMED])
        more = f" and {several(len(others) - _NAMED, 'other')}" if len(others) > _NAMED else ""
        lines.append(f"{'so does' if len(others) == 1 else 'so do'} {shown}{more}, each more than a rank has")
    return lines


def _kept(inputs: PlanInputs) -> str:
    """What is kept from tables, if that is worth a word."""
    kind = 1 if inputs.topology.compute_device == "cpu" else 0
    whole = inputs.topology.devices[0].storage
    has = (whole.hbm, whole.ddr)[kind]
    kept = has - int(inputs.problem.capacity[0, kind])
    words = f"; {bytes_text(kept)} of a rank's {bytes_text(has)} {MEMORIES[kind]} are kept for everything else"
    return words if kept * 100 >= has else ""


def _contents(inputs: PlanInputs, least: Choice, choices: tuple[Choice, ...]) -> str:
    """What the least demanding way to shard a table stores in its largest piece, and which ways there are."""
    option = least.options[0]
    facts, pieces = option.facts, option.pieces()
    largest = int(least.memory.max(axis=1).argmax())
    stored = stored_bytes(
        facts, ShardingType(option.sharding_type), option.compute_kernel, pieces.sizes[[largest]], inputs.topology
    )
    rows, columns = pieces.sizes[largest].tolist()
    each = f"{facts.row_bytes(columns)} B" if facts.packed else f"{columns} x {facts.element_bytes} B"
    parts = [f"weights {rows:,} x {each} = {bytes_text(stored.weights[0])}"]
    named = {"optimizer state": stored.state, "gradients": stored.gradients}
    named |= {"ids": stored.input, "looked-up rows": stored.output}
    parts += [f"{name} {bytes_text(count[0])}" for name, count in named.items() if count[0] > 0]
    allowed = ", ".join(dict.fromkeys(type_of(choice) for choice in choices))
    pin = inputs.constraint(option.name).pin
    pinned = f"; pinned to {'rank' if len(pin) == 1 else 'ranks'} {ranks_text(pin)}" if pin is not None else ""
    return f"{', '.join(parts)}; allowed sharding: {allowed}{pinned}{_kept(inputs)}"


def _sum_lines(inputs: PlanInputs, shortage: Shortage) -> list[str]:
    """The case of tables that fit alone, and not together."""
    problem, memory, tables = inputs.problem, MEMORIES[shortage.kind], shortage.together
    count = several(sum(len(problem.choices[table][0].options) for table in tables), "table")
    where = several(problem.world_size, "rank")
    if len(shortage.ranks) < problem.world_size:
        where = f"{'rank' if len(shortage.ranks) == 1 else 'ranks'} {ranks_text(shortage.ranks)}"
        count += f" pinned to {where}"
    sizes = sorted(
        ((least_bytes(problem, t, shortage.kind), names_of(problem.choices[t][0])) for t in tables), reverse=True
    )
    largest = "the largest: " + ", ".join(f"{name!r} {bytes_text(size)}" for size, name in sizes[:_NAMED])
    needed, room = bytes_text(shortage.needed), bytes_text(shortage.room)
    if shortage.needed > shortage.room:
        has = "has" if len(shortage.ranks) == 1 else "have"
        head = (
            f"no sharding plan fits: {count} together need at least {needed} of {memory}, and {where} {has} {room} for "
            "tables"
        )
    else:
        head = (
            f"no sharding plan was found: {count} {'needs' if count == '1 table' else 'need'} at least {needed} of "
            f"{memory}, and {where} have {room} for tables, but no way was found to place all pieces"
        )
    return [f"{head} (world_size={problem.world_size})", f"{largest}{_kept(inputs)}"]

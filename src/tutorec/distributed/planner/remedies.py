"""The error if no plan fits: what is short, and at most three changes that make one fit.

::

    no sharding plan fits: table 'item' needs 24.2 GiB of HBM on one rank, and each has ...
      weights 100,000,000 x 64 x 4 B = 23.8 GiB, optimizer state 0.4 GiB; ...
      ParameterConstraints(sharding_types=['row_wise']) for table 'item': 12.1 GiB ...

The size of each change is computed from the shortage, and the change is offered if the planner
finds a plan with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from tutorec._text import bytes_text, ms_text, ranks_text, several
from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.planner.problem import (
    MEMORIES,
    Choice,
    Ints,
    PlanningProblem,
    cost,
    fits,
    rank_memory,
)
from tutorec.distributed.planner.report import PlanInputs, sharding_text, table_names
from tutorec.distributed.planner.search import search
from tutorec.distributed.planner.shard_estimators import stored_bytes
from tutorec.distributed.planner.topology import device_memory, own_memory
from tutorec.errors import PlannerError, PlannerErrorType

_REMEDIES = 3
_NAMED = 3
_NARROWING = ("sharding_types", "compute_kernels", "pin", "colocate")
# Shards do not fill ranks to the last byte: the offered memory and ranks include this margin.
_SPARE = 1.25
# With more than this many times the ranks, it is the memory of each that is too small.
_MOST_TIMES = 64


@dataclass(frozen=True)
class Shortage:
    """The memory that is too small.

    Args:
        memory: The kind of memory: 0 HBM, 1 DDR.
        needed: Bytes of the largest shard of the first table that fits on no rank; else the least
            bytes of all `tables`.
        room: Available bytes.
        tables: Indices of the tables, the largest first.
        ranks: The ranks that these tables share; empty if the first table does not fit even alone.
    """

    memory: int
    needed: int
    room: int
    tables: tuple[int, ...]
    ranks: tuple[int, ...] = ()


def find_shortage(problem: PlanningProblem) -> Shortage:
    """The memory with the largest shortage.

    Example:
        >>> from tutorec.distributed.plan.plan import PlacementRule
        >>> from tutorec.distributed.planner.problem import Choice
        >>> whole = Choice(np.array([1.0]), np.array([[0, 12]]), PlacementRule.ANY_RANK)
        >>> find_shortage(PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((whole,),)))
        Shortage(memory=1, needed=12, room=8, tables=(0,), ranks=())
    """
    room = problem.capacity.max(axis=0)
    largest = {
        table: _smallest(problem, table).memory.max(axis=0)
        for table, choices in enumerate(problem.choices)
        if not any(fits(problem, choice) for choice in choices)
    }
    if largest:
        tables = sorted(largest, key=lambda table: -_fullness(largest[table], room))
        worst = largest[tables[0]]
        memory = int((worst - room).argmax())
        return Shortage(memory, int(worst[memory]), int(room[memory]), tuple(tables))

    everywhere = np.ones(problem.world_size, dtype=np.bool_)
    pins = [
        everywhere if choices[0].allowed is None else choices[0].allowed
        for choices in problem.choices
    ]
    shared = []
    for ranks in np.unique([everywhere, *pins], axis=0)[::-1]:
        inside = [table for table, mask in enumerate(pins) if not (mask & ~ranks).any()]
        for memory in (0, 1):
            needed = {table: _least_bytes(problem, table, memory) for table in inside}
            tables = tuple(sorted(needed, key=lambda table: -needed[table]))
            total = sum(needed.values())
            available = int(problem.capacity[ranks, memory].sum())
            shared.append(
                Shortage(memory, total, available, tables, tuple(np.flatnonzero(ranks).tolist()))
            )

    return max(shared, key=lambda short: short.needed / max(short.room, 1))


def _fullness(memory: Ints, room: Ints) -> float:
    return float((memory / np.maximum(room, 1)).max())


def _smallest(problem: PlanningProblem, table: int) -> Choice:
    """The choice of a table whose largest shard is smallest."""
    room = problem.capacity.max(axis=0)
    return min(
        problem.choices[table], key=lambda choice: _fullness(choice.memory.max(axis=0), room)
    )


def _least_bytes(problem: PlanningProblem, table: int, memory: int) -> int:
    """The least bytes of a table, over all its shards."""
    return min(int(choice.memory[:, memory].sum()) for choice in problem.choices[table])


def why_infeasible(inputs: PlanInputs, proposed: bool = False) -> PlannerError:
    """The error for inputs without a plan: the shortage in bytes, and changes that make a plan fit.

    Args:
        inputs: The inputs of the plan.
        proposed: Whether only proposals failed, and the planner's own search has not run.
    """
    problem = inputs.problem
    if proposed and search(problem) is not None:
        return PlannerError(
            "none of the proposals could be placed, though "
            f"{several(len(problem.choices), 'table')} fit on "
            f"{several(problem.world_size, 'rank')}: leave proposer, partitioner and "
            "performance_model out, and the planner searches for itself",
            PlannerErrorType.PARTITION,
        )

    shortage = find_shortage(problem)
    lines = (_lines_of_all if shortage.ranks else _lines_of_a_table)(inputs, shortage)
    error_type = (
        PlannerErrorType.PARTITION if shortage.ranks else PlannerErrorType.INSUFFICIENT_STORAGE
    )
    if any(
        _narrowed(inputs, option.name)
        for choices in problem.choices
        for option in choices[0].options
    ):
        error_type = PlannerErrorType.STRICT_CONSTRAINTS

    if shortage.needed > shortage.room and len(shortage.ranks) == problem.world_size:
        error_type = PlannerErrorType.INSUFFICIENT_STORAGE

    changes = (_looser_constraints, _smaller_reservation, _smaller_batch, _more_memory, _more_ranks)
    remedies = (line for change in changes if (line := change(inputs, shortage)) is not None)
    lines += list(islice(remedies, _REMEDIES)) or [
        "no single change was found that makes it fit: give it more ranks and more memory"
    ]

    return PlannerError("\n  ".join(lines), error_type)


# --- what is short


def _lines_of_a_table(inputs: PlanInputs, shortage: Shortage) -> list[str]:
    """A table that fits on no rank: the bytes of the largest shard under the best sharding."""
    problem = inputs.problem
    memory = shortage.memory
    first, *others = shortage.tables
    choices = problem.choices[first]
    least = _smallest(problem, first)
    tables = (
        f"table {table_names(least)!r} needs"
        if len(least.options) == 1
        else f"tables {table_names(least)} need"
    )
    reason = f"{bytes_text(shortage.needed)} of {MEMORIES[memory]} on one rank, and "
    if shortage.needed <= shortage.room:
        reason += "the ranks that may hold it have no room for it"
    else:
        even = (problem.capacity[:, memory] == shortage.room).all()
        where = (
            "each rank"
            if even
            else f"rank {problem.capacity[:, memory].argmax()}, which has the most,"
        )
        reason += f"{where} has {bytes_text(shortage.room)} for tables"

    option = least.options[0]
    profile = option.profile
    size = option.shard_arrays().sizes[[int(least.memory.max(axis=1).argmax())]]
    stored = stored_bytes(
        profile, ShardingType(option.sharding_type), option.compute_kernel, size, inputs.topology
    )
    rows, columns = size[0].tolist()
    row_text = (
        f"{profile.row_bytes(columns)} B"
        if profile.packed
        else f"{columns} x {profile.element_bytes} B"
    )
    components = [f"weights {rows:,} x {row_text} = {bytes_text(stored.weights[0])}"]
    names = ("optimizer state", "gradients", "ids", "looked-up rows", "mapping of raw ids")
    components += [
        f"{name} {bytes_text(of[0])}"
        for name, of in zip(names, stored[1:6], strict=True)
        if of[0] > 0
    ]
    allowed = ", ".join(dict.fromkeys(sharding_text(choice) for choice in choices))
    pin = inputs.constraint(option.name).pin
    pinned = "" if pin is None else f"; pinned to {_ranks(pin)}"
    lines = [
        f"no sharding plan fits: {tables} {reason} (world_size={problem.world_size})",
        f"{', '.join(components)}; allowed sharding: {allowed}{pinned}{_reserved_text(inputs)}",
    ]
    if others:
        lines.append(
            f"so do {_listed([table_names(problem.choices[t][0]) for t in others])}, each more "
            "than a rank has"
        )

    return lines


def _lines_of_all(inputs: PlanInputs, shortage: Shortage) -> list[str]:
    """Tables that fit alone, but not together."""
    problem = inputs.problem
    memory = MEMORIES[shortage.memory]
    tables = shortage.tables
    count = several(sum(len(problem.choices[table][0].options) for table in tables), "table")
    where = several(problem.world_size, "rank")
    if len(shortage.ranks) < problem.world_size:
        where = _ranks(shortage.ranks)
        count += f" pinned to {where}"

    has = "has" if len(shortage.ranks) == 1 else "have"
    need = "together need" if len(tables) > 1 else "needs"
    text = (
        f"{count} {need} at least {bytes_text(shortage.needed)} of {memory}, and {where} {has} "
        f"{bytes_text(shortage.room)} for tables"
    )
    head = f"no sharding plan fits: {text}"
    if shortage.needed <= shortage.room:
        head = f"no sharding plan was found: {text}, but no way was found to place all shards"

    largest = ", ".join(
        (
            f"{table_names(problem.choices[table][0])!r} "
            f"{bytes_text(_least_bytes(problem, table, shortage.memory))}"
        )
        for table in tables[:_NAMED]
    )
    return [
        f"{head} (world_size={problem.world_size})",
        f"the largest: {largest}{_reserved_text(inputs)}",
    ]


def _reserved_text(inputs: PlanInputs) -> str:
    memory = own_memory(inputs.topology)
    has = int(device_memory(inputs.topology)[0, memory])
    reserved = has - int(inputs.problem.capacity[0, memory])
    text = (
        f"; {bytes_text(reserved)} of a rank's {bytes_text(has)} {MEMORIES[memory]} are kept for "
        "everything else"
    )

    return text if reserved * 100 >= has else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {several(len(names) - _NAMED, 'other')}" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(ranks)}"


# --- changes, each of which is offered only if the search finds a plan with it


def _fits(inputs: PlanInputs | None) -> bool:
    return inputs is not None and search(inputs.problem) is not None


def _narrowed(inputs: PlanInputs, table: str) -> list[str]:
    """The constraints that exclude options or ranks of a table."""
    return [name for name in _NARROWING if getattr(inputs.constraint(table), name) is not None]


def _looser_constraints(inputs: PlanInputs, shortage: Shortage) -> str | None:
    narrowed = {
        option.name: fields
        for table in shortage.tables
        for option in inputs.problem.choices[table][0].options
        if (fields := _narrowed(inputs, option.name))
    }
    loosened = {
        name: replace(inputs.constraint(name), **dict.fromkeys(fields))
        for name, fields in narrowed.items()
    }
    remade = inputs.remade(constraints=loosened) if narrowed else None
    placement = search(remade.problem) if remade else None
    if remade is None or placement is None:
        return None

    chosen = {
        option.name: choice
        for choice in placement.choices(remade.problem)
        for option in choice.options
    }
    fields = [
        name
        for name in _NARROWING
        if any(name in table_fields for table_fields in narrowed.values())
    ]
    change = f"no {' and no '.join(fields)}"
    if fields == ["sharding_types"]:
        sharding_types = dict.fromkeys(chosen[name].options[0].sharding_type for name in narrowed)
        change = f"ParameterConstraints(sharding_types={list(sharding_types)})"

    names = list(narrowed)
    used = bytes_text(chosen[names[0]].memory[:, shortage.memory].max())
    return (
        f"{change} for {'table' if len(names) == 1 else 'tables'} {_listed(names)}: {used} of "
        f"{names[0]!r} on a rank, a step of {ms_text(cost(remade.problem, placement))} ms"
    )


def _smaller_reservation(inputs: PlanInputs, shortage: Shortage) -> str | None:
    memory = own_memory(inputs.topology)
    installed = device_memory(inputs.topology)[:, :2]
    reserved = int((installed - inputs.problem.capacity)[:, memory].max())
    problem = replace(inputs.problem, capacity=installed)
    placement = search(problem) if reserved > 0 else None
    if placement is None:
        return None

    left = min(int((installed - rank_memory(problem, placement))[:, memory].min()), reserved)
    return (
        f"FixedAbsoluteStorageReservation({left}) keeps {bytes_text(left)} of each rank for "
        f"everything else, instead of {bytes_text(reserved)}"
    )


def _smaller_batch(inputs: PlanInputs, shortage: Shortage) -> str | None:
    """A batch size whose buffers fit; it helps if nearly all memory of a table is buffers."""
    share = shortage.room / max(shortage.needed, 1) / _SPARE
    smaller = 2 ** int(math.log2(max(inputs.batch_size * share, 1)))
    if smaller >= inputs.batch_size or not _fits(inputs.remade(batch_size=smaller)):
        return None
    return f"batch_size={smaller} instead of {inputs.batch_size}"


def _more_memory(inputs: PlanInputs, shortage: Shortage) -> str | None:
    memory = shortage.memory
    topology = inputs.topology
    problem = inputs.problem
    has = int(device_memory(topology)[:, memory].max())
    room = int(problem.capacity[:, memory].min())
    if has <= 0:
        return None

    least = sum(_least_bytes(problem, table, memory) for table in range(len(problem.choices)))
    needed = max(least * _SPARE / problem.world_size, 0 if shortage.ranks else shortage.needed)

    # The reservation is a fraction of the memory, or a number of bytes.
    proposed = max(has * needed / room if room > has / 2 else 0, has - room + needed)
    step = 2 ** max(int(math.log2(proposed)) - 4, 0)  # a number with few digits in binary units
    count = math.ceil(proposed / step) * step
    storages = [
        replace(device.storage, **{("hbm", "ddr")[memory]: count}) for device in topology.devices
    ]
    if not _fits(inputs.remade(topology=topology.with_storage(storages))):
        return None

    return (
        f"{bytes_text(count)} of {MEMORIES[memory]} on each rank instead of {bytes_text(has)}: "
        f"{('hbm_cap', 'ddr_cap')[memory]}={count}"
    )


def _more_ranks(inputs: PlanInputs, shortage: Shortage) -> str | None:
    """More ranks per host if a host has few, else more hosts; new ranks are like the old ones.

    If a rank has next to no room for tables, no number of ranks is offered.
    """
    topology = inputs.topology
    world_size = topology.world_size
    local_size = topology.local_world_size
    factor = max(
        math.ceil(shortage.needed * (_SPARE if shortage.ranks else 1.0) / max(shortage.room, 1)), 2
    )
    if factor > _MOST_TIMES:
        return None

    group = topology.intra_group_size
    if world_size == local_size and local_size * factor <= 8:
        local_size = group = local_size * factor

    ranks = [rank % world_size for rank in range(factor * world_size)]
    if not _fits(inputs.remade(topology=topology.regrouped(ranks, local_size, group))):
        return None

    return (
        f"{several(len(ranks), 'rank')} instead of {world_size}: world_size={len(ranks)}, "
        f"local_world_size={local_size}"
    )

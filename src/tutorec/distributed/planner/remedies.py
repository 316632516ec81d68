"""Why nothing fits, with the numbers, and at most three changes that make it fit.

    no sharding plan fits: table 'item' needs 24.2 GiB of HBM on one rank, and each rank has 16.0 GiB for tables ...
      weights 100,000,000 x 64 x 4 B = 23.8 GiB, optimizer state 0.4 GiB; allowed sharding: table_wise
      ParameterConstraints(sharding_types=['row_wise']) for table 'item': 12.1 GiB of 'item' on a rank ...

The size of each change is computed from the shortage, and the change is offered if the planner finds a plan with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from tutorec._text import bytes_text, ms_text, ranks_text, several
from tutorec.distributed.plan import ShardingType
from tutorec.distributed.planner.options import Storage
from tutorec.distributed.planner.placements import fits_alone
from tutorec.distributed.planner.problem import Choice, Placement, PlanningProblem, cost, rank_memory
from tutorec.distributed.planner.report import MEMORIES, PlanInputs, names_of, type_of
from tutorec.distributed.planner.search import search
from tutorec.distributed.planner.storage import stored_bytes
from tutorec.distributed.planner.topology import DeviceHardware, Topology
from tutorec.errors import PlannerError, PlannerErrorType

_REMEDIES = 3
_NAMED = 3
_NARROWING = ("sharding_types", "compute_kernels", "pin", "colocate")
# Shards do not fill ranks to the last byte: memory and ranks are offered with so much to spare.
_SPARE = 1.25


@dataclass(frozen=True)
class Shortage:
    """What there is too little room for.

    Args:
        kind: The memory that is short: 0 HBM, 1 DDR.
        needed: Bytes: of the largest shard of the first table that fits nowhere; else of all `tables` at least.
        room: Bytes that there are for it.
        tables: Numbers of the tables, the largest first.
        ranks: The ranks that these tables share; empty where the first table fits nowhere even alone.
    """

    kind: int
    needed: int
    room: int
    tables: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    @property
    def proves(self) -> bool:
        """Whether it follows that nothing fits."""
        return not self.ranks or self.needed > self.room


def find_shortage(problem: PlanningProblem) -> Shortage:
    """The memory that a problem is shortest of.

    Example:
        >>> from tutorec.distributed.planner.problem import Choice, Spread
        >>> whole = Choice(np.array([1.0]), np.array([[0, 12]]), Spread.ANY)
        >>> find_shortage(PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((whole,),)))
        Shortage(kind=1, needed=12, room=8, tables=(0,), ranks=())
    """
    room = problem.capacity.max(axis=0)
    alone = {
        table: min((choice.memory.max(axis=0) for choice in choices), key=lambda memory: _fullness(memory, room))
        for table, choices in enumerate(problem.choices)
        if not any(fits_alone(problem, choice) for choice in choices)
    }
    if alone:
        tables = sorted(alone, key=lambda table: -_fullness(alone[table], room))
        worst = alone[tables[0]]
        kind = int((worst - room).argmax())
        return Shortage(kind, int(worst[kind]), int(room[kind]), tuple(tables))
    return max(_shared_shortages(problem), key=lambda short: short.needed / max(short.room, 1))


def _shared_shortages(problem: PlanningProblem) -> Iterator[Shortage]:
    """What all tables need of all ranks, and what those need that are pinned to some of the ranks."""
    everywhere = np.ones(problem.world_size, dtype=np.bool_)
    pins = [everywhere if choices[0].allowed is None else choices[0].allowed for choices in problem.choices]
    for ranks in {mask.tobytes(): mask for mask in (everywhere, *pins)}.values():
        for kind in (0, 1):
            needed = {t: _least_bytes(problem, t, kind) for t, mask in enumerate(pins) if not (mask & ~ranks).any()}
            tables = sorted(needed, key=lambda table: -needed[table])
            room = int(problem.capacity[ranks, kind].sum())
            yield Shortage(kind, sum(needed.values()), room, tuple(tables), tuple(np.flatnonzero(ranks).tolist()))


def _fullness(memory: np.ndarray, room: np.ndarray) -> float:
    return float((memory / np.maximum(room, 1)).max())


def _least_bytes(problem: PlanningProblem, table: int, kind: int) -> int:
    """Bytes that a table takes at least, in all its shards."""
    return min(int(choice.memory[:, kind].sum()) for choice in problem.choices[table] if fits_alone(problem, choice))


def why_infeasible(inputs: PlanInputs, proposed: bool = False) -> PlannerError:
    """The error for inputs that no plan was found for: what is short, by how much, and what would make it fit.

    Args:
        inputs: What was to be planned.
        proposed: Whether proposals failed, which the planner's own search has not tried yet.
    """
    problem, shortage = inputs.problem, find_shortage(inputs.problem)
    if proposed and not shortage.proves and search(problem) is not None:
        return PlannerError(
            f"none of the proposals could be placed, though {several(len(problem.choices), 'table')} fit on "
            f"{several(problem.world_size, 'rank')}: leave proposer, partitioner and performance_model out, and the "
            "planner searches for itself",
            PlannerErrorType.PARTITION,
        )
    if shortage.ranks:
        lines, kind = _shared_lines(inputs, shortage), PlannerErrorType.PARTITION
    else:
        lines, kind = _table_lines(inputs, shortage), PlannerErrorType.INSUFFICIENT_STORAGE
    if any(_narrowed(inputs, option.name) for choices in problem.choices for option in choices[0].options):
        kind = PlannerErrorType.STRICT_CONSTRAINTS
    if shortage.needed > shortage.room and len(shortage.ranks) == problem.world_size:
        kind = PlannerErrorType.INSUFFICIENT_STORAGE
    remedies = list(islice(_remedies(inputs, shortage), _REMEDIES))
    lines += remedies or ["no single change was found that makes it fit: give it more ranks and more memory"]
    return PlannerError("\n  ".join(lines), kind)


# What is short


def _table_lines(inputs: PlanInputs, shortage: Shortage) -> list[str]:
    """The lines about a table that fits on no rank."""
    problem, kind = inputs.problem, shortage.kind
    first, *others = shortage.tables
    least = min(
        problem.choices[first], key=lambda choice: _fullness(choice.memory.max(axis=0), problem.capacity.max(axis=0))
    )
    names, needed = names_of(least), f"{bytes_text(shortage.needed)} of {MEMORIES[kind]}"
    tables = f"table {names!r} needs" if len(least.options) == 1 else f"tables {names} together need"
    capacity = problem.capacity[:, kind]
    where = "each rank" if (capacity == capacity[0]).all() else f"rank {capacity.argmax()}, which has the most,"
    reason = f"{needed} on one rank, and {where} has {bytes_text(shortage.room)} for tables"
    if shortage.needed <= shortage.room:
        reason = f"{needed} on a rank, and the ranks that it may lie on have no room for it"
    lines = [f"no sharding plan fits: {tables} {reason} (world_size={problem.world_size})", _contents(inputs, least)]
    if others:
        so_do = "so does" if len(others) == 1 else "so do"
        names = [names_of(problem.choices[other][0]) for other in others]
        lines.append(f"{so_do} {_listed(names)}, each more than a rank has")
    return lines


def _contents(inputs: PlanInputs, least: Choice) -> str:
    """What the least demanding way to shard a table stores in its largest shard, and the ways that are allowed."""
    option = least.options[0]
    facts, pieces = option.facts, option.pieces()
    largest = int(least.memory.max(axis=1).argmax())
    kind = ShardingType(option.sharding_type)
    stored = stored_bytes(facts, kind, option.compute_kernel, pieces.sizes[[largest]], inputs.topology)
    rows, columns = pieces.sizes[largest].tolist()
    each = f"{facts.row_bytes(columns)} B" if facts.packed else f"{columns} x {facts.element_bytes} B"
    parts = [f"weights {rows:,} x {each} = {bytes_text(stored.weights[0])}"]
    others = {"optimizer state": stored.state, "gradients": stored.gradients}
    others |= {"ids": stored.input, "looked-up rows": stored.output}
    parts += [f"{name} {bytes_text(count[0])}" for name, count in others.items() if count[0] > 0]
    choices = next(choices for choices in inputs.problem.choices if any(choice is least for choice in choices))
    allowed = ", ".join(dict.fromkeys(type_of(choice) for choice in choices))
    pin = inputs.constraint(option.name).pin
    pinned = "" if pin is None else f"; pinned to {_ranks(pin)}"
    return f"{', '.join(parts)}; allowed sharding: {allowed}{pinned}{_reserved_text(inputs)}"


def _shared_lines(inputs: PlanInputs, shortage: Shortage) -> list[str]:
    """The lines about tables that fit alone, but not all of them."""
    problem, memory, tables = inputs.problem, MEMORIES[shortage.kind], shortage.tables
    count = several(sum(len(problem.choices[table][0].options) for table in tables), "table")
    where = several(problem.world_size, "rank")
    if len(shortage.ranks) < problem.world_size:
        where = _ranks(shortage.ranks)
        count += f" pinned to {where}"
    needed, room = f"at least {bytes_text(shortage.needed)} of {memory}", f"{bytes_text(shortage.room)} for tables"
    if shortage.needed > shortage.room:
        has = "has" if len(shortage.ranks) == 1 else "have"
        head = f"no sharding plan fits: {count} together need {needed}, and {where} {has} {room}"
    else:
        need = "needs" if count == "1 table" else "need"
        head = (
            f"no sharding plan was found: {count} {need} {needed}, and {where} have {room}, but no way was found to "
            "place all pieces"
        )
    largest = ", ".join(
        f"{names_of(problem.choices[table][0])!r} {bytes_text(_least_bytes(problem, table, shortage.kind))}"
        for table in tables[:_NAMED]
    )
    return [f"{head} (world_size={problem.world_size})", f"the largest: {largest}{_reserved_text(inputs)}"]


def _reserved_text(inputs: PlanInputs) -> str:
    kind = _main_memory(inputs)
    has = int(_whole_memory(inputs)[0, kind])
    kept = has - int(inputs.problem.capacity[0, kind])
    text = f"; {bytes_text(kept)} of a rank's {bytes_text(has)} {MEMORIES[kind]} are kept for everything else"
    return text if kept * 100 >= has else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {several(len(names) - _NAMED, 'other')}" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(ranks)}"


# What would make it fit


def _remedies(inputs: PlanInputs, shortage: Shortage) -> Iterator[str]:
    """Changes with which there is a plan, those that cost nothing first; each takes one search."""
    for change in (_looser_constraints, _smaller_reservation, _smaller_batch, _more_memory, _more_ranks):
        line = change(inputs, shortage)
        if line is not None:
            yield line


def _planned(inputs: PlanInputs | None) -> tuple[PlanningProblem, Placement] | None:
    """The problem of changed inputs with a placement; None where nothing fits."""
    if inputs is None or find_shortage(inputs.problem).proves:
        return None
    placement = search(inputs.problem)
    return None if placement is None else (inputs.problem, placement)


def _narrowed(inputs: PlanInputs, table: str) -> list[str]:
    """The constraints that take options or ranks from a table."""
    return [name for name in _NARROWING if getattr(inputs.constraint(table), name) is not None]


def _looser_constraints(inputs: PlanInputs, shortage: Shortage) -> str | None:
    choices = inputs.problem.choices
    options = [option for table in shortage.tables for option in choices[table][0].options]
    narrowed = {option.name: fields for option in options if (fields := _narrowed(inputs, option.name))}
    loosened = {name: replace(inputs.constraint(name), **dict.fromkeys(fields)) for name, fields in narrowed.items()}
    planned = _planned(inputs.remade(constraints=loosened)) if narrowed else None
    if planned is None:
        return None
    problem, placement = planned
    taken = {option.name: choice for choice in placement.taken(problem) for option in choice.options}
    fields = [name for name in _NARROWING if any(name in of_table for of_table in narrowed.values())]
    change = f"no {' and no '.join(fields)}"
    if fields == ["sharding_types"]:
        kinds = dict.fromkeys(taken[name].options[0].sharding_type for name in narrowed)
        change = f"ParameterConstraints(sharding_types={list(kinds)})"
    names = list(narrowed)
    held = bytes_text(taken[names[0]].memory[:, shortage.kind].max())
    return (
        f"{change} for {'table' if len(names) == 1 else 'tables'} {_listed(names)}: {held} of {names[0]!r} on a rank, "
        f"a step of {ms_text(cost(problem, placement))} ms"
    )


def _smaller_reservation(inputs: PlanInputs, shortage: Shortage) -> str | None:
    kind, whole = _main_memory(inputs), _whole_memory(inputs)
    kept = int((whole - inputs.problem.capacity)[:, kind].max())
    if kept <= 0:
        return None
    problem = replace(inputs.problem, capacity=whole)
    placement = None if find_shortage(problem).proves else search(problem)
    if placement is None:
        return None
    left = min(int((whole - rank_memory(problem, placement))[:, kind].min()), kept)
    return (
        f"FixedAbsoluteStorageReservation({left}) keeps {bytes_text(left)} of each rank for everything else, instead "
        f"of {bytes_text(kept)}"
    )


def _smaller_batch(inputs: PlanInputs, shortage: Shortage) -> str | None:
    """A batch whose buffers leave room; nearly all memory of a table is buffers where this helps."""
    share = shortage.room / max(shortage.needed, 1) / _SPARE
    smaller = 2 ** int(math.log2(max(inputs.batch_size * share, 1)))
    if smaller >= inputs.batch_size or _planned(inputs.remade(batch_size=smaller)) is None:
        return None
    return f"batch_size={smaller} instead of {inputs.batch_size}"


def _more_memory(inputs: PlanInputs, shortage: Shortage) -> str | None:
    kind, topology = shortage.kind, inputs.topology
    has = int(_whole_memory(inputs)[:, kind].max())
    if has <= 0:
        return None
    problem, room = inputs.problem, int(inputs.problem.capacity[:, kind].min())
    least = sum(min(int(choice.memory[:, kind].sum()) for choice in choices) for choices in problem.choices)
    needed = max(least * _SPARE / problem.world_size, 0 if shortage.ranks else shortage.needed)
    # Reserved is a share of the memory, or a number of bytes.
    wanted = max(has * needed / room if room > has / 2 else 0, has - room + needed)
    power = next((power for power in (3, 2, 1) if has >= 4 * 1024**power), 0)
    count = math.ceil(wanted / 1024**power)
    bytes_ = count * 1024**power
    storages = [replace(device.storage, **{("hbm", "ddr")[kind]: bytes_}) for device in topology.devices]
    if _planned(inputs.remade(topology=topology.with_storage(storages))) is None:
        return None
    unit = "" if power == 0 else " * 1024" if power == 1 else f" * 1024**{power}"
    return (
        f"{bytes_text(bytes_)} of {MEMORIES[kind]} on each rank instead of {bytes_text(has)}: "
        f"{('hbm_cap', 'ddr_cap')[kind]}={count}{unit}"
    )


def _more_ranks(inputs: PlanInputs, shortage: Shortage) -> str | None:
    """Ranks on the same host if that has few, else more hosts."""
    topology = inputs.topology
    local_size, hosts = topology.local_world_size, topology.world_size // topology.local_world_size
    factor = max(math.ceil(shortage.needed * (_SPARE if shortage.ranks else 1.0) / max(shortage.room, 1)), 2)
    if hosts == 1 and local_size * factor <= 8:
        local_size *= factor
    else:
        hosts *= factor
    if _planned(inputs.remade(topology=_with_ranks(topology, hosts, local_size))) is None:
        return None
    world_size = hosts * local_size
    return (
        f"{several(world_size, 'rank')} instead of {topology.world_size}: world_size={world_size}, "
        f"local_world_size={local_size}"
    )


def _main_memory(inputs: PlanInputs) -> int:
    return 1 if inputs.topology.compute_device == "cpu" else 0


def _whole_memory(inputs: PlanInputs) -> np.ndarray:
    """``[W, 2]`` bytes that each rank has."""
    storages = [device.storage for device in inputs.topology.devices]
    return np.array([[storage.hbm, storage.ddr] for storage in storages], dtype=np.int64)


def _with_ranks(topology: Topology, hosts: int, local_size: int) -> Topology:
    """More of the same machines: each new rank is like one of the old ones."""
    grown = copy(topology)
    grown.world_size, grown.local_world_size = hosts * local_size, local_size
    if topology.local_world_size != local_size:
        grown.intra_group_size = local_size
    devices = [topology.devices[rank % topology.world_size] for rank in range(grown.world_size)]
    grown.devices = [
        DeviceHardware(rank, Storage(device.storage.hbm, device.storage.ddr, device.storage.ssd), copy(device.perf))
        for rank, device in enumerate(devices)
    ]
    return grown

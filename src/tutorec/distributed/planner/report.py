"""Inputs and results of planning, and the error where there is no plan.

The error says what is short, and at most three changes that make it fit::

    no sharding plan fits: table 'item' needs 24.2 GiB of HBM on one rank, and each has ...
      weights 100,000,000 x 64 x 4 B = 23.8 GiB, optimizer state 0.4 GiB; ...
      ParameterConstraints(sharding_types=['row_wise']) for table 'item': 12.1 GiB ...

The size of each change is computed from the shortage, and the change is offered if the planner
finds a plan with it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from tutorec._text import bytes_text, ms_text, ranks_text, several
from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.planner.enumerators import Refusal
from tutorec.distributed.planner.options import Constraints, ParameterConstraints, ShardingOption
from tutorec.distributed.planner.problem import (
    MEMORIES,
    Bound,
    Choice,
    Floats,
    Ints,
    Placement,
    PlanningProblem,
    cost,
    fits,
    fixed_time,
    lower_bound,
    rank_memory,
    rank_sums,
)
from tutorec.distributed.planner.search import search
from tutorec.distributed.planner.shard_estimators import StoredBytes, stored_bytes
from tutorec.distributed.planner.topology import PERF_FIELDS, Topology, memory_of, own_memory
from tutorec.errors import PlannerError, PlannerErrorType

_COMPUTE = [PERF_FIELDS.index(name) for name in ("fwd_compute", "bwd_compute", "prefetch_compute")]
_REMEDIES = 3
_NAMED = 3
_NARROWING = ("sharding_types", "compute_kernels", "pin", "colocate")
# Shards do not fill ranks to the last byte: the offered memory and ranks include this margin.
_SPARE = 1.25
# With more than this many times the ranks, it is the memory of each that is too small.
_MOST_TIMES = 64


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
        """Milliseconds of the slowest rank by what it does, and the latency; their sum is `cost`.

        The latency is that of all exchanges, however few bytes they carry.
        """
        memory_work, exchanges = self.rank_parts[int(self.rank_times.argmax())].tolist()
        latency = fixed_time(self.problem, self.taken)
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

    def _stored(self, bytes_of: Callable[[StoredBytes], Ints]) -> list[int]:
        """The sum on each rank of some bytes of its shards."""
        topology = self.inputs.topology

        def of_choice(choice: Choice) -> Ints:
            stored = [
                stored_bytes(
                    option.facts,
                    ShardingType(option.sharding_type),
                    option.compute_kernel,
                    option.pieces().sizes,
                    topology,
                )
                for option in choice.options
            ]
            return np.sum([bytes_of(each) for each in stored], axis=0)

        return rank_sums(self.problem, self.placement, of_choice).tolist()


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


# --- no plan


@dataclass(frozen=True)
class Shortage:
    """The memory that is too small.

    Args:
        kind: The kind of memory: 0 HBM, 1 DDR.
        needed: Bytes of the largest shard of the first table that fits on no rank; else the least
            bytes of all `tables`.
        room: Available bytes.
        tables: Indices of the tables, the largest first.
        ranks: The ranks that these tables share; empty if the first table does not fit even alone.
    """

    kind: int
    needed: int
    room: int
    tables: tuple[int, ...]
    ranks: tuple[int, ...] = ()


def find_shortage(problem: PlanningProblem) -> Shortage:
    """The memory with the largest shortage.

    Example:
        >>> from tutorec.distributed.planner.problem import Choice, Spread
        >>> whole = Choice(np.array([1.0]), np.array([[0, 12]]), Spread.ANY)
        >>> find_shortage(PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((whole,),)))
        Shortage(kind=1, needed=12, room=8, tables=(0,), ranks=())
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
        kind = int((worst - room).argmax())
        return Shortage(kind, int(worst[kind]), int(room[kind]), tuple(tables))
    everywhere = np.ones(problem.world_size, dtype=np.bool_)
    pins = [
        everywhere if choices[0].allowed is None else choices[0].allowed
        for choices in problem.choices
    ]
    shared = []
    for ranks in np.unique([everywhere, *pins], axis=0)[::-1]:
        inside = [table for table, mask in enumerate(pins) if not (mask & ~ranks).any()]
        for kind in (0, 1):
            needed = {table: _least_bytes(problem, table, kind) for table in inside}
            tables = tuple(sorted(needed, key=lambda table: -needed[table]))
            total, available = sum(needed.values()), int(problem.capacity[ranks, kind].sum())
            shared.append(
                Shortage(kind, total, available, tables, tuple(np.flatnonzero(ranks).tolist()))
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


def _least_bytes(problem: PlanningProblem, table: int, kind: int) -> int:
    """The least bytes of a table, over all its shards."""
    return min(int(choice.memory[:, kind].sum()) for choice in problem.choices[table])


def why_infeasible(inputs: PlanInputs, proposed: bool = False) -> PlannerError:
    """The error for inputs without a plan: what is short, by how much, and what would make it fit.

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
    kind = PlannerErrorType.PARTITION if shortage.ranks else PlannerErrorType.INSUFFICIENT_STORAGE
    if any(
        _narrowed(inputs, option.name)
        for choices in problem.choices
        for option in choices[0].options
    ):
        kind = PlannerErrorType.STRICT_CONSTRAINTS
    if shortage.needed > shortage.room and len(shortage.ranks) == problem.world_size:
        kind = PlannerErrorType.INSUFFICIENT_STORAGE
    changes = (_looser_constraints, _smaller_reservation, _smaller_batch, _more_memory, _more_ranks)
    remedies = (line for change in changes if (line := change(inputs, shortage)) is not None)
    lines += list(islice(remedies, _REMEDIES)) or [
        "no single change was found that makes it fit: give it more ranks and more memory"
    ]
    return PlannerError("\n  ".join(lines), kind)


# --- what is short


def _lines_of_a_table(inputs: PlanInputs, shortage: Shortage) -> list[str]:
    """A table that fits on no rank: the bytes of the largest shard under the best sharding."""
    problem, kind = inputs.problem, shortage.kind
    first, *others = shortage.tables
    choices = problem.choices[first]
    least = _smallest(problem, first)
    tables = (
        f"table {names_of(least)!r} needs"
        if len(least.options) == 1
        else f"tables {names_of(least)} need"
    )
    reason = f"{bytes_text(shortage.needed)} of {MEMORIES[kind]} on one rank, and "
    if shortage.needed <= shortage.room:
        reason += "the ranks that it may lie on have no room for it"
    else:
        even = (problem.capacity[:, kind] == shortage.room).all()
        where = (
            "each rank"
            if even
            else f"rank {problem.capacity[:, kind].argmax()}, which has the most,"
        )
        reason += f"{where} has {bytes_text(shortage.room)} for tables"
    option = least.options[0]
    facts, size = option.facts, option.pieces().sizes[[int(least.memory.max(axis=1).argmax())]]
    stored = stored_bytes(
        facts, ShardingType(option.sharding_type), option.compute_kernel, size, inputs.topology
    )
    rows, columns = size[0].tolist()
    each = (
        f"{facts.row_bytes(columns)} B" if facts.packed else f"{columns} x {facts.element_bytes} B"
    )
    parts = [f"weights {rows:,} x {each} = {bytes_text(stored.weights[0])}"]
    names = ("optimizer state", "gradients", "ids", "looked-up rows", "mapping of raw ids")
    parts += [
        f"{name} {bytes_text(of[0])}"
        for name, of in zip(names, stored[1:6], strict=True)
        if of[0] > 0
    ]
    allowed = ", ".join(dict.fromkeys(type_of(choice) for choice in choices))
    pin = inputs.constraint(option.name).pin
    pinned = "" if pin is None else f"; pinned to {_ranks(pin)}"
    lines = [
        f"no sharding plan fits: {tables} {reason} (world_size={problem.world_size})",
        f"{', '.join(parts)}; allowed sharding: {allowed}{pinned}{_reserved_text(inputs)}",
    ]
    if others:
        lines.append(
            f"so do {_listed([names_of(problem.choices[t][0]) for t in others])}, each more "
            "than a rank has"
        )
    return lines


def _lines_of_all(inputs: PlanInputs, shortage: Shortage) -> list[str]:
    """Tables that fit alone, but not together."""
    problem, memory, tables = inputs.problem, MEMORIES[shortage.kind], shortage.tables
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
            f"{names_of(problem.choices[table][0])!r} "
            f"{bytes_text(_least_bytes(problem, table, shortage.kind))}"
        )
        for table in tables[:_NAMED]
    )
    return [
        f"{head} (world_size={problem.world_size})",
        f"the largest: {largest}{_reserved_text(inputs)}",
    ]


def _reserved_text(inputs: PlanInputs) -> str:
    kind = own_memory(inputs.topology)
    has = int(memory_of(inputs.topology)[0, kind])
    kept = has - int(inputs.problem.capacity[0, kind])
    text = (
        f"; {bytes_text(kept)} of a rank's {bytes_text(has)} {MEMORIES[kind]} are kept for "
        "everything else"
    )
    return text if kept * 100 >= has else ""


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
    taken = {
        option.name: choice
        for choice in placement.taken(remade.problem)
        for option in choice.options
    }
    fields = [
        name for name in _NARROWING if any(name in of_table for of_table in narrowed.values())
    ]
    change = f"no {' and no '.join(fields)}"
    if fields == ["sharding_types"]:
        kinds = dict.fromkeys(taken[name].options[0].sharding_type for name in narrowed)
        change = f"ParameterConstraints(sharding_types={list(kinds)})"
    names = list(narrowed)
    held = bytes_text(taken[names[0]].memory[:, shortage.kind].max())
    return (
        f"{change} for {'table' if len(names) == 1 else 'tables'} {_listed(names)}: {held} of "
        f"{names[0]!r} on a rank, a step of {ms_text(cost(remade.problem, placement))} ms"
    )


def _smaller_reservation(inputs: PlanInputs, shortage: Shortage) -> str | None:
    kind, whole = own_memory(inputs.topology), memory_of(inputs.topology)[:, :2]
    kept = int((whole - inputs.problem.capacity)[:, kind].max())
    problem = replace(inputs.problem, capacity=whole)
    placement = search(problem) if kept > 0 else None
    if placement is None:
        return None
    left = min(int((whole - rank_memory(problem, placement))[:, kind].min()), kept)
    return (
        f"FixedAbsoluteStorageReservation({left}) keeps {bytes_text(left)} of each rank for "
        f"everything else, instead of {bytes_text(kept)}"
    )


def _smaller_batch(inputs: PlanInputs, shortage: Shortage) -> str | None:
    """A batch size whose buffers fit; it helps if nearly all memory of a table is buffers."""
    share = shortage.room / max(shortage.needed, 1) / _SPARE
    smaller = 2 ** int(math.log2(max(inputs.batch_size * share, 1)))
    if smaller >= inputs.batch_size or not _fits(inputs.remade(batch_size=smaller)):
        return None
    return f"batch_size={smaller} instead of {inputs.batch_size}"


def _more_memory(inputs: PlanInputs, shortage: Shortage) -> str | None:
    kind, topology, problem = shortage.kind, inputs.topology, inputs.problem
    has, room = int(memory_of(topology)[:, kind].max()), int(problem.capacity[:, kind].min())
    if has <= 0:
        return None
    least = sum(_least_bytes(problem, table, kind) for table in range(len(problem.choices)))
    needed = max(least * _SPARE / problem.world_size, 0 if shortage.ranks else shortage.needed)
    # The reservation is a fraction of the memory, or a number of bytes.
    wanted = max(has * needed / room if room > has / 2 else 0, has - room + needed)
    step = 2 ** max(int(math.log2(wanted)) - 4, 0)  # a number with few digits in binary units
    count = math.ceil(wanted / step) * step
    storages = [
        replace(device.storage, **{("hbm", "ddr")[kind]: count}) for device in topology.devices
    ]
    if not _fits(inputs.remade(topology=topology.with_storage(storages))):
        return None
    return (
        f"{bytes_text(count)} of {MEMORIES[kind]} on each rank instead of {bytes_text(has)}: "
        f"{('hbm_cap', 'ddr_cap')[kind]}={count}"
    )


def _more_ranks(inputs: PlanInputs, shortage: Shortage) -> str | None:
    """More ranks per host if a host has few, else more hosts; new ranks are like the old ones.

    If a rank has next to no room for tables, no number of ranks is offered.
    """
    topology = inputs.topology
    world_size, local_size = topology.world_size, topology.local_world_size
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

"""Changes that make tables fit, from what costs nothing to what costs machines; each is planned before it is told."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tutorec.distributed.planner.changes import Change, found_plan, with_capacity
from tutorec.distributed.planner.constraints import ParameterConstraints
from tutorec.distributed.planner.inputs import PlanInputs
from tutorec.distributed.planner.options import Storage
from tutorec.distributed.planner.problem import PREFERENCE, Placement, PlanningProblem, cost
from tutorec.distributed.planner.report import MEMORIES
from tutorec.distributed.planner.shortage import find_shortage
from tutorec.distributed.planner.topology import DeviceHardware, Topology
from tutorec.distributed.text_table import bytes_text, ms_text, several

# Seconds after which no further change is tried.
PATIENCE = 6.0
_NARROWING = ("sharding_types", "compute_kernels", "pin", "colocate")
_CAPS = ("hbm_cap", "ddr_cap")
# Exponents of 1024 in which memory is offered, the largest that leaves some precision.
_UNITS = (3, 2, 1)
_NAMED = 3


def narrowed(constraint: ParameterConstraints) -> bool:
    """Whether a constraint takes options or ranks from a table.

    Example:
        >>> narrowed(ParameterConstraints(pooling_factors=[4.0])), narrowed(ParameterConstraints(pin=[0]))
        (False, True)
    """
    return any(getattr(constraint, name) is not None for name in _NARROWING)


@dataclass(frozen=True)
class _Found:
    """A plan that a change makes possible."""

    problem: PlanningProblem
    placement: Placement

    @property
    def step(self) -> float:
        """Milliseconds."""
        return cost(self.problem, self.placement)

    def largest_piece(self, table: str, kind: int) -> int:
        """Bytes of a table on the rank that holds most of it."""
        taken = self.placement.taken(self.problem)
        choice = next(choice for choice in taken if table in [option.name for option in choice.options])
        return int(choice.memory[:, kind].max())


@dataclass
class RemedySearch:
    """Looks for the smallest change of each kind.

    Args:
        inputs: What does not fit.
        tables: Numbers of tables that fit on no rank even alone.
        kind: The memory that is short: 0 HBM, 1 DDR.
    """

    inputs: PlanInputs
    tables: Sequence[int]
    kind: int
    _until: float = field(default=0.0, init=False)

    def lines(self) -> list[str]:
        """A line for each kind of change that was found, the cheapest first."""
        self._until = time.monotonic() + PATIENCE
        kinds: list[Callable[[], str | None]] = [
            self._constraints,
            self._reservation,
            self._batch,
            self._memory,
            self._ranks,
        ]
        found = []
        for look in kinds:
            if time.monotonic() < self._until and (line := look()) is not None:
                found.append(line)
        return found

    def _plan(self, change: Change) -> _Found | None:
        """A plan after a change, if that makes everything fit."""
        remade = self.inputs.remade(change) if time.monotonic() < self._until else None
        return None if remade is None else _planned(remade.problem)

    def _names(self, table: int) -> list[str]:
        return [option.name for option in self.inputs.problem.choices[table][0].options]

    def _constraints(self) -> str | None:
        """Constraints of as few tables as do."""
        problem = self.inputs.problem
        tables = list(self.tables) or sorted(range(len(problem.choices)), key=lambda table: -self._least(table))
        names = [name for table in tables for name in self._names(table) if narrowed(self.inputs.constraint(name))]
        found = [(plan, changed) for changed in self._loosenings(names) if (plan := self._loosened(names, changed))]
        if not found:
            return None
        plan, changed = min(found, key=lambda each: each[0].step)
        if not self.tables:  # single tables are not too large: the largest may be enough
            names, plan = self._fewest(names, changed, plan)
        held = bytes_text(plan.largest_piece(names[0], self.kind))
        words = f"{_loosening(changed)} for {_tables(names)}"
        return f"{words}: {held} of {names[0]!r} on a rank, a step of {ms_text(plan.step)} ms"

    def _least(self, table: int) -> int:
        return min(int(choice.memory[:, self.kind].sum()) for choice in self.inputs.problem.choices[table])

    def _loosened(self, names: Sequence[str], changed: Mapping[str, Any]) -> _Found | None:
        return self._plan(Change({name: replace(self.inputs.constraint(name), **changed) for name in names}))

    def _fewest(self, names: list[str], changed: Mapping[str, Any], plan: _Found) -> tuple[list[str], _Found]:
        """As few of the tables, taken from the first, as are enough, and the plan for them; all of them are."""
        low, high = 0, len(names)
        while high - low > 1:
            middle = (low + high) // 2
            better = self._loosened(names[:middle], changed)
            low, high, plan = (low, middle, better) if better is not None else (middle, high, plan)
        return names[:high], plan

    def _loosenings(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Fields of constraints that may be changed for some tables, the smaller changes first."""
        constraints = [self.inputs.constraint(name) for name in names]
        set_fields = [name for name in _NARROWING if any(getattr(each, name) is not None for each in constraints)]
        if "sharding_types" in set_fields:
            taken = [set(each.sharding_types or PREFERENCE) for each in constraints]
            yield from ({"sharding_types": [kind]} for kind in PREFERENCE if not all(kind in each for each in taken))
        yield from ({name: None} for name in set_fields)
        if len(set_fields) > 1:
            yield dict.fromkeys(set_fields)

    def _reservation(self) -> str | None:
        """Less kept for everything else."""
        problem = self.inputs.problem
        kind = 1 if self.inputs.topology.compute_device == "cpu" else 0
        whole = np.array([[d.storage.hbm, d.storage.ddr] for d in self.inputs.topology.devices], dtype=np.int64)
        kept = int((whole - problem.capacity)[:, kind].max())
        if kept <= 0:
            return None

        def fits(keep: int) -> bool:
            less = whole.copy()
            less[:, kind] = np.maximum(less[:, kind] - keep, 0)
            return time.monotonic() < self._until and _planned(with_capacity(problem, less)) is not None

        if not fits(0):
            return None
        low, high = 0, kept
        while high - low > kept // 64:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return (
            f"FixedAbsoluteStorageReservation({low}) keeps {bytes_text(low)} of each rank for everything else, "
            f"instead of {bytes_text(kept)}"
        )

    def _batch(self) -> str | None:
        """Fewer samples, where buffers are what is too much."""
        size = self.inputs.batch_size
        for smaller in (size // 2, size // 4, size // 16, size // 64):
            if smaller >= 1 and self._plan(Change(batch_size=smaller)) is not None:
                return f"batch_size={smaller} instead of {size}"
        return None

    def _memory(self) -> str | None:
        """More memory on each rank."""
        kind, topology = self.kind, self.inputs.topology
        has = max((d.storage.hbm, d.storage.ddr)[kind] for d in topology.devices)
        if has <= 0:
            return None

        def fits(bytes_: int) -> bool:
            return self._plan(Change(topology=_with_memory(topology, kind, bytes_))) is not None

        power = next((power for power in _UNITS if has >= 4 * 1024**power), 0)
        unit = 1024**power
        # Less than what is missing now is never enough.
        short = find_shortage(self.inputs.problem)
        missing = max(short.needed - short.room, 0) // (1 if short.alone else max(len(short.ranks), 1))
        low, high = has, 0
        for factor in (1, 1.25, 1.5, 2, 3, 4, 8, 16, 32, 64):
            high = _rounded((has + missing) * factor, unit)
            if fits(high):
                break
            low = high
        else:
            return None
        while high - low > max(unit, has // 32):
            middle = _rounded((low + high) / 2, unit)
            if middle in (low, high):
                break
            low, high = (low, middle) if fits(middle) else (middle, high)
        words = f"{high // unit} * {unit if power < 2 else f'1024**{power}'}" if power else f"{high}"
        return (
            f"{bytes_text(high)} of {MEMORIES[kind]} on each rank instead of {bytes_text(has)}: {_CAPS[kind]}={words}"
        )

    def _ranks(self) -> str | None:
        """More ranks, on the same host if there is one of few, else more hosts."""
        topology = self.inputs.topology
        hosts, local = topology.world_size // topology.local_world_size, topology.local_world_size
        grown = [(1, local * k) for k in (2, 3, 4) if local * k <= 8] if hosts == 1 else []
        more = sorted({hosts + 1, hosts + 2, math.ceil(hosts * 1.5), hosts * 2, hosts * 3, hosts * 4, hosts * 8})
        for wanted_hosts, wanted_local in grown or [(count, local) for count in more]:
            if self._plan(Change(topology=_with_ranks(topology, wanted_hosts, wanted_local))) is not None:
                world = wanted_hosts * wanted_local
                return (
                    f"{several(world, 'rank')} instead of {topology.world_size}: world_size={world}, "
                    f"local_world_size={wanted_local}"
                )
        return None


def _loosening(changed: Mapping[str, Any]) -> str:
    """A change to a constraint in words."""
    if changed.get("sharding_types"):
        return f"ParameterConstraints(sharding_types={changed['sharding_types']})"
    return f"no {' and no '.join(changed)}"


def _tables(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_NAMED]))
    more = f" and {several(len(names) - _NAMED, 'other')}" if len(names) > _NAMED else ""
    return f"table {shown}" if len(names) == 1 else f"tables {shown}{more}"


def _planned(problem: PlanningProblem) -> _Found | None:
    if find_shortage(problem).proves:
        return None
    placement = found_plan(problem)
    return None if placement is None else _Found(problem, placement)


def _rounded(count: float, unit: int) -> int:
    return math.ceil(count / unit) * unit


def _with_memory(topology: Topology, kind: int, bytes_: int) -> Topology:
    """The same machines with other memory of one kind, the same on each rank."""
    name = ("hbm", "ddr")[kind]
    return topology.with_storage([replace(device.storage, **{name: bytes_}) for device in topology.devices])


def _with_ranks(topology: Topology, hosts: int, local_size: int) -> Topology:
    """The same machines, more of them: memory as that of the ranks that there are, over and over."""
    changed = copy(topology)
    changed.world_size, changed.local_world_size = hosts * local_size, local_size
    if topology.local_world_size != local_size:
        changed.intra_group_size = local_size
    had = topology.devices
    changed.devices = [
        DeviceHardware(rank, _same(had[rank % len(had)].storage), copy(had[rank % len(had)].perf))
        for rank in range(changed.world_size)
    ]
    return changed


def _same(storage: Storage) -> Storage:
    return Storage(storage.hbm, storage.ddr, storage.ssd)

"""Why nothing fits: which table, or which tables together, need more than there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tutorec.distributed.planner.changes import fits_alone
from tutorec.distributed.planner.problem import PlanningProblem


@dataclass(frozen=True)
class Shortage:
    """What there is too little room for.

    Args:
        kind: The memory that is short: 0 HBM, 1 DDR.
        needed: Bytes: of the largest piece of the first table that fits nowhere; else of tables together at least.
        room: Bytes that there are for it.
        alone: Numbers of the tables that fit nowhere even alone, the largest first.
        together: Otherwise the numbers of the tables that do not fit together ...
        ranks: ... on these ranks.
    """

    kind: int
    needed: int
    room: int
    alone: tuple[int, ...] = ()
    together: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def proves(self) -> bool:
        """Whether it follows that nothing fits; if not, all that is known is that there is no obvious reason."""
        return bool(self.alone) or self.needed > self.room


def find_shortage(problem: PlanningProblem) -> Shortage:
    """What a problem is shortest of.

    Example:
        >>> from tutorec.distributed.planner.problem import Choice, Spread
        >>> whole = Choice(np.array([1.0]), np.array([[0, 12]]), Spread.ANY)
        >>> find_shortage(PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((whole,),)))
        Shortage(kind=1, needed=12, room=8, alone=(0,), together=(), ranks=())
    """
    room = problem.capacity.max(axis=0)
    alone = {}
    for table, choices in enumerate(problem.choices):
        if not any(fits_alone(problem, choice) for choice in choices):
            least = min((choice.memory.max(axis=0) for choice in choices), key=lambda memory: fullness(memory, room))
            alone[table] = least
    if alone:
        tables = sorted(alone, key=lambda table: -fullness(alone[table], room))
        worst = alone[tables[0]]
        kind = int((worst - room).argmax())
        return Shortage(kind, int(worst[kind]), int(room[kind]), tuple(tables))
    return max(_shortages_together(problem), key=lambda short: short.needed / max(short.room, 1))


def _shortages_together(problem: PlanningProblem) -> Iterator[Shortage]:
    """What all tables need of all ranks at least, and those that are pinned to some ranks of these."""
    everywhere = np.ones(problem.world_size, dtype=np.bool_)
    pins = [choices[0].allowed if choices[0].allowed is not None else everywhere for choices in problem.choices]
    for ranks in {mask.tobytes(): mask for mask in (everywhere, *pins)}.values():
        tables = [table for table, mask in enumerate(pins) if not (mask & ~ranks).any()]
        for kind in (0, 1):
            needed = sum(least_bytes(problem, table, kind) for table in tables)
            room = int(problem.capacity[ranks, kind].sum())
            yield Shortage(kind, needed, room, (), tuple(tables), tuple(np.flatnonzero(ranks).tolist()))


def fullness(memory: np.ndarray, room: np.ndarray) -> float:
    """Bytes of HBM and DDR as a part of the room for them, the larger of the two."""
    return float((memory / np.maximum(room, 1)).max())


def least_bytes(problem: PlanningProblem, table: int, kind: int) -> int:
    """Bytes that a table takes at least, of the choices that fit alone.

    Args:
        problem: All choices.
        table: Its number.
        kind: Of memory: 0 HBM, 1 DDR.
    """
    usable = [choice for choice in problem.choices[table] if fits_alone(problem, choice)]
    return min(int(choice.memory[:, kind].sum()) for choice in usable)

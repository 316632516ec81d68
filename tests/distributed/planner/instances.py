"""Planning problems as numbers: drawn small ones for properties, and a few fixed ones
of some size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from hypothesis import strategies as st

from tutorec.distributed.plan.plan import PlacementRule
from tutorec.distributed.planner.problem import Choice, Ints, PlanningProblem

SHAPES = ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2))


@st.composite
def problems(draw: st.DrawFn, most_tables: int = 3, latencies: bool = True) -> PlanningProblem:
    """Few tables on at most four ranks, with choices of every spread, short memory, pins and
    latencies.
    """
    world_size, local_size = draw(st.sampled_from(SHAPES))
    rooms = draw(st.lists(st.integers(4, 24), min_size=world_size, max_size=world_size))
    if draw(st.booleans()):
        rooms = [rooms[0]] * world_size
    capacity = np.array([[room, draw(st.sampled_from([0, 8, 100]))] for room in rooms])
    latency = st.sampled_from([0.0, 0.5, 3.0] if latencies else [0.0])
    fixed = np.array([draw(latency) for _ in range(3)])
    tables = tuple(
        tuple(draw(choices(world_size, local_size)) for _ in range(draw(st.integers(1, 3))))
        for _ in range(draw(st.integers(1, most_tables)))
    )
    return PlanningProblem(world_size, local_size, capacity, tables, fixed)


@st.composite
def choices(draw: st.DrawFn, world_size: int, local_size: int) -> Choice:
    """One choice; its pieces are equal, or each drawn."""
    spread = draw(st.sampled_from(list(PlacementRule)))
    pieces = {
        PlacementRule.ANY_RANK: draw(st.integers(1, 2)),
        PlacementRule.ONE_HOST: draw(st.integers(1, 3)),
        PlacementRule.ROWS_ON_HOST: local_size,
        PlacementRule.ROW_BLOCKS_ON_HOSTS: local_size * draw(st.integers(1, 2)),
        PlacementRule.EVERY_RANK: world_size,
    }[spread]
    drawn = 1 if draw(st.booleans()) else pieces
    time = np.resize([draw(st.integers(0, 12)) / 4 for _ in range(drawn)], pieces)
    memory = np.array(
        [[draw(st.integers(0, 10)), draw(st.sampled_from([0, 0, 3]))] for _ in range(drawn)]
    )
    allowed = None
    if spread is not PlacementRule.EVERY_RANK and draw(st.integers(0, 4)) == 0:
        allowed = np.array(draw(st.lists(st.booleans(), min_size=world_size, max_size=world_size)))
    group = (draw(st.integers(0, 2)),)
    return Choice(
        time, np.resize(memory, (pieces, 2)), spread, group, draw(st.integers(0, 3)), allowed
    )


def ways(problem: PlanningProblem, choice: Choice) -> Iterator[Ints]:
    """Every legal way to lay the pieces of a choice."""
    for ranks in _all_ways(problem, choice):
        if choice.allowed is None or choice.allowed[ranks].all():
            yield ranks


def _all_ways(problem: PlanningProblem, choice: Choice) -> Iterator[Ints]:
    pieces, size, hosts = (
        len(choice.time),
        problem.local_size,
        problem.world_size // problem.local_size,
    )
    rows = np.arange(size)
    if choice.rule is PlacementRule.EVERY_RANK:
        yield np.arange(problem.world_size)
    elif choice.rule is PlacementRule.ANY_RANK:
        yield from (np.array(ranks) for ranks in product(range(problem.world_size), repeat=pieces))
    elif choice.rule is PlacementRule.ONE_HOST:
        for host in range(hosts):
            yield from (
                host * size + np.array(ranks) for ranks in product(range(size), repeat=pieces)
            )
    else:
        for some in product(range(hosts), repeat=pieces // size):
            yield np.concatenate([host * size + rows for host in some])


def brute_force(problem: PlanningProblem) -> float:
    """Milliseconds of the best placement that fits, by trying all of them; infinite where none
    does.
    """
    world_size = problem.world_size
    fixed = problem.fixed if len(problem.fixed) else np.zeros(1)
    time, memory = np.zeros((1, world_size)), np.zeros((1, world_size, 2), dtype=np.int64)
    groups = np.zeros((1, len(fixed)), dtype=np.bool_)
    for of_table in problem.choices:
        parts = [
            _laid(choice, ranks, len(fixed), world_size)
            for choice in of_table
            for ranks in ways(problem, choice)
        ]
        if not parts:
            return float("inf")
        own = [np.stack([part[kind] for part in parts]) for kind in range(3)]
        time = (time[:, None] + own[0]).reshape(-1, world_size)
        memory = (memory[:, None] + own[1]).reshape(-1, world_size, 2)
        groups = (groups[:, None] | own[2]).reshape(-1, len(fixed))
        fits = (memory <= problem.capacity).all(axis=(1, 2))
        time, memory, groups = time[fits], memory[fits], groups[fits]
    return float((time.max(axis=1) + groups @ fixed).min(initial=np.inf))


def _laid(
    choice: Choice, ranks: Ints, groups: int, world_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a choice adds to every rank when its pieces lie on these, and the groups
    that it uses.
    """
    time, memory = np.zeros(world_size), np.zeros((world_size, 2), dtype=np.int64)
    np.add.at(time, ranks, choice.time)
    np.add.at(memory, ranks, choice.memory)
    return time, memory, np.isin(np.arange(groups), choice.groups)


def model(seed: int, tables: int, world_size: int, local_size: int, fill: float) -> PlanningProblem:
    """Tables from small to large that fill a part of the ranks: whole, in columns, in rows, in rows
    of a host, copied.

    Args:
        seed: Of the tables.
        tables: T.
        world_size: W.
        local_size: L.
        fill: Bytes of all tables as a part of the ranks' memory.

    Returns:
        The problem; its times have the form of lookups and exchanges, in no unit that matters.
    """
    draw = np.random.default_rng(seed)
    sizes = np.exp(draw.uniform(np.log(1e-5), 0.0, tables))
    work = np.exp(draw.uniform(0.0, np.log(50.0), tables))
    slices = draw.choice([1, 2, 4], tables)
    room = 10**9
    bytes_ = (sizes / sizes.sum() * fill * room * world_size).astype(np.int64)

    def choice(ms: float, size: int, pieces: int, spread: PlacementRule, group: int) -> Choice:
        memory = np.zeros((pieces, 2), dtype=np.int64)
        memory[:, 0] = size
        return Choice(np.full(pieces, ms), memory, spread, (group,), group)

    found = []
    for lookup, size, columns in zip(work.tolist(), bytes_.tolist(), slices.tolist(), strict=True):
        home = 0.2 * lookup
        ways_ = [
            choice(lookup + home, size, 1, PlacementRule.ANY_RANK, 0),
            choice(
                (lookup + 2.0 * home) / world_size + 0.3,
                -(-size // world_size),
                world_size,
                PlacementRule.EVERY_RANK,
                1,
            ),
            choice(lookup + home, size // 50 + 1, 1, PlacementRule.ANY_RANK, 5),
        ]
        ways_[2] = Choice(8.0 * ways_[2].time, ways_[2].memory, PlacementRule.ANY_RANK, (0,), 6)
        if columns > 1:
            part = (0.6 * lookup + home) / columns + 0.4 * lookup / columns + 0.1
            ways_.append(choice(part, -(-size // columns), columns, PlacementRule.ANY_RANK, 2))
        if local_size < world_size:
            rows = (lookup + 1.5 * home) / local_size + 0.2
            ways_.append(
                choice(rows, -(-size // local_size), local_size, PlacementRule.ROWS_ON_HOST, 3)
            )
        if size < room // 20:
            ways_.append(
                choice(
                    lookup / world_size + size / room * 40.0,
                    2 * size,
                    world_size,
                    PlacementRule.EVERY_RANK,
                    4,
                )
            )
        found.append(tuple(ways_))
    capacity = np.tile([[room, 0]], (world_size, 1))
    return PlanningProblem(world_size, local_size, capacity, tuple(found), np.zeros(6))


# Seed, tables, ranks, ranks of a host, filled part of the memory: at most 40 tables and 16 ranks.
FIXED = (
    (0, 8, 2, 2, 0.5),
    (1, 10, 4, 4, 0.6),
    (2, 12, 8, 4, 0.3),
    (3, 16, 4, 4, 0.8),
    (4, 20, 8, 8, 0.5),
    (5, 24, 8, 4, 0.7),
    (6, 30, 16, 8, 0.5),
    (7, 40, 16, 8, 0.6),
    (4, 20, 4, 4, 0.5),
    (6, 12, 16, 8, 0.5),
    (6, 30, 4, 2, 0.5),
    (7, 40, 4, 4, 0.6),
)

"""Where the shards of one more table can go, the other tables staying where they are."""

from __future__ import annotations

import numpy as np

from tutorec.distributed.planner.problem import Choice, Placement, PlanningProblem, Spread, rank_memory, rank_time


def with_choice(problem: PlanningProblem, placement: Placement, table: int, choice: int) -> Placement | None:
    """The placement with another choice for one table, the others staying where they are; None where it does not fit.

    Pieces go, longest first, where they end earliest.

    Args:
        problem: All choices.
        placement: An answer that fits.
        table: Its number.
        choice: The number among its choices.

    Example:
        >>> whole = Choice(np.array([2.0]), np.array([[0, 8]]), Spread.ANY)
        >>> halves = Choice(np.array([1.0, 1.0]), np.array([[0, 4], [0, 4]]), Spread.ALL)
        >>> problem = PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ((whole, halves),))
        >>> with_choice(problem, Placement(np.array([0]), [np.array([0])]), 0, 1).ranks[0].tolist()
        [0, 1]
    """
    wanted = problem.choices[table][choice]
    mine = problem.choices[table][int(placement.chosen[table])]
    load, held = rank_time(problem, placement), rank_memory(problem, placement)
    np.subtract.at(load, placement.ranks[table], mine.time)
    np.subtract.at(held, placement.ranks[table], mine.memory)
    ranks = _Room(problem, load, problem.capacity - held).place(wanted)
    if ranks is None:
        return None
    chosen, everyone = placement.chosen.copy(), list(placement.ranks)
    chosen[table], everyone[table] = choice, ranks
    return Placement(chosen, everyone)


def fits_alone(problem: PlanningProblem, choice: Choice) -> bool:
    """Whether a choice could be placed if no other table were there; true where that is hard to tell.

    Example:
        >>> empty = PlanningProblem(2, 2, np.array([[0, 8], [0, 8]]), ())
        >>> fits_alone(empty, Choice(np.array([2.0]), np.array([[0, 9]]), Spread.ANY))
        False
    """
    if _Room(problem, np.zeros(problem.world_size), problem.capacity).place(choice) is not None:
        return True
    if choice.spread not in (Spread.ANY, Spread.HOST) or (choice.memory == choice.memory[:1]).all():
        return False
    # The greedy order may fail with shards of different sizes; a shard that fits nowhere rules the choice out.
    allowed = problem.capacity if choice.allowed is None else problem.capacity[choice.allowed]
    return all(bool((piece <= allowed).all(axis=1).any()) for piece in choice.memory)


class _Room:
    """Where pieces can go: ``load [W]`` in ms, ``free [W, 2]`` bytes."""

    def __init__(self, problem: PlanningProblem, load: np.ndarray, free: np.ndarray) -> None:
        self.hosts, self.local_size = problem.world_size // problem.local_size, problem.local_size
        self.load, self.free = load, free

    def place(self, wanted: Choice) -> np.ndarray | None:
        """A rank for each piece, or None."""
        world = np.arange(len(self.load))
        allowed = wanted.allowed if wanted.allowed is not None else np.ones(len(world), dtype=np.bool_)
        if wanted.spread is Spread.ALL:
            return world if allowed.all() and (wanted.memory <= self.free).all() else None
        if wanted.spread is Spread.ANY:
            found = self._anywhere(wanted, allowed)
            return None if found is None else found[1]
        if wanted.spread is Spread.HOST:
            inside = [
                self._anywhere(wanted, allowed & (world // self.local_size == host)) for host in range(self.hosts)
            ]
            return min((each for each in inside if each is not None), key=lambda each: each[0], default=(0.0, None))[1]
        return self._blocks(wanted, allowed)

    def _anywhere(self, wanted: Choice, allowed: np.ndarray) -> tuple[float, np.ndarray] | None:
        """The load of the fullest rank that is used, and a rank for each piece."""
        load, free, ranks = self.load.copy(), self.free.copy(), np.zeros(len(wanted.time), dtype=np.int64)
        for piece in np.argsort(-wanted.time, kind="stable"):
            fits = allowed & (wanted.memory[piece] <= free).all(axis=1)
            if not fits.any():
                return None
            rank = ranks[piece] = np.where(fits, load, np.inf).argmin()
            load[rank] += wanted.time[piece]
            free[rank] -= wanted.memory[piece]
        return float(load[ranks].max(initial=0.0)), ranks

    def _blocks(self, wanted: Choice, allowed: np.ndarray) -> np.ndarray | None:
        """A host for each block of L pieces."""
        load = self.load.reshape(self.hosts, self.local_size).copy()
        free = self.free.reshape(self.hosts, self.local_size, 2).copy()
        times = wanted.time.reshape(-1, self.local_size)
        memory = wanted.memory.reshape(-1, self.local_size, 2)
        open_hosts, ranks = allowed.reshape(self.hosts, self.local_size).all(axis=1), []
        for time, bytes_of in zip(times, memory, strict=True):
            fits = open_hosts & (bytes_of <= free).all(axis=(1, 2))
            if not fits.any():
                return None
            host = int(np.where(fits, (load + time).max(axis=1), np.inf).argmin())
            load[host] += time
            free[host] -= bytes_of
            ranks.append(host * self.local_size + np.arange(self.local_size))
        return np.concatenate(ranks)

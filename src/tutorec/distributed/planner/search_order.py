"""Tables and hosts in an order that does not depend on how they were listed, so that the search does not either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tutorec.distributed.planner.problem import Choice, Ints, Placement, PlanningProblem, Spread


class SortedProblem:
    """A problem with its tables sorted, the one with the most work first, and its hosts, the one with most room first.

    Tables of equal work are sorted by memory, the largest first, then by everything else; what is equal in all that
    keeps its order.

    Args:
        given: The problem as it was posed.

    Attributes:
        problem: The sorted problem.

    Example:
        >>> def whole(ms):
        ...     return (Choice(np.array([ms]), np.array([[0, 1]]), Spread.ANY),)
        >>> ordered = SortedProblem(PlanningProblem(1, 1, np.array([[0, 9]]), (whole(1.0), whole(3.0), whole(2.0))))
        >>> [float(choices[0].time[0]) for choices in ordered.problem.choices]
        [3.0, 2.0, 1.0]
        >>> ordered.restore(Placement(np.array([0, 0, 0]), [np.array([0])] * 3)).chosen.tolist()
        [0, 0, 0]
    """

    def __init__(self, given: PlanningProblem) -> None:
        self.tables = sorted(range(len(given.choices)), key=lambda table: _table_key(given.choices[table]))
        self.ranks = _order_of_ranks(given, self.tables)
        sorted_choices = tuple(given.choices[table] for table in self.tables)
        if (self.ranks == np.arange(given.world_size)).all():
            self.problem = replace(given, choices=sorted_choices)
        else:
            moved = tuple(tuple(_moved(choice, self.ranks) for choice in choices) for choices in sorted_choices)
            self.problem = replace(given, choices=moved, capacity=given.capacity[self.ranks])

    def restore(self, placement: Placement) -> Placement:
        """A placement of the sorted problem, in the order of the given one."""
        chosen = np.empty_like(placement.chosen)
        ranks: list[Ints] = [np.empty(0, dtype=np.int64)] * len(self.tables)
        for place, table in enumerate(self.tables):
            chosen[table] = placement.chosen[place]
            choice = self.problem.choices[place][int(placement.chosen[place])]
            lies = placement.ranks[place]
            ranks[table] = lies if choice.spread is Spread.ALL else self.ranks[lies]
        return Placement(chosen, ranks)


def _table_key(choices: tuple[Choice, ...]) -> tuple[object, ...]:
    each = [
        (
            float(choice.time.sum()),
            -int(choice.memory.sum()),
            float(choice.time.max(initial=0.0)),
            choice.spread.value,
            choice.preference,
            choice.groups,
            len(choice.time),
            () if choice.allowed is None else tuple(choice.allowed.tolist()),
        )
        for choice in choices
    ]
    least = min(each)
    return (-least[0], least[1], sorted(each))


def _order_of_ranks(problem: PlanningProblem, tables: Sequence[int]) -> Ints:
    """Hosts with more room first, and on a host ranks as they are: pieces of rows follow their numbers.

    Where hosts differ for some table, that decides between hosts of equal room.
    """
    size = problem.local_size
    choices = [choice for table in tables for choice in problem.choices[table]]
    masks = [choice.allowed for choice in choices if choice.allowed is not None]
    differ = bool(masks) or bool((problem.capacity != problem.capacity[0]).any())
    columns = [-problem.capacity, *(~mask[:, None] for mask in masks)]
    if differ:
        columns += [choice.time[:, None] for choice in choices if choice.spread is Spread.ALL]
    of_ranks = np.concatenate([column.astype(np.float64) for column in columns], axis=1)
    order = sorted(
        range(problem.world_size // size), key=lambda host: of_ranks[host * size : (host + 1) * size].ravel().tolist()
    )
    return np.concatenate([np.arange(host * size, (host + 1) * size) for host in order])


def _moved(choice: Choice, ranks: Ints) -> Choice:
    """A choice for ranks in another order."""
    if choice.spread is Spread.ALL:
        choice = replace(choice, time=choice.time[ranks], memory=choice.memory[ranks])
    return choice if choice.allowed is None else replace(choice, allowed=choice.allowed[ranks])

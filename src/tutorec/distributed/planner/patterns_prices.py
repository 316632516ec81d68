"""The best prices of tables: a small linear program, kept from one question to the next.

Several sets of tables are to be refuted together, each the tables that are left for single ranks beside a base (see
`patterns_bases`). Prices are as good as the cheapest set is dear while no pattern is worth more than 1:

    maximise    f
    such that   sum over the set's tables of v        >= f     for each set s
                sum over tables of share[p, k] * v[k] <= 1     for each pattern p
                v                                     >= 0

The dual of this asks for the fewest ranks that hold a mixture of the sets, ranks and sets taken in parts:

    minimise    sum of lambda
    such that   sum over p of share[p, k] * lambda[p] >= sum over s with k of mu[s]    for each table k
                sum of mu                             =  1

It is solved by the simplex method, whose multipliers are the prices. Its basis has a column for each table and one
more; patterns and sets enter it as they are found, and it is the start for the next question, which has smaller
patterns and fewer sets: what it no longer has is made so dear that it leaves. A solver that starts anew each time would
take most of the time there is. Nothing hinges on the prices being exact: whatever they are, `patterns.worthiest` says
what they prove.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from tutorec.distributed.planner.problem import Floats, Ints

# What a pattern costs that no longer fits, and a set that is no longer asked for.
_GONE = 50.0
_PIVOTS, _FRESH_AFTER, _TINY = 400, 50, 1e-9
# Improvements of less than this part are none.
_ENOUGH = 1e-7


@dataclass(eq=False)
class Columns:
    """Patterns and sets that may enter the basis.

    Args:
        shares: ``[n, T]`` of each pattern.
        sizes: ``[n, 1 + D]`` of each pattern.
        sets: ``[m, T]`` 1 for each table of a set.
        names: ``[m]`` numbers by which sets are told from one another.
    """

    shares: Floats
    sizes: Floats
    sets: Floats
    names: Ints


class Basis:
    """The basis of the linear program, and the prices that follow from it.

    Args:
        single: ``[T]`` largest share of each table that a rank can hold; above 0 where the set has the table.
        sizes: ``[T, 1 + D]`` what that takes.
        some: ``[T]`` a set; ``name`` is its number.
    """

    def __init__(self, single: Floats, sizes: Floats, some: Floats, name: int) -> None:
        tables = len(single)
        self.columns = np.diag(np.append(np.where(single > 0, single, 1.0), 1.0))
        self.columns[:tables, tables] = -some
        self.cost = np.append(np.where(single > 0, 1.0, _GONE), 0.0)
        self.own_cost = self.cost.copy()
        self.sizes = np.vstack([sizes, np.zeros(sizes.shape[1])])
        self.name = np.append(np.full(tables, -1), name)
        self._pivots = 0
        self._invert()

    def moved(self, room: Floats, names: Ints) -> Basis | None:
        """A copy in which patterns that exceed the room, and sets but those named, are too dear; None: it is spoilt."""
        found = object.__new__(Basis)
        found.columns, found.sizes, found.name = self.columns.copy(), self.sizes.copy(), self.name.copy()
        found.own_cost = self.own_cost.copy()
        gone = (found.sizes > room * (1 + _TINY)).any(axis=1) | ((found.name >= 0) & ~np.isin(found.name, names))
        found.cost = np.where(gone, _GONE, found.own_cost)
        found._pivots = 0
        try:
            found._invert()
        except np.linalg.LinAlgError:
            return None
        return found if float(found._amount.min()) > -1e-7 else None

    def _invert(self) -> None:
        self._inverse = np.asarray(np.linalg.inv(self.columns), np.float64)
        self._amount = self._inverse[:, -1]

    def prices(self) -> tuple[Floats, float]:
        """``[T]`` prices, none below 0, and f: so many ranks hold the mixture. All are 0 where the basis is spoilt."""
        found = self.cost @ self._inverse
        if not np.isfinite(found).all():
            return np.zeros(len(found) - 1), 0.0
        return np.maximum(found[:-1], 0.0), float(found[-1])

    def improve(self, columns: Columns, enough: float) -> float:
        """Exchange columns until no other is of use, or f is no more than enough; returns f."""
        ranks = float("inf")
        for _ in range(_PIVOTS):
            prices: Floats = self.cost @ self._inverse
            ranks = float(prices[-1])
            if ranks <= enough or not self._exchange(columns, prices[:-1], ranks):
                break
        return ranks

    def _exchange(self, columns: Columns, prices: Floats, ranks: float) -> bool:
        """Let the column in that promises most; False where none does."""
        worth, dear = columns.shares @ prices, columns.sets @ prices
        pattern, some, table = int(worth.argmax()), int(dear.argmin()), int(prices.argmin())
        gains = (worth[pattern] - 1.0, (ranks - dear[some]) / max(ranks, 1.0), -prices[table])
        if max(gains) < _ENOUGH:
            return False
        column = np.zeros(len(prices) + 1)
        sizes, name, cost = np.zeros(self.sizes.shape[1]), -1, 0.0
        if gains[0] == max(gains):
            column[:-1], sizes, cost = columns.shares[pattern], columns.sizes[pattern], 1.0
        elif gains[1] == max(gains):
            column[:-1], column[-1], name = -columns.sets[some], 1.0, int(columns.names[some])
        else:
            column[table] = -1.0
        return self._enter(column, sizes, name, cost)

    def _enter(self, column: Floats, sizes: Floats, name: int, cost: float) -> bool:
        """Put a column in the place of the one that is used up first."""
        change = self._inverse @ column
        shrinks = np.flatnonzero(change > _TINY)
        if not len(shrinks):
            return False
        ratio = np.maximum(self._amount[shrinks], 0.0) / change[shrinks]
        first = shrinks[ratio <= ratio.min() + 1e-12]
        leaves = int(first[change[first].argmax()])
        self.columns[:, leaves], self.sizes[leaves], self.name[leaves] = column, sizes, name
        self.cost[leaves] = self.own_cost[leaves] = cost
        row = self._inverse[leaves] / change[leaves]
        self._inverse = np.asarray(self._inverse - np.outer(change, row), np.float64)
        self._inverse[leaves] = row
        self._pivots += 1
        if self._pivots % _FRESH_AFTER == 0:
            with suppress(np.linalg.LinAlgError):
                self._inverse: Floats = np.linalg.inv(self.columns)
        self._amount = self._inverse[:, -1]
        return True

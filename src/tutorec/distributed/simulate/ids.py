"""Distributions of ids over the rows of a table: uniform, power law, or observed.

A distribution returns, for a table of R rows, a step function: ranges of rows with equal
probability. From it follow the share of ids below a row, the hottest rows, and the number of
distinct rows in a batch, at a cost that hardly depends on R.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tutorec._check import require_finite

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Rows of a power law with a step of their own; the others share steps, each 2 % wider than the
# previous one.
_HEAD = 4096
_GROWTH = 1.02


@dataclass(frozen=True, eq=False)
class RowShares:
    """The share of a feature's ids on each row of a table, as K steps of equal rows.

    Args:
        edges: ``[K + 1]``, the first row of each step, and R.
        shares: ``[K]``, the share of ids on each step; they sum to 1, or are all 0 if there are no
            ids.
        behind: For steps over which rows of different shares are scattered, so that only the mean
            share is known: those rows as steps of their own, and the index of the step over which
            each is scattered.

    Example:
        >>> shares = RowShares(
        ...     np.array([0, 1, 5]), np.array([0.6, 0.4])
        ... )  # row 0 is hot, four rows share the rest
        >>> shares.below(np.array([0, 1, 3, 5])).round(9).tolist()
        [0.0, 0.6, 0.8, 1.0]
        >>> shares.hottest(2)
        [(0, 0.6), (1, 0.1)]
    """

    edges: Ints
    shares: Floats
    behind: tuple[RowShares, Ints] | None = None

    def below(self, ends: Ints) -> Floats:
        """The share of ids below each of ``ends [P]``."""
        return np.interp(ends, self.edges, self._below_edges)

    def hottest(self, count: int) -> list[tuple[int, float]]:
        """The ``count`` most frequent rows, with their shares, most frequent first."""
        share_of_row, order = self._by_frequency
        rows: list[tuple[int, float]] = []
        for step in order[:count]:
            step_rows = range(self.edges[step], self.edges[step + 1])[: count - len(rows)]
            rows += [
                (row, float(share_of_row[step])) for row in step_rows if share_of_row[step] > 0
            ]

        return rows

    def distinct(self, ids: float, starts: Ints, ends: Ints) -> Floats:
        """Expected number of distinct rows in ``[start, end)`` for a number of ids, ``[P]``.

        Example:
            >>> even = RowShares(np.array([0, 4]), np.array([1.0]))
            >>> even.distinct(2.0, np.array([0]), np.array([4])).round(
            ...     9
            ... ).tolist()  # 4 * (1 - (3 / 4) ** 2)
            [1.75]
        """
        below_edges = _distinct_below_edges(self, ids)
        ends_and_starts = np.interp(np.stack([ends, starts]), self.edges, below_edges)
        return ends_and_starts[0] - ends_and_starts[1]

    @cached_property
    def _below_edges(self) -> Floats:
        """The share of ids below each edge, ``[K + 1]``."""
        return np.append(0.0, np.cumsum(self.shares))

    @cached_property
    def _by_frequency(self) -> tuple[Floats, Ints]:
        """The share of a row of each step, and the steps, the most frequent rows first."""
        share_of_row = self.shares / np.diff(self.edges)
        return share_of_row, np.argsort(-share_of_row, kind="stable")

    def _touched(self, ids: float) -> Floats:
        """Expected distinct rows of each step, ``[K]``."""
        widths = np.diff(self.edges)
        if ids == 0:
            return np.zeros(len(widths))

        # log1p(-1) is minus infinity: every id is that row.
        with np.errstate(divide="ignore"):
            return widths * -np.expm1(ids * np.log1p(-np.minimum(self.shares / widths, 1.0)))


@lru_cache(maxsize=64)  # A model has many tables of the same rows with as many ids.
def _distinct_below_edges(shares: RowShares, ids: float) -> Floats:
    """Expected distinct rows below each edge, ``[K + 1]``."""
    touched = shares._touched(ids)
    if shares.behind is not None:
        rows, steps = shares.behind
        widths = np.diff(shares.edges)[steps]
        touched[steps] = widths * (rows._touched(ids).sum() / max(widths.sum(), 1))

    return np.append(0.0, np.cumsum(touched))


class IdLaw(Protocol):
    """A distribution of ids, for tables of any number of rows."""

    def over(self, rows: int) -> RowShares:
        """Return the shares for a table of R rows."""
        ...


@dataclass(frozen=True)
class Uniform:
    """The uniform distribution; `datasets.ids.uniform_ids` draws such ids.

    Example:
        >>> Uniform().over(8).below(np.array([2])).tolist()
        [0.25]
    """

    def over(self, rows: int) -> RowShares:
        """Return a single step."""
        return RowShares(np.array([0, rows]), np.array([1.0]))


@dataclass(frozen=True)
class PowerLaw:
    """A power law: row k has a share proportional to ``(k + 1) ** -exponent``.

    `datasets.ids.power_law_ids` draws such ids.

    Args:
        exponent: 0 is uniform; about 1 is usual for users and products.
        scattered: None: row 0 is the most frequent, row 1 the next, as in a vocabulary sorted by
            frequency, so the first range of rows gets most ids. A number: the rows are shuffled
            with this seed, as hashing does.

    Raises:
        ValueError: The exponent is negative or not finite.

    Example:
        >>> law = PowerLaw(1.0).over(3)
        >>> law.below(np.array([1, 2, 3])).round(3).tolist()  # 6/11, 9/11, 11/11
        [0.545, 0.818, 1.0]
    """

    exponent: float
    scattered: int | None = None

    def __post_init__(self) -> None:
        require_finite("PowerLaw.exponent", self.exponent, least=0)

    def over(self, rows: int) -> RowShares:
        """Return steps of one row for the 4,096 most frequent rows, then steps of growing width."""
        return _power_law(rows, self.exponent, self.scattered)


@lru_cache(maxsize=256)
def _power_law(rows: int, exponent: float, scattered: int | None) -> RowShares:
    head = min(rows, _HEAD)
    steps = max(1, math.ceil(math.log(rows / head) / math.log(_GROWTH)))
    tail = np.unique(np.round(np.geomspace(head, rows, steps + 1)).astype(np.int64))

    # For such k, the sum of (k + 1) ** -s over a step is close to the integral of x ** -s from
    # first + 1/2 to end + 1/2.
    mass = np.append(np.arange(1.0, head + 1) ** -exponent, np.diff(_area(tail + 0.5, exponent)))
    mass /= mass.sum()
    if scattered is None:
        return RowShares(np.append(np.arange(head), tail), mass)

    hot = np.random.default_rng(scattered).choice(rows, size=head, replace=False).astype(np.int64)
    edges = np.unique(np.concatenate([[0, rows], hot, hot + 1]))

    # The other rows have the mean share of the rest; their order is undetermined.
    shares = np.diff(edges) * (float(mass[head:].sum()) / max(rows - head, 1))
    hot_steps = np.searchsorted(edges, hot)
    shares[hot_steps] = mass[:head]

    return RowShares(
        edges,
        shares,
        (RowShares(tail, mass[head:]), np.setdiff1d(np.arange(len(shares)), hot_steps)),
    )


def _area(x: NDArray[Any], exponent: float) -> NDArray[Any]:
    """The integral of ``x ** -s``, up to a constant."""
    return np.log(x) if abs(exponent - 1) < 1e-12 else x ** (1 - exponent) / (1 - exponent)

"""Hit rates of row caches, computed from the popularity of rows."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log, log10

import torch
from torch import Tensor

from tutorec._kernels.caches.row_cache import ADMITTED, CacheAlgorithm
from tutorec.distributed.core.cache_params import CacheStatistics

__all__ = ["RowPopularity", "hit_rate"]

_ROUNDS = 60  # bisection steps: all bits of a float64
_FACTORS = (0.0, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)


def hit_rate(
    probabilities: Tensor,
    slots: int,
    algorithm: CacheAlgorithm = "lru",
    *,
    ids: int = 1,
    admitted: float | None = None,
    copies: Tensor | None = None,
) -> float:
    """The fraction of lookups that hit a cache in its steady state.

    Ids are assumed to be independent of one another. A row is read once per batch, so further
    occurrences of an id in a batch are hits. A batch uses row i with probability ``b_i = 1 -
    exp(-p_i * ids)``.

    - ``"lfu"``: the most popular rows are cached.
    - ``"lru"``: a row is evicted when it has not been used for T batches. T is the value for which
      the expected number of cached rows, the sum of ``h_i``, equals the number of slots. With
      batches that are always admitted, ``h_i = 1 - (1 - b_i) ** T``; with batches of one id this is
      Che's approximation, ``1 - exp(-p_i * T)`` [Che, Tung and Wang 2002].

    Args:
        probabilities: How often each row is looked up ``[R]``, as probabilities or counts.
        slots: Number of cached rows.
        algorithm: Eviction policy.
        ids: Ids per batch.
        admitted: Fraction of batches whose missing rows may evict others; by default the library's.
        copies: Number of rows with each of the probabilities ``[R]``; one each by default.

    Raises:
        ValueError: A probability is negative, or all are 0.

    Example:
        >>> import torch
        >>> popularity = torch.tensor([4.0, 2.0, 1.0, 1.0])
        >>> (
        ...     round(hit_rate(popularity, 2, "lfu", ids=1), 2),
        ...     round(hit_rate(popularity, 2, "lru", admitted=1), 2),
        ... )
        (0.76, 0.66)
    """
    rows = (
        torch.ones(len(probabilities), dtype=torch.float64) if copies is None else copies.double()
    )
    total = float((probabilities * rows).sum())
    if total <= 0 or bool((probabilities < 0).any()):
        raise ValueError(f"hit_rate: probabilities must not be negative or all 0; sum {total:g}")
    if slots >= float(rows.sum()):
        return 1.0

    uses = probabilities.double() * (ids / total)
    used = -torch.expm1(-uses)
    if algorithm == "lfu":
        order = used.argsort(descending=True)
        before = rows[order].cumsum(0) - rows[order]
        in_memory = ((slots - before) / rows[order]).clamp(0, 1)
        return 1 - float((used[order] * rows[order] * (1 - in_memory)).sum()) / ids
    share = ADMITTED[algorithm] if admitted is None else admitted
    in_memory = _settled(uses, used, rows, slots, share)
    return 1 - float((used * rows * (1 - in_memory)).sum()) / ids


def _settled(uses: Tensor, used: Tensor, rows: Tensor, slots: int, share: float) -> Tensor:
    """The probability that each row is cached ``[R]``."""

    def by_age(age: float) -> Tensor:
        # A row is cached from an admitting batch that uses it until an admitting batch finds it
        # unused for longer than the limit. The ratio is that of the mean numbers of batches with
        # and without a slot, of a renewal process.
        unused = torch.exp(-uses * age).clamp(min=1e-300)
        ratio = (share * (1 - unused) + used / (1 - used).clamp(min=1e-300)) / unused
        return 1 - 1 / (1 + ratio)

    def by_chance(chance: float) -> Tensor:
        # An admitting batch evicts all rows that it does not use, and admits each of its missing
        # rows with the same probability.
        return used * chance / (1 - used + used * chance).clamp(min=1e-300)

    def solve(in_memory: Callable[[float], Tensor], high: float) -> Tensor:
        low = 0.0
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            too_few = float((rows * in_memory(middle)).sum()) < slots
            low, high = (middle, high) if too_few else (low, middle)
        return in_memory(high)

    if float((rows * used).sum()) >= slots:  # a batch has more distinct rows than slots
        return solve(by_chance, 1.0)
    limit = 1.0
    while float((rows * by_age(limit)).sum()) < slots and limit < 1e15:
        limit *= 2
    return solve(by_age, limit)


class RowPopularity(CacheStatistics):
    """Access statistics of a table, from the row counts of a log.

    Pass it as `CacheParams(stats=RowPopularity(counts, ids=8192))`. With it the planner compares
    cache sizes by expected misses; without it the planner assumes equally popular rows.

    Args:
        counts: Number of lookups of each row ``[R]``, or its probability. A row that is not in the
            log counts as never looked up, so the log should be much longer than the table.
        ids: Ids in a batch of all ranks.
        algorithm: Eviction policy.

    Example:
        >>> import torch
        >>> popularity = RowPopularity(torch.tensor([4, 2, 1, 1]), ids=8)
        >>> round(popularity.expected_lookups, 1), round(popularity.hit_rate(0.5), 2)
        (3.1, 0.83)
        >>> round(popularity.expected_miss_rate(0.5), 2)  # 1.4 of the 3.1 rows of a batch
        0.45
    """

    def __init__(self, counts: Tensor, ids: int, algorithm: CacheAlgorithm = "lru") -> None:
        self._counts, self._rows = counts.unique(return_counts=True)
        self._ids = ids
        self._algorithm: CacheAlgorithm = algorithm

    @classmethod
    def power_law(
        cls, rows: int, exponent: float, ids: int, algorithm: CacheAlgorithm = "lru"
    ) -> RowPopularity:
        """Statistics of a power law: the k-th row has a probability ~ ``k ** -exponent``.

        Example:
            >>> law = RowPopularity.power_law(1000, 1.05, ids=100, algorithm="lfu")
            >>> round(law.hit_rate(0.1), 2)
            0.74
        """
        result = cls(torch.ones(1), ids, algorithm)
        # Rows whose ranks differ by less than one percent count as equally popular.
        edges = (
            torch.logspace(0, log10(rows + 1), ceil(100 * log(rows + 1)) + 2, dtype=torch.float64)
            .floor()
            .unique()
        )
        edges[-1] = rows + 1

        result._rows = edges.diff()
        result._counts = ((edges[:-1] + edges[1:] - 1) / 2) ** -exponent
        return result

    def hit_rate(self, clf: float) -> float:
        """Fraction of the ids of a batch that hit a cache of the fraction ``clf`` of the rows.

        It is `hit_rate` of this file: an id that is repeated in a batch hits.
        """
        slots = ceil(clf * int(self._rows.sum()))
        return hit_rate(self._counts, slots, self._algorithm, ids=self._ids, copies=self._rows)

    @property
    def expected_lookups(self) -> float:
        """Number of distinct rows in a batch."""
        return self._ids * (1 - self.hit_rate(0.0))

    def expected_miss_rate(self, clf: float) -> float:
        """Fraction of the distinct rows of a batch that miss a cache of ``clf`` of the rows."""
        return (1 - self.hit_rate(clf)) / (1 - self.hit_rate(0.0))

    @property
    def cacheability(self) -> float:
        """The area under the miss rate curve over load factors, 0 to 1."""
        misses = [self.expected_miss_rate(factor) for factor in _FACTORS]
        return float(torch.trapezoid(torch.tensor(misses), torch.tensor(_FACTORS)))

"""The batches of the ranks in a simulated step: expected numbers, or real batches.

Ranks with equal batches form a *class*. A simulation computes each of C classes once, so thousands
of ranks with equal batches cost as much as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np

from tutorec.distributed.simulate.ids import Floats, IdLaw, Ints, Uniform
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_V = TypeVar("_V")


@dataclass(frozen=True)
class Load:
    """A batch, as expected numbers.

    Args:
        batch_size: B, samples per rank; or one number per rank.
        pooling_factor: Mean number of ids per bag, for all features; or feature -> number.
        law: Distribution of ids over rows, for all features; or feature -> distribution.

    Example:
        >>> Load(4, pooling_factor={"item": 2.5}).of_ranks(2).ids(
        ...     "item", 10, np.array([0]), np.array([10])
        ... ).tolist()
        [[10.0]]
    """

    batch_size: int | Sequence[int]
    pooling_factor: float | Mapping[str, float] = 1.0
    law: IdLaw | Mapping[str, IdLaw] = field(default_factory=Uniform)

    def of_ranks(self, world_size: int) -> ExpectedLoads:
        """Return the load of each of W ranks.

        Raises:
            ValueError: There are not W batch sizes, or a batch size or pooling factor is negative.
        """
        return ExpectedLoads(self, world_size)


class _Classes:
    """The class of each rank.

    Args:
        classes: ``[W]``, from 0; every class has a rank.
    """

    variable = False
    """Whether on some rank features have different numbers of samples."""

    def __init__(self, classes: Ints) -> None:
        self.classes = classes
        self.members: Ints = np.bincount(classes)


class ExpectedLoads(_Classes):
    """The expected load of each rank; ranks with the same batch size form a class.

    Args:
        load: The batch of a rank.
        world_size: W.
    """

    def __init__(self, load: Load, world_size: int) -> None:
        sizes = np.asarray(load.batch_size, dtype=np.float64)
        sizes = sizes if sizes.ndim else np.full(world_size, sizes)
        if sizes.shape != (world_size,) or not (sizes >= 0).all():
            raise ValueError(
                f"Load.batch_size={load.batch_size!r} for {world_size} ranks: give one number of "
                "at least 0, or one for each rank"
            )

        factors = (
            load.pooling_factor
            if isinstance(load.pooling_factor, Mapping)
            else {"": load.pooling_factor}
        )
        for feature, factor in factors.items():
            if not 0 <= factor < math.inf:
                raise ValueError(
                    f"Load.pooling_factor={factor!r} of feature {feature!r}: give the mean number "
                    "of ids of a bag, at least 0"
                )

        self._sizes, classes = np.unique(sizes, return_inverse=True)
        super().__init__(classes.reshape(-1))
        self._load = load

    def samples(self, feature: str) -> Floats:
        """B of a rank of each class, ``[C]``."""
        return self._sizes

    def ids(self, feature: str, rows: int, starts: Ints, ends: Ints) -> Floats:
        """Ids of a rank of each class in P ranges of a table's R rows, ``[C, P]``."""
        shares = self._law(feature).over(rows)
        return np.outer(
            self._sizes, self._factor(feature) * (shares.below(ends) - shares.below(starts))
        )

    def distinct(self, features: Sequence[str], rows: int, starts: Ints, ends: Ints) -> Floats:
        """Expected distinct rows of all ranks' ids in each range, ``[P]``."""
        # Features with one distribution count as one feature with all ids; for different
        # distributions, common rows count several times.
        by_law: dict[IdLaw, float] = {}
        for feature in features:
            by_law[self._law(feature)] = by_law.get(self._law(feature), 0.0) + self._total(feature)
        counts = [law.over(rows).distinct(ids, starts, ends) for law, ids in by_law.items()]
        return np.minimum(np.sum(counts, axis=0), ends - starts)

    def hottest(self, features: Sequence[str], rows: int, count: int) -> list[tuple[int, float]]:
        """The most frequent rows, with the number of their ids on all ranks."""
        laws = [(self._law(feature).over(rows), self._total(feature)) for feature in features]
        hot = np.array(
            sorted({row for law, _ in laws for row, _ in law.hottest(count)}), dtype=np.int64
        )
        reads = sum(
            (total * (law.below(hot + 1) - law.below(hot)) for law, total in laws),
            np.zeros(len(hot)),
        )

        return _most_frequent(hot, reads, count)

    def _total(self, feature: str) -> float:
        return float(self._sizes @ self.members) * self._factor(feature)

    def _factor(self, feature: str) -> float:
        return _feature_value(self._load.pooling_factor, feature, "pooling_factor")

    def _law(self, feature: str) -> IdLaw:
        return _feature_value(self._load.law, feature, "law")


class MeasuredLoads(_Classes):
    """The load of real batches.

    Args:
        batches: Rank r has batch r; with fewer batches than ranks, they are repeated cyclically.
        world_size: W.

    Raises:
        ValueError: There is no batch, or there are more batches than ranks.

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([0, 5, 2]), lengths=torch.tensor([1, 2])
        ... )
        >>> loads = MeasuredLoads([batch], world_size=4)
        >>> (
        ...     loads.ids("item", 6, np.array([0, 3]), np.array([3, 6])).tolist(),
        ...     loads.hottest(["item"], 6, 1),
        ... )
        ([[2.0, 1.0]], [(0, 4.0)])
    """

    def __init__(self, batches: Sequence[KeyedJaggedTensor], world_size: int) -> None:
        if not 0 < len(batches) <= world_size:
            raise ValueError(
                f"a simulation of {world_size} ranks got {len(batches)} batches: give one for each "
                "rank, or fewer that come again in turn"
            )

        super().__init__(np.arange(world_size) % len(batches))
        self.variable = any(batch.variable_stride_per_key() for batch in batches)
        self._samples = [
            dict(zip(batch.keys(), batch.stride_per_key(), strict=True)) for batch in batches
        ]
        self._sorted_ids = [
            {
                key: np.sort(ids.cpu().numpy()).astype(np.int64)
                for key, ids in zip(
                    batch.keys(), batch.values().split(batch.length_per_key()), strict=True
                )
            }
            for batch in batches
        ]

    def samples(self, feature: str) -> Floats:
        """B of a rank of each class, ``[C]``."""
        return np.array(
            [_feature_value(batch, feature, "batches") for batch in self._samples], dtype=np.float64
        )

    def ids(self, feature: str, rows: int, starts: Ints, ends: Ints) -> Floats:
        """Ids of a rank of each class in P ranges, counted, ``[C, P]``.

        Raises:
            ValueError: An id is outside the table.
        """
        batch_ids = self._of([feature])
        for index, ids in enumerate(batch_ids):
            for wrong in ids[(ids < 0) | (ids >= rows)][:1]:
                raise ValueError(
                    f"batch {index}: id {wrong} of feature {feature!r} is outside its table of "
                    f"{rows} rows: it must be 0 to {rows - 1}"
                )

        counts = [np.searchsorted(ids, ends) - np.searchsorted(ids, starts) for ids in batch_ids]
        return np.stack(counts).astype(np.float64)

    def distinct(self, features: Sequence[str], rows: int, starts: Ints, ends: Ints) -> Floats:
        """Number of distinct rows of all ranks' ids in each range, ``[P]``."""
        touched = np.unique(np.concatenate(self._of(features)))
        return (np.searchsorted(touched, ends) - np.searchsorted(touched, starts)).astype(
            np.float64
        )

    def hottest(self, features: Sequence[str], rows: int, count: int) -> list[tuple[int, float]]:
        """The most frequent rows, with their counts."""
        ids = self._of(features)
        weights = np.repeat(
            np.tile(self.members, len(features)), [len(feature_ids) for feature_ids in ids]
        )
        hot, index = np.unique(np.concatenate(ids), return_inverse=True)
        reads = np.bincount(index.reshape(-1), weights, len(hot)).astype(np.float64)
        return _most_frequent(hot, reads, count)

    def _of(self, features: Sequence[str]) -> list[Ints]:
        return [
            _feature_value(ids, feature, "batches")
            for feature in features
            for ids in self._sorted_ids
        ]


RankLoads: TypeAlias = ExpectedLoads | MeasuredLoads


def rank_loads(
    load: Load | KeyedJaggedTensor | Sequence[KeyedJaggedTensor], world_size: int
) -> RankLoads:
    """The load of W ranks, from any accepted form.

    Args:
        load: Expected numbers, or batches.
        world_size: W.

    Raises:
        ValueError: The load does not fit the number of ranks.

    Example:
        >>> rank_loads(Load([2, 2, 5]), world_size=3).classes.tolist()
        [0, 0, 1]
    """
    if isinstance(load, Load):
        return load.of_ranks(world_size)
    return MeasuredLoads([load] if isinstance(load, KeyedJaggedTensor) else load, world_size)


def most_samples(loads: RankLoads, features: Sequence[str]) -> Floats:
    """B of a rank of each class, the maximum over several features, ``[C]``."""
    return np.max([np.zeros(len(loads.members)), *map(loads.samples, features)], axis=0)


def _feature_value(values: _V | Mapping[str, _V], feature: str, source: str) -> _V:
    """The value of a feature: its own, or the common one."""
    if not isinstance(values, Mapping):
        return values
    if feature not in values:
        raise ValueError(
            f"{source} has no value for feature {feature!r}; add it to {sorted(values)}"
        )
    return values[feature]


def _most_frequent(rows: Ints, reads: Floats, count: int) -> list[tuple[int, float]]:
    order = np.argsort(-reads, kind="stable")[:count]
    return [(int(rows[index]), float(reads[index])) for index in order if reads[index] > 0]

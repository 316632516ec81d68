"""What the ranks bring to a step: expected numbers, or those of real batches.

Ranks that bring the same are a *class*. A simulation computes for each of the C classes what W ranks would compute, so
that four thousand ranks with batches of one size cost as much as one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from tutorec.distributed.simulate.ids import Floats, IdLaw, Ints, Uniform
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_V = TypeVar("_V")


@dataclass(frozen=True)
class Load:
    """The batch of a step, as expected numbers.

    Args:
        batch_size: B, samples of a rank; or one number for each rank.
        pooling_factor: Mean number of ids in a bag, of all features; or feature -> number.
        law: How ids spread over rows, of all features; or feature -> law.

    Example:
        >>> Load(4, pooling_factor={"item": 2.5}).of_ranks(2).ids("item", 10, np.array([0]), np.array([10])).tolist()
        [[10.0]]
    """

    batch_size: int | Sequence[int]
    pooling_factor: float | Mapping[str, float] = 1.0
    law: IdLaw | Mapping[str, IdLaw] = field(default_factory=Uniform)

    def of_ranks(self, world_size: int) -> RankLoads:
        """The load of each of W ranks.

        Raises:
            ValueError: There are not W batch sizes, or one is negative; a pooling factor is negative.
            TypeError: A law is none.
        """
        return _Expected(self, world_size)


class RankLoads(ABC):
    """The load of each rank.

    Args:
        classes: ``[W]``, the class of each rank, from 0; every class has a rank.
        variable: Whether on any rank features differ in their number of samples.
    """

    def __init__(self, classes: Ints, variable: bool = False) -> None:
        self.classes = classes
        self.variable = variable
        self.members: Ints = np.bincount(classes)

    @abstractmethod
    def samples(self, feature: str) -> Floats:
        """B of a rank of each class, ``[C]``."""

    @abstractmethod
    def ids(self, feature: str, rows: int, starts: Ints, ends: Ints) -> Floats:
        """Ids of a rank of each class in P ranges of a table's R rows, ``[C, P]``."""

    @abstractmethod
    def distinct(self, features: Sequence[str], rows: int, starts: Ints, ends: Ints) -> Floats:
        """Distinct rows in each range that the ids of all ranks touch together, ``[P]``."""

    @abstractmethod
    def hottest(self, features: Sequence[str], rows: int, count: int) -> list[tuple[int, float]]:
        """The rows that come most often, with their ids of all ranks; nothing where that is not known."""


class _Expected(RankLoads):
    def __init__(self, load: Load, world_size: int) -> None:
        given: Any = load.batch_size
        sizes = list(given) if isinstance(given, (Sequence, np.ndarray)) else [given] * world_size
        if len(sizes) != world_size or not all(isinstance(size, Integral) and int(size) >= 0 for size in sizes):
            raise ValueError(
                f"Load.batch_size={given!r} for {world_size} ranks: give one number of at least 0, or one for each rank"
            )
        factors = (
            load.pooling_factor.items() if isinstance(load.pooling_factor, Mapping) else [("", load.pooling_factor)]
        )
        for feature, factor in factors:
            if not (isinstance(factor, Real) and math.isfinite(factor) and factor >= 0):
                raise ValueError(
                    f"Load.pooling_factor={factor!r} of feature {feature!r}: give the mean number of ids of a bag, at "
                    "least 0"
                )
        for law in load.law.values() if isinstance(load.law, Mapping) else [load.law]:
            if isinstance(law, type) or not callable(getattr(law, "over", None)):
                raise TypeError(f"Load.law={law!r} is no law of ids: give Uniform(), PowerLaw(1.05) or Observed(...)")
        unique, classes = np.unique(np.array(sizes, dtype=np.int64), return_inverse=True)
        super().__init__(classes.reshape(-1).astype(np.int64))
        self._load, self._sizes = load, unique.astype(np.float64)

    def samples(self, feature: str) -> Floats:
        return self._sizes

    def ids(self, feature: str, rows: int, starts: Ints, ends: Ints) -> Floats:
        shares = self._law(feature).over(rows)
        return self._sizes[:, None] * (self._factor(feature) * (shares.below(ends) - shares.below(starts)))[None]

    def distinct(self, features: Sequence[str], rows: int, starts: Ints, ends: Ints) -> Floats:
        # Features of one law are as one feature with the ids of all; of several laws, rows that two touch count twice.
        by_law: dict[IdLaw, float] = {}
        for feature in features:
            by_law[self._law(feature)] = by_law.get(self._law(feature), 0.0) + self._total(feature)
        counts = np.zeros(len(starts))
        for law, count in by_law.items():
            counts += law.over(rows).distinct(count, starts, ends)
        return np.minimum(counts, ends - starts)

    def hottest(self, features: Sequence[str], rows: int, count: int) -> list[tuple[int, float]]:
        laws = [(self._law(feature).over(rows), self._total(feature)) for feature in features]
        hot = np.array(sorted({row for law, _ in laws for row, _ in law.hottest(count)}), dtype=np.int64)
        reads = np.zeros(len(hot))
        for law, total in laws:
            reads += total * (law.below(hot + 1) - law.below(hot))
        return _first(hot, reads, count)

    def _total(self, feature: str) -> float:
        return float((self._sizes * self.members).sum()) * self._factor(feature)

    def _factor(self, feature: str) -> float:
        factor = self._load.pooling_factor
        return float(_of_feature(factor, feature, "pooling_factor") if isinstance(factor, Mapping) else factor)

    def _law(self, feature: str) -> IdLaw:
        law = self._load.law
        return _of_feature(law, feature, "law") if isinstance(law, Mapping) else law


class MeasuredLoads(RankLoads):
    """The load of real batches.

    Args:
        batches: Rank r brings batch r; where there are fewer batches than ranks, they come again in turn.
        world_size: W.

    Raises:
        ValueError: There is no batch, or there are more than ranks.

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(["item"], torch.tensor([0, 5, 2]), lengths=torch.tensor([1, 2]))
        >>> loads = MeasuredLoads([batch], world_size=4)
        >>> loads.ids("item", 6, np.array([0, 3]), np.array([3, 6])).tolist(), loads.hottest(["item"], 6, 1)
        ([[2.0, 1.0]], [(0, 4.0)])
    """

    def __init__(self, batches: Sequence[KeyedJaggedTensor], world_size: int) -> None:
        if not 0 < len(batches) <= world_size:
            raise ValueError(
                f"a simulation of {world_size} ranks got {len(batches)} batches: give one for each rank, or fewer that "
                "come again in turn"
            )
        super().__init__(
            np.arange(world_size, dtype=np.int64) % len(batches), any(b.variable_stride_per_key() for b in batches)
        )
        self._samples = [dict(zip(batch.keys(), batch.stride_per_key(), strict=True)) for batch in batches]
        self._ids = [
            {
                key: np.sort(ids.cpu().numpy()).astype(np.int64)
                for key, ids in zip(batch.keys(), batch.values().split(batch.length_per_key()), strict=True)
            }
            for batch in batches
        ]

    def samples(self, feature: str) -> Floats:
        """B of a rank of each class, ``[C]``."""
        return np.array([_of_feature(of_batch, feature, "batches") for of_batch in self._samples], dtype=np.float64)

    def ids(self, feature: str, rows: int, starts: Ints, ends: Ints) -> Floats:
        """Ids of a rank of each class in P ranges, counted, ``[C, P]``.

        Raises:
            ValueError: An id is no row of the table.
        """
        counts = np.zeros((len(self._ids), len(starts)))
        for index, ids in enumerate(self._of(feature)):
            if len(ids) and (ids[0] < 0 or ids[-1] >= rows):
                wrong = ids[0] if ids[0] < 0 else ids[-1]
                raise ValueError(
                    f"batch {index}: id {wrong} of feature {feature!r} is outside of its table of {rows} rows: it "
                    f"must be 0 to {rows - 1}"
                )
            counts[index] = np.searchsorted(ids, ends) - np.searchsorted(ids, starts)
        return counts

    def distinct(self, features: Sequence[str], rows: int, starts: Ints, ends: Ints) -> Floats:
        """Distinct rows in each range that the ids of all ranks touch together, counted, ``[P]``."""
        touched = np.unique(np.concatenate([ids for feature in features for ids in self._of(feature)]))
        return (np.searchsorted(touched, ends) - np.searchsorted(touched, starts)).astype(np.float64)

    def hottest(self, features: Sequence[str], rows: int, count: int) -> list[tuple[int, float]]:
        """The rows that come most often, counted."""
        weighted = [
            (ids, float(members))
            for feature in features
            for ids, members in zip(self._of(feature), self.members, strict=True)
        ]
        hot, place = np.unique(np.concatenate([ids for ids, _ in weighted]), return_inverse=True)
        times = np.concatenate([np.full(len(ids), members) for ids, members in weighted])
        return _first(hot, np.bincount(place.reshape(-1), weights=times, minlength=len(hot)).astype(np.float64), count)

    def _of(self, feature: str) -> list[Ints]:
        return [_of_feature(of_batch, feature, "batches") for of_batch in self._ids]


def rank_loads(load: Load | RankLoads | KeyedJaggedTensor | Sequence[KeyedJaggedTensor], world_size: int) -> RankLoads:
    """What W ranks bring, however it was said.

    Args:
        load: Expected numbers, or batches.
        world_size: W.

    Raises:
        TypeError: It is none of these.
        ValueError: It does not fit the number of ranks.

    Example:
        >>> rank_loads(Load([2, 2, 5]), world_size=3).classes.tolist()
        [0, 0, 1]
    """
    if isinstance(load, Load):
        return load.of_ranks(world_size)
    if isinstance(load, RankLoads):
        if len(load.classes) != world_size:
            raise ValueError(
                f"a simulation of {world_size} ranks got the load of {len(load.classes)}: give {world_size}"
            )
        return load
    batches = [load] if isinstance(load, KeyedJaggedTensor) else load
    if isinstance(batches, Sequence) and all(isinstance(batch, KeyedJaggedTensor) for batch in batches):
        return MeasuredLoads(batches, world_size)
    raise TypeError(
        f"a simulation needs a Load or KeyedJaggedTensors, got {type(load).__name__}: "
        "Load(batch_size=1024, pooling_factor=10)"
    )


def _of_feature(of_features: Mapping[str, _V], feature: str, what: str) -> _V:
    if feature not in of_features:
        raise ValueError(f"{what} says nothing about feature {feature!r}; give it beside {sorted(of_features)}")
    return of_features[feature]


def _first(rows: Ints, reads: Floats, count: int) -> list[tuple[int, float]]:
    order = np.argsort(-reads, kind="stable")[:count]
    return [
        (row, float(many)) for row, many in zip(rows[order].tolist(), reads[order].tolist(), strict=True) if many > 0
    ]

"""Exercises of chapter 19: whose row an id is, and a bag over ranges of rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import per_rank

__all__ = ["EXERCISES"]


def _place(rows: Sequence[int], bounds: Sequence[int], feature: int, identifier: int) -> list[int]:
    """The rank that owns an id, and its row there."""
    row = sum(rows[:feature]) + identifier
    rank = bisect_right(bounds, row) - 1
    return [rank, row - bounds[rank]]


def _forgets_features_before(
    rows: Sequence[int], bounds: Sequence[int], feature: int, identifier: int
) -> list[int]:
    return _place([0] * len(rows), bounds, feature, identifier)


def _row_of_all(
    rows: Sequence[int], bounds: Sequence[int], feature: int, identifier: int
) -> list[int]:
    return [_place(rows, bounds, feature, identifier)[0], sum(rows[:feature]) + identifier]


def _bound_belongs_below(
    rows: Sequence[int], bounds: Sequence[int], feature: int, identifier: int
) -> list[int]:
    row = sum(rows[:feature]) + identifier
    rank = max(sum(row > bound for bound in bounds) - 1, 0)
    return [rank, row - bounds[rank]]


# The rows of three features on two ranks, and the ids of each rank's two samples.
_ROWS = (2, 5, 1)
_BOUNDS = (0, 4, 8)
_IDS = ([[0, 4, 0], [1, 2, 0]], [[1, 0, 0], [1, 1, 0]])


def _partial_sums(
    ids: Tensor, my_rows: Tensor, bounds: Sequence[int], starts: Tensor, *, clamp: bool = False
) -> Tensor:
    """For the samples of all ranks the sums over the rows of this rank, [W, B, D]."""
    arrived = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
    dist.all_gather(arrived, ids)
    rows = torch.stack(arrived) + starts - bounds[dist.get_rank()]

    is_local = (rows >= 0) & (rows < len(my_rows))
    vectors = my_rows[rows.clamp(0, len(my_rows) - 1)]
    if not clamp:
        vectors = vectors * is_local.unsqueeze(-1)
    return vectors.sum(dim=2)


def _sums_of_my_samples(partial: Tensor) -> Tensor:
    dist.all_reduce(partial)
    return partial[dist.get_rank()]


def _bag(ids: Tensor, my_rows: Tensor, bounds: Sequence[int], starts: Tensor) -> Tensor:
    """Partial sums of all samples, added up over the ranks; each rank keeps its samples."""
    return _sums_of_my_samples(_partial_sums(ids, my_rows, bounds, starts))


def _clamped(ids: Tensor, my_rows: Tensor, bounds: Sequence[int], starts: Tensor) -> Tensor:
    return _sums_of_my_samples(_partial_sums(ids, my_rows, bounds, starts, clamp=True))


def _own_rows_only(ids: Tensor, my_rows: Tensor, bounds: Sequence[int], starts: Tensor) -> Tensor:
    return _partial_sums(ids, my_rows, bounds, starts)[dist.get_rank()]


def _samples_mixed(ids: Tensor, my_rows: Tensor, bounds: Sequence[int], starts: Tensor) -> Tensor:
    mixed = _own_rows_only(ids, my_rows, bounds, starts)
    dist.all_reduce(mixed)
    return mixed


def _inputs(rank: int) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """Ids of a rank, its rows, the bounds of both, and where each feature starts."""
    weights = 10.0 ** torch.arange(sum(_ROWS), device=device()).reshape(-1, 1)
    starts = torch.tensor([0, *accumulate(_ROWS[:-1])], device=device())
    ids = torch.tensor(_IDS[rank], device=device())
    return ids, weights[_BOUNDS[rank] : _BOUNDS[rank + 1]], list(_BOUNDS), starts


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="19.1",
        compared=(
            "the rank and the row of the first and last ids of features and of the ids at bounds"
        ),
        solution=_place,
        cases=(
            ([5, 26, 1], [0, 10, 21, 32], 0, 4),
            ([5, 26, 1], [0, 10, 21, 32], 1, 4),
            ([5, 26, 1], [0, 10, 21, 32], 1, 5),
            ([5, 26, 1], [0, 10, 21, 32], 1, 25),
            ([5, 26, 1], [0, 10, 21, 32], 2, 0),
            ([24, 24], [0, 24, 48], 1, 0),
        ),
        mistakes=(
            Mistake(
                "forgets the features before",
                _forgets_features_before,
                "Ids of the first feature are right. The bounds count the rows of all features, "
                "and an id counts from the first row of its own feature.",
            ),
            Mistake(
                "returns the row among all rows",
                _row_of_all,
                "The ranks are right. A rank's own rows count from 0; which of all rows is its "
                "first?",
            ),
            Mistake(
                "gives the row at a bound to the rank below",
                _bound_belongs_below,
                "Look at the ids at a bound: a range ends before its upper bound. Which rank owns "
                "the row at the bound itself?",
            ),
        ),
        shape="a function that returns two numbers, [rank, row]",
    ),
    Exercise(
        id="19.2",
        compared="the sums of two samples on each of two ranks",
        solution=_bag,
        measure=per_rank(2, _inputs),
        mistakes=(
            Mistake(
                "adds a row for an id that it does not own",
                _clamped,
                "Each sum has a row too many, or several. What does a rank add for an id whose "
                "row it does not own?",
            ),
            Mistake(
                "sums only the rows that are on the rank of the sample",
                _own_rows_only,
                "The rows of your own rank are in the sums, and no others. Which ranks have the "
                "rest, and do they know your ids?",
            ),
            Mistake(
                "adds the samples of one rank to those of the other",
                _samples_mixed,
                "Both ranks have the same sums. Sample 0 of rank 0 and sample 0 of rank 1 are "
                "different samples: which partial sums belong together?",
            ),
        ),
        shape="a function that returns a tensor [samples, columns]",
    ),
)

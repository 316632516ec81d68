"""Exercises of chapter 19: whose row an id is, and whole features by size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

_Loads = Callable[[Sequence[int], int], list[int]]


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


def _by_load(order: Callable[[Sequence[int]], Iterable[int]]) -> _Loads:
    """Each feature goes to the rank with the fewest rows, in this order."""

    def loads(rows: Sequence[int], ranks: int) -> list[int]:
        held = [0] * ranks
        for count in order(rows):
            held[held.index(min(held))] += count
        return sorted(held)

    return loads


def _descending(rows: Sequence[int]) -> list[int]:
    return sorted(rows, reverse=True)


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
                misconception="forgets the features before",
                answer=_forgets_features_before,
                hint=(
                    "Ids of the first feature are right. The bounds count the rows of all "
                    "features, and an id counts from the first row of its own feature."
                ),
            ),
            Mistake(
                misconception="returns the row among all rows",
                answer=_row_of_all,
                hint=(
                    "The ranks are right. A rank's own rows count from 0; which of all rows is "
                    "its first?"
                ),
            ),
            Mistake(
                misconception="gives the row at a bound to the rank below",
                answer=_bound_belongs_below,
                hint=(
                    "Look at the ids at a bound: a range ends before its upper bound. Which rank "
                    "owns the row at the bound itself?"
                ),
            ),
        ),
        shape="a function that returns two numbers, [rank, row]",
    ),
    Exercise(
        id="19.2",
        compared="the rows of each rank, in ascending order, for three lists of features",
        solution=_by_load(_descending),
        cases=(
            ([5, 12, 4, 10], 2),
            ([3, 3, 2, 2, 2], 2),
            ([100, 2020, 3203, 3434, 3023, 4545, 123, 4566], 4),
        ),
        mistakes=(
            Mistake(
                misconception="takes the features as they come",
                answer=_by_load(list),
                hint=(
                    "Your rule is right, and the order is not: a large feature that comes last "
                    "overfills its rank. Which features should come first?"
                ),
            ),
            Mistake(
                misconception="takes the smallest first, which is to deal them out in turn",
                answer=_by_load(sorted),
                hint=(
                    "Every rank gets equally many features that way, and the largest comes last. "
                    "Which features are left then to even the ranks out?"
                ),
            ),
        ),
        shape="a function that returns one number of rows for each rank, ascending",
    ),
)

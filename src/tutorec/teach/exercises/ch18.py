"""Exercises of chapter 18: rows at equal bytes, and the interval in which a new id gets a row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

_ROWS, _COLUMNS = 100_000_000, 64
_ROW = 4 * _COLUMNS + 4  # bytes of a row and of its state under row-wise Adagrad


def _remapped_rows(of_mapping: int) -> int:
    """Rows that take the bytes of the hashed table, with so many bytes of the mapping for each."""
    return _ROWS * _ROW // (_ROW + of_mapping)


def _first_above(least: int, seen: Sequence[int]) -> int:
    return next((interval for interval, count in enumerate(seen) if count > least), -1)


def _first_sum_above(least: int, seen: Sequence[int]) -> int:
    return _first_above(least, list(accumulate(seen)))


def _first_equal(least: int, seen: Sequence[int]) -> int:
    return _first_above(least - 1, seen)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="18.1",
        compared="the rows of the remapping table",
        solution=_remapped_rows(32),
        mistakes=(
            Mistake(
                misconception="leaves out the mapping",
                answer=_remapped_rows(0),
                hint=(
                    "That many rows fit if the mapping takes no memory. What does it hold for "
                    "each row?"
                ),
            ),
            Mistake(
                misconception="counts the raw ids and nothing else of the mapping",
                answer=_remapped_rows(8),
                hint=(
                    "The raw id is one of the mapping's numbers. It also holds the row, and what "
                    "the policy needs."
                ),
            ),
            Mistake(
                misconception="counts the metadata of LRU",
                answer=_remapped_rows(24),
                hint=(
                    "That is right for LRU or LFU, with one number of metadata. Which two numbers "
                    "does DistanceLFU divide?"
                ),
            ),
            Mistake(
                misconception="forgets the state of the optimizer",
                answer=_ROWS * (_ROW - 4) // (_ROW - 4 + 32),
                hint="Row-wise Adagrad keeps a number for each row, in both tables.",
            ),
        ),
        shape="a whole number of rows",
    ),
    Exercise(
        id="18.2",
        compared="the intervals of six new ids",
        solution=_first_above,
        cases=(
            (3, [1, 2]),
            (3, [5]),
            (3, [3, 4]),
            (4, [2, 2, 2, 5, 9]),
            (10, [4, 4, 4, 4]),
            (2, [0, 2, 1, 3]),
        ),
        mistakes=(
            Mistake(
                misconception="adds up the counts of earlier intervals",
                answer=_first_sum_above,
                hint="Ids that lose the competition are forgotten, with their counts. From what "
                "does the next interval "
                "count?",
            ),
            Mistake(
                misconception="lets a new id win at equal counts",
                answer=_first_equal,
                hint="Who keeps the row at equal scores?",
            ),
        ),
        shape="a function that returns the number of an interval, from 0, or -1",
    ),
)

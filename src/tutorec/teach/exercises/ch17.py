"""Exercises of chapter 17: the cache that fits in memory, and slots that two tables share."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

_ROWS, _COLUMNS, _BYTES = 40_000_000, 128, 2 * 2**30
_WEIGHTS, _STATE, _INDEX = 4 * _COLUMNS, 8 * _COLUMNS, 24  # bytes of a slot under Adam


def _load_factor(slot: int, row: int = 8) -> float:
    """The largest load factor of three decimals that fits, from the bytes of slot and index."""
    return floor(1000 * (_BYTES - row * _ROWS) / (_ROWS * slot)) / 1000


def _popular(first: Sequence[int], second: Sequence[int], slots: int) -> int:
    """How many of the most popular rows of both tables are in the first one."""
    rows = [(count, True) for count in first] + [(count, False) for count in second]
    return sum(is_first for _, is_first in sorted(rows, reverse=True)[:slots])


def _by_rows(first: Sequence[int], second: Sequence[int], slots: int) -> int:
    return round(slots * len(first) / (len(first) + len(second)))


def _by_lookups(first: Sequence[int], second: Sequence[int], slots: int) -> int:
    return round(slots * sum(first) / (sum(first) + sum(second)))


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="17.1",
        compared="the load factor, to three decimals",
        solution=_load_factor(_WEIGHTS + _STATE + _INDEX),
        mistakes=(
            Mistake(
                misconception="leaves the optimizer's state in the file",
                answer=_load_factor(_WEIGHTS + _INDEX),
                hint=(
                    "That is right for rows without state. An update also reads and writes the "
                    "optimizer state of its row. Where must the state be?"
                ),
            ),
            Mistake(
                misconception="counts one state of Adam",
                answer=_load_factor(_WEIGHTS + _STATE // 2 + _INDEX),
                hint=(
                    "The state comes with its row. How many averages does Adam keep for each "
                    "weight?"
                ),
            ),
            Mistake(
                misconception="leaves out the index",
                answer=_load_factor(_WEIGHTS + _STATE, row=0),
                hint=(
                    "The index is in memory, too: 8 bytes for each of the 40,000,000 rows, and 24 "
                    "for each slot."
                ),
            ),
            Mistake(
                misconception="rounds up",
                answer=_load_factor(_WEIGHTS + _STATE + _INDEX) + 0.001,
                hint="Multiply: 0.030 x 40,000,000 rows x 1,560 bytes, and 320,000,000 bytes of "
                "index. Is that at most "
                "2,147,483,648?",
            ),
        ),
        shape="one number between 0 and 1",
    ),
    Exercise(
        id="17.2",
        compared="the slots of the first table, for three pairs of tables",
        solution=_popular,
        cases=(
            ([9, 8, 7, 1], [6, 2], 3),
            ([50, 3, 2, 1], [20, 19, 18, 17], 4),
            ([5, 4], [30, 1, 2, 3, 29, 28], 4),
        ),
        mistakes=(
            Mistake(
                misconception="divides the slots in proportion to the rows",
                answer=_by_rows,
                hint="Both tables then have the same load factor. A slot is worth the lookups of "
                "the row in it: which "
                "rows have the most?",
            ),
            Mistake(
                misconception="divides the slots in proportion to the lookups",
                answer=_by_lookups,
                hint=(
                    "One row with 50 lookups needs one slot. Compare single rows, not whole tables."
                ),
            ),
        ),
        shape="a function that returns a whole number from 0 to slots",
    ),
)

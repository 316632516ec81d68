"""Exercises of chapter 17: the cache that fits into a GPU, and the hits of the most popular rows."""

from __future__ import annotations

from collections.abc import Sequence

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

_ROWS, _COLUMNS, _BYTES = 40_000_000, 128, 2 * 2**30


def _load_factor(numbers_of_a_row: int) -> float:
    return round(_BYTES / (_ROWS * 4 * numbers_of_a_row), 3)


def _hottest(counts: Sequence[int], slots: int) -> float:
    """The part of the lookups whose row is one of the most popular."""
    return sum(sorted(counts, reverse=True)[:slots]) / sum(counts)


def _all_alike(counts: Sequence[int], slots: int) -> float:
    return slots / len(counts)


def _first_ids(counts: Sequence[int], slots: int) -> float:
    return sum(counts[:slots]) / sum(counts)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="17.1",
        compared="the load factor, to three decimals",
        solution=_load_factor(3 * _COLUMNS),
        mistakes=(
            Mistake(
                misconception="leaves the optimizer's state in the file",
                answer=_load_factor(_COLUMNS),
                hint="That is right for rows without state. An update reads and writes the state of a row, too; where "
                "should it be?",
            ),
            Mistake(
                misconception="counts one state of Adam",
                answer=_load_factor(2 * _COLUMNS),
                hint="The state comes with its row. How many averages does Adam keep for each weight?",
            ),
        ),
        shape="one number between 0 and 1",
    ),
    Exercise(
        id="17.2",
        compared="the hit rates of three tables",
        solution=_hottest,
        cases=(([1, 6, 2, 1], 1), ([1, 6, 2, 1], 2), ([5, 0, 90, 5], 3)),
        mistakes=(
            Mistake(
                misconception="takes all rows for equally popular",
                answer=_all_alike,
                hint="That is the hit rate when every row is looked up as often as the others. Which numbers say how "
                "often?",
            ),
            Mistake(
                misconception="takes the first ids for the most popular",
                answer=_first_ids,
                hint="The popular rows are in memory, wherever they are in the table. Are ids in the order of "
                "popularity?",
            ),
        ),
        shape="a function that returns one number between 0 and 1",
    ),
)

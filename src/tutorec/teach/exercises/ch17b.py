"""Exercises of chapter 17b: slots or pages, and slots that two tables share."""

from __future__ import annotations

from collections.abc import Sequence

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

_ROWS = 10_000_000
_POPULAR = 100_000
_PAGE = 4096
# Sizes in bytes.
_ROW = 4 * 16
_STATE = 4
_SLOT_INDEX = 24
_ROW_INDEX = 8
_SLOT = _ROW + _STATE + _SLOT_INDEX


def _popular(first: Sequence[int], second: Sequence[int], slots: int) -> int:
    """How many of the most popular rows of both tables are in the first one."""
    rows = [(count, True) for count in first] + [(count, False) for count in second]
    return sum(is_first for _, is_first in sorted(rows, reverse=True)[:slots])


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="17b.1",
        compared="the bytes of the pages and of the cache",
        solution=[_POPULAR * _PAGE, _POPULAR * _SLOT + _ROW_INDEX * _ROWS],
        mistakes=(
            Mistake(
                "counts a popular row without the rest of its page",
                [_POPULAR * _ROW, _POPULAR * _SLOT + _ROW_INDEX * _ROWS],
                "The second number is right. The system keeps whole pages: how many bytes does it "
                "keep for one row?",
            ),
            Mistake(
                "leaves out the index of the rows",
                [_POPULAR * _PAGE, _POPULAR * _SLOT],
                "The first number is right. The index also says of each of the 10,000,000 rows "
                "where it is.",
            ),
            Mistake(
                "leaves out the index of the slots",
                [_POPULAR * _PAGE, _POPULAR * (_ROW + _STATE) + _ROW_INDEX * _ROWS],
                "The first number is right. A slot has 24 bytes of index beside its row and its "
                "state.",
            ),
        ),
        shape="a list of two numbers",
    ),
    Exercise(
        id="17b.2",
        compared="the slots of the first table, for three pairs of tables",
        solution=_popular,
        cases=(
            ([9, 8, 7, 1], [6, 2], 3),
            ([50, 3, 2, 1], [20, 19, 18, 17], 4),
            ([5, 4], [30, 1, 2, 3, 29, 28], 4),
        ),
        mistakes=(
            Mistake(
                "divides the slots in proportion to the rows",
                lambda first, second, n: round(n * len(first) / (len(first) + len(second))),
                "Both tables then have the same load factor. A slot is worth the lookups of the "
                "row in it: which rows have the most?",
            ),
            Mistake(
                "divides the slots in proportion to the lookups",
                lambda first, second, n: round(n * sum(first) / (sum(first) + sum(second))),
                "One row with 50 lookups needs one slot. Compare single rows, not whole tables.",
            ),
        ),
        shape="a function that returns a whole number from 0 to slots",
    ),
)

"""Exercises of chapter 17b: slots or pages, and slots that two tables share."""

from __future__ import annotations

from tutorec.teach.grading import Exercise

EXERCISES = (
    Exercise(
        "17b.1",
        compared="the bytes of the pages and of the cache",
        right=[409_600_000, 89_200_000],
        mistakes={
            "The second number is right. The system keeps whole pages: how many bytes does it "
            "keep for one row?": [6_400_000, 89_200_000],
            "The first number is right. The index also says of each of the 10,000,000 rows "
            "where it is.": [409_600_000, 9_200_000],
            "The first number is right. A slot has 24 bytes of index beside its row and its "
            "state.": [409_600_000, 86_800_000],
        },
        shape="a list of two numbers",
    ),
    Exercise(
        "17b.2",
        compared="the slots of the first table, for three pairs of tables",
        right=[3, 1, 1],
        cases=(
            ([9, 8, 7, 1], [6, 2], 3),
            ([50, 3, 2, 1], [20, 19, 18, 17], 4),
            ([5, 4], [30, 1, 2, 3, 29, 28], 4),
        ),
        mistakes={
            "Both tables then have the same load factor. A slot is worth the lookups of the "
            "row in it: which rows have the most?": [2, 2, 1],
            "One row with 50 lookups needs one slot. Compare single rows, not whole tables.": [
                2,
                2,
                0,
            ],
        },
        shape="a function that returns a whole number from 0 to slots",
    ),
)

"""Exercises of chapter 03: bytes of a forward pass, order of results, rows of stacked tables."""

from __future__ import annotations

from tutorec.teach.grading import Exercise

EXERCISES = (
    Exercise(
        "03.1",
        compared="a row for each id in, a row for each bag out, and half of the first",
        right=[34.08, 3.408, 17.04],
        mistakes={
            "A bag of ten ids becomes one row. What the forward returns is pooled.": [
                34.08,
                34.08,
                17.04,
            ],
            "A bag of ten ids has to read ten rows before it can add them up.": [
                3.408,
                3.408,
                1.704,
            ],
            "Each sample has a list for every table.": [1.311, 0.1311, 0.6554],
            "You counted numbers. How many bytes has one in float32?": [8.52, 0.852, 4.26],
        },
        tolerance=0.005,
        shape="a list of three numbers, in units of 10^6 bytes",
    ),
    Exercise(
        "03.2",
        compared=(
            "tables in order, features in order, and a group of columns for each of the four"
        ),
        right=[["x@a", "y", "z", "x@b"], 24],
        mistakes={
            "The batch may come in any order. What fixes the order of the columns?": [
                ["z", "y", "x@a", "x@b"],
                24,
            ],
            "x is looked up twice, in rows of 8 and of 4 columns. Two results need two names.": [
                ["x", "y", "z"],
                20,
            ],
            "A key carries the name of its table only if the feature is looked up in more "
            "than one table.": [["x@a", "y@a", "z@b", "x@b"], 24],
            "You went through the features. The columns come table after table.": [
                ["x@a", "x@b", "y", "z"],
                24,
            ],
            "The names are right. Each of the four has the columns of its table.": [
                ["x@a", "y", "z", "x@b"],
                12,
            ],
        },
        shape="a list of names, and a number",
    ),
    Exercise(
        "03.3",
        compared="tables of different sizes, shared tables, empty lists",
        right=[[[1], [5]], [[3], [3, 7], [], [9]]],
        cases=(
            ([4, 2], [0, 1], [[1], [1]]),
            ([3, 5, 2], [1, 1, 0, 2], [[0], [0, 4], [], [1]]),
        ),
        mistakes={
            "Two features that read one table must read the same rows. In your stack each of "
            "them has a copy.": [[[1], [5]], [[0], [5, 9], [], [14]]],
            "The first table begins at row 0. Yours begins where it should end.": [
                [[5], [7]],
                [[8], [8, 12], [], [11]],
            ],
            "t * R is right when all tables have R rows. How many rows lie before table t "
            "when they do not?": [[[1], [3]], [[5], [5, 9], [], [5]]],
        },
    ),
)

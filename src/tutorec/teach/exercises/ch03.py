"""Exercises of chapter 03: bytes of a forward pass, order of results, rows of stacked tables."""

from __future__ import annotations

from itertools import accumulate

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

_MEGABYTES = 512 * 26 * 64 * 4 / 1e6  # of one row for each bag

Rows = list[list[int]]


def _shifted(first: list[int], tables: list[int], ids: Rows) -> Rows:
    return [
        [first[table] + row for row in table_rows]
        for table, table_rows in zip(tables, ids, strict=True)
    ]


def _stacked_rows(table_rows: list[int], feature_tables: list[int], ids: Rows) -> Rows:
    return _shifted([0, *accumulate(table_rows)], feature_tables, ids)


def _one_piece_per_feature(table_rows: list[int], feature_tables: list[int], ids: Rows) -> Rows:
    """Stacks a table once for each feature that reads it."""
    rows = [table_rows[table] for table in feature_tables]
    return _shifted([0, *accumulate(rows)], list(range(len(rows))), ids)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="03.1",
        compared="a row for each id in, a row for each bag out, and half of the first",
        solution=[10 * _MEGABYTES, _MEGABYTES, 5 * _MEGABYTES],
        mistakes=(
            Mistake(
                "returns a row for each id",
                [10 * _MEGABYTES, 10 * _MEGABYTES, 5 * _MEGABYTES],
                "A bag of ten ids becomes one row. What the forward returns is pooled.",
            ),
            Mistake(
                "reads a row for each bag",
                [_MEGABYTES, _MEGABYTES, _MEGABYTES / 2],
                "A bag of ten ids has to read ten rows before it can add them up.",
            ),
            Mistake(
                "forgets that there are 26 tables",
                [10 * _MEGABYTES / 26, _MEGABYTES / 26, 5 * _MEGABYTES / 26],
                "Each sample has a list for every table.",
            ),
            Mistake(
                "counts numbers, not bytes",
                [10 * _MEGABYTES / 4, _MEGABYTES / 4, 5 * _MEGABYTES / 4],
                "You counted numbers. How many bytes has one in float32?",
            ),
        ),
        tolerance=0.005,
        shape="a list of three numbers, in units of 10^6 bytes",
    ),
    Exercise(
        id="03.2",
        compared="tables in order, features in order, and a group of columns for each of the four",
        solution=[["x@a", "y", "z", "x@b"], 24],
        mistakes=(
            Mistake(
                "keeps the order of the batch",
                [["z", "y", "x@a", "x@b"], 24],
                "The batch may come in any order. What fixes the order of the columns?",
            ),
            Mistake(
                "expects each feature once",
                [["x", "y", "z"], 20],
                "x is looked up twice, in rows of 8 and of 4 columns. Two results need two names.",
            ),
            Mistake(
                "names every result after its table",
                [["x@a", "y@a", "z@b", "x@b"], 24],
                "A key carries the name of its table only if the feature is looked up in more "
                "than one table.",
            ),
            Mistake(
                "sorts features, then tables",
                [["x@a", "x@b", "y", "z"], 24],
                "You went through the features. The columns come table after table.",
            ),
            Mistake(
                "counts the columns of each table once",
                [["x@a", "y", "z", "x@b"], 12],
                "The names are right. Each of the four has the columns of its table.",
            ),
        ),
        shape="a list of names, and a number",
    ),
    Exercise(
        id="03.3",
        compared="tables of different sizes, shared tables, empty lists",
        solution=_stacked_rows,
        mistakes=(
            Mistake(
                "stacks a table once for each feature",
                _one_piece_per_feature,
                "Two features that read one table must read the same rows. In your stack each of "
                "them has a copy.",
            ),
            Mistake(
                "begins a table at its end",
                lambda rows, tables, ids: _shifted(list(accumulate(rows)), tables, ids),
                "The first table begins at row 0. Yours begins where it should end.",
            ),
            Mistake(
                "takes all tables to be equally large",
                lambda rows, tables, ids: _shifted(
                    [n * r for n, r in enumerate(rows)], tables, ids
                ),
                "t * R is right when all tables have R rows. How many rows lie before table t "
                "when they do not?",
            ),
        ),
        cases=(
            ([4], [0], [[0, 3]]),
            ([4, 2], [0, 1], [[1], [1]]),
            ([3, 5, 2], [0, 1, 2], [[2], [0, 4], [1]]),
            ([3, 5, 2], [1, 1, 0, 2], [[0], [0, 4], [], [1]]),
        ),
    ),
)

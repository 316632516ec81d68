"""Exercises of chapter 16: rows of a quotient-remainder table, and two bags that look the same."""

from __future__ import annotations

import math

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


def _rows(table_rows: int, buckets: int) -> int:
    """Rows of the quotient table and of the remainder table."""
    return -(-table_rows // buckets) + buckets


def _without_the_last_quotient(table_rows: int, buckets: int) -> int:
    return table_rows // buckets + buckets


def _two_remainder_tables(table_rows: int, buckets: int) -> int:
    return 2 * buckets


def _two_roots(table_rows: int, buckets: int) -> int:
    return 2 * math.ceil(math.sqrt(table_rows))


def _twin(first: int, second: int, buckets: int) -> list[int]:
    """The two ids with the same quotients and the same remainders, paired the other way."""
    return sorted(
        [
            first // buckets * buckets + second % buckets,
            second // buckets * buckets + first % buckets,
        ]
    )


def _same_bag(first: int, second: int, buckets: int) -> list[int]:
    return sorted([first, second])


def _quotient_times_one(first: int, second: int, buckets: int) -> list[int]:
    return sorted([first // buckets + second % buckets, second // buckets + first % buckets])


def _same_sum_of_ids(first: int, second: int, buckets: int) -> list[int]:
    return sorted([first + 1, second - 1])


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="16.1",
        compared="the stored rows of four quotient-remainder tables",
        solution=_rows,
        cases=((12, 4), (13, 4), (1024, 32), (1_000_000, 5_000)),
        mistakes=(
            Mistake(
                misconception="forgets the rows after the last full bucket",
                answer=_without_the_last_quotient,
                hint=(
                    "With 12 rows and 4 buckets it is right. Of 13 rows the last is row 12: what "
                    "is its quotient?"
                ),
            ),
            Mistake(
                misconception="takes both tables to be equally long",
                answer=_two_remainder_tables,
                hint=(
                    "The remainder table has as many rows as there are buckets. What is the "
                    "largest quotient?"
                ),
            ),
            Mistake(
                misconception="takes the number of buckets to be the root",
                answer=_two_roots,
                hint=(
                    "That is the fewest rows that any number of buckets gives. How many does this "
                    "number give?"
                ),
            ),
        ),
        shape="a function that returns one number of rows",
    ),
    Exercise(
        id="16.2",
        compared="the two other ids of three bags, in ascending order",
        solution=_twin,
        cases=((1, 6, 4), (7, 8, 4), (5, 1000, 32)),
        mistakes=(
            Mistake(
                misconception="returns the bag itself",
                answer=_same_bag,
                hint=(
                    "This bag has the same rows in both tables. Which other two ids have these "
                    "four rows, too?"
                ),
            ),
            Mistake(
                misconception="adds the quotient itself to the remainder",
                answer=_quotient_times_one,
                hint=(
                    "You put an id together as q + r. Id 6 has quotient q = 1 and remainder r = 2 "
                    "with 4 buckets: what is done to q before r is added?"
                ),
            ),
            Mistake(
                misconception="keeps the sum of the ids",
                answer=_same_sum_of_ids,
                hint="The ids add up to the same number, but no table is looked up by a sum. Which "
                "rows do these ids "
                "read, table by table?",
            ),
        ),
        shape="a function that returns two ids, ascending",
    ),
)

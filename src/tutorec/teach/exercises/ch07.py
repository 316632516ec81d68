"""Exercises of chapter 07: columns against rows, where an id goes, a mean made of parts."""

from __future__ import annotations

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


def _rank_and_row(identity: int, rows: int, world_size: int) -> tuple[int, int]:
    """Rows are dealt out in ranges of equal height, rounded up."""
    return divmod(identity, -(-rows // world_size))


def _rounded_down(identity: int, rows: int, world_size: int) -> tuple[int, int]:
    return divmod(identity, max(1, rows // world_size))


def _dealt_in_turn(identity: int, rows: int, world_size: int) -> tuple[int, int]:
    return identity % world_size, identity // world_size


def _not_renumbered(identity: int, rows: int, world_size: int) -> tuple[int, int]:
    return identity // -(-rows // world_size), identity


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="07.1",
        compared="the bag length at which the two formulas are equal",
        solution=2 * 256,
        mistakes=(
            Mistake(
                misconception="counts the pooled rows and not the gradients",
                answer=256,
                hint="That counts pooled rows only. Their gradients are sent, too.",
            ),
            Mistake(
                misconception="takes the chapter's width",
                answer=128,
                hint="128 is right for the chapter's tables of 64 columns. How wide is this one?",
            ),
            Mistake(
                misconception="lets the break-even grow with the ranks",
                answer=2 * 256 * 8,
                hint=(
                    "Write both formulas down with W = 8 and divide by what they share. Does W "
                    "stay?"
                ),
            ),
        ),
        shape="a number of ids",
    ),
    Exercise(
        id="07.2",
        compared="(rank, row there) for ids of tables of 10, 8 and 3 rows",
        solution=_rank_and_row,
        mistakes=(
            Mistake(
                misconception="rounds the rows of a rank down",
                answer=_rounded_down,
                hint=(
                    "With 10 // 4 = 2 rows a rank, id 9 would be on rank 4. How many rows does "
                    "each rank take?"
                ),
            ),
            Mistake(
                misconception="deals rows out in turn",
                answer=_dealt_in_turn,
                hint=(
                    "That deals single rows out in turn. Row-wise gives each rank one range of "
                    "neighbouring rows."
                ),
            ),
            Mistake(
                misconception="keeps the id's number",
                answer=_not_renumbered,
                hint=(
                    "The rank is right. What is the number of the first row of its piece, counted "
                    "there?"
                ),
            ),
        ),
        cases=((7, 10, 4), (9, 10, 4), (5, 8, 2), (2, 3, 4)),
        shape="a function of (identity, rows, world_size) that returns a pair of integers",
    ),
    Exercise(
        id="07.3",
        compared="the mean of the three rows 3, 6 and 12",
        solution=7,
        mistakes=(
            Mistake(
                misconception="takes the mean of two means",
                answer=8.25,
                hint="(4.5 + 12) / 2 counts the row of rank 1 as much as both of rank 0 together.",
            ),
            Mistake(
                misconception="adds two means",
                answer=16.5,
                hint=(
                    "Those are the ranks' means, added. What would three equal rows give that way?"
                ),
            ),
            Mistake(
                misconception="divides the sum by the ranks",
                answer=10.5,
                hint="The sum is right. By what does a mean divide: by ranks, or by ids?",
            ),
        ),
        shape="one number",
    ),
)

"""Exercises of chapter 07: columns against rows, where an id goes, a mean made of parts, column-wise by hand."""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence

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


_Rows = Sequence[Sequence[float]]
_Batches = Sequence[Sequence[Sequence[int]]]


def _pooled(mine: _Rows, bag: Sequence[int]) -> list[float]:
    """The sum of a bag's rows, over the columns of one rank."""
    return [sum(mine[i][column] for i in bag) for column in range(len(mine[0]))]


def _column_wise(slices: Sequence[_Rows], batches: _Batches) -> list[list[list[float]]]:
    """Every rank adds up its columns of all bags; the parts of a bag stand side by side."""
    return [
        [[n for mine in slices for n in _pooled(mine, bag)] for bag in bags] for bags in batches
    ]


def _parts_added(slices: Sequence[_Rows], batches: _Batches) -> list[list[list[float]]]:
    return [
        [
            [sum(parts) for parts in zip(*(_pooled(mine, bag) for mine in slices), strict=True)]
            for bag in bags
        ]
        for bags in batches
    ]


def _own_columns_only(slices: Sequence[_Rows], batches: _Batches) -> list[list[list[float]]]:
    return [
        [_pooled(mine, bag) for bag in bags] for mine, bags in zip(slices, batches, strict=True)
    ]


def _own_columns_first(slices: Sequence[_Rows], batches: _Batches) -> list[list[list[float]]]:
    world = len(slices)
    orders = [[rank, *(other for other in range(world) if other != rank)] for rank in range(world)]
    return [
        [[n for owner in order for n in _pooled(slices[owner], bag)] for bag in bags]
        for order, bags in zip(orders, batches, strict=True)
    ]


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
                    "Write both byte formulas with W = 8, set them equal and cancel what they "
                    "share. Is W still there?"
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
                    "The rank is right. Each rank numbers its own rows from 0: which number has "
                    "the row there?"
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
    Exercise(
        id="07.4",
        compared="the pooled sums of every rank's bags, in three worlds",
        solution=_column_wise,
        mistakes=(
            Mistake(
                misconception="adds the parts up as row-wise does",
                answer=_parts_added,
                hint=(
                    "Your rows are too narrow: partial sums are added, but these parts are "
                    "different columns."
                ),
            ),
            Mistake(
                misconception="reads only the rank's own columns",
                answer=_own_columns_only,
                hint=(
                    "A bag's rank has some of the columns. Which ranks have the others, and what "
                    "must they be sent?"
                ),
            ),
            Mistake(
                misconception="puts the rank's own columns first",
                answer=_own_columns_first,
                hint=("All parts are there. In which order are the columns of the table?"),
            ),
        ),
        cases=(
            ([[[1], [2]], [[10], [20]]], [[[0, 1]], [[1]]]),
            (
                [[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 1], [2, 3]]],
                [[[0, 2], []], [[1, 1, 2], [0]]],
            ),
            ([[[1], [2]], [[3], [4]], [[5], [6]]], [[[0]], [[1]], [[0, 1]]]),
        ),
        shape="for each rank a list of rows, each a list of all columns",
    ),
)

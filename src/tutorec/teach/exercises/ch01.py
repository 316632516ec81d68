"""Exercises of chapter 01: bytes of a table, collisions, copies."""

from __future__ import annotations

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


def _shared(ids: int, rows: int) -> float:
    return 1 - (1 - 1 / rows) ** (ids - 1)


def _any_collision(ids: int, rows: int) -> float:
    """The birthday probability: some pair collides."""
    alone = 1.0
    for taken in range(min(ids, rows + 1)):
        alone *= (rows - taken) / rows
    return 1 - alone


def _fraction_full(ids: int, rows: int) -> float:
    return min(1.0, (ids - 1) / rows)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="01.1",
        compared="40,000,000 rows of 128 half-precision numbers, and one float32 of state per row",
        solution=40_000_000 * (128 * 2 + 4) / 1e9,
        mistakes=(
            Mistake(
                misconception="keeps optimizer state per weight",
                answer=40_000_000 * 128 * (2 + 4) / 1e9,
                hint="That is Adagrad with one number per weight. How many numbers does the *row-wise* one keep?",
            ),
            Mistake(
                misconception="forgets the optimizer state",
                answer=40_000_000 * 128 * 2 / 1e9,
                hint="Those are the weights alone, as they would be served. The question asks about training.",
            ),
            Mistake(
                misconception="counts a gradient table",
                answer=40_000_000 * (2 * 128 * 2 + 4) / 1e9,
                hint="A gradient as large as the table is counted here. What does 'fused' do to it?",
            ),
        ),
        tolerance=1e-3,
        shape="one number, in units of 10^9 bytes",
    ),
    Exercise(
        id="01.2",
        compared="the expected share on a few sizes, from 2 ids in 2 rows to 1,000 ids in 100 rows",
        solution=_shared,
        mistakes=(
            Mistake(
                misconception="asks whether any two ids collide",
                answer=_any_collision,
                hint="That is the probability that *some* pair collides, the birthday problem; it is nearly 1 for any "
                "real catalogue. The question is about one id and all the others.",
            ),
            Mistake(
                misconception="takes the filled share of the rows",
                answer=_fraction_full,
                hint="That treats the others as if no two of them ever met in one row; with as many ids as rows it "
                "says that nobody is alone, and you measured otherwise.",
            ),
        ),
        cases=((2, 2), (3, 4), (10, 10), (100, 1000), (1000, 100)),
        tolerance=1e-6,
    ),
    Exercise(
        id="01.3",
        compared="what a copy on each device can and cannot do",
        solution="never",
        mistakes=(
            Mistake(
                misconception="adds up the memory of the copies",
                answer=4,
                hint="4 x 80 GB is 320 GB, if each GPU held a quarter. What does each GPU hold in data parallel?",
            ),
            Mistake(
                misconception="takes all there is",
                answer=8,
                hint="Together they have twice the bytes, but they do not share one table: each has its own copy.",
            ),
        ),
        shape="a number of GPUs, or 'never'",
    ),
)

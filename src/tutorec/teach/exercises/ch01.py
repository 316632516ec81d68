"""Exercises of chapter 01: bytes of a table, collisions, copies."""

from __future__ import annotations

import math

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="01.1",
        compared="40,000,000 rows of 128 half-precision numbers, and one float32 of state per row",
        solution=40_000_000 * (128 * 2 + 4) / 1e9,
        mistakes=(
            Mistake(
                "keeps optimizer state per weight",
                40_000_000 * 128 * (2 + 4) / 1e9,
                "That is Adagrad with one number per weight. How many numbers does the *row-wise* "
                "one keep?",
            ),
            Mistake(
                "forgets the optimizer state",
                40_000_000 * 128 * 2 / 1e9,
                "Those are the weights alone, as they would be served. The question asks about "
                "training.",
            ),
            Mistake(
                "counts a gradient table",
                40_000_000 * (2 * 128 * 2 + 4) / 1e9,
                "A gradient as large as the table is counted here. What does 'fused' do to it?",
            ),
        ),
        tolerance=1e-3,
        shape="one number, in units of 10^9 bytes",
    ),
    Exercise(
        id="01.2",
        compared=(
            "the rows for a few catalogues, from 10 ids of which half are alone to a million "
            "of which 99 % are"
        ),
        solution=lambda ids, alone: 1 / (1 - alone ** (1 / (ids - 1))),
        mistakes=(
            Mistake(
                "asks that no two ids collide",
                lambda ids, alone: ids * (ids - 1) / (-2 * math.log(alone)),
                "That is the birthday problem: rows for which no two ids collide at all, and they "
                "grow with the square of the number of ids. The question is about one id: how "
                "likely is it that no other id has its row?",
            ),
            Mistake(
                "takes the filled share of the rows",
                lambda ids, alone: (ids - 1) / (1 - alone),
                "This counts the other ids as if no two of them shared a row. With as many rows "
                "as ids it says that hardly any id is alone. What did the chapter measure?",
            ),
        ),
        cases=((10, 0.5), (1000, 0.5), (1000, 0.9), (1_000_000, 0.99)),
        tolerance=0.01,
    ),
    Exercise(
        id="01.3",
        compared="what a copy needs on each device, and the fewest devices if the table is cut",
        solution=[320, 4],
        mistakes=(
            Mistake(
                "divides the table in data parallel",
                [40, 4],
                "40 GB each would be a table cut into eight shards. What does a GPU hold in data "
                "parallel?",
            ),
            Mistake(
                "gives each copy what the GPU has",
                [80, 4],
                "80 GB is what the GPU has, not what the copy needs.",
            ),
            Mistake(
                "uses all GPUs",
                [320, 8],
                "All eight can hold it, but the question is how few can.",
            ),
        ),
        shape="a list of two numbers",
    ),
)

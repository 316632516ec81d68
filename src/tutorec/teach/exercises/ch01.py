"""Exercises of chapter 01: bytes of a table, collisions, copies."""

from __future__ import annotations

from tutorec.teach.grading import Exercise

EXERCISES = (
    Exercise(
        "01.1",
        compared=(
            "40,000,000 rows of 128 half-precision numbers, and one float32 of state per row"
        ),
        right=10.4,
        mistakes={
            "That is Adagrad with one number per weight. How many numbers does the *row-wise* "
            "one keep?": 30.72,
            "Those are the weights alone, as they would be served. The question asks about "
            "training.": 10.24,
            "A gradient as large as the table is counted here. What does 'fused' do to it?": 20.64,
        },
        tolerance=0.001,
        shape="one number, in units of 10^9 bytes",
    ),
    Exercise(
        "01.2",
        compared=(
            "the rows for a few catalogues, from 10 ids of which half are alone to a "
            "million of which 99 % are"
        ),
        right=[13.49, 1441.8, 9482.2, 99_499_000],
        cases=((10, 0.5), (1000, 0.5), (1000, 0.9), (1_000_000, 0.99)),
        mistakes={
            "That is the birthday problem: rows for which no two ids collide at all, and they "
            "grow with the square of the number of ids. The question is about one id: how "
            "likely is it that no other id has its row?": [64.92, 720_626, 4_740_865, 4.975e13],
            "This counts the other ids as if no two of them shared a row. With as many rows "
            "as ids it says that hardly any id is alone. What did the chapter measure?": [
                18,
                1998,
                9990,
                1e8,
            ],
        },
        tolerance=0.01,
    ),
    Exercise(
        "01.3",
        compared=("what a copy needs on each device, and the fewest devices if the table is cut"),
        right=[320, 4],
        mistakes={
            "40 GB each would be a table cut into eight shards. What does a GPU hold in data "
            "parallel?": [40, 4],
            "80 GB is what the GPU has, not what the copy needs.": [80, 4],
            "All eight can hold it, but the question is how few can.": [320, 8],
        },
        shape="a list of two numbers",
    ),
)

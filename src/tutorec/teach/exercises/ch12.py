"""Exercises of chapter 12: when arithmetic is the limit, the ranks that the others wait for."""

from __future__ import annotations

import torch

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import per_rank

_WORKED = ([1.0, 6.0, 2.0], [4.0, 1.0, 2.0], [2.0, 2.0, 3.0])  # ms of three ranks in three phases

EXERCISES = (
    Exercise(
        "12.1",
        compared=(
            "five products of an H100, in float32 and in bfloat16, for two of which no B is enough"
        ),
        right=[107, None, None, 462, 41],
        cases=(
            (128, 128, 4, 67e12, 3.35e12),
            (64, 64, 4, 67e12, 3.35e12),
            (4096, 1, 4, 67e12, 3.35e12),
            (4096, 1024, 2, 989e12, 3.35e12),
            (4096, 4096, 4, 67e12, 3.35e12),
        ),
        mistakes={
            "The bytes of inputs and matrix are right. Where do the B * O results go, and "
            "does memory take no time for them?": [59, 107, None, 415, 41],
            "That is one operation where a number of the input meets a number of the matrix. "
            "What happens to their product?": [None, None, None, 2115, 84],
            "The bytes of the matrix are right. Each of the B rows brings bytes of its own, "
            "too: for some matrices so many that no B is enough.": [40, 40, 40, 296, 40],
            "The numbers that are moved are right. How many bytes has each of them?": [
                12,
                15,
                None,
                181,
                11,
            ],
            "At this B, memory still takes longer. B is a whole number: which is next?": [
                106,
                None,
                None,
                461,
                40,
            ],
        },
        shape=(
            "a function of (i, o, size, peak, bandwidth) that returns a number of rows, or None"
        ),
    ),
    Exercise(
        "12.2",
        compared=("on three ranks the milliseconds of the step, and whom each phase waits for"),
        right=[(13, [1, 0, 2])] * 3,
        measure=per_rank(3, lambda rank: (torch.tensor(_WORKED[rank], device=device()),)),
        mistakes={
            "That is the longest time of any one rank. Another rank is the slowest in another "
            "phase: can the busiest rank go on before it is done?": [(9, [1, 0, 2])] * 3,
            "The ranks that are done early wait. For how long does the last one work?": [
                (23 / 3, [1, 0, 2])
            ]
            * 3,
            "These are the times of one rank, and each rank returns another answer. How does "
            "a rank learn the times of the others?": [
                (9, [0, 0, 0]),
                (7, [1, 1, 1]),
                (7, [2, 2, 2]),
            ],
        },
        shape="a function of (mine) that returns milliseconds and a list of ranks",
    ),
)

"""Exercises of chapter 12b: one hot row on many ranks, a row requested once, the cost of a copy."""

from __future__ import annotations

import torch
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import per_rank

_IDS = ([3, 0, 3, 3, 5, 3], [4, 3, 3, 0])  # of two ranks
_TABLE = torch.tensor([[0, 1], [2, 3], [4, 5], [10, 11], [12, 13], [14, 15]])  # three rows each


def _inputs(rank: int) -> tuple[Tensor, Tensor]:
    """Ids of a rank, and its rows."""
    ids = torch.tensor(_IDS[rank], device=device())
    return ids, _TABLE[3 * rank :][:3].float().to(device())


EXERCISES = (
    Exercise(
        "12b.1",
        compared="three tables, whose hottest rows have 8, 8 and 0 % of the ids",
        right=[1.56, 41.88, 1],
        cases=((0.08, 8), (0.08, 512), (0.0, 64)),
        mistakes={
            "Hashing spreads rows evenly. Can it spread the ids of a single row?": [1, 1, 1],
            "The row's 8 % are a share of all ids. What share of all ids does a rank read on "
            "average?": [1.08, 1.08, 1],
            "That is the hot row alone. The rank also has its even part of all the other ids.": [
                0.64,
                40.96,
                0,
            ],
        },
        tolerance=0.001,
        shape="a function of (share, world_size) that returns a number",
    ),
    Exercise(
        "12b.2",
        compared="the rows of all ids, and the bytes that two ranks send for them",
        right=[(_TABLE[_IDS[0]], 56), (_TABLE[_IDS[1]], 72)],
        measure=per_rank(2, _inputs, {"all_to_all_single": 1}),
        mistakes={
            "The rows are right, but one of them travels several times. Which ids does a rank "
            "have to send?": [(_TABLE[_IDS[0]], 80), (_TABLE[_IDS[1]], 112)],
            "Each row travels once now. The caller has more ids than that: which of the rows "
            "belongs to each of them?": [(_TABLE[[0, 3, 5]], 56), (_TABLE[[0, 3, 4]], 72)],
        },
        shape="a function of (ids, weight) that returns a tensor [ids, columns]",
    ),
    Exercise(
        "12b.3",
        compared="bytes that a rank sends for copies of 1,000 rows, on 8 ranks and on 512",
        right=[448_000, 511_000],
        mistakes={
            "Nothing is sent forward. How do the copies stay equal when every rank has other "
            "gradients?": [0, 0],
            "The number for 8 ranks is right. Each of 512 ranks adds up one 512th of the "
            "table. From how many ranks does it get that part?": [448_000, 511_000 / 64],
            "No rank needs all gradients of all ranks: each rank adds up its part of the rows "
            "and sends the sums to the others.": [7 * 256_000, 511 * 256_000],
            "That is the first half, gradients on their way to the ranks that add them. The "
            "sums have to reach all ranks, too.": [224_000, 255_500],
        },
        tolerance=0.001,
        shape="a list of two numbers of bytes",
    ),
)

"""Exercises of chapter 19: whose row an id is, and a bag over ranges of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import per_rank

# The ids of two samples of each rank. Three features have 2, 5 and 1 rows; row r holds 10**r.
_IDS = ([[0, 4, 0], [1, 2, 0]], [[1, 0, 0], [1, 1, 0]])


def _inputs(rank: int) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """Ids of a rank, its rows, the bounds of both, and where each feature starts."""
    rows = 10.0 ** torch.arange(8, device=device()).view(2, 4, 1)[rank]
    starts = torch.tensor([0, 2, 7], device=device())
    return torch.tensor(_IDS[rank], device=device()), rows, [0, 4, 8], starts


EXERCISES = (
    Exercise(
        "19.1",
        compared=(
            "the rank and the row of the first and last ids of features and of the ids at bounds"
        ),
        right=[(0, 4), (0, 9), (1, 0), (1, 0)],
        cases=(
            ([5, 26, 1], [0, 10, 21, 32], 0, 4),
            ([5, 26, 1], [0, 10, 21, 32], 1, 4),
            ([5, 26, 1], [0, 10, 21, 32], 1, 5),
            ([24, 24], [0, 24, 48], 1, 0),
        ),
        mistakes={
            "Ids of the first feature are right. The bounds count the rows of all features, "
            "and an id counts from the first row of its own feature.": [
                (0, 4),
                (0, 4),
                (0, 5),
                (0, 0),
            ],
            "The ranks are right. A rank's own rows count from 0; which of all rows is its "
            "first?": [(0, 4), (0, 9), (1, 10), (1, 24)],
            "Look at the ids at a bound: a range ends before its upper bound. Which rank owns "
            "the row at the bound itself?": [(0, 4), (0, 9), (0, 10), (0, 24)],
        },
        shape="a function that returns two numbers, [rank, row]",
    ),
    Exercise(
        "19.2",
        compared="the sums of two samples on each of two ranks",
        right=[[[11_000_001], [10_010_010]], [[10_000_110], [10_001_010]]],
        measure=per_rank(2, _inputs),
        mistakes={
            "Each sum has a row too many, or several. What does a rank add for an id whose "
            "row it does not own?": [[[11_012_001], [10_022_010]], [[10_021_110], [10_022_010]]],
            "The rows of your own rank are in the sums, and no others. Which ranks have the "
            "rest, and do they know your ids?": [[[1], [10]], [[10_000_000], [10_000_000]]],
            "Both ranks have the same sums. Sample 0 of rank 0 and sample 0 of rank 1 are "
            "different samples: which partial sums belong together?": [[[10_000_001], [10_000_010]]]
            * 2,
        },
        tolerance=1e-9,
        shape="a function that returns a tensor [samples, columns]",
    ),
)

"""Exercises of chapter 10: state out of stored shards, a cut without a disk, how often to save."""

from __future__ import annotations

import torch
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import per_rank

Stored = list[tuple[int, int, int, Tensor]]

_UNCUT: Stored = [(0, 0, 8, torch.tensor([1.0, 2.0, 3.0]))]
_TWO_WIDTHS: Stored = [
    (0, 0, 2, torch.tensor([1.0, 2.0, 3.0, 4.0])),
    (0, 2, 6, torch.tensor([5.0, 6.0, 7.0, 8.0])),
]
_IN_BOTH_DIRECTIONS: Stored = [
    (0, 0, 4, torch.tensor([1.0, 2.0])),
    (0, 4, 4, torch.tensor([3.0, 4.0])),
    (2, 0, 4, torch.tensor([5.0, 6.0, 7.0])),
    (2, 4, 4, torch.tensor([8.0, 9.0, 10.0])),
]

_TABLE = torch.arange(16.0).view(4, 4)
_ROW_COUNTS = [3, 1]


def _inputs(rank: int) -> tuple[Tensor, list[int]]:
    """The rows of a rank: three of a table, or one."""
    return _TABLE.split(_ROW_COUNTS)[rank].to(device()), _ROW_COUNTS


EXERCISES = (
    Exercise(
        "10.1",
        compared=("each row has the mean of the stored numbers over the columns of the new shard"),
        right=[[2, 3], [4, 5, 6, 7], [3, 6.5, 7.5]],
        cases=(
            (_UNCUT, 1, 4, 2, 4),
            (_TWO_WIDTHS, 0, 0, 4, 8),
            (_IN_BOTH_DIRECTIONS, 1, 2, 3, 4),
        ),
        mistakes={
            "A row of the new shard can overlap with several stored shards, and each has a "
            "number for it. Does the last one replace the others?": [
                [2, 3],
                [5, 6, 7, 8],
                [4, 8, 9],
            ],
            "Two stored shards may share different numbers of columns with the new one. How "
            "much does each of them count?": [[2, 3], [3, 4, 5, 6], [3, 6.5, 7.5]],
            "Each stored number is a mean over columns already. Is the mean over all columns "
            "the sum of these means?": [[2, 3], [6, 8, 10, 12], [6, 13, 15]],
        },
        shape="a function that returns a tensor [rows]",
    ),
    Exercise(
        "10.2",
        compared="two ranks have all rows, of two columns each",
        right=[_TABLE[:, :2], _TABLE[:, 2:]],
        measure=per_rank(2, _inputs),
        mistakes={
            "Those are this rank's columns of its own rows. Where are the other rows of these "
            "columns?": [_TABLE[:3, :2], _TABLE[3:, 2:]],
            "Every rank now has columns 0 and 1. Which columns should rank 1 receive?": [
                _TABLE[:, :2]
            ]
            * 2,
        },
        shape=("a function that returns a tensor [rows of all ranks, columns of this rank]"),
    ),
    Exercise(
        "10.3",
        compared="the interval at which saving costs as much as failures do",
        right=600,
        mistakes={
            "A failure comes at any moment of the interval, so half of it is lost on average, "
            "not all of it.": (18 * 10_000) ** 0.5,
            "Then, on average, half of the time between two failures is lost. Saving costs "
            "little at this interval; where are the costs equal?": 10_000,
            "Then a run does nothing but save: 18 / 18 of its time.": 18,
        },
        shape="a number of seconds",
    ),
)

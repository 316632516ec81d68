"""Exercises of chapter 18: rows at equal bytes, when a new id gets a row, rows from owners."""

from __future__ import annotations

import torch
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import per_rank

_IDS = [7, 61, 7, 40], [99, 40, 50, 12, 88]  # raw ids of each rank; both have 40


def _inputs(rank: int) -> tuple[Tensor, int, int, int, int]:
    """Raw ids of a rank, its number, W, the limit of the ids, and the rows of the table."""
    return torch.tensor(_IDS[rank], device=device()), rank, 2, 100, 16


EXERCISES = (
    Exercise(
        "18.1",
        compared="the rows of the remapping table",
        right=79_268_292,
        mistakes={
            "That many rows fit if the mapping takes no memory. What does it hold for each "
            "row?": 100_000_000,
            "The raw id is one of the mapping's numbers. It also holds the row, and what the "
            "policy needs.": 85_526_315,
            "That is right for LRU or LFU, with one number of metadata. Which two numbers "
            "does DistanceLFU divide?": 81_250_000,
            "That is right on a GPU, which needs no index. How large is it on a CPU?": 89_041_095,
            "Row-wise Adagrad keeps a number for each row, in both tables.": 79_012_345,
        },
        tolerance=1e-9,
        shape="a whole number of rows",
    ),
    Exercise(
        "18.2",
        compared="the batches of four new ids",
        right=[0, 1, 3, -1],
        cases=((3, [5]), (3, [3, 4]), (4, [2, 2, 2, 5, 9]), (10, [4, 4, 4, 4])),
        mistakes={
            "Ids that lose the competition are forgotten, with their counts. From what does "
            "the next batch count?": [0, 1, 2, 2],
            "Who keeps the row at equal scores?": [0, 0, 3, -1],
        },
        shape="a function that returns the number of a batch, from 0, or -1",
    ),
    Exercise(
        "18.3",
        compared="two ranks get a row for each of their ids, from the owner of the id",
        right=[[0, 9, 0, 2], [11, 2, 8, 1, 10]],
        measure=per_rank(2, _inputs),
        mistakes={
            "Both ranks have id 40, and it gets two rows. Which rank may decide about it?": [
                [0, 2, 0, 1],
                [12, 9, 10, 8, 11],
            ],
            "These rows return in the order of the owners. In which order were the ids?": [
                [0, 0, 2, 9],
                [2, 1, 11, 8, 10],
            ],
            "Two ids of different owners have one row. Which is the first row of rank 1?": [
                [0, 1, 0, 2],
                [3, 2, 0, 1, 2],
            ],
            "Id 7 occurs twice on rank 0. How many rows has it?": [[0, 9, 1, 3], [11, 4, 8, 2, 10]],
        },
        shape="a function that returns a tensor [ids]",
    ),
)

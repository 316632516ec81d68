"""Exercises of chapter 18: rows at equal bytes, when a new id gets a row, rows from owners."""

from __future__ import annotations

import torch
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import per_rank

__all__ = ["EXERCISES"]

_IDS = [7, 61, 7, 40], [99, 40, 50, 12, 88]  # raw ids of each rank; both have 40


def _inputs(rank: int) -> tuple[Tensor, int, int, int, int]:
    """Raw ids of a rank, its number, W, the limit of the ids, and the rows of the table."""
    return torch.tensor(_IDS[rank], device=device()), rank, 2, 100, 16


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "18.1",
        compared="the rows of the remapping table",
        right=79_268_292,
        mistakes=(
            Mistake(
                100_000_000,
                "That many rows fit if the mapping takes no memory. What does it hold for each "
                "row?",
            ),
            Mistake(
                85_526_315,
                "The raw id is one of the mapping's numbers. It also holds the row, and what the "
                "policy needs.",
            ),
            Mistake(
                81_250_000,
                "That is right for LRU or LFU, with one number of metadata. Which two numbers "
                "does DistanceLFU divide?",
            ),
            Mistake(
                89_041_095,
                "That is right on a GPU, which needs no index. How large is it on a CPU?",
            ),
            Mistake(
                79_012_345,
                "Row-wise Adagrad keeps a number for each row, in both tables.",
            ),
        ),
        tolerance=1e-9,
        shape="a whole number of rows",
    ),
    Exercise(
        "18.2",
        compared="the batches of four new ids",
        right=[0, 1, 3, -1],
        cases=((3, [5]), (3, [3, 4]), (4, [2, 2, 2, 5, 9]), (10, [4, 4, 4, 4])),
        mistakes=(
            Mistake(
                [0, 1, 2, 2],
                "Ids that lose the competition are forgotten, with their counts. From what does "
                "the next batch count?",
            ),
            Mistake(
                [0, 0, 3, -1],
                "Who keeps the row at equal scores?",
            ),
        ),
        shape="a function that returns the number of a batch, from 0, or -1",
    ),
    Exercise(
        "18.3",
        compared="two ranks get a row for each of their ids, from the owner of the id",
        right=[[0, 9, 0, 2], [11, 2, 8, 1, 10]],
        measure=per_rank(2, _inputs),
        mistakes=(
            Mistake(
                [[0, 2, 0, 1], [12, 9, 10, 8, 11]],
                "Both ranks have id 40, and it gets two rows. Which rank may decide about it?",
            ),
            Mistake(
                [[0, 0, 2, 9], [2, 1, 11, 8, 10]],
                "These rows return in the order of the owners. In which order were the ids?",
            ),
            Mistake(
                [[0, 1, 0, 2], [3, 2, 0, 1, 2]],
                "Two ids of different owners have one row. Which is the first row of rank 1?",
            ),
            Mistake(
                [[0, 9, 1, 3], [11, 4, 8, 2, 10]],
                "Id 7 occurs twice on rank 0. How many rows has it?",
            ),
        ),
        shape="a function that returns a tensor [ids]",
    ),
)

"""Exercises of chapter 17: the cache that fits in memory, and the hit rate of LFU."""

from __future__ import annotations

import torch
from torch import Tensor

from tutorec.teach.grading import Exercise


def _law(rows: int, exponent: float) -> Tensor:
    """Probabilities of a power law, the most popular row last."""
    law = torch.arange(rows, 0, -1, dtype=torch.float64) ** -exponent
    return law / law.sum()


EXERCISES = (
    Exercise(
        "17.1",
        compared="the load factor, to three decimals",
        right=0.029,
        mistakes={
            "That is right for rows without state. An update also reads and writes the "
            "optimizer state of its row. Where must the state be?": 0.085,
            "The state comes with its row. How many averages does Adam keep for each "
            "weight?": 0.043,
            "The index is in memory, too: 8 bytes for each of the 40,000,000 rows, and 24 for "
            "each slot.": 0.034,
            "Multiply: 0.030 x 40,000,000 rows x 1,560 bytes, and 320,000,000 bytes of index. "
            "Is that at most 2,147,483,648?": 0.030,
        },
        shape="one number between 0 and 1",
    ),
    Exercise(
        "17.2",
        compared="the hit rate, for three tables",
        right=[0.73906, 0.63692, 0.54155],
        cases=((_law(4, 1.0), 2, 1), (_law(100, 1.05), 10, 32), (_law(1000, 0.6), 200, 256)),
        mistakes={
            "A row without a slot is read once for each batch that uses it. What happens to "
            "an id that the batch repeats?": [0.72, 0.59588, 0.50115],
            "`p` is in any order. Which rows have the slots under LFU?": [
                0.40541,
                0.43319,
                0.30529,
            ],
            "The sum is the number of rows that a batch reads. How many lookups does a batch "
            "have?": [0.73906, -10.6187, -116.363],
        },
        tolerance=0.0001,
        shape="a function that returns a number from 0 to 1",
    ),
)

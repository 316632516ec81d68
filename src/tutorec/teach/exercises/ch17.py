"""Exercises of chapter 17: the cache that fits in memory, and the hit rate of LFU."""

from __future__ import annotations

from math import floor

import torch
from torch import Tensor

from tutorec.distributed.hit_rate import hit_rate
from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

_ROWS = 40_000_000
_COLUMNS = 128
_BYTES = 2 * 2**30
# Bytes of a slot under Adam.
_WEIGHTS = 4 * _COLUMNS
_STATE = 8 * _COLUMNS
_INDEX = 24


def _load_factor(slot: int, row: int = 8) -> float:
    """The largest load factor of three decimals that fits, from the bytes of slot and index."""
    return floor(1000 * (_BYTES - row * _ROWS) / (_ROWS * slot)) / 1000


def _law(rows: int, exponent: float) -> Tensor:
    """Probabilities of a power law, the most popular row last."""
    law = torch.arange(rows, 0, -1, dtype=torch.float64) ** -exponent
    return law / law.sum()


def _lfu_rate(p: Tensor, slots: int, ids: int) -> float:
    return hit_rate(p, slots, "lfu", ids=ids)


def _without_repeats(p: Tensor, slots: int, ids: int) -> float:
    """The share of the lookups that the popular rows get."""
    return float(p.sort(descending=True).values[:slots].sum())


def _in_the_order_given(p: Tensor, slots: int, ids: int) -> float:
    """Slots for the first rows."""
    used = -torch.expm1(-ids * p[slots:])
    return 1 - float(used.sum()) / ids


def _for_each_batch(p: Tensor, slots: int, ids: int) -> float:
    """Rows that miss, not divided by the ids."""
    used = -torch.expm1(-ids * p.sort(descending=True).values[slots:])
    return 1 - float(used.sum())


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="17.1",
        compared="the load factor, to three decimals",
        solution=_load_factor(_WEIGHTS + _STATE + _INDEX),
        mistakes=(
            Mistake(
                "leaves the optimizer's state in the file",
                _load_factor(_WEIGHTS + _INDEX),
                "That is right for rows without state. An update also reads and writes the "
                "optimizer state of its row. Where must the state be?",
            ),
            Mistake(
                "counts one state of Adam",
                _load_factor(_WEIGHTS + _STATE // 2 + _INDEX),
                "The state comes with its row. How many averages does Adam keep for each weight?",
            ),
            Mistake(
                "leaves out the index",
                _load_factor(_WEIGHTS + _STATE, row=0),
                "The index is in memory, too: 8 bytes for each of the 40,000,000 rows, and 24 for "
                "each slot.",
            ),
            Mistake(
                "rounds up",
                _load_factor(_WEIGHTS + _STATE + _INDEX) + 0.001,
                "Multiply: 0.030 x 40,000,000 rows x 1,560 bytes, and 320,000,000 bytes of index. "
                "Is that at most 2,147,483,648?",
            ),
        ),
        shape="one number between 0 and 1",
    ),
    Exercise(
        id="17.2",
        compared="the hit rate, for three tables",
        solution=_lfu_rate,
        cases=((_law(4, 1.0), 2, 1), (_law(100, 1.05), 10, 32), (_law(1000, 0.6), 200, 256)),
        mistakes=(
            Mistake(
                "takes the share of the lookups that popular rows get",
                _without_repeats,
                "A row without a slot is read once for each batch that uses it. What happens to "
                "an id that the batch repeats?",
            ),
            Mistake(
                "gives the slots to the first rows",
                _in_the_order_given,
                "`p` is in any order. Which rows have the slots under LFU?",
            ),
            Mistake(
                "leaves out the division by the ids",
                _for_each_batch,
                "The sum is the number of rows that a batch reads. How many lookups does a batch "
                "have?",
            ),
        ),
        tolerance=1e-4,
        shape="a function that returns a number from 0 to 1",
    ),
)

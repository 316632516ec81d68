"""Exercises of chapter 07: columns against rows, where an id goes, column-wise by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import per_rank

# For each of two ranks: the ids of its three bags.
_BAGS = ([[7, 2, 6], [], [1]], [[5], [3, 4, 4], [0]])
_COLUMNS = torch.arange(24.0).view(8, 3)  # of rank 0; the numbers of rank 1 are larger by 100


def _sums(bags: list[list[int]], rank: int) -> Tensor:
    """Sums over the columns of a rank."""
    return torch.stack([(_COLUMNS + 100 * rank)[bag].sum(0) for bag in bags])


def _inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The columns of a rank, and the ids and the lengths of its bags."""
    bags = _BAGS[rank]
    ids = torch.tensor([identifier for bag in bags for identifier in bag], device=device())
    lengths = torch.tensor([len(bag) for bag in bags], device=device())
    return (_COLUMNS + 100 * rank).to(device()), ids, lengths


EXERCISES = (
    Exercise(
        "07.1",
        compared="the bag length at which the two formulas are equal",
        right=96,
        mistakes={
            "That counts pooled rows only. Their gradients are sent, too.": 48,
            "2 D holds for ids and floats of 4 bytes. How many bytes do they take here?": 384,
            "Ids take 8 bytes, as you say. How many does a float16 take?": 192,
            "Write both byte formulas with W = 8, set them equal and cancel what they share. "
            "Is W still there?": 768,
        },
        shape="a number of ids",
    ),
    Exercise(
        "07.2",
        compared="(rank, row there) for ids of tables of 10, 8 and 3 rows",
        right=[(2, 1), (3, 0), (1, 1), (2, 0)],
        cases=((7, 10, 4), (9, 10, 4), (5, 8, 2), (2, 3, 4)),
        mistakes={
            "With 10 // 4 = 2 rows a rank, id 9 would be on rank 4. How many rows does each "
            "rank take?": [(3, 1), (4, 1), (1, 1), (2, 0)],
            "That deals single rows out in turn. Row-wise gives each rank one range of "
            "neighbouring rows.": [(3, 1), (1, 2), (1, 2), (2, 0)],
            "The rank is right. Each rank numbers its own rows from 0: which number has the "
            "row there?": [(2, 7), (3, 9), (1, 5), (2, 2)],
        },
        shape=("a function of (identity, rows, world_size) that returns a pair of integers"),
    ),
    Exercise(
        "07.3",
        compared="two ranks get the sums of their bags, with the columns of both in order",
        right=[torch.cat([_sums(bags, 0), _sums(bags, 1)], 1) for bags in _BAGS],
        measure=per_rank(2, _inputs),
        mistakes={
            "Your rows are too narrow: partial sums are added, but these parts are different "
            "columns.": [_sums(bags, 0) + _sums(bags, 1) for bags in _BAGS],
            "A bag's rank has some of the columns. Which ranks have the others, and what must "
            "they be sent?": [_sums(bags, rank) for rank, bags in enumerate(_BAGS)],
            "All parts are there. In which order are the columns of the table?": [
                torch.cat([_sums(bags, rank), _sums(bags, 1 - rank)], 1)
                for rank, bags in enumerate(_BAGS)
            ],
        },
        shape="a function that returns a tensor [bags, all columns]",
    ),
)

"""Exercises of chapter 06: shapes between the stages, rows without pooling, bytes of a backward."""

from __future__ import annotations

import torch
from torch import Tensor

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import per_rank

# For each rank the ids of the users and of the products of its two samples.
_IDS = (([2], [7, 7, 2]), ([2, 3, 5, 4, 1], [1, 2, 1, 5]))
_LENGTHS = ([1, 0, 1, 2], [3, 2, 3, 1])


def _table(rank: int) -> Tensor:
    return torch.arange(16.0).view(8, 2) + 100 * rank


def _inputs(rank: int) -> tuple[KeyedJaggedTensor, Tensor]:
    """A batch of each rank, and its table."""
    users, products = _IDS[rank]
    ids = torch.tensor(users + products, dtype=torch.int32)
    lengths = torch.tensor(_LENGTHS[rank], dtype=torch.int32)
    batch = KeyedJaggedTensor(["user", "product"], ids, lengths=lengths)
    return batch.to(device()), _table(rank).to(device())


EXERCISES = (
    Exercise(
        "06.1",
        compared="three features of 400 samples, and 8 + 8 + 16 columns",
        right=[1200, 400, 32],
        mistakes={
            "Those are the samples of rank 2 alone. Whose bags has `input_dist` brought to "
            "rank 2?": [300, 100, 32],
            "A table that serves two features is looked up for each of them. How many columns "
            "does each of the two lookups give?": [800, 400, 24],
            "The columns of a sample's features stand side by side. How many samples are there?": [
                1200,
                1200,
                32,
            ],
        },
        shape="a list of three numbers: bags, rows, columns",
    ),
    Exercise(
        "06.2",
        compared="two ranks get a row for each of their ids, in the order of the batch",
        right=[torch.cat([_table(0)[users], _table(1)[products]]) for users, products in _IDS],
        measure=per_rank(2, _inputs),
        mistakes={
            "Those are the rows of the ids that arrived here. Whose samples are they for?": [
                _table(0)[[2, 2, 3, 5, 4, 1]],
                _table(1)[[7, 7, 2, 1, 2, 1, 5]],
            ],
            "Rank r has the table of key r only. The rows of the other key lie on the other "
            "rank.": [
                _table(rank)[users + products] for rank, (users, products) in enumerate(_IDS)
            ],
        },
        shape="a function that returns a tensor [ids, columns]",
    ),
    Exercise(
        "06.3",
        compared="100 samples, the 64 columns of the other ranks, and 4 bytes",
        right=25_600,
        mistakes={
            "That includes the columns of rank 0. Do their gradients leave the rank?": 32_000,
            "Those are the rows that rank 0 sends in a forward: its own columns for the "
            "samples of others. In backward it has gradients of its own samples.": 19_200,
            "That many numbers. How many bytes has a float32?": 6_400,
        },
        shape="a number of bytes",
    ),
)

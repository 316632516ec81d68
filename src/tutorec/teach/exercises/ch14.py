"""Exercises of chapter 14: a request in flat lists, a traced counter, a table on two machines."""

from __future__ import annotations

import torch
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import per_rank

_IDS = [7, 1, 3, 4, 1]
# Rows 0 to 3 are on rank 0, rows 4 to 7 on rank 1.
_TABLE = torch.cat([torch.arange(8.0).view(4, 2), torch.arange(100.0, 108.0).view(4, 2)])


def _inputs(rank: int) -> tuple[int, Tensor, Tensor, Tensor]:
    """The rows of a rank, and a request that both get; its second bag is empty."""
    ids = torch.tensor([7, 1, 5, 5, 0, 3], device=device())
    starts = torch.tensor([0, 4, 4], device=device())
    return rank, _TABLE.chunk(2)[rank].to(device()), ids, starts


EXERCISES = (
    Exercise(
        "14.1",
        compared="two features of two visitors, one without clicks, keys in another order",
        right=[(_IDS, [2, 0, 1, 2])],
        cases=(({"user": [[3], [4, 1]], "product": [[7, 1], []]}, ["product", "user"]),),
        mistakes={
            "Right as long as the batch has the served order. Which numbers does the model "
            "take for products when `user` comes first?": [([3, 4, 1, 7, 1], [1, 2, 2, 0])],
            "All numbers are there, visitor by visitor. A table reads all lists of one "
            "feature together: in which order must they be stored?": [(_IDS, [2, 1, 0, 2])],
            "The ids are right. Your second list says where each list begins, and has one "
            "number too many. What does the request want instead?": [(_IDS, [0, 2, 2, 3, 5])],
            "The ids are right. From the sum of a feature's lengths nobody can tell whose ids "
            "they are.": [(_IDS, [2, 3])],
            "A visitor who has clicked nothing has a list, too. What happens to all lists "
            "that come after it?": [(_IDS, [2, 1, 2])],
        },
        shape="a function that returns two lists of numbers, values and lengths",
    ),
    Exercise(
        "14.2",
        compared="10, 10 and 10: the counter stood at 1 while the graph was written down",
        right=[10, 10, 10],
        mistakes={
            "That is what the module would answer. A graph records operations on `x`. Is "
            "`self.calls += 1` one of them?": [10, 20, 30],
            "You are right that tracing was a call. Who would count the next ones? Print the "
            "graph's code.": [20, 30, 40],
            "Right, nothing counts any more. What was the counter when `x * self.calls` was "
            "recorded?": [0, 0, 0],
        },
        shape="a list of three numbers",
    ),
    Exercise(
        "14.3",
        compared="the pooled rows of three bags, bit for bit the same on both ranks",
        right=[[[312, 316], [0, 0], [6, 8]]] * 2,
        measure=per_rank(2, _inputs),
        mistakes={
            "The rows of this rank are in the sums. Who adds the rows that the other rank has?": [
                [[2, 3], [0, 0], [6, 8]],
                [[310, 313], [0, 0], [0, 0]],
            ],
            "Both ranks add something for every id, so each id is counted twice. What must a "
            "rank add for an id whose row it does not have?": [[[430, 438], [0, 0], [206, 210]]]
            * 2,
            "Rank 0 is right. The first row of rank 1 is row 4 of the table: which id does "
            "your rank 1 look up there?": [[[104, 106], [0, 0], [212, 216]]] * 2,
        },
        tolerance=0.0,
        shape="a function that returns a tensor [bags, columns] on each rank",
    ),
)

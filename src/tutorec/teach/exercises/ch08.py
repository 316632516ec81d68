"""Exercises of chapter 08: traffic between hosts, the way back of gradients, a type for a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import per_rank

# Of each of four ranks for the tables of both hosts, [W, hosts, B, D].
_GRADIENTS = torch.arange(12.0).view(2, 3, 2) + 100 * torch.arange(4).view(4, 1, 1, 1)
_FITTING = {
    "sellers": "table_wise",
    "visitors": "table_column_wise",
    "products": "table_row_wise",
    "pairs": "grid_shard",
}


def _inputs(rank: int) -> tuple[Tensor, Any, Any]:
    """Gradients of a rank, the group of its host, and that of its local rank."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    host, local_rank = divmod(rank, 2)
    return _GRADIENTS[rank].to(device()), inside[host], across[local_rank]


EXERCISES = (
    Exercise(
        "08.1",
        compared="120 of the 127 other ranks",
        right=100 * 120 / 127,
        mistakes={
            "15 of 16 counts a rank among those that it sends to. What a rank keeps is not "
            "sent.": 100 * 15 / 16,
            "That is the share of eight hosts. How many other ranks are there now?": 100 * 56 / 63,
            "Seven of the other ranks are on the same host: this share does not cross.": 100
            * 7
            / 127,
        },
        tolerance=0.001,
        shape="a percentage between 0 and 100",
    ),
    Exercise(
        "08.2",
        compared="four ranks get the gradients of all samples for the table of their host",
        right=[_GRADIENTS[:, rank // 2] for rank in range(4)],
        measure=per_rank(4, _inputs),
        mistakes={
            "Those are the samples of ranks with your local rank. Which other ranks of your "
            "host have rows of the same bags?": [
                _GRADIENTS[rank % 2 :: 2, rank // 2] for rank in range(4)
            ],
            "All gradients are there, in the order 0, 2, 1, 3. What is the first axis in rank "
            "order?": [_GRADIENTS[[0, 2, 1, 3], rank // 2] for rank in range(4)],
            "Forward adds the parts of one bag. The gradients on two ranks of a host are of "
            "different bags.": [
                _GRADIENTS[:, rank // 2].unflatten(0, (2, 2)).sum(1) for rank in range(4)
            ],
            "Those are gradients of your own host's samples for all tables. Whose samples "
            "does your host's table serve?": [
                torch.cat([_GRADIENTS[rank // 2 * 2 :][:2, host] for host in (0, 1)])
                for rank in range(4)
            ],
        },
        shape=("a function of (my_gradients, inside, across) that returns a tensor [W, B, D]"),
    ),
    Exercise(
        "08.3",
        compared="what fits and is estimated to be fastest, for four models",
        right=_FITTING,
        mistakes={
            "Three are right. There is a table of sellers for each rank, and it fits. What "
            "would a cut gain?": _FITTING | {"sellers": "table_row_wise"},
            "Three are right. Row-wise holds the pairs, and sends 64 partial sums for every "
            "bag. Which type also uses several hosts, and adds inside each of them?": _FITTING
            | {"pairs": "row_wise"},
            "Three are right. A visitor's bag has one id. What does it cost to send that id "
            "to eight slices, and what to bring eight partial sums together?": _FITTING
            | {"visitors": "table_row_wise"},
            "Three are right. How many GB are free on the ranks of one host, and how many do "
            "the pairs need?": _FITTING | {"pairs": "table_row_wise"},
            "Three are right. Table-column-wise sends every id of a bag to each slice: 500 "
            "ids to 8 slices.": _FITTING | {"products": "table_column_wise"},
        },
        shape="a dict from model to the name of a sharding type, such as 'row_wise'",
    ),
)

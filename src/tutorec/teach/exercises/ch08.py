"""Exercises of chapter 08: traffic between hosts, the way back of gradients, a type for a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import per_rank

__all__ = ["EXERCISES"]

_HOSTS = 2
_LOCAL = 2
_SAMPLES = 3
_COLUMNS = 2


def _cross(my_gradients: Tensor, across: Any) -> Tensor:
    """Gradients for my host's table, of each host's rank that has my local rank."""
    arrived = torch.empty_like(my_gradients)
    dist.all_to_all_single(arrived, my_gradients, group=across)
    return arrived


def _copy(arrived: Tensor, inside: Any) -> list[Tensor]:
    """What has arrived on each rank of my host."""
    host_gradients = [torch.empty_like(arrived) for _ in range(dist.get_world_size(inside))]
    dist.all_gather(host_gradients, arrived, group=inside)
    return host_gradients


def _cross_then_copy(my_gradients: Tensor, inside: Any, across: Any) -> Tensor:
    host_gradients = _copy(_cross(my_gradients, across), inside)
    return torch.stack(host_gradients, dim=1).flatten(0, 1)


def _not_copied(my_gradients: Tensor, inside: Any, across: Any) -> Tensor:
    return _cross(my_gradients, across)


def _by_local_rank(my_gradients: Tensor, inside: Any, across: Any) -> Tensor:
    return torch.cat(_copy(_cross(my_gradients, across), inside))


def _added(my_gradients: Tensor, inside: Any, across: Any) -> Tensor:
    return torch.stack(_copy(_cross(my_gradients, across), inside)).sum(dim=0)


def _not_crossed(my_gradients: Tensor, inside: Any, across: Any) -> Tensor:
    return torch.stack(_copy(my_gradients, inside), dim=1).flatten(0, 1)


def _inputs(rank: int) -> tuple[Tensor, Any, Any]:
    """Gradients of a rank, the group of its host, and that of its local rank."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    host, local_rank = divmod(rank, _LOCAL)
    count = _HOSTS * _SAMPLES * _COLUMNS
    gradients = torch.arange(float(count), device=device()) + 100 * rank
    return gradients.view(_HOSTS, _SAMPLES, _COLUMNS), inside[host], across[local_rank]


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="08.1",
        compared="120 of the 127 other ranks",
        solution=100 * 120 / 127,
        tolerance=1e-3,
        mistakes=(
            Mistake(
                "takes the share of hosts that are elsewhere",
                100 * 15 / 16,
                "15 of 16 counts a rank among those that it sends to. What a rank keeps is not "
                "sent.",
            ),
            Mistake(
                "leaves the second half of the hosts out",
                100 * 56 / 63,
                "That is the share of eight hosts. How many other ranks are there now?",
            ),
            Mistake(
                "gives what stays inside",
                100 * 7 / 127,
                "Seven of the other ranks are on the same host: this share does not cross.",
            ),
        ),
        shape="a percentage between 0 and 100",
    ),
    Exercise(
        id="08.2",
        compared="four ranks get the gradients of all samples for the table of their host",
        solution=_cross_then_copy,
        measure=per_rank(_HOSTS * _LOCAL, _inputs),
        mistakes=(
            Mistake(
                "leaves each gradient on the rank where it arrived",
                _not_copied,
                "Those are the samples of ranks with your local rank. Which other ranks of your "
                "host have rows of the same bags?",
            ),
            Mistake(
                "puts the ranks of one local rank together",
                _by_local_rank,
                "All gradients are there, in the order 0, 2, 1, 3. What is the first axis in rank "
                "order?",
            ),
            Mistake(
                "adds the gradients up as forward adds sums",
                _added,
                "Forward adds the parts of one bag. The gradients on two ranks of a host are of "
                "different bags.",
            ),
            Mistake(
                "never crosses",
                _not_crossed,
                "Those are gradients of your own host's samples for all tables. Whose samples "
                "does your host's table serve?",
            ),
        ),
        shape="a function of (my_gradients, inside, across) that returns a tensor [W, B, D]",
    ),
    Exercise(
        id="08.3",
        compared="what fits and is estimated to be fastest, for four models",
        solution={
            "sellers": "table_wise",
            "visitors": "table_column_wise",
            "products": "table_row_wise",
            "pairs": "grid_shard",
        },
        mistakes=(
            Mistake(
                "cuts the tables that need no cut",
                {
                    "sellers": "table_row_wise",
                    "visitors": "table_column_wise",
                    "products": "table_row_wise",
                    "pairs": "grid_shard",
                },
                "Three are right. There is a table of sellers for each rank, and it fits. What "
                "would a cut gain?",
            ),
            Mistake(
                "cuts by rows over all ranks what one host cannot hold",
                {
                    "sellers": "table_wise",
                    "visitors": "table_column_wise",
                    "products": "table_row_wise",
                    "pairs": "row_wise",
                },
                "Three are right. Row-wise holds the pairs, and sends 64 partial sums for every "
                "bag. Which type also uses several hosts, and adds inside each of them?",
            ),
            Mistake(
                "cuts by rows whatever the bags hold",
                {
                    "sellers": "table_wise",
                    "visitors": "table_row_wise",
                    "products": "table_row_wise",
                    "pairs": "grid_shard",
                },
                "Three are right. A visitor's bag has one id. What does it cost to send that id "
                "to eight slices, and what to bring eight partial sums together?",
            ),
            Mistake(
                "forgets what a host can hold",
                {
                    "sellers": "table_wise",
                    "visitors": "table_column_wise",
                    "products": "table_row_wise",
                    "pairs": "table_row_wise",
                },
                "Three are right. How many GB are free on the ranks of one host, and how many do "
                "the pairs need?",
            ),
            Mistake(
                "cuts long bags by columns",
                {
                    "sellers": "table_wise",
                    "visitors": "table_column_wise",
                    "products": "table_column_wise",
                    "pairs": "grid_shard",
                },
                "Three are right. Table-column-wise sends every id of a bag to each slice: 500 "
                "ids to 8 slices.",
            ),
        ),
        shape="a dict from model to the name of a sharding type, such as 'row_wise'",
    ),
)

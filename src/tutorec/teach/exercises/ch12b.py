"""Exercises of chapter 12b: one hot row on many ranks, a row requested once, the cost of a copy."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import per_rank

__all__ = ["EXERCISES"]


_IDS = ([3, 0, 3, 3, 5, 3], [4, 3, 3, 0])  # of two ranks, for a table of 6 rows


def _rows_of(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of ids; each rank holds as many rows as ``weight`` has."""
    outgoing, order = ids.sort(stable=True)  # so those of one rank are side by side
    ids_for = (outgoing // len(weight)).bincount(minlength=dist.get_world_size())
    ids_from = torch.empty_like(ids_for)
    dist.all_to_all_single(ids_from, ids_for)
    sizes = ids_for.tolist(), ids_from.tolist()

    incoming = ids.new_empty(sum(sizes[1]))
    dist.all_to_all_single(incoming, outgoing, sizes[1], sizes[0])
    first = dist.get_rank() * len(weight)
    returned = weight.new_empty(len(ids), weight.shape[1])
    dist.all_to_all_single(returned, weight[incoming - first], *sizes)

    rows = torch.empty_like(returned)
    rows[order] = returned
    return rows


def _rows_once(ids: Tensor, weight: Tensor) -> Tensor:
    distinct, position = ids.unique(return_inverse=True)
    return _rows_of(distinct, weight)[position]


def _distinct_rows_only(ids: Tensor, weight: Tensor) -> Tensor:
    return _rows_of(ids.unique(), weight)


def _inputs(rank: int) -> tuple[Tensor, Tensor]:
    """Ids of a rank, and its rows."""
    weight = torch.arange(6.0, device=device()).view(3, 2) + 10 * rank
    return torch.tensor(_IDS[rank], device=device()), weight


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="12b.1",
        compared="three tables, whose hottest rows have 8, 8 and 0 % of the ids",
        solution=lambda share, world_size: (share + (1 - share) / world_size) * world_size,
        tolerance=1e-3,
        mistakes=(
            Mistake(
                "trusts hashing to even everything out",
                lambda share, world_size: 1.0,
                "Hashing spreads rows evenly. Can it spread the ids of a single row?",
            ),
            Mistake(
                "adds the share to the mean instead of comparing with it",
                lambda share, world_size: 1.0 + share,
                "The row's 8 % are a share of all ids. What share of all ids does a rank read on "
                "average?",
            ),
            Mistake(
                "forgets the other rows of that rank",
                lambda share, world_size: share * world_size,
                "That is the hot row alone. The rank also has its even part of all the other ids.",
            ),
        ),
        cases=((0.08, 8), (0.08, 512), (0.0, 64)),
        shape="a function of (share, world_size) that returns a number",
    ),
    Exercise(
        id="12b.2",
        compared="the rows of all ids, and the bytes that two ranks send for them",
        solution=_rows_once,
        measure=per_rank(2, _inputs, {"all_to_all_single": 1}),
        mistakes=(
            Mistake(
                "requests a row as often as it has the id",
                _rows_of,
                "The rows are right, but one of them travels several times. Which ids does a rank "
                "have to send?",
            ),
            Mistake(
                "returns the distinct rows only",
                _distinct_rows_only,
                "Each row travels once now. The caller has more ids than that: which of the rows "
                "belongs to each of them?",
            ),
        ),
        shape="a function of (ids, weight) that returns a tensor [ids, columns]",
    ),
    Exercise(
        id="12b.3",
        compared="bytes that a rank sends for copies of 1,000 rows, on 8 ranks and on 512",
        solution=[448_000, 511_000],
        tolerance=1e-3,
        mistakes=(
            Mistake(
                "takes data-parallel to be free",
                [0, 0],
                "Nothing is sent forward. How do the copies stay equal when every rank has other "
                "gradients?",
            ),
            Mistake(
                "divides the gradient by the ranks",
                [448_000, 511_000 / 64],
                "The number for 8 ranks is right. Each of 512 ranks adds up one 512th of the "
                "table. From how many ranks does it get that part?",
            ),
            Mistake(
                "sends the whole gradient to every other rank",
                [7 * 256_000, 511 * 256_000],
                "No rank needs all gradients of all ranks: each rank adds up its part of the rows "
                "and sends the sums to the others.",
            ),
            Mistake(
                "forgets that the sums have to come back",
                [224_000, 255_500],
                "That is the first half, gradients on their way to the ranks that add them. The "
                "sums have to reach all ranks, too.",
            ),
        ),
        shape="a list of two numbers of bytes",
    ),
)

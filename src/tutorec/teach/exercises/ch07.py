"""Exercises of chapter 07: columns against rows, where an id goes, column-wise by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding_bag

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import per_rank

__all__ = ["EXERCISES"]


def _rank_and_row(identity: int, rows: int, world_size: int) -> tuple[int, int]:
    """Rows are assigned in ranges of equal height, rounded up."""
    return divmod(identity, -(-rows // world_size))


# For each of two ranks: the ids of its three bags.
_BAGS = ([[7, 2, 6], [], [1]], [[5], [3, 4, 4], [0]])
# The table of one rank, which has some of the columns.
_ROWS = 8
_COLUMNS = 3


def _from_all(ids: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Ids and lengths of the bags of every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (ids.tolist(), lengths.tolist()))
    return [
        (torch.tensor(rank_ids, device=ids.device), torch.tensor(counts, device=ids.device))
        for rank_ids, counts in gathered
    ]


def _pooled(my_columns: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    return embedding_bag(ids, my_columns, lengths.cumsum(0) - lengths, mode="sum")


def _parts(my_columns: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """The parts of my bags, [W, B, columns of a rank], rank after rank."""
    sums = [_pooled(my_columns, *bags) for bags in _from_all(ids, lengths)]
    outgoing = torch.stack(sums)
    arrived = torch.empty_like(outgoing)
    dist.all_to_all_single(arrived, outgoing)
    return arrived


def _column_wise(my_columns: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """Every rank adds up its columns of all bags; the parts of a bag are side by side."""
    return torch.cat([*_parts(my_columns, ids, lengths)], dim=1)


def _parts_added(my_columns: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    return _parts(my_columns, ids, lengths).sum(dim=0)


def _own_columns_only(my_columns: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    return _pooled(my_columns, ids, lengths)


def _own_columns_first(my_columns: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    blocks = [*_parts(my_columns, ids, lengths)]
    own = blocks.pop(dist.get_rank())
    return torch.cat([own, *blocks], dim=1)


def _inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The columns of a rank, and the ids and the lengths of its bags."""
    bags = _BAGS[rank]
    ids = torch.tensor([identifier for bag in bags for identifier in bag], device=device())
    lengths = torch.tensor([len(bag) for bag in bags], device=device())
    numbers = torch.arange(float(_ROWS * _COLUMNS), device=device())
    return numbers.view(_ROWS, _COLUMNS) + 100 * rank, ids, lengths


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="07.1",
        compared="the bag length at which the two formulas are equal",
        solution=192 / 2,
        mistakes=(
            Mistake(
                "counts the pooled rows and not the gradients",
                192 / 4,
                "That counts pooled rows only. Their gradients are sent, too.",
            ),
            Mistake(
                "takes the chapter's limit of 2 D",
                2 * 192,
                "2 D holds for ids and floats of 4 bytes. How many bytes do they take here?",
            ),
            Mistake(
                "changes the bytes of an id and not those of a float",
                192,
                "Ids take 8 bytes, as you say. How many does a float16 take?",
            ),
            Mistake(
                "lets the break-even grow with the ranks",
                192 / 2 * 8,
                "Write both byte formulas with W = 8, set them equal and cancel what they share. "
                "Is W still there?",
            ),
        ),
        shape="a number of ids",
    ),
    Exercise(
        id="07.2",
        compared="(rank, row there) for ids of tables of 10, 8 and 3 rows",
        solution=_rank_and_row,
        mistakes=(
            Mistake(
                "rounds the rows of a rank down",
                lambda identity, rows, world: divmod(identity, max(1, rows // world)),
                "With 10 // 4 = 2 rows a rank, id 9 would be on rank 4. How many rows does each "
                "rank take?",
            ),
            Mistake(
                "deals rows out in turn",
                lambda identity, rows, world: (identity % world, identity // world),
                "That deals single rows out in turn. Row-wise gives each rank one range of "
                "neighbouring rows.",
            ),
            Mistake(
                "keeps the id's number",
                lambda identity, rows, world: (identity // -(-rows // world), identity),
                "The rank is right. Each rank numbers its own rows from 0: which number has the "
                "row there?",
            ),
        ),
        cases=((7, 10, 4), (9, 10, 4), (5, 8, 2), (2, 3, 4)),
        shape="a function of (identity, rows, world_size) that returns a pair of integers",
    ),
    Exercise(
        id="07.3",
        compared="two ranks get the sums of their bags, with the columns of both in order",
        solution=_column_wise,
        measure=per_rank(2, _inputs),
        mistakes=(
            Mistake(
                "adds the parts up as row-wise does",
                _parts_added,
                "Your rows are too narrow: partial sums are added, but these parts are different "
                "columns.",
            ),
            Mistake(
                "reads only the rank's own columns",
                _own_columns_only,
                "A bag's rank has some of the columns. Which ranks have the others, and what must "
                "they be sent?",
            ),
            Mistake(
                "puts the rank's own columns first",
                _own_columns_first,
                "All parts are there. In which order are the columns of the table?",
            ),
        ),
        shape="a function that returns a tensor [bags, all columns]",
    ),
)

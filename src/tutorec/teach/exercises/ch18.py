"""Exercises of chapter 18: rows at equal bytes, when a new id gets a row, rows from owners."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import per_rank

__all__ = ["EXERCISES"]

_ROWS = 100_000_000
_COLUMNS = 64
_ROW = 4 * _COLUMNS + 4  # bytes of a row and of its state under row-wise Adagrad


def _remapped_rows(of_mapping: int) -> int:
    """Rows that take the bytes of the hashed table, with so many bytes of the mapping for each."""
    return _ROWS * _ROW // (_ROW + of_mapping)


def _first_above(least: int, seen: Sequence[int]) -> int:
    return next((batch for batch, count in enumerate(seen) if count > least), -1)


_LIMIT = 100
_TABLE_ROWS = 16
_IDS = [7, 61, 7, 40], [99, 40, 50, 12, 88]  # raw ids of each rank; both have 40


def _by_owner(
    ids: Tensor, world_size: int, limit: int
) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """The order of the owners; the ids that I own; how many came from each rank and went to it."""
    owner = ids // (limit // world_size)
    order = owner.argsort(stable=True)
    ids_for = owner.bincount(minlength=world_size)
    ids_from = torch.empty_like(ids_for)
    dist.all_to_all_single(ids_from, ids_for)
    sizes = ids_from.tolist(), ids_for.tolist()

    arrived = ids.new_empty(sum(sizes[0]))
    dist.all_to_all_single(arrived, ids[order].contiguous(), *sizes)
    return order, arrived, *sizes


def _returned(rows: Tensor, came: list[int], went: list[int]) -> Tensor:
    """Rows for my ids, in the order of their owners."""
    returned = rows.new_empty(sum(went))
    dist.all_to_all_single(returned, rows.contiguous(), went, came)
    return returned


def _rows_of(ids: Tensor, rank: int, world_size: int, limit: int, rows: int) -> Tensor:
    """The row of each id [N], from its owner."""
    order, arrived, came, went = _by_owner(ids, world_size, limit)
    position = arrived.unique(return_inverse=True)[1]
    result = torch.empty_like(ids)
    result[order] = _returned(position + rank * (rows // world_size), came, went)
    return result


def _own_rows(ids: Tensor, rank: int, world_size: int, limit: int, rows: int) -> Tensor:
    """Each rank gives its ids its own rows, and sends nothing."""
    return ids.unique(return_inverse=True)[1] + rank * (rows // world_size)


def _in_owners_order(ids: Tensor, rank: int, world_size: int, limit: int, rows: int) -> Tensor:
    """Rows in the order in which the ids were sent."""
    _, arrived, came, went = _by_owner(ids, world_size, limit)
    position = arrived.unique(return_inverse=True)[1]
    return _returned(position + rank * (rows // world_size), came, went)


def _from_zero(ids: Tensor, rank: int, world_size: int, limit: int, rows: int) -> Tensor:
    """Rows counted from 0 on every owner."""
    return _rows_of(ids, 0, world_size, limit, rows)


def _a_row_for_each_copy(ids: Tensor, rank: int, world_size: int, limit: int, rows: int) -> Tensor:
    """Copies of an id get a row each."""
    order, arrived, came, went = _by_owner(ids, world_size, limit)
    position = arrived.argsort(stable=True).argsort()
    result = torch.empty_like(ids)
    result[order] = _returned(position + rank * (rows // world_size), came, went)
    return result


def _inputs(rank: int) -> tuple[Tensor, int, int, int, int]:
    """Raw ids of a rank, its number, W, the limit of the ids, and the rows of the table."""
    return torch.tensor(_IDS[rank], device=device()), rank, 2, _LIMIT, _TABLE_ROWS


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="18.1",
        compared="the rows of the remapping table",
        solution=_remapped_rows(68),
        mistakes=(
            Mistake(
                "leaves out the mapping",
                _remapped_rows(0),
                "That many rows fit if the mapping takes no memory. What does it hold for each "
                "row?",
            ),
            Mistake(
                "counts the raw ids and nothing else of the mapping",
                _remapped_rows(8 + 36),
                "The raw id is one of the mapping's numbers. It also holds the row, and what the "
                "policy needs.",
            ),
            Mistake(
                "counts the metadata of LRU",
                _remapped_rows(24 + 36),
                "That is right for LRU or LFU, with one number of metadata. Which two numbers "
                "does DistanceLFU divide?",
            ),
            Mistake(
                "leaves out the index",
                _remapped_rows(32),
                "That is right on a GPU, which needs no index. How large is it on a CPU?",
            ),
            Mistake(
                "forgets the state of the optimizer",
                _ROWS * (_ROW - 4) // (_ROW - 4 + 68),
                "Row-wise Adagrad keeps a number for each row, in both tables.",
            ),
        ),
        shape="a whole number of rows",
    ),
    Exercise(
        id="18.2",
        compared="the batches of six new ids",
        solution=_first_above,
        cases=(
            (3, [1, 2]),
            (3, [5]),
            (3, [3, 4]),
            (4, [2, 2, 2, 5, 9]),
            (10, [4, 4, 4, 4]),
            (2, [0, 2, 1, 3]),
        ),
        mistakes=(
            Mistake(
                "adds up the counts of earlier batches",
                lambda least, seen: _first_above(least, list(accumulate(seen))),
                "Ids that lose the competition are forgotten, with their counts. From what does "
                "the next batch count?",
            ),
            Mistake(
                "lets a new id win at equal counts",
                lambda least, seen: _first_above(least - 1, seen),
                "Who keeps the row at equal scores?",
            ),
        ),
        shape="a function that returns the number of a batch, from 0, or -1",
    ),
    Exercise(
        id="18.3",
        compared="two ranks get a row for each of their ids, from the owner of the id",
        solution=_rows_of,
        measure=per_rank(2, _inputs),
        mistakes=(
            Mistake(
                "gives its own ids rows of its own",
                _own_rows,
                "Both ranks have id 40, and it gets two rows. Which rank may decide about it?",
            ),
            Mistake(
                "leaves the rows in the order in which the ids were sent",
                _in_owners_order,
                "These rows return in the order of the owners. In which order were the ids?",
            ),
            Mistake(
                "counts the rows of every owner from 0",
                _from_zero,
                "Two ids of different owners have one row. Which is the first row of rank 1?",
            ),
            Mistake(
                "gives each copy of an id a row",
                _a_row_for_each_copy,
                "Id 7 occurs twice on rank 0. How many rows has it?",
            ),
        ),
        shape="a function that returns a tensor [ids]",
    ),
)

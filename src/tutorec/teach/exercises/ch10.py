"""Exercises of chapter 10: state out of stored shards, a cut without a disk, how often to save."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import per_rank

__all__ = ["EXERCISES"]

Stored = list[tuple[int, int, int, Tensor]]

_UNCUT: Stored = [(0, 0, 8, torch.tensor([1.0, 2.0, 3.0]))]
_TWO_WIDTHS: Stored = [
    (0, 0, 2, torch.tensor([1.0, 2.0, 3.0, 4.0])),
    (0, 2, 6, torch.tensor([5.0, 6.0, 7.0, 8.0])),
]
_IN_BOTH_DIRECTIONS: Stored = [
    (0, 0, 4, torch.tensor([1.0, 2.0])),
    (0, 4, 4, torch.tensor([3.0, 4.0])),
    (2, 0, 4, torch.tensor([5.0, 6.0, 7.0])),
    (2, 4, 4, torch.tensor([8.0, 9.0, 10.0])),
]
_CASES: tuple[tuple[Stored, int, int, int, int], ...] = (
    (_UNCUT, 1, 4, 2, 4),
    (_TWO_WIDTHS, 0, 0, 4, 8),
    (_TWO_WIDTHS, 1, 0, 2, 4),
    (_IN_BOTH_DIRECTIONS, 1, 2, 3, 4),
)


def _overlaps(
    stored: Stored, first_row: int, first_column: int, rows: int, columns: int
) -> list[tuple[slice, Tensor, int]]:
    """Of each stored shard: the requested rows that it has, their numbers, the shared columns."""
    overlaps = []
    for top, left, width, numbers in stored:
        row_start = max(first_row, top)
        row_end = min(first_row + rows, top + len(numbers))
        shared = min(first_column + columns, left + width) - max(first_column, left)
        if row_start < row_end and shared > 0:
            target = slice(row_start - first_row, row_end - first_row)
            overlaps.append((target, numbers[row_start - top : row_end - top], shared))

    return overlaps


def _read_state(stored: Stored, *region: int) -> Tensor:
    """The mean over the columns of the new shard."""
    rows, columns = region[2:]
    state = torch.zeros(rows)
    for target, numbers, shared in _overlaps(stored, *region):
        state[target] += numbers * shared / columns
    return state


def _overwritten(stored: Stored, *region: int) -> Tensor:
    """As weights are read: the last stored shard wins."""
    state = torch.zeros(region[2])
    for target, numbers, _ in _overlaps(stored, *region):
        state[target] = numbers
    return state


def _unweighted(stored: Stored, *region: int) -> Tensor:
    """The mean over stored shards, whatever their widths."""
    counts = torch.zeros(region[2])
    for target, _, _ in _overlaps(stored, *region):
        counts[target] += 1
    return _summed(stored, *region) / counts


def _summed(stored: Stored, *region: int) -> Tensor:
    """The sum over stored shards."""
    state = torch.zeros(region[2])
    for target, numbers, _ in _overlaps(stored, *region):
        state[target] += numbers
    return state


_ROW_COUNTS = [3, 1]
_COLUMNS = 4


def _to_columns(shard: Tensor, row_counts: list[int]) -> Tensor:
    """The rows of all ranks, of this rank's columns."""
    world_size = dist.get_world_size()
    outgoing = torch.cat(shard.chunk(world_size, dim=1))
    incoming = outgoing.new_empty(sum(row_counts), outgoing.shape[1])
    dist.all_to_all_single(incoming, outgoing, row_counts, [len(shard)] * world_size)
    return incoming


def _always_first(shard: Tensor, row_counts: list[int]) -> Tensor:
    """Gathers the first columns on every rank."""
    width = shard.shape[1] // dist.get_world_size()
    outgoing = shard[:, :width].repeat(dist.get_world_size(), 1)
    incoming = outgoing.new_empty(sum(row_counts), width)
    sizes_out = [len(shard)] * dist.get_world_size()
    dist.all_to_all_single(incoming, outgoing, row_counts, sizes_out)
    return incoming


def _inputs(rank: int) -> tuple[Tensor, list[int]]:
    """The rows of a rank: three of a table, or one."""
    table = torch.arange(float(sum(_ROW_COUNTS) * _COLUMNS), device=device())
    shards = table.view(-1, _COLUMNS).split(_ROW_COUNTS)
    return shards[rank].clone(), list(_ROW_COUNTS)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="10.1",
        compared="each row has the mean of the stored numbers over the columns of the new shard",
        solution=_read_state,
        cases=_CASES,
        mistakes=(
            Mistake(
                "reads state like weights, the last shard wins",
                _overwritten,
                "A row of the new shard can overlap with several stored shards, and each has a "
                "number for it. Does the last one replace the others?",
            ),
            Mistake(
                "takes the mean over shards, not over columns",
                _unweighted,
                "Two stored shards may share different numbers of columns with the new one. How "
                "much does each of them count?",
            ),
            Mistake(
                "adds the numbers of column shards",
                _summed,
                "Each stored number is a mean over columns already. Is the mean over all columns "
                "the sum of these means?",
            ),
        ),
        shape="a function that returns a tensor [rows]",
    ),
    Exercise(
        id="10.2",
        compared="two ranks have all rows, of two columns each",
        solution=_to_columns,
        measure=per_rank(2, _inputs),
        mistakes=(
            Mistake(
                "no row leaves its rank",
                lambda shard, counts: shard.chunk(dist.get_world_size(), dim=1)[dist.get_rank()],
                "Those are this rank's columns of its own rows. Where are the other rows of these "
                "columns?",
            ),
            Mistake(
                "sends the same columns to every rank",
                _always_first,
                "Every rank now has columns 0 and 1. Which columns should rank 1 receive?",
            ),
        ),
        shape="a function that returns a tensor [rows of all ranks, columns of this rank]",
    ),
    Exercise(
        id="10.3",
        compared="the interval at which saving costs as much as failures do",
        solution=600.0,
        mistakes=(
            Mistake(
                "loses a whole interval at each failure",
                (18 * 10_000) ** 0.5,
                "A failure comes at any moment of the interval, so half of it is lost on average, "
                "not all of it.",
            ),
            Mistake(
                "saves once for each failure",
                10_000,
                "Then, on average, half of the time between two failures is lost. Saving costs "
                "little at this interval; where are the costs equal?",
            ),
            Mistake(
                "saves without a pause",
                18,
                "Then a run does nothing but save: 18 / 18 of its time.",
            ),
        ),
        shape="a number of seconds",
    ),
)

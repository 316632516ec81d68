"""Exercises of chapter 12: when arithmetic is the limit, the ranks that the others wait for."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import per_rank

__all__ = ["EXERCISES"]


def _least(per_row: float, matrix: float) -> int | None:
    """The least B of which B * per_row is at least `matrix`."""
    return math.ceil(matrix / per_row) if per_row > 0 else None


def _rows_needed(i: int, o: int, size: int, peak: float, bandwidth: float) -> int | None:
    """The least B at which arithmetic takes as long as memory."""
    ridge = peak / bandwidth
    return _least(2 * i * o - ridge * size * (i + o), ridge * size * i * o)


def _no_results(i: int, o: int, size: int, peak: float, bandwidth: float) -> int | None:
    ridge = peak / bandwidth
    return _least(2 * i * o - ridge * size * i, ridge * size * i * o)


def _matrix_only(i: int, o: int, size: int, peak: float, bandwidth: float) -> int | None:
    ridge = peak / bandwidth
    return _least(2 * i * o, ridge * size * i * o)


def _rounded_down(i: int, o: int, size: int, peak: float, bandwidth: float) -> int | None:
    least = _rows_needed(i, o, size, peak, bandwidth)
    return least and least - 1


_WORKED = ([1.0, 6.0, 2.0], [4.0, 1.0, 2.0], [2.0, 2.0, 3.0])  # ms of three ranks in three phases


def _waited_for(mine: Tensor) -> tuple[float, list[int]]:
    """The length of the step, and the slowest rank of each phase."""
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    longest, ranks = torch.stack(gathered).max(dim=0)
    return float(longest.sum()), ranks.tolist()


def _busiest(mine: Tensor) -> tuple[float, list[int]]:
    """The longest sum of any rank, and the slowest rank of each phase."""
    total = mine.sum()
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return total.item(), _waited_for(mine)[1]


def _mean(mine: Tensor) -> tuple[float, list[int]]:
    total = mine.sum()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size(), _waited_for(mine)[1]


def _alone(mine: Tensor) -> tuple[float, list[int]]:
    return mine.sum().item(), [dist.get_rank()] * len(mine)


def _inputs(rank: int) -> tuple[Tensor]:
    """Milliseconds of a rank in each phase."""
    return (torch.tensor(_WORKED[rank], device=device()),)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="12.1",
        compared=(
            "five products of an H100, in float32 and in bfloat16, for two of which no B is enough"
        ),
        solution=_rows_needed,
        mistakes=(
            Mistake(
                "forgets that results are written",
                _no_results,
                "The bytes of inputs and matrix are right. Where do the B * O results go, and "
                "does memory take no time for them?",
            ),
            Mistake(
                "counts one operation for each number of the matrix and row",
                lambda i, o, size, peak, speed: _rows_needed(i, o, size, 2 * peak, speed),
                "That is one operation where a number of the input meets a number of the matrix. "
                "What happens to their product?",
            ),
            Mistake(
                "ignores inputs and outputs",
                _matrix_only,
                "The bytes of the matrix are right. Each of the B rows brings bytes of its own, "
                "too: for some matrices so many that no B is enough.",
            ),
            Mistake(
                "counts numbers as bytes",
                lambda i, o, size, peak, speed: _rows_needed(i, o, 1, peak, speed),
                "The numbers that are moved are right. How many bytes has each of them?",
            ),
            Mistake(
                "rounds down",
                _rounded_down,
                "At this B, memory still takes longer. B is a whole number: which is next?",
            ),
        ),
        cases=(
            (128, 128, 4, 67e12, 3.35e12),
            (64, 64, 4, 67e12, 3.35e12),
            (4096, 1, 4, 67e12, 3.35e12),
            (4096, 1024, 2, 989e12, 3.35e12),
            (4096, 4096, 4, 67e12, 3.35e12),
        ),
        shape="a function of (i, o, size, peak, bandwidth) that returns a number of rows, or None",
    ),
    Exercise(
        id="12.2",
        compared="on three ranks the milliseconds of the step, and whom each phase waits for",
        solution=_waited_for,
        measure=per_rank(3, _inputs),
        mistakes=(
            Mistake(
                "takes the rank that worked longest in the whole step",
                _busiest,
                "That is the longest time of any one rank. Another rank is the slowest in another "
                "phase: can the busiest rank go on before it is done?",
            ),
            Mistake(
                "takes the mean of the ranks",
                _mean,
                "The ranks that are done early wait. For how long does the last one work?",
            ),
            Mistake(
                "knows its own times only",
                _alone,
                "These are the times of one rank, and each rank returns another answer. How does "
                "a rank learn the times of the others?",
            ),
        ),
        shape="a function of (mine) that returns milliseconds and a list of ranks",
    ),
)

"""Exercises of chapter 11: partial row-wise Adam, copies of a table, and a row that comes late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import per_rank

__all__ = ["EXERCISES"]

_RATE = 0.02
_EPS = 1e-8
_ROWS = 6
_COLUMNS = 4
# Ids of each of two ranks: row 2 on both, row 4 twice on the first.
_IDS = ([4, 2, 4], [2, 1])


def _partial_rowwise_adam(
    weight: Tensor, m: Tensor, v: Tensor, t: int, rows: Tensor, sums: Tensor
) -> Tensor:
    """A step of the rows of the batch."""
    m[rows] = 0.9 * m[rows] + 0.1 * sums
    v[rows] = 0.999 * v[rows] + 0.001 * sums.square().mean(1, keepdim=True)
    root = (v[rows] / (1 - 0.999**t)).sqrt() + _EPS
    weight[rows] -= _RATE * m[rows] / (1 - 0.9**t) / root
    return weight


def _not_corrected(
    weight: Tensor, m: Tensor, v: Tensor, t: int, rows: Tensor, sums: Tensor
) -> Tensor:
    """The averages as they are, although they started from zero."""
    return _partial_rowwise_adam(weight, m, v, 10**6, rows, sums)


def _all_rows(weight: Tensor, m: Tensor, v: Tensor, t: int, rows: Tensor, sums: Tensor) -> Tensor:
    """A step of all rows, with a gradient of zero for those that are absent."""
    all_rows = torch.arange(len(weight), device=weight.device)
    gradient = torch.zeros_like(weight).index_copy_(0, rows, sums)
    return _partial_rowwise_adam(weight, m, v, t, all_rows, gradient)


def _square_of_mean(
    weight: Tensor, m: Tensor, v: Tensor, t: int, rows: Tensor, sums: Tensor
) -> Tensor:
    """The square of the mean gradient where the mean of the squares belongs."""
    m[rows] = 0.9 * m[rows] + 0.1 * sums
    v[rows] = 0.999 * v[rows] + 0.001 * sums.mean(1, keepdim=True).square()
    root = (v[rows] / (1 - 0.999**t)).sqrt() + _EPS
    weight[rows] -= _RATE * m[rows] / (1 - 0.9**t) / root
    return weight


def _after_two_steps(function: Callable[..., Any]) -> Any:
    """The weights after steps 3 and 4, in which different rows occur.

    Raises:
        ValueError: It does not return a tensor, or one of another shape.
    """
    random = torch.Generator().manual_seed(11)
    weight = torch.rand(_ROWS, _COLUMNS, generator=random).to(device())
    m = torch.rand(_ROWS, _COLUMNS, generator=random).to(device())
    v = torch.rand(_ROWS, 1, generator=random).to(device()) / 1000  # as small as its changes

    for t, rows in ((3, [0, 2, 5]), (4, [2, 3])):
        sums = torch.randn(len(rows), _COLUMNS, generator=random).to(device())
        weight = function(weight, m, v, t, torch.tensor(rows, device=device()), sums)
        if weight is ...:
            return weight
        if not isinstance(weight, Tensor) or weight.shape != (_ROWS, _COLUMNS):
            raise ValueError("It does not return the table, [R, D]: end with return weight.")
    return weight


def _move(weight: Tensor, state: Tensor, gradient: Tensor) -> Tensor:
    """Row-wise Adagrad of a gradient as large as the table."""
    state += gradient.square().mean(1, keepdim=True)
    weight -= _RATE * gradient / (state.sqrt() + _EPS)
    return weight


def _own_gradient(weight: Tensor, ids: Tensor, gradients: Tensor) -> Tensor:
    """The gradients of this rank, as a table."""
    return torch.zeros_like(weight).index_add_(0, ids, gradients)


def _step_of_copy(weight: Tensor, state: Tensor, ids: Tensor, gradients: Tensor) -> Tensor:
    """One step by the mean over ranks."""
    total = _own_gradient(weight, ids, gradients)
    dist.all_reduce(total)
    return _move(weight, state, total / dist.get_world_size())


def _alone(weight: Tensor, state: Tensor, ids: Tensor, gradients: Tensor) -> Tensor:
    """A step by the gradients of this rank."""
    return _move(weight, state, _own_gradient(weight, ids, gradients))


def _not_divided(weight: Tensor, state: Tensor, ids: Tensor, gradients: Tensor) -> Tensor:
    """One step by the sum over ranks."""
    total = _own_gradient(weight, ids, gradients)
    dist.all_reduce(total)
    return _move(weight, state, total)


def _mean_of_weights(weight: Tensor, state: Tensor, ids: Tensor, gradients: Tensor) -> Tensor:
    """A step of each rank, and the mean of the copies afterwards."""
    moved = _alone(weight, state, ids, gradients)
    dist.all_reduce(moved)
    return moved / dist.get_world_size()


def _inputs(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same table and state on both ranks, and the ids and the gradients of each."""
    random = torch.Generator().manual_seed(11)
    weight = torch.rand(_ROWS, _COLUMNS, generator=random).to(device())
    state = torch.rand(_ROWS, 1, generator=random).to(device())
    ids = torch.tensor(_IDS[rank], device=device())
    gradients = torch.arange(1.0, 1 + len(ids) * _COLUMNS, device=device())
    return weight, state, ids, gradients.view(len(ids), _COLUMNS) / 10


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="11.1",
        compared="the weights after two steps of partial row-wise Adam",
        solution=_partial_rowwise_adam,
        measure=_after_two_steps,
        tolerance=1e-5,
        mistakes=(
            Mistake(
                "leaves out the corrections for the start from zero",
                _not_corrected,
                "The averages started from zero and are still small in step 3. Which two "
                "divisions by a function of t make up for that?",
            ),
            Mistake(
                "moves the rows that are absent",
                _all_rows,
                "Rows moved that are not in the batch. Whose m and v does a fused optimizer "
                "change?",
            ),
            Mistake(
                "takes the square of the mean for the mean of the squares",
                _square_of_mean,
                "In v, gradients of +1 and -1 do not cancel. Which comes first, the square or the "
                "mean?",
            ),
        ),
        shape="a function that moves the rows and returns weight, [R, D]",
    ),
    Exercise(
        id="11.2",
        compared="two ranks end with equal copies, moved by the mean of their gradients",
        solution=_step_of_copy,
        measure=per_rank(2, _inputs),
        tolerance=1e-5,
        mistakes=(
            Mistake(
                "each rank moves its copy by its own gradients",
                _alone,
                "After this step the two copies differ. What does a rank have to know before it "
                "moves a row?",
            ),
            Mistake(
                "sums gradients over ranks and does not divide",
                _not_divided,
                "The copies are equal, but the state and the step come from the sum over ranks. "
                "What does the text divide it by?",
            ),
            Mistake(
                "averages the copies after each rank has moved its own",
                _mean_of_weights,
                "The copies are equal, but each rank has divided its gradient by a state of its "
                "own. Exchange gradients, and move once.",
            ),
        ),
        shape="a function that returns weight, [R, D]",
    ),
    Exercise(
        id="11.3",
        compared="a late row begins with a step of 0.1 / sqrt(0.001) rates",
        solution=0.1 / 0.001**0.5,
        tolerance=5e-3,
        mistakes=(
            Mistake(
                "believes that the correction makes every row's first step one rate long",
                1.0,
                "That is so in batch 1, where both averages are corrected for their start. In "
                "batch one million there is nothing left to correct, and the row's averages still "
                "start from zero.",
            ),
            Mistake(
                "forgets that the gradient is divided by its own size",
                0.1,
                "0.1 is what the average m makes of a first gradient of 1. By what is it divided?",
            ),
            Mistake(
                "forgets the root",
                100.0,
                "The average of the squares is 0.001. The step divides by its root.",
            ),
        ),
        shape="a number of rates",
    ),
)

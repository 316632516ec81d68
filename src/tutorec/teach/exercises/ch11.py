"""Exercises of chapter 11: partial row-wise Adam, copies of a table, and a row that comes late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import per_rank

_RATE = 0.02
_EPS = 1e-8
# Ids of each of two ranks: row 2 on both, row 4 twice on the first.
_IDS = ([4, 2, 4], [2, 1])


def _partial_rowwise_adam(
    weight: Tensor,
    m: Tensor,
    v: Tensor,
    t: int,
    rows: Tensor,
    sums: Tensor,
    squared: Callable[[Tensor], Tensor] = lambda sums: sums.square().mean(1, keepdim=True),
) -> Tensor:
    """A step of the rows of the batch."""
    m[rows] = 0.9 * m[rows] + 0.1 * sums
    v[rows] = 0.999 * v[rows] + 0.001 * squared(sums)
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
    gradient = torch.zeros_like(weight).index_copy_(0, rows, sums)
    return _partial_rowwise_adam(weight, m, v, t, torch.arange(6, device=device()), gradient)


def _square_of_mean(*inputs: Any) -> Tensor:
    """The square of the mean gradient where the mean of the squares belongs."""
    return _partial_rowwise_adam(*inputs, squared=lambda sums: sums.mean(1, keepdim=True).square())


def _after_two_steps(function: Callable[..., Any]) -> Any:
    """The weights after steps 3 and 4, in which different rows occur.

    Raises:
        ValueError: It does not return a tensor, or one of another shape.
    """
    random = torch.Generator().manual_seed(11)
    weight = torch.rand(6, 4, generator=random).to(device())
    m = torch.rand(6, 4, generator=random).to(device())
    v = torch.rand(6, 1, generator=random).to(device()) / 1000  # as small as its changes

    for t, rows in ((3, [0, 2, 5]), (4, [2, 3])):
        sums = torch.randn(len(rows), 4, generator=random).to(device())
        weight = function(weight, m, v, t, torch.tensor(rows, device=device()), sums)
        if weight is ...:
            return weight
        if not isinstance(weight, Tensor) or weight.shape != (6, 4):
            raise ValueError("It does not return the table, [R, D]: end with return weight.")
    return weight


def _inputs(rank: int) -> tuple[Tensor, ...]:
    """The same table and state on both ranks, and the ids and the gradients of each."""
    random = torch.Generator().manual_seed(11)
    weight = torch.rand(6, 4, generator=random)
    state = torch.rand(6, 1, generator=random)
    ids = torch.tensor(_IDS[rank])
    gradients = torch.arange(1.0, 1 + 4 * len(ids)).view(-1, 4) / 10
    return tuple(tensor.to(device()) for tensor in (weight, state, ids, gradients))


def _moved(*ranks: int, divided_by: int = 1) -> Tensor:
    """The table after a step of row-wise Adagrad by the gradients of some ranks."""
    weight, state, *_ = _inputs(0)
    total = torch.zeros_like(weight)
    for rank in ranks:
        total.index_add_(0, *_inputs(rank)[2:])
    gradient = total / divided_by
    root = (state + gradient.square().mean(1, keepdim=True)).sqrt()
    return weight - _RATE * gradient / (root + _EPS)


EXERCISES = (
    Exercise(
        "11.1",
        compared="the weights after two steps of partial row-wise Adam",
        right=_after_two_steps(_partial_rowwise_adam),
        measure=_after_two_steps,
        mistakes={
            "The averages started from zero and are still small in step 3. Which two "
            "divisions by a function of t make up for that?": _after_two_steps(_not_corrected),
            "Rows moved that are not in the batch. Whose m and v does a fused optimizer "
            "change?": _after_two_steps(_all_rows),
            "In v, gradients of +1 and -1 do not cancel. Which comes first, the square or the "
            "mean?": _after_two_steps(_square_of_mean),
        },
        tolerance=1e-05,
        shape="a function that moves the rows and returns weight, [R, D]",
    ),
    Exercise(
        "11.2",
        compared="two ranks end with equal copies, moved by the mean of their gradients",
        right=[_moved(0, 1, divided_by=2)] * 2,
        measure=per_rank(2, _inputs),
        mistakes={
            "After this step the two copies differ. What does a rank have to know before it "
            "moves a row?": [_moved(0), _moved(1)],
            "The copies are equal, but the state and the step come from the sum over ranks. "
            "What does the text divide it by?": [_moved(0, 1)] * 2,
            "The copies are equal, but each rank has divided its gradient by a state of its "
            "own. Exchange gradients, and move once.": [(_moved(0) + _moved(1)) / 2] * 2,
        },
        tolerance=1e-05,
        shape="a function that returns weight, [R, D]",
    ),
    Exercise(
        "11.3",
        compared="a late row begins with a step of 0.1 / sqrt(0.001) rates",
        right=0.1 / 0.001**0.5,
        mistakes={
            "That is so in batch 1, where both averages are corrected for their start. In "
            "batch one million there is nothing left to correct, and the row's averages still "
            "start from zero.": 1.0,
            "0.1 is what the average m makes of a first gradient of 1. By what is it divided?": 0.1,
            "The average of the squares is 0.001. The step divides by its root.": 100.0,
        },
        tolerance=0.005,
        shape="a number of rates",
    ),
)

"""Exercises of chapter 11: partial row-wise Adam, copies of a table, and a row that comes late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import per_rank

# Ids of each of two ranks: row 0 on both, row 2 twice on the first.
_IDS = ([2, 0, 2], [0, 1])


def _after_two_steps(function: Callable[..., Any]) -> Any:
    """The weights after steps 3 and 4 of a table of zeros, in which different rows occur.

    Raises:
        ValueError: It does not return a tensor, or one of another shape.
    """
    weight = torch.zeros(3, 2, device=device())
    m = torch.tensor([[1.0, 2.0], [3.0, -1.0], [-2.0, 1.0]], device=device()) / 10
    v = torch.tensor([[1.0], [2.0], [3.0]], device=device()) / 1000  # as small as its changes
    for t, rows, sums in ((3, [0, 2], [[1.0, -2.0], [3.0, 1.0]]), (4, [2], [[-1.0, 2.0]])):
        batch_rows = torch.tensor(rows, device=device())
        weight = function(weight, m, v, t, batch_rows, torch.tensor(sums, device=device()))
        if weight is ...:
            return weight
        if not isinstance(weight, Tensor) or weight.shape != (3, 2):
            raise ValueError("It does not return the table, [R, D]: end with return weight.")
    return weight


def _inputs(rank: int) -> tuple[Tensor, ...]:
    """The same table of zeros and state on both ranks, and the ids and the gradients of each."""
    ids = torch.tensor(_IDS[rank])
    gradients = torch.arange(1.0, 1 + 2 * len(ids)).view(-1, 2)
    state = torch.tensor([[1.0], [2.0], [3.0]])
    return tuple(tensor.to(device()) for tensor in (torch.zeros(3, 2), state, ids, gradients))


EXERCISES = (
    Exercise(
        "11.1",
        compared="the weights after two steps of partial row-wise Adam",
        right=[[-0.012977, 0.001366], [0, 0], [-0.005709, -0.021898]],
        measure=_after_two_steps,
        mistakes={
            "The averages started from zero and are still small in step 3. Which two "
            "divisions by a function of t make up for that?": [
                [-0.064241, 0.006762],
                [0, 0],
                [-0.0284, -0.114943],
            ],
            "Rows moved that are not in the batch. Whose m and v does a fused optimizer change?": [
                [-0.023608, 0.002485],
                [-0.044395, 0.014798],
                [-0.005709, -0.021898],
            ],
            "In v, gradients of +1 and -1 do not cancel. Which comes first, the square or the "
            "mean?": [[-0.021721, 0.002286], [0, 0], [-0.006142, -0.025202]],
        },
        tolerance=1e-05,
        shape="a function that moves the rows and returns weight, [R, D]",
    ),
    Exercise(
        "11.2",
        compared="two ranks end with equal copies, moved by the mean of their gradients",
        right=[[[-0.014606, -0.021909], [-0.013252, -0.017669], [-0.01524, -0.02032]]] * 2,
        measure=per_rank(2, _inputs),
        mistakes={
            "After this step the two copies differ. What does a rank have to know before it "
            "moves a row?": [
                [[-0.01633, -0.021773], [0, 0], [-0.016483, -0.021978]],
                [[-0.01069, -0.021381], [-0.015757, -0.021009], [0, 0]],
            ],
            "The copies are equal, but the state and the step come from the sum over ranks. "
            "What does the text divide it by?": [
                [[-0.015396, -0.023094], [-0.015757, -0.021009], [-0.016483, -0.021978]]
            ]
            * 2,
            "The copies are equal, but each rank has divided its gradient by a state of its "
            "own. Exchange gradients, and move once.": [
                [[-0.01351, -0.021577], [-0.007878, -0.010505], [-0.008242, -0.010989]]
            ]
            * 2,
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

"""Exercises of chapter 04, Processes."""

from __future__ import annotations

import torch

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import per_rank

_SUM = 10 * torch.arange(16)

EXERCISES = (
    Exercise(
        "04.1",
        compared="the two messages that rank 1 holds, and their order",
        right=["a1", "b1"],
        mistakes={
            "That is what an all-gather delivers: everything to everybody. Here every message "
            "has one address.": ["a0", "a1", "b0", "b1"],
            "These are the messages that rank 1 sent. To whom is message 0 of rank 1 addressed?": [
                "b0",
                "b1",
            ],
            "That would be a swap of whole lists. A message is addressed by its place in the "
            "sender's list.": ["a0", "a1"],
        },
        shape='a list of messages, such as ["a0", "b0"]',
    ),
    Exercise(
        "04.2",
        compared="the sum on four ranks, and the bytes that each of them sends",
        right=[(_SUM, 96)] * 4,
        measure=per_rank(
            4,
            lambda rank: (torch.arange(16.0, device=device()) * (rank + 1), rank, 4),
            {"send": 0, "isend": 0},
        ),
        mistakes={
            "The sum is right, and each rank sends 3 whole tensors, where 1.5 are enough. "
            "Which part of them does a rank need, to add up its own part?": [(_SUM, 192)] * 4,
            "Each rank has the finished sum of one part. How do the parts get to the others?": [
                (block, 48) for block in _SUM.chunk(4)
            ],
        },
        tolerance=0.0001,
        shape="a function that returns a tensor as long as the one that it gets",
    ),
    Exercise(
        "04.3",
        compared="the rank where the trouble began",
        right=2,
        mistakes={
            "Rank 3 reports what it saw: the other end of its connection went away. Why did "
            "it go away?": 3,
            "These three report that a connection was closed. Which rank could have closed it "
            "without reporting anything?": [0, 1, 3],
        },
        shape="the number of a rank",
    ),
)

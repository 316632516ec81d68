"""Exercises of chapter 04, Processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import per_rank


def _swap(messages: list[Tensor], rank: int) -> list[Tensor]:
    """Message p goes to rank p; message p of the result came from rank p."""
    arrived = [message.clone() for message in messages]
    pending = []
    for peer in range(len(messages)):
        if peer != rank:
            pending.append(dist.isend(messages[peer], dst=peer))
            pending.append(dist.irecv(arrived[peer], src=peer))
    for work in pending:
        assert work is not None, "this rank is in the group"
        work.wait()
    return arrived


def _first_half(mine: Tensor, rank: int, world_size: int) -> Tensor:
    """The sum of this rank's part."""
    blocks = [block.contiguous() for block in mine.chunk(world_size)]
    return torch.stack(_swap(blocks, rank)).sum(dim=0)


def _in_parts(mine: Tensor, rank: int, world_size: int) -> Tensor:
    """Each rank adds up one part and sends its sum to all."""
    total = _first_half(mine, rank, world_size)
    return torch.cat(_swap([total] * world_size, rank))


def _whole_to_all(mine: Tensor, rank: int, world_size: int) -> Tensor:
    """Each rank adds up whole tensors."""
    return torch.stack(_swap([mine] * world_size, rank)).sum(dim=0)


def _inputs(rank: int) -> tuple[Tensor, int, int]:
    """Numbers of a rank, the rank, and W."""
    return torch.arange(16.0, device=device()) * (rank + 1), rank, 4


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="04.1",
        compared="the two messages that rank 1 holds, and their order",
        solution=["a1", "b1"],
        mistakes=(
            Mistake(
                "takes all-to-all for all-gather",
                ["a0", "a1", "b0", "b1"],
                "That is what an all-gather delivers: everything to everybody. Here every message "
                "has one address.",
            ),
            Mistake(
                "keeps its own messages",
                ["b0", "b1"],
                "These are the messages that rank 1 sent. To whom is message 0 of rank 1 "
                "addressed?",
            ),
            Mistake(
                "swaps the lists",
                ["a0", "a1"],
                "That would be a swap of whole lists. A message is addressed by its place in the "
                "sender's list.",
            ),
        ),
        shape='a list of messages, such as ["a0", "b0"]',
    ),
    Exercise(
        id="04.2",
        compared="the sum on four ranks, and the bytes that each of them sends",
        solution=_in_parts,
        measure=per_rank(4, _inputs, {"send": 0, "isend": 0}),
        mistakes=(
            Mistake(
                "sends the whole tensor to everybody",
                _whole_to_all,
                "The sum is right, and each rank sends 3 whole tensors, where 1.5 are enough. "
                "Which part of them does a rank need, to add up its own part?",
            ),
            Mistake(
                "leaves out the second half",
                _first_half,
                "Each rank has the finished sum of one part. How do the parts get to the others?",
            ),
        ),
        tolerance=1e-4,
        shape="a function that returns a tensor as long as the one that it gets",
    ),
    Exercise(
        id="04.3",
        compared="the rank where the trouble began",
        solution=2,
        mistakes=(
            Mistake(
                "blames the rank that reported first",
                3,
                "Rank 3 reports what it saw: the other end of its connection went away. Why did "
                "it go away?",
            ),
            Mistake(
                "blames all with an error message",
                [0, 1, 3],
                "These three report that a connection was closed. Which rank could have closed it "
                "without reporting anything?",
            ),
        ),
        shape="the number of a rank",
    ),
)

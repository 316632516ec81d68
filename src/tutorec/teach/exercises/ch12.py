"""Exercises of chapter 12: a step from its bytes, the ranks that the others wait for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.spmd.devices import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import on_ranks

__all__ = ["EXERCISES"]


# Of an H100: bytes in a millisecond on a wire inside a host and in memory, and milliseconds of an
# exchange.
_INSIDE, _MEMORY, _LATENCY = 450e6, 3.35e9, 0.02
_Phases = list[list[float]]


def _times(sent: _Phases, moved: _Phases) -> _Phases:
    """Milliseconds of each rank in each phase."""
    wires = [[_LATENCY + nbytes / _INSIDE for nbytes in ranks] for ranks in sent]
    return wires + [[nbytes / _MEMORY for nbytes in ranks] for ranks in moved]


def _sum_of_waited_for(sent: _Phases, moved: _Phases) -> float:
    return sum(max(ranks) for ranks in _times(sent, moved))


def _busiest_rank(sent: _Phases, moved: _Phases) -> float:
    return max(sum(of) for of in zip(*_times(sent, moved), strict=True))


def _mean_rank(sent: _Phases, moved: _Phases) -> float:
    return sum(sum(ranks) / len(ranks) for ranks in _times(sent, moved))


def _one_latency(sent: _Phases, moved: _Phases) -> float:
    return _sum_of_waited_for(sent, moved) - (len(sent) - 1) * _LATENCY


def _nothing_is_free(sent: _Phases, moved: _Phases) -> float:
    return _sum_of_waited_for([ranks for ranks in sent if any(ranks)], moved)


def _one_wire(sent: _Phases, moved: _Phases) -> float:
    return _sum_of_waited_for([[sum(ranks)] for ranks in sent], [[sum(ranks)] for ranks in moved])


_WORKED = ([1.0, 6.0, 2.0], [4.0, 1.0, 2.0], [2.0, 2.0, 3.0])  # ms of three ranks in three phases


def _waited_for(mine: Tensor) -> tuple[float, list[int]]:
    """The length of the step, and the slowest rank of each phase."""
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    longest, ranks = torch.stack(of_ranks).max(dim=0)
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


def _on_three_ranks(function: Any) -> list[Any]:
    """What a function returns on three ranks, each with its own milliseconds.

    Raises:
        ValueError: It fails on a rank, or does not return a number and a list.
    """

    def report(rank: int) -> Any:
        return function(torch.tensor(_WORKED[rank], device=device()))

    found = on_ranks(3, report)
    if found == [...] * 3:
        return found
    if not all(isinstance(one, tuple | list) and len(one) == 2 for one in found):
        raise ValueError(f"It returns {found[0]!r}, not (milliseconds, ranks of the phases).")
    return [[ms, ranks] for ms, ranks in found]


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="12.1",
        compared=(
            "three steps of one host: all ranks alike, another rank slowest in each phase, "
            "one idle exchange"
        ),
        solution=_sum_of_waited_for,
        mistakes=(
            Mistake(
                misconception="takes the rank that does most in the whole step",
                answer=_busiest_rank,
                hint=(
                    "That is the longest time of any one rank. In each phase, who is it that the "
                    "others wait for?"
                ),
            ),
            Mistake(
                misconception="takes the mean of the ranks",
                answer=_mean_rank,
                hint=(
                    "A rank with few bytes is done early. Can it begin the next phase before the "
                    "others are done?"
                ),
            ),
            Mistake(
                misconception="pays the latency once for a step",
                answer=_one_latency,
                hint=(
                    "The bytes are right. Latency is paid for each exchange, whatever it carries. "
                    "How many exchanges are there?"
                ),
            ),
            Mistake(
                misconception="takes an exchange of nothing to be free",
                answer=_nothing_is_free,
                hint=(
                    "All ranks enter every exchange. What is left of latency + bytes / bandwidth "
                    "where there are no bytes?"
                ),
            ),
            Mistake(
                misconception="lets all ranks share one wire and one memory",
                answer=_one_wire,
                hint=(
                    "Each rank has a wire and a memory of its own. Do they work one after the "
                    "other?"
                ),
            ),
        ),
        cases=(
            ([[9e6, 9e6]], [[33.5e6, 33.5e6]]),
            (
                [[18e6, 0.0, 4.5e6, 0.0], [0.0, 27e6, 9e6, 0.0]],
                [[6.7e6, 33.5e6, 0.0, 0.0], [0.0, 0.0, 67e6, 13.4e6]],
            ),
            ([[0.0, 0.0], [9e6, 0.0]], []),
        ),
        shape="a function of (sent, moved) that returns milliseconds",
    ),
    Exercise(
        id="12.2",
        compared="on three ranks the milliseconds of the step, and whom each phase waits for",
        solution=_waited_for,
        measure=_on_three_ranks,
        mistakes=(
            Mistake(
                misconception="takes the rank that worked longest in the whole step",
                answer=_busiest,
                hint=(
                    "That is the longest time of any one rank. Another rank is the slowest in "
                    "another phase: can the busiest rank go on before it is done?"
                ),
            ),
            Mistake(
                misconception="takes the mean of the ranks",
                answer=_mean,
                hint="The ranks that are done early wait. For how long does the last one work?",
            ),
            Mistake(
                misconception="knows its own times only",
                answer=_alone,
                hint=(
                    "These are the times of one rank, and each rank returns another answer. How "
                    "does a rank learn the times of the others?"
                ),
            ),
        ),
        shape="a function of (mine) that returns milliseconds and a list of ranks",
    ),
)

"""Exercises of chapter 12: time from bytes, one hot row on many ranks, the cost of a copy."""

from __future__ import annotations

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


# Of an H100: bytes in a millisecond on a wire inside a host and in memory, and milliseconds of an
# exchange.
_INSIDE, _MEMORY, _LATENCY = 450e6, 3.35e9, 0.02
_Phases = list[list[float]]


def _times(sent: _Phases, moved: _Phases) -> _Phases:
    """Milliseconds of each rank in each phase."""
    wires = [[_LATENCY + nbytes / _INSIDE for nbytes in ranks] for ranks in sent]
    return wires + [[nbytes / _MEMORY for nbytes in ranks] for ranks in moved]


def _sum_of_slowest(sent: _Phases, moved: _Phases) -> float:
    return sum(max(ranks) for ranks in _times(sent, moved))


def _busiest_rank(sent: _Phases, moved: _Phases) -> float:
    return max(sum(of) for of in zip(*_times(sent, moved), strict=True))


def _mean_rank(sent: _Phases, moved: _Phases) -> float:
    return sum(sum(ranks) / len(ranks) for ranks in _times(sent, moved))


def _one_latency(sent: _Phases, moved: _Phases) -> float:
    return _sum_of_slowest(sent, moved) - (len(sent) - 1) * _LATENCY


def _nothing_is_free(sent: _Phases, moved: _Phases) -> float:
    return _sum_of_slowest([ranks for ranks in sent if any(ranks)], moved)


def _one_wire(sent: _Phases, moved: _Phases) -> float:
    return _sum_of_slowest([[sum(ranks)] for ranks in sent], [[sum(ranks)] for ranks in moved])


def _times_the_mean(share: float, world_size: int) -> float:
    """The hottest row's share, and an even part of the rest, by the mean."""
    return (share + (1 - share) / world_size) * world_size


def _evened_by_hashing(share: float, world_size: int) -> float:
    return 1.0


def _share_on_top(share: float, world_size: int) -> float:
    return 1.0 + share


def _only_the_row(share: float, world_size: int) -> float:
    return share * world_size


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="12.1",
        compared=(
            "three steps of one host: all ranks alike, another rank slowest in each phase, "
            "one idle exchange"
        ),
        solution=_sum_of_slowest,
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
        compared="three tables, whose hottest rows have 8, 8 and 0 % of the ids",
        solution=_times_the_mean,
        tolerance=1e-3,
        mistakes=(
            Mistake(
                misconception="trusts hashing to even everything out",
                answer=_evened_by_hashing,
                hint="Hashing deals rows out evenly. Can it deal out the ids of a single row?",
            ),
            Mistake(
                misconception="adds the share to the mean instead of comparing with it",
                answer=_share_on_top,
                hint=(
                    "The row's 8 % are a share of all ids. What share of all ids does a rank read "
                    "on average?"
                ),
            ),
            Mistake(
                misconception="forgets the other rows of that rank",
                answer=_only_the_row,
                hint=(
                    "That is the hot row alone. The rank also has its even part of all the other "
                    "ids."
                ),
            ),
        ),
        cases=((0.08, 8), (0.08, 512), (0.0, 64)),
        shape="a function of (share, world_size) that returns a number",
    ),
    Exercise(
        id="12.3",
        compared="bytes that a rank sends for copies of 1,000 rows, on 8 ranks and on 512",
        solution=[448_000, 511_000],
        tolerance=1e-3,
        mistakes=(
            Mistake(
                misconception="takes data-parallel to be free",
                answer=[0, 0],
                hint=(
                    "Nothing is sent forward. How do the copies stay equal when every rank has "
                    "other gradients?"
                ),
            ),
            Mistake(
                misconception="divides the gradient by the ranks",
                answer=[448_000, 511_000 / 64],
                hint=(
                    "The number for 8 ranks is right. Each of 512 ranks adds up one 512th of the "
                    "table. From how many ranks does it get that part?"
                ),
            ),
            Mistake(
                misconception="sends the whole gradient to every other rank",
                answer=[7 * 256_000, 511 * 256_000],
                hint=(
                    "No rank needs all gradients of all ranks: each rank adds up its part of the "
                    "rows and sends the sums to the others."
                ),
            ),
            Mistake(
                misconception="forgets that the sums have to come back",
                answer=[224_000, 255_500],
                hint=(
                    "That is the first half, gradients on their way to the ranks that add them. "
                    "The sums have to reach all ranks, too."
                ),
            ),
        ),
        shape="a list of two numbers of bytes",
    ),
)

"""Exercises of chapter 12: a way home that does not shrink, one hot row among many ranks, what a copy costs."""

from __future__ import annotations

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


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
        compared="what one of 8 ranks sends home, and what one of 512",
        solution=[14.0, 511 / 32],
        tolerance=1e-3,
        mistakes=(
            Mistake(
                misconception="divides the way home by the ranks",
                answer=[14.0, 511 / 32 / 64],
                hint="8 ranks are right. On 512 each holds fewer rows. But of how many samples does it hold parts?",
            ),
            Mistake(
                misconception="counts what a rank keeps",
                answer=[16.0, 16.0],
                hint="16 MiB are the partial sums that a rank makes. Those of its own samples do not travel.",
            ),
            Mistake(
                misconception="counts all ranks together",
                answer=[112.0, 511 / 32 * 512],
                hint="That is what all ranks send together. What does one of them send?",
            ),
            Mistake(
                misconception="sends home what one sample makes",
                answer=[14 / 8, 511 / 32 / 512],
                hint="That is the part for the samples of one rank. A rank makes partial sums for all ranks' samples.",
            ),
        ),
        shape="a list of two numbers of MiB",
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
                hint="The row's 8 % are a share of all ids. What share of all ids does a rank read on average?",
            ),
            Mistake(
                misconception="forgets the other rows of that rank",
                answer=_only_the_row,
                hint="That is the hot row alone. The rank also has its even part of all the other ids.",
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
                hint="Nothing is sent forward. How do the copies stay equal when every rank has other gradients?",
            ),
            Mistake(
                misconception="divides the gradient by the ranks",
                answer=[448_000, 511_000 / 64],
                hint="8 ranks are right. Each of 512 ranks adds up a 512th of the table. Of how many ranks?",
            ),
            Mistake(
                misconception="sends the whole gradient to every other rank",
                answer=[7 * 256_000, 511 * 256_000],
                hint="Nobody needs all gradients of all ranks: each rank adds up its part of the rows and hands around "
                "the sums.",
            ),
            Mistake(
                misconception="forgets that the sums have to come back",
                answer=[224_000, 255_500],
                hint="That is the way there, to the ranks that add. The sums have to reach everybody, too.",
            ),
        ),
        shape="a list of two numbers of bytes",
    ),
)

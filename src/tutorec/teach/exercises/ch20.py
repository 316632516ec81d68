"""Exercises of chapter 20: which way of loading survives in TorchRec, and a paired ratio."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


def _paired(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return median(a / b for a, b in zip(theirs, ours, strict=True))


def _of_medians(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return median(theirs) / median(ours)


def _mean_of_ratios(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return mean(a / b for a, b in zip(theirs, ours, strict=True))


def _of_sums(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return sum(theirs) / sum(ours)


def _inverse(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return _paired(ours, theirs)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="20.1",
        compared="where the rows survive, as the stored losses show it",
        solution=[True, False, True],
        mistakes=(
            Mistake(
                misconception="expects of TorchRec what tutorec does",
                answer=[True, True, True],
                hint=(
                    "That is right for tutorec. Which of the three runs began at 0.694 in TorchRec?"
                ),
            ),
            Mistake(
                misconception="believes that init_fn fills the unsharded tables only",
                answer=[False, False, True],
                hint=(
                    "On which tables does TorchRec call init_fn when it draws rows again? "
                    "The first 20 losses of the script were equal in both libraries."
                ),
            ),
            Mistake(
                misconception="believes that wrapped models keep what they were given",
                answer=[False, True, False],
                hint=(
                    "Loading before the model is wrapped writes into tables. Are these "
                    "tables the ones that train?"
                ),
            ),
        ),
        shape="a list of three values, True or False",
    ),
    Exercise(
        id="20.2",
        compared="the ratios of four machines",
        solution=_paired,
        cases=(
            ([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]),
            ([2.0, 6.0, 2.2, 6.3, 2.1], [1.0, 3.0, 1.0, 1.0, 3.0]),
            ([1.0, 9.0, 1.1], [1.0, 1.0, 1.0]),
            ([3.0, 1.0, 1.2, 3.6], [1.0, 1.0, 3.0, 3.0]),
        ),
        mistakes=(
            Mistake(
                misconception="divides the medians",
                answer=_of_medians,
                hint=(
                    "Each median may come from another round, a fast one or a slow one. "
                    "What does a slow round not change?"
                ),
            ),
            Mistake(
                misconception="takes the mean of the ratios",
                answer=_mean_of_ratios,
                hint=(
                    "You divide round by round, as you should. One round that was disturbed "
                    "in the middle moves your number; which kind of average does it hardly "
                    "move?"
                ),
            ),
            Mistake(
                misconception="divides the sums",
                answer=_of_sums,
                hint="A slow round takes three times as long, and counts three times in a sum.",
            ),
            Mistake(
                misconception="divides ours by theirs",
                answer=_inverse,
                hint="How many times as long do *they* take?",
            ),
        ),
        shape="a function that returns a number",
    ),
)

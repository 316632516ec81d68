"""Exercises of chapter 09b: what a bound proves, how many ranks a table needs."""

from __future__ import annotations

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="09b.1",
        compared="the most that can be saved is 0.1 of 2.1 ms",
        solution=100 * 0.1 / 2.1,
        tolerance=1e-2,  # 4.8 is right, 5 is not
        mistakes=(
            Mistake(
                misconception="takes the bound for a plan that exists and divides by it",
                answer=100 * 0.1 / 2.0,
                hint="The saving is a part of the time that the plan takes now.",
            ),
            Mistake(
                misconception="believes that a gap is a plan waiting to be found",
                answer=100.0,
                hint="A bound limits what can be saved: no plan takes less than 2.0 ms.",
            ),
            Mistake(
                misconception="believes that a plan above the bound proves nothing",
                answer=0.0,
                hint=(
                    "Perhaps nothing can be saved, but that is not proven. What is the most that "
                    "the bound leaves?"
                ),
            ),
        ),
        shape="a percentage of the plan's time",
    ),
    Exercise(
        id="09b.2",
        compared=(
            "four ranks have room for the weights, and only five for the optimizer's state, too"
        ),
        solution=5,
        mistakes=(
            Mistake(
                misconception="forgets the state of the optimizer",
                answer=4,
                hint=(
                    "The weights fit on so many ranks. Row-wise Adagrad keeps one number for each "
                    "row beside them."
                ),
            ),
            Mistake(
                misconception="counts the state of element-wise Adagrad",
                answer=8,
                hint=(
                    "That is a number of state for each weight. Row-wise Adagrad keeps one for "
                    "each row."
                ),
            ),
        ),
        shape="a number of ranks",
    ),
)

"""Exercises of chapter 11: the second step, and a row that comes late."""

from __future__ import annotations

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

_RATE, _EPS = 0.02, 0.002
_COUNTS = (2, 1, 1, 1, 1, 1, 1)  # how often each of the seven rows of the document's batch occurs


def _drop(root_of_one: float) -> float:
    """How far the loss falls when the root of a row that occurs once has become this."""
    return sum(64 * c * _RATE * c / (root_of_one * c + _EPS) for c in _COUNTS)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="11.1",
        compared="the drop of the second step is 7.2318",
        solution=_drop(2**0.5),
        tolerance=1e-4,
        mistakes=(
            Mistake(
                misconception="believes that every step is like the first",
                answer=_drop(1.0),
                hint="This is the first step again. What does row-wise Adagrad know before the "
                "second step that it did "
                "not know before the first?",
            ),
            Mistake(
                misconception="adds up roots instead of squares",
                answer=_drop(2.0),
                hint=(
                    "In your answer the root grows from c to 2c. The optimizer adds up squares, "
                    "and takes the root of their sum."
                ),
            ),
            Mistake(
                misconception="lets the state of all rows grow alike, however often they occur",
                answer=sum(64 * c * _RATE * c / (2**0.5 + _EPS) for c in _COUNTS),
                hint="Six of the seven rows are right. What does the row that occurs twice add to "
                "its sum in each "
                "step?",
            ),
        ),
        shape="a number, how far the loss falls",
    ),
    Exercise(
        id="11.2",
        compared="a late row begins with a step of 0.1 / sqrt(0.001) rates",
        solution=0.1 / 0.001**0.5,
        tolerance=5e-3,
        mistakes=(
            Mistake(
                misconception=(
                    "believes that the correction makes every row's first step one rate long"
                ),
                answer=1.0,
                hint="That is so in batch 1, where both averages are corrected for their start. In "
                "batch one million "
                "there is nothing left to correct, and the row's averages still start from zero.",
            ),
            Mistake(
                misconception="forgets that the gradient is divided by its own size",
                answer=0.1,
                hint=(
                    "0.1 is what the average m makes of a first gradient of 1. By what is it "
                    "divided?"
                ),
            ),
            Mistake(
                misconception="forgets the root",
                answer=100.0,
                hint="The average of the squares is 0.001. The step divides by its root.",
            ),
        ),
        shape="a number of rates",
    ),
)

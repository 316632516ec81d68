"""Exercises of chapter 15: step time with two messages in flight, and the batches in flight."""

from __future__ import annotations

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


def _largest(window: float, rest: float, ids: float, rows: float) -> float:
    """What runs at the same time takes as long as the longest of it."""
    return rest + max(window, ids, rows)


def _one_after_the_other(window: float, rest: float, ids: float, rows: float) -> float:
    return rest + max(window, ids + rows)


def _nothing_hidden(window: float, rest: float, ids: float, rows: float) -> float:
    return rest + window + max(ids, rows)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="15.1",
        compared="the times of three steps",
        solution=_largest,
        cases=((8.0, 4.0, 5.0, 2.0), (8.0, 4.0, 5.0, 6.0), (8.0, 4.0, 20.0, 9.0)),
        mistakes=(
            Mistake(
                misconception="adds messages that travel at the same time",
                answer=_one_after_the_other,
                hint="Both messages are sent before the backward, and neither waits for the other. "
                "How long until both "
                "have arrived?",
            ),
            Mistake(
                misconception="adds the delay to the work that hides it",
                answer=_nothing_hidden,
                hint=(
                    "That is a loop that waits first and works then. What does the rank do while "
                    "messages travel?"
                ),
            ),
        ),
        shape="a function that returns milliseconds",
    ),
    Exercise(
        id="15.2",
        compared="the batches whose ids and rows travel",
        solution=(9, 8),
        mistakes=(
            Mistake(
                misconception="takes the schedule of TrainPipelineSparseDist",
                answer=(8, 7),
                hint="Batch 7 has its rows already, since its forward is over. How far ahead does "
                "this schedule look "
                "up rows?",
            ),
            Mistake(
                misconception="takes the batch that is loaded for the one whose ids travel",
                answer=(10, 8),
                hint=(
                    "Batch 10 is loaded after the backward. Which batch's ids were sent before it?"
                ),
            ),
        ),
        shape="two numbers",
    ),
)

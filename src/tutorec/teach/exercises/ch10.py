"""Exercises of chapter 10: the overlap of two rectangles, how often to save."""

from __future__ import annotations

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="10.1",
        compared="the overlap of old rank 3's rows with new rank 1's columns: 250,000 x 32 numbers",
        solution=250_000 * 32 * 4,
        mistakes=(
            Mistake(
                misconception="reads the whole file",
                answer=250_000 * 64 * 4,
                hint=(
                    "That is all that old rank 3 has written. Which of its columns does new rank "
                    "1 hold?"
                ),
            ),
            Mistake(
                misconception="takes all that the new rank holds",
                answer=1_000_000 * 32 * 4,
                hint=(
                    "That is all that the new rank holds. Only some of its rows are in this file."
                ),
            ),
            Mistake(
                misconception="believes that ranks have to match",
                answer=0,
                hint="The numbers of ranks do not matter. Do the two rectangles overlap?",
            ),
            Mistake(
                misconception="counts numbers, not bytes",
                answer=250_000 * 32,
                hint="Those are numbers; a float32 has more than one byte.",
            ),
        ),
        shape="a number of bytes",
    ),
    Exercise(
        id="10.2",
        compared="the interval at which saving costs as much as failures do",
        solution=600.0,
        mistakes=(
            Mistake(
                misconception="loses a whole interval at each failure",
                answer=(18 * 10_000) ** 0.5,
                hint=(
                    "A failure comes at any moment of the interval, so half of it is lost on "
                    "average, not all of it."
                ),
            ),
            Mistake(
                misconception="saves once for each failure",
                answer=10_000,
                hint=(
                    "Then, on average, half of the time between two failures is lost. Saving "
                    "costs little at this interval; where are the costs equal?"
                ),
            ),
            Mistake(
                misconception="saves without a pause",
                answer=18,
                hint="Then a run does nothing but save: 18 / 18 of its time.",
            ),
        ),
        shape="a number of seconds",
    ),
)

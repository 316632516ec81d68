"""Exercises of chapter 05: bytes on the wire, the averaged gradient, who holds what."""

from __future__ import annotations

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="05.1",
        compared="1,000 pooled rows of 64 floats for each rank that is not the owner",
        solution=3 * 1_000 * 64 * 4,
        mistakes=(
            Mistake(
                misconception="sends its own samples' rows too",
                answer=4 * 1_000 * 64 * 4,
                hint=(
                    "That counts 1,000 rows for each of the four ranks. Which rank's rows need "
                    "not be sent?"
                ),
            ),
            Mistake(
                misconception="sends the table",
                answer=1_000 * 64 * 4,
                hint="That is what one other rank receives. How many other ranks have samples?",
            ),
            Mistake(
                misconception="counts numbers, not bytes",
                answer=3 * 1_000 * 64,
                hint="Those are numbers; a float32 has more than one byte.",
            ),
        ),
        shape="a number of bytes",
    ),
    Exercise(
        id="05.2",
        compared="two mentions among the 8 samples of the global mean",
        solution=0.8 * 2 / 8,
        mistakes=(
            Mistake(
                misconception="takes the mean over one rank only",
                answer=0.8 * 2 / 4,
                hint=(
                    "That adds the two ranks' means. The gradients of two ranks are averaged, not "
                    "added."
                ),
            ),
            Mistake(
                misconception="counts one mention",
                answer=0.8 * 1 / 8,
                hint=(
                    "The row has two mentions, and their gradients are added up before the one "
                    "update."
                ),
            ),
            Mistake(
                misconception="ignores the means",
                answer=0.8 * 2,
                hint="That is the gradient of the sum of all losses; the loss here is a mean.",
            ),
        ),
        shape="one number",
    ),
    Exercise(
        id="05.3",
        compared="the largest table alone against the three others, and dense layers on both ranks",
        solution=8_002_000_000,
        mistakes=(
            Mistake(
                misconception="splits the dense layers too",
                answer=8_001_000_000,
                hint=(
                    "The dense layers are not divided between the ranks. What does data parallel "
                    "do with them?"
                ),
            ),
            Mistake(
                misconception="forgets the dense layers",
                answer=8_000_000_000,
                hint=("Those are the tables. What else is on every rank?"),
            ),
            Mistake(
                misconception="halves the tables",
                answer=7_002_000_000,
                hint=(
                    "Half of all numbers would be a table cut in two. Table-wise keeps each table "
                    "whole."
                ),
            ),
            Mistake(
                misconception="places tables alternately",
                answer=10_002_000_000,
                hint=(
                    "Tables dealt out in turn, 1 and 3 against 2 and 8. There is a better division."
                ),
            ),
        ),
        shape="a number of parameters",
    ),
)

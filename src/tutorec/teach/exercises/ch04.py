"""Exercises of chapter 04, Processes."""

from __future__ import annotations

from tutorec.teach.grading import Exercise, Mistake

EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="04.1",
        compared="the two messages that rank 1 holds, and their order",
        solution=["a1", "b1"],
        mistakes=(
            Mistake(
                misconception="takes all-to-all for all-gather",
                answer=["a0", "a1", "b0", "b1"],
                hint=(
                    "That is what an all-gather delivers: everything to everybody. Here every "
                    "message has one address."
                ),
            ),
            Mistake(
                misconception="keeps its own messages",
                answer=["b0", "b1"],
                hint=(
                    "These are the messages that rank 1 sent. To whom is message 0 of rank 1 "
                    "addressed?"
                ),
            ),
            Mistake(
                misconception="swaps the lists",
                answer=["a0", "a1"],
                hint=(
                    "That would be a swap of whole lists. A message is addressed by its place in "
                    "the sender's list."
                ),
            ),
        ),
        shape='a list of messages, such as ["a0", "b0"]',
    ),
    Exercise(
        id="04.2",
        compared="the bytes that one rank sends, for worlds of 2, 4 and 8",
        solution=lambda world_size, tensor_bytes: 2 * (world_size - 1) / world_size * tensor_bytes,
        mistakes=(
            Mistake(
                misconception="sends the whole tensor to everybody",
                answer=lambda world_size, tensor_bytes: (world_size - 1) * tensor_bytes,
                hint="That is what rank 0 sends in the version written by hand, which no rank does "
                "when the tensor is "
                "divided into parts.",
            ),
            Mistake(
                misconception="counts one of the two phases",
                answer=lambda world_size, tensor_bytes: (
                    (world_size - 1) / world_size * tensor_bytes
                ),
                hint=(
                    "After that every rank has the finished sum of one part. How do the parts "
                    "get to the others?"
                ),
            ),
            Mistake(
                misconception="counts its own part as sent",
                answer=lambda world_size, tensor_bytes: 2 * tensor_bytes,
                hint="Both phases are there, but a rank need not send anything to itself.",
            ),
        ),
        cases=((2, 8), (4, 4096), (8, 1_000_000)),
    ),
    Exercise(
        id="04.3",
        compared="the rank where the trouble began",
        solution=2,
        mistakes=(
            Mistake(
                misconception="blames the rank that reported first",
                answer=3,
                hint=(
                    "Rank 3 reports what it saw: the other end of its connection went away. Why "
                    "did it go away?"
                ),
            ),
            Mistake(
                misconception="blames all with an error message",
                answer=[0, 1, 3],
                hint=(
                    "These three report that a connection was closed. Which rank could have "
                    "closed it without reporting anything?"
                ),
            ),
        ),
        shape="the number of a rank",
    ),
)

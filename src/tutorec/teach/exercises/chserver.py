"""The exercise of the page *A small server*: a pair that another thread replaces."""

from __future__ import annotations

from collections.abc import Callable

from tutorec.teach.grading import Exercise


class _Server:
    """A server whose model is replaced at every look: model number n multiplies by n."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"a server with model {self._number}"

    @property
    def current(self) -> tuple[int, Callable[[int], int]]:
        """Number and model."""
        number = self._number
        self._number += 1
        return number, lambda request: number * request


EXERCISES = (
    Exercise(
        "server.1",
        compared="number and score, of a server whose model is replaced at every look",
        right=[(1, 10)],
        cases=((_Server(1), 10),),
        mistakes={
            "Your score is that of a newer model than your number says. How often do you read "
            "`server.current`?": [(1, 20)],
            "Your number is that of a newer model than your score. What may happen between "
            "two looks at `server.current`?": [(2, 10)],
        },
        shape="a function that returns a pair, number and score",
    ),
)

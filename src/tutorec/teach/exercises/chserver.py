"""The exercise of the page *A small server*: a pair that another thread replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


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


def _read_once(server: Any, request: int) -> tuple[int, int]:
    number, model = server.current
    return number, model(request)


def _number_first(server: Any, request: int) -> tuple[int, int]:
    number = server.current[0]
    return number, server.current[1](request)


def _number_last(server: Any, request: int) -> tuple[int, int]:
    score = server.current[1](request)
    return server.current[0], score


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="server.1",
        compared="number and score, of a server whose model is replaced at every look",
        solution=_read_once,
        cases=((_Server(1), 10), (_Server(7), 10)),
        mistakes=(
            Mistake(
                "reads the number, and then the model",
                _number_first,
                "Your score is that of a newer model than your number says. How often do you read "
                "`server.current`?",
            ),
            Mistake(
                "reads the model, and then the number",
                _number_last,
                "Your number is that of a newer model than your score. What may happen between "
                "two looks at `server.current`?",
            ),
        ),
        shape="a function that returns a pair, number and score",
    ),
)

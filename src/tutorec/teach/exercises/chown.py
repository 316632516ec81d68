"""The exercise of *Your own data*: bags of what each user clicked before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


def _bags(
    users: Sequence[int],
    items: Sequence[int],
    times: Sequence[int],
    longest: int,
    *,
    own: bool = False,
    sort: bool = True,
    newest: bool = True,
) -> list[list[int]]:
    bags: list[list[int]] = [[] for _ in users]
    so_far: dict[int, list[int]] = {}
    for click in sorted(range(len(users)), key=times.__getitem__ if sort else None):
        before = so_far.setdefault(users[click], [])
        seen = [*before, items[click]] if own else before
        bags[click] = seen[-longest:] if newest else seen[:longest]
        before.append(items[click])
    return bags


EXERCISES = (
    Exercise(
        id="own.1",
        compared="what each user clicked before, on 2 logs",
        solution=_bags,
        mistakes=(
            Mistake(
                misconception="the click is in its own bag",
                answer=partial(_bags, own=True),
                hint="A bag holds the answer: the click that the model is to find.",
            ),
            Mistake(
                misconception="lines are in the order of time",
                answer=partial(_bags, sort=False),
                hint="Some bags hold clicks that came later. Files are not always in order.",
            ),
            Mistake(
                misconception="cuts off the newest clicks",
                answer=partial(_bags, newest=False),
                hint="Long histories are cut at the wrong end: which clicks say most?",
            ),
        ),
        cases=(
            ([1, 2, 1], [10, 20, 30], [5, 1, 3], 2),
            ([7, 7, 8, 7, 7], [1, 2, 3, 4, 5], [4, 1, 2, 3, 5], 2),
        ),
        shape="a function that returns a list of lists",
    ),
)

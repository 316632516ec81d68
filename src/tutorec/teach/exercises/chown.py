"""The exercise of *Your own data*: bags of what each user clicked before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

Ints = Sequence[int]


def _bags(
    users: Ints, items: Ints, times: Ints, longest: int, own: bool = False, sort: bool = True
) -> list[list[int]]:
    bags: list[list[int]] = [[] for _ in users]
    so_far: dict[int, list[int]] = {}
    for click in sorted(range(len(users)), key=times.__getitem__ if sort else None):
        before = so_far.setdefault(users[click], [])
        seen = [*before, items[click]] if own else before
        bags[click] = seen[-longest:]
        before.append(items[click])

    return bags


EXERCISES = (
    Exercise(
        id="own.1",
        compared="what each user clicked before, on a log out of order",
        solution=_bags,
        mistakes=(
            Mistake(
                "the click is in its own bag",
                partial(_bags, own=True),
                "A bag holds the answer: the click that the model is to find.",
            ),
            Mistake(
                "lines are in the order of time",
                partial(_bags, sort=False),
                "Some bags hold clicks that came later. Files are not always in order.",
            ),
        ),
        cases=(([7, 7, 8, 7], [1, 2, 3, 4], [4, 1, 2, 3], 1),),
        shape="a function that returns a list of lists",
    ),
)

"""The exercise of *Your own data*: bags of what each user clicked before."""

from __future__ import annotations

from tutorec.teach.grading import Exercise

EXERCISES = (
    Exercise(
        "own.1",
        compared="what each user clicked before, on a log out of order",
        right=[[[4], [], [], [2]]],
        cases=(([7, 7, 8, 7], [1, 2, 3, 4], [4, 1, 2, 3], 1),),
        mistakes={
            "A bag holds the answer: the click that the model is to find.": [[[1], [2], [3], [4]]],
            "Some bags hold clicks that came later. Files are not always in order.": [
                [[], [1], [], [2]]
            ],
        },
        shape="a function that returns a list of lists",
    ),
)

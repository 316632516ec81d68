"""Exercises of chapter 02: offsets, one list out of a batch, another order of features."""

from __future__ import annotations

from tutorec.teach.grading import Exercise

_BATCH = (["item", "user"], [11, 12, 13, 14, 21, 22, 23], [2, 0, 2, 1, 2, 0])

EXERCISES = (
    Exercise(
        "02.1",
        compared="where each of the four lists begins, and where the last one ends",
        right=[0, 3, 4, 6, 8],
        mistakes={
            "These are the ends of the lists. Offsets also say where the first list begins.": [
                3,
                4,
                6,
                8,
            ],
            "You begin again at 0 for user. A batch has one vector of values: those of "
            "product first, then those of user.": [0, 3, 4, 0, 2, 4],
            "Those are the lengths. An offset is a place in the vector of values.": [3, 1, 2, 2],
            "You took product and user of the first sample, then of the second. A batch "
            "stores all lists of one feature together.": [0, 3, 5, 6, 8],
        },
        shape="a list of places, one more than there are lists",
    ),
    Exercise(
        "02.2",
        compared="lists from the middle, empty lists and the last one",
        right=[[7, 1], [13, 14], [], [21], []],
        cases=(
            (["item"], [5, 7, 1], [1, 2], "item", 1),
            (*_BATCH, "item", 2),
            (*_BATCH, "item", 1),
            (*_BATCH, "user", 0),
            (*_BATCH, "user", 2),
        ),
        mistakes={
            "You look for list number sample * F + feature, with F features, as if the lists "
            "of one sample were stored together. What does the figure store together?": [
                [7, 1],
                [22, 23],
                [13, 14],
                [],
                [],
            ],
            "For each feature you skip F lists, as many as there are features. How many lists "
            "does one feature have?": [[7, 1], [13, 14], [], [13, 14], [22, 23]],
            "You add up the lengths up to and including this list, which is where it ends. "
            "Which lists come before it?": [[], [21, 22], [], [22], []],
        },
    ),
    Exercise(
        "02.3",
        compared="two and three features, lists of different lengths and empty ones",
        right=[([7, 1, 5], [2, 1]), ([8, 4, 5, 7, 1, 9], [2, 0, 1, 2, 0, 1])],
        cases=(
            ([5, 7, 1], [1, 2], 2, [1, 0]),
            ([5, 7, 1, 9, 8, 4], [1, 2, 0, 1, 2, 0], 3, [2, 0, 1]),
        ),
        mistakes={
            "Your lengths have the new order, and your values still have the old one. Which "
            "ids belong to the first list now?": [
                ([5, 7, 1], [2, 1]),
                ([5, 7, 1, 9, 8, 4], [2, 0, 1, 2, 0, 1]),
            ],
            "You cut the values into equal shares. How many ids a feature has is the sum of "
            "its lengths.": [([7, 5], [2, 1]), ([8, 4, 5, 7, 1, 9], [2, 0, 1, 2, 0, 1])],
            "You moved the old feature i to position order[i]. The new feature i is the old "
            "feature order[i].": [([7, 1, 5], [2, 1]), ([9, 8, 4, 5, 7, 1], [0, 1, 2, 0, 1, 2])],
        },
    ),
)

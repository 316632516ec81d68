"""Exercises of chapter 02: offsets, one list out of a batch, another order of features."""

from __future__ import annotations

from collections.abc import Callable

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

Ints = list[int]
OneList = Callable[[list[str], Ints, Ints, str, int], Ints]


def _reader(position: Callable[[int, int, int, int], int]) -> OneList:
    """A function that reads list number `position(f, b, F, B)`."""

    def one_list(keys: list[str], values: Ints, lengths: Ints, key: str, sample: int) -> Ints:
        index = position(keys.index(key), sample, len(keys), len(lengths) // len(keys))
        start = sum(lengths[:index])
        return values[start : start + lengths[index]]

    return one_list


def _from_its_end(keys: list[str], values: Ints, lengths: Ints, key: str, sample: int) -> Ints:
    """Begins a list at its end, as a running sum without a leading zero does."""
    index = keys.index(key) * (len(lengths) // len(keys)) + sample
    start = sum(lengths[: index + 1])
    return values[start : start + lengths[index]]


def _reorder(values: Ints, lengths: Ints, features: int, order: Ints) -> tuple[Ints, Ints]:
    """The batch with feature order[i] at position i."""
    samples = len(lengths) // features
    new_values: Ints = []
    new_lengths: Ints = []
    for feature in order:
        start = sum(lengths[: feature * samples])
        feature_lengths = lengths[feature * samples : (feature + 1) * samples]
        new_values += values[start : start + sum(feature_lengths)]
        new_lengths += feature_lengths

    return new_values, new_lengths


def _lengths_alone(values: Ints, lengths: Ints, features: int, order: Ints) -> tuple[Ints, Ints]:
    """Moves the lengths and leaves the values where they are."""
    return values, _reorder(values, lengths, features, order)[1]


def _equal_shares(values: Ints, lengths: Ints, features: int, order: Ints) -> tuple[Ints, Ints]:
    """Gives each feature as many values as every other."""
    share = len(values) // features
    moved = [value for f in order for value in values[f * share : (f + 1) * share]]
    return moved, _reorder(values, lengths, features, order)[1]


def _inverse_order(values: Ints, lengths: Ints, features: int, order: Ints) -> tuple[Ints, Ints]:
    """Moves the old feature i to position order[i]."""
    return _reorder(values, lengths, features, [order.index(f) for f in range(features)])


_KEYS = ["item", "user"]
_VALUES = [11, 12, 13, 14, 21, 22, 23]
_LENGTHS = [2, 0, 2, 1, 2, 0]  # item: 2, 0, 2   user: 1, 2, 0

EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="02.1",
        compared="where each of the four lists begins, and where the last one ends",
        solution=[0, 3, 4, 6, 8],
        mistakes=(
            Mistake(
                "leaves out the zero in front",
                [3, 4, 6, 8],
                "These are the ends of the lists. Offsets also say where the first list begins.",
            ),
            Mistake(
                "starts again for each feature",
                [0, 3, 4, 0, 2, 4],
                "You begin again at 0 for user. A batch has one vector of values: those of "
                "product first, then those of user.",
            ),
            Mistake(
                "gives the lengths",
                [3, 1, 2, 2],
                "Those are the lengths. An offset is a place in the vector of values.",
            ),
            Mistake(
                "puts sample after sample",
                [0, 3, 5, 6, 8],
                "You took product and user of the first sample, then of the second. A batch "
                "stores all lists of one feature together.",
            ),
        ),
        shape="a list of places, one more than there are lists",
    ),
    Exercise(
        id="02.2",
        compared="lists from the middle, empty lists and the last one",
        solution=_reader(lambda f, b, features, samples: f * samples + b),
        mistakes=(
            Mistake(
                "reads the batch sample by sample",
                _reader(lambda f, b, features, samples: b * features + f),
                "You look for list number sample * F + feature, with F features, as if the lists "
                "of one sample were stored together. What does the figure store together?",
            ),
            Mistake(
                "steps by the number of features",
                _reader(lambda f, b, features, samples: f * features + b),
                "For each feature you skip F lists, as many as there are features. How many lists "
                "does one feature have?",
            ),
            Mistake(
                "begins a list at its end",
                _from_its_end,
                "You add up the lengths up to and including this list, which is where it ends. "
                "Which lists come before it?",
            ),
        ),
        cases=(
            (["item"], [5, 7, 1], [1, 2], "item", 0),
            (["item"], [5, 7, 1], [1, 2], "item", 1),
            (_KEYS, _VALUES, _LENGTHS, "item", 2),
            (_KEYS, _VALUES, _LENGTHS, "item", 1),
            (_KEYS, _VALUES, _LENGTHS, "user", 0),
            (_KEYS, _VALUES, _LENGTHS, "user", 1),
            (_KEYS, _VALUES, _LENGTHS, "user", 2),
        ),
    ),
    Exercise(
        id="02.3",
        compared="two and three features, lists of different lengths and empty ones",
        solution=_reorder,
        mistakes=(
            Mistake(
                "moves the lengths and not the values",
                _lengths_alone,
                "Your lengths have the new order, and your values still have the old one. Which "
                "ids belong to the first list now?",
            ),
            Mistake(
                "gives each feature equally many values",
                _equal_shares,
                "You cut the values into equal shares. How many ids a feature has is the sum of "
                "its lengths.",
            ),
            Mistake(
                "reads the order backwards",
                _inverse_order,
                "You moved the old feature i to position order[i]. The new feature i is the old "
                "feature order[i].",
            ),
        ),
        cases=(
            ([5, 7, 1], [1, 2], 2, [1, 0]),
            (_VALUES, _LENGTHS, 2, [1, 0]),
            ([5, 7, 1, 9, 8, 4], [1, 2, 0, 1, 2, 0], 3, [2, 0, 1]),
        ),
    ),
)

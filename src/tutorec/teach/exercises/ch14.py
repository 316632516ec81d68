"""Exercises of chapter 14: a request in flat lists, a traced counter, bytes of three layouts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

_Batch = dict[str, list[list[int]]]
_Request = tuple[list[int], list[int]]


def _request_of(
    lists: Callable[[_Batch, list[str]], list[list[int]]],
) -> Callable[[_Batch, list[str]], _Request]:
    """A function that flattens the lists of ids, in the order in which another one brings them."""

    def request_by_hand(batch: _Batch, features: list[str]) -> _Request:
        ordered = lists(batch, features)
        return [each for ids in ordered for each in ids], [len(ids) for ids in ordered]

    return request_by_hand


def _feature_by_feature(batch: _Batch, features: list[str]) -> list[list[int]]:
    return [ids for feature in features for ids in batch[feature]]


def _as_they_come(batch: _Batch, features: list[str]) -> list[list[int]]:
    return [ids for feature in batch.values() for ids in feature]


def _visitor_by_visitor(batch: _Batch, features: list[str]) -> list[list[int]]:
    return [
        ids
        for visitor in zip(*(batch[feature] for feature in features), strict=True)
        for ids in visitor
    ]


def _without_empty(batch: _Batch, features: list[str]) -> list[list[int]]:
    return [ids for ids in _feature_by_feature(batch, features) if ids]


def _offsets(batch: _Batch, features: list[str]) -> _Request:
    """Where each list begins, instead of how long it is."""
    values, lengths = _request_of(_feature_by_feature)(batch, features)
    return values, [0, *accumulate(lengths)]


def _length_of_feature(batch: _Batch, features: list[str]) -> _Request:
    """One length for each feature."""
    values, _ = _request_of(_feature_by_feature)(batch, features)
    return values, [sum(map(len, batch[feature])) for feature in features]


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="14.1",
        compared=(
            "four batches: two features of two visitors, a visitor without clicks, keys in "
            "another order"
        ),
        solution=_request_of(_feature_by_feature),
        cases=(
            ({"product": [[7, 1], [5]], "user": [[3], [4, 1]]}, ["product", "user"]),
            (
                {
                    "user": [[7]],
                    "item": [[2]],
                    "clicked": [
                        [],
                    ],
                },
                ["user", "item", "clicked"],
            ),
            ({"user": [[3], [4, 1]], "product": [[7, 1], [5]]}, ["product", "user"]),
            (
                {"item": [[9], [8], [7]], "clicked": [[4, 5], [], [6]], "user": [[1], [2], [3]]},
                ["user", "item", "clicked"],
            ),
        ),
        mistakes=(
            Mistake(
                misconception="takes features in the order in which the batch has them",
                answer=_request_of(_as_they_come),
                hint="Right as long as the batch has the served order. Which numbers does the "
                "model take for products "
                "when `user` comes first?",
            ),
            Mistake(
                misconception="goes through the batch visitor by visitor",
                answer=_request_of(_visitor_by_visitor),
                hint=(
                    "All numbers are there, visitor by visitor. A table reads all lists of one "
                    "feature together: in which order must they be stored?"
                ),
            ),
            Mistake(
                misconception="sends offsets instead of lengths",
                answer=_offsets,
                hint=(
                    "The ids are right. Your second list says where each list begins, and has one "
                    "number too many. What does the request want instead?"
                ),
            ),
            Mistake(
                misconception="gives one length for each feature",
                answer=_length_of_feature,
                hint=(
                    "The ids are right. From the sum of a feature's lengths nobody can tell whose "
                    "ids they are."
                ),
            ),
            Mistake(
                misconception="leaves empty lists out",
                answer=_request_of(_without_empty),
                hint=(
                    "A visitor who has clicked nothing has a list, too. What happens to all lists "
                    "that come after it?"
                ),
            ),
        ),
        shape="a function that returns two lists of numbers, values and lengths",
    ),
    Exercise(
        id="14.2",
        compared="10, 10 and 10: the counter stood at 1 while the graph was written down",
        solution=[10, 10, 10],
        mistakes=(
            Mistake(
                misconception="believes that a graph keeps the state of the module",
                answer=[10, 20, 30],
                hint=(
                    "That is what the module would answer. A graph records operations on `x`. Is "
                    "`self.calls += 1` one of them?"
                ),
            ),
            Mistake(
                misconception="believes that the graph goes on counting where tracing stopped",
                answer=[20, 30, 40],
                hint=(
                    "You are right that tracing was a call. Who would count the next ones? Print "
                    "the graph's code."
                ),
            ),
            Mistake(
                misconception="forgets that tracing runs the code once",
                answer=[0, 0, 0],
                hint=(
                    "Right, nothing counts any more. What was the counter when `x * self.calls` "
                    "was recorded?"
                ),
            ),
        ),
        shape="a list of three numbers",
    ),
    Exercise(
        id="14.3",
        compared="68 bytes a row twice, and four parts of 20 bytes",
        solution=[68_000, 68_000, 80_000],
        mistakes=(
            Mistake(
                misconception="believes that columns are cut without a cost",
                answer=[68_000, 68_000, 68_000],
                hint=(
                    "Two of three are right. What does each part of a row have to store besides "
                    "its codes?"
                ),
            ),
            Mistake(
                misconception="leaves scale and bias behind when columns are cut",
                answer=[68_000, 68_000, 4 * 16 * 1000],
                hint=(
                    "16 codes take 16 bytes. What else does a device need to turn its codes into "
                    "numbers?"
                ),
            ),
            Mistake(
                misconception="believes that every device has a copy",
                answer=[68_000, 272_000, 272_000],
                hint="That would be data-parallel. Each row, or each column, is in one place only.",
            ),
        ),
        shape="a list of three numbers of bytes",
    ),
)

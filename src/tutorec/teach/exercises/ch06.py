"""Exercises of chapter 06: shapes between the steps, message sizes, exchanges of a step."""

from __future__ import annotations

from collections.abc import Sequence

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


def _lists(ids: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Consecutive lists of these lengths."""
    lists, start = [], 0
    for length in lengths:
        lists.append(list(ids[start : start + length]))
        start += length
    return lists


def _unpack(message: Sequence[int], features: int, samples: int) -> list[list[list[int]]]:
    """Lengths first, feature after feature, then ids."""
    count = features * samples
    lists = _lists(message[count:], message[:count])
    return [lists[feature * samples : (feature + 1) * samples] for feature in range(features)]


def _samples_first(message: Sequence[int], features: int, samples: int) -> list[list[list[int]]]:
    """Lists dealt out to features in turn, as if a sample's lists stood together."""
    count = features * samples
    lists = _lists(message[count:], message[:count])
    return [lists[feature::features] for feature in range(features)]


def _each_length_before_its_list(
    message: Sequence[int], features: int, samples: int
) -> list[list[list[int]]]:
    """A length, its ids, the next length: another format than this one."""
    lists, at = [], 0
    for _ in range(features * samples):
        length = message[at] if at < len(message) else 0
        lists.append(list(message[at + 1 : at + 1 + length]))
        at += 1 + length
    return [lists[feature * samples : (feature + 1) * samples] for feature in range(features)]


def _lengths_of_one_feature(
    message: Sequence[int], features: int, samples: int
) -> list[list[list[int]]]:
    """Reads as many lengths as there are samples."""
    lists = _lists(message[samples:], list(message[:samples]) * features)
    return [lists[feature * samples : (feature + 1) * samples] for feature in range(features)]


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="06.1",
        compared="three features of 400 samples, and 8 + 8 + 16 columns",
        solution=[1200, 400, 32],
        mistakes=(
            Mistake(
                misconception="looks up its own samples only",
                answer=[300, 100, 32],
                hint=(
                    "Those are the samples of rank 2 alone. Whose lists has `input_dist` brought "
                    "to rank 2?"
                ),
            ),
            Mistake(
                misconception="counts tables instead of features",
                answer=[800, 400, 24],
                hint=(
                    "A table that serves two features is looked up for each of them. How many "
                    "columns does each of the two lookups give?"
                ),
            ),
            Mistake(
                misconception="takes a row for each list",
                answer=[1200, 1200, 32],
                hint=(
                    "The columns of a sample's features stand side by side. How many samples are "
                    "there?"
                ),
            ),
        ),
        shape="a list of three numbers: lists, rows, columns",
    ),
    Exercise(
        id="06.2",
        compared="the lists of every feature and sample, in four messages",
        solution=_unpack,
        mistakes=(
            Mistake(
                misconception="takes the lists of a sample to stand together",
                answer=_samples_first,
                hint=(
                    "You deal the lists out to the features in turn. All lists of one feature "
                    "stand together."
                ),
            ),
            Mistake(
                misconception="expects each length before its list",
                answer=_each_length_before_its_list,
                hint=(
                    "You read a length, then its ids, then the next length. Here all lengths come "
                    "first."
                ),
            ),
            Mistake(
                misconception="reads the lengths of one feature only",
                answer=_lengths_of_one_feature,
                hint="You read as many lengths as there are samples. Every feature has its own.",
            ),
        ),
        cases=(
            ([2, 0, 1, 5, 6, 7], 1, 3),
            ([1, 2, 0, 1, 3, 4, 5, 6], 2, 2),
            ([0, 0, 0, 0], 2, 2),
            ([1, 0, 2, 1, 1, 0, 9, 8, 8, 7, 6], 3, 2),
        ),
    ),
    Exercise(
        id="06.3",
        compared="sizes, ids, rows and gradients, whatever the number of tables and ranks",
        solution=4,
        mistakes=(
            Mistake(
                misconception="counts an exchange for each table",
                answer=160,
                hint=(
                    "That is 4 for each table. Tables that are sharded in the same way travel "
                    "together."
                ),
            ),
            Mistake(
                misconception="counts a message for each peer",
                answer=28,
                hint="A collective is one call, in which every rank has a message for every other.",
            ),
            Mistake(
                misconception="forgets the way back",
                answer=3,
                hint="That is the forward. A training step has a second half.",
            ),
            Mistake(
                misconception="reverses every exchange of the forward",
                answer=6,
                hint=(
                    "Backward does not reverse all three. Which of them carried numbers that have "
                    "a gradient?"
                ),
            ),
        ),
        shape="a number of calls",
    ),
)

"""What an exercise is, and how an answer is compared with right and with known wrong ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Exercise:
    """One question of the book with its right answer and wrong ones that many people give.

    An answer is a value (number, text, list, dict, tensor), or a function, whose results are
    compared: those on `cases`, or what `measure` makes of it. Two different programs with the same
    results count as the same answer.

    Args:
        id: Chapter and number, such as "01.2".
        compared: What is compared, as the object of "right: ..." ("the five offsets of the two
            features").
        right: The right answer; of a function its results.
        mistakes: A hint -> the wrong answer that it is for, in the form of `right`; many people
            give it. A hint is one or two sentences that point at the belief behind the answer and
            do not give the right one. All answers differ.
        cases: Argument tuples for an answer that is a function, the smallest first.
        tolerance: Absolute and relative tolerance for numbers.
        shape: What a well-formed answer looks like ("a list of five integers"); shown when an
            answer is neither right nor one of the wrong ones.
        measure: What an answer comes to, where it is not just called on cases. A ValueError says
            what is wrong with the form of an answer; its message is shown.
    """

    id: str
    compared: str
    right: Any
    mistakes: Mapping[str, Any]
    cases: tuple[tuple[Any, ...], ...] = ()
    tolerance: float = 1e-6
    shape: str = ""
    measure: Callable[[Any], Any] | None = None


class Verdict(NamedTuple):
    """The result of `grade`: `status` ("not attempted", "right", "hint" or "wrong") and `text`."""

    status: str
    text: str


def same(left: Any, right: Any, tolerance: float = 1e-6) -> bool:
    """Whether two answers mean the same.

    Tensors, lists and tuples are compared by their numbers, text without case and blanks.

    Example:
        >>> import torch
        >>> (
        ...     same(torch.tensor([1, 2]), (1.0, 2.0)),
        ...     same("Gloo ", "gloo"),
        ...     same(True, 1),
        ...     same([1], [1, 2]),
        ... )
        (True, True, False, False)
    """
    left = _plain(left)
    right = _plain(right)
    numbers = (int, float)

    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, numbers) and isinstance(right, numbers):
        return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(left, str) and isinstance(right, str):
        return "".join(left.casefold().split()) == "".join(right.casefold().split())
    if isinstance(left, list) and isinstance(right, list):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(same(a, b, tolerance) for a, b in pairs)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k], tolerance) for k in left)
    return type(left) is type(right) and bool(left == right)


def _plain(value: Any) -> Any:
    """The answer with tensors, arrays, sets and tuples turned into lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        numbers = all(isinstance(member, int | float) for member in value)
        return sorted(value, key=None if numbers else repr)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    return value


def is_untouched(answer: Any) -> bool:
    """Whether a stub was left as it was: None, `...`, or a list or dict of nothing else.

    Example:
        >>> is_untouched(...), is_untouched([None, ...]), is_untouched([]), is_untouched(0)
        (True, True, False, False)
    """
    if isinstance(answer, Mapping):
        answer = list(answer.values())
    if isinstance(answer, list | tuple):
        return bool(answer) and all(map(is_untouched, answer))
    return answer is None or answer is Ellipsis


def grade(exercise: Exercise, answer: Any) -> Verdict:
    """Compare an answer with the right one, then with each stored wrong one.

    Returns:
        A verdict whose text never holds the right answer.
    """
    status, text = _judged(exercise, answer)
    return Verdict(status, f"exercise {exercise.id}: {text}")


def _judged(exercise: Exercise, answer: Any) -> tuple[str, str]:
    """The status of an answer, and what is said about it."""
    if is_untouched(answer):
        return "not attempted", "not attempted. Fill in the `...` and run it again."
    if exercise.cases and not callable(answer):
        return "wrong", f"the answer must be a function, and this is {_short(answer)}."
    try:
        observed = _observe(exercise, answer)
    except ValueError as error:
        return "wrong", f"not yet. {error}"
    if is_untouched(observed):
        return "not attempted", "not attempted. The function returns nothing yet."

    if same(observed, exercise.right, exercise.tolerance):
        return "right", f"right: {exercise.compared}."
    for hint, wrong in exercise.mistakes.items():
        if same(observed, wrong, exercise.tolerance):
            return "hint", f"not yet. {hint}"
    return "wrong", f"not yet. {_locate(exercise, observed)}"


def _observe(exercise: Exercise, answer: Any) -> Any:
    """The answer itself, what it comes to, or what it returns on each case.

    Raises:
        ValueError: It cannot be judged, or fails on a case.
    """
    if exercise.measure is not None:
        return exercise.measure(answer)
    if not exercise.cases:
        return answer

    results = []
    for case in exercise.cases:
        try:
            results.append(answer(*copy.deepcopy(case)))  # it may change its input
        except Exception as error:
            raise ValueError(
                f"On {_arguments(case)} your function raised {type(error).__name__}: {error}"
            ) from error
    return results


def _locate(exercise: Exercise, observed: Any) -> str:
    """Where the answer first goes wrong, without saying what would be right there."""
    expects = f" An answer here is {exercise.shape}." if exercise.shape else ""
    places, value = _first_difference(observed, exercise.right, exercise.tolerance)
    if exercise.cases:
        case = exercise.cases[places[0]]
        gives = _short(observed[places[0]])
        return f"The smallest case that differs: on {_arguments(case)} your function gives {gives}."
    if places:
        entry = "".join(f"[{place}]" for place in places)
        return f"Entry {entry} is the first that differs (yours: {_short(value)}).{expects}"
    if isinstance(value, list) and isinstance(_plain(exercise.right), list):
        return f"Your answer has {len(value)} entries, and that is not their number.{expects}"
    return f"{_short(value)} is not it.{expects}"


def _first_difference(left: Any, right: Any, tolerance: float) -> tuple[list[int], Any]:
    """Positions in nested lists that lead to where two answers differ first, and what left has."""
    left = _plain(left)
    right = _plain(right)
    if not isinstance(left, list) or not isinstance(right, list) or len(left) != len(right):
        return [], left
    position = [same(*pair, tolerance) for pair in zip(left, right, strict=True)].index(False)
    places, value = _first_difference(left[position], right[position], tolerance)
    return [position, *places], value


def _arguments(case: tuple[Any, ...]) -> str:
    return f"({', '.join(map(_short, case))})"


def _short(value: Any) -> str:
    """The value on one line of at most 80 characters."""
    text = " ".join(repr(_plain(value)).split())
    return text if len(text) <= 80 else f"{text[:77]}..."

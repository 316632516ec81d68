"""What an exercise is, and how an answer is compared with right and with known wrong ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Exercise", "Mistake", "Verdict", "grade", "is_untouched", "same"]


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that many people give, and what to tell them.

    Args:
        misconception: The belief behind the answer, in a few words ("counts samples instead of
            ids").
        answer: The answer that this belief leads to, in the form the exercise asks for.
        hint: One or two sentences that point at the belief and do not give the answer.
    """

    misconception: str
    answer: Any
    hint: str


@dataclass(frozen=True)
class Exercise:
    """One question of the book with its right answer and at least two wrong ones.

    An answer is a value (number, text, list, dict, tensor) or, where `cases` is given, a function.
    Functions are called on every case and their results are compared, so that two different
    programs with the same results count as the same answer.

    Args:
        id: Chapter and number, such as "01.2".
        compared: What is compared, as the object of "right: ..." ("the five offsets of the two
            features").
        solution: The right answer.
        mistakes: Named wrong answers; no two may be equal, and none may equal the solution.
        cases: Argument tuples for an answer that is a function, the smallest first.
        tolerance: Absolute and relative tolerance for numbers.
        shape: What a well-formed answer looks like ("a list of five integers"); shown when an
            answer is neither right nor a known mistake.
        measure: Where many answers are right: what an answer comes to. Results are compared then,
            and not answers. A ValueError says what is wrong with the form of an answer; its message
            is shown.
    """

    id: str
    compared: str
    solution: Any
    mistakes: tuple[Mistake, ...]
    cases: tuple[tuple[Any, ...], ...] | None = None
    tolerance: float = 1e-6
    shape: str = ""
    measure: Callable[[Any], Any] | None = None
    known: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse an exercise that could not tell its answers apart."""
        if len(self.mistakes) < 2:
            raise ValueError(
                f"exercise {self.id!r} needs two wrong answers, has {len(self.mistakes)}"
            )


@dataclass(frozen=True)
class Verdict:
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
        both_nan = left != left and right != right
        return both_nan or math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
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
    """Compare an answer with the solution, then with each stored mistake.

    Returns:
        A verdict whose text never holds the right answer.
    """
    status, text = _judged(exercise, answer)
    return Verdict(status, f"exercise {exercise.id}: {text}")


def _judged(exercise: Exercise, answer: Any) -> tuple[str, str]:
    """The status of an answer, and what is said about it."""
    if is_untouched(answer):
        return "not attempted", "not attempted. Fill in the `...` and run it again."
    if exercise.cases is not None and not callable(answer):
        return "wrong", f"the answer must be a function, and this is {_short(answer)}."
    try:
        observed = _observe(exercise, answer)
    except ValueError as error:
        return "wrong", f"not yet. {error}"
    if observed is ...:
        return "not attempted", "not attempted. The function returns nothing yet."

    right = _observe_stored(exercise, exercise.solution)
    if same(observed, right, exercise.tolerance):
        return "right", f"right: {exercise.compared}."
    for mistake in exercise.mistakes:
        if same(observed, _observe_stored(exercise, mistake.answer), exercise.tolerance):
            return "hint", f"not yet. {mistake.hint}"
    return "wrong", f"not yet. {_locate(exercise, observed, right)}"


def _observe_stored(exercise: Exercise, answer: Any) -> Any:
    """As `_observe`, of the solution or a stored mistake, once in a process: some start ranks."""
    if id(answer) not in exercise.known:
        exercise.known[id(answer)] = _observe(exercise, answer)
    return exercise.known[id(answer)]


def _observe(exercise: Exercise, answer: Any) -> Any:
    """The answer itself, what it comes to, or what the answer, a function, returns on each case.

    Of a stub of a function, the dots.

    Raises:
        ValueError: It cannot be judged, or fails on a case.
    """
    if exercise.measure is not None:
        observed = exercise.measure(answer)
        return ... if is_untouched(observed) else observed
    if exercise.cases is None:
        return answer

    results = []
    for case in exercise.cases:
        try:
            results.append(answer(*copy.deepcopy(case)))  # it may change its input
        except Exception as error:
            raise ValueError(
                f"On {_arguments(case)} your function raised {type(error).__name__}: {error}"
            ) from error
    return ... if all(result is None or result is ... for result in results) else results


def _locate(exercise: Exercise, observed: Any, right: Any) -> str:
    """Where the answer first goes wrong, without saying what would be right there."""
    expects = f" An answer here is {exercise.shape}." if exercise.shape else ""
    if exercise.measure is not None:
        return f"It comes to {_short(observed)}.{expects}"

    actual = _plain(observed)
    if not isinstance(actual, list) or not isinstance(_plain(right), list):
        return f"{_short(observed)} is not it.{expects}"
    if len(actual) != len(right):
        entries = f"Your answer has {len(actual)} entries, and that is not the number of entries."
        return entries + expects

    pairs = zip(actual, right, strict=True)
    wrong = [same(*pair, exercise.tolerance) for pair in pairs].index(False)
    if exercise.cases is None:
        return f"Entry {wrong} is the first that differs (yours: {_short(actual[wrong])})."
    case = _arguments(exercise.cases[wrong])
    return f"The smallest case that differs: on {case} your function gives {_short(actual[wrong])}."


def _arguments(case: tuple[Any, ...]) -> str:
    return f"({', '.join(map(_short, case))})"


def _short(value: Any) -> str:
    """The value on one line of at most 80 characters."""
    text = " ".join(repr(_plain(value)).split())
    return text if len(text) <= 80 else f"{text[:77]}..."

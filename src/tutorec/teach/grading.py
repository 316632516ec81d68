"""What an exercise is, and how an answer is compared with right and with known wrong ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

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

    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return abs(left - right) <= tolerance * max(1.0, abs(left), abs(right)) or (
            left != left and right != right
        )
    if isinstance(left, str) and isinstance(right, str):
        return "".join(left.casefold().split()) == "".join(right.casefold().split())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(
            same(a, b, tolerance) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(
            same(left[key], right[key], tolerance) for key in left
        )
    return type(left) is type(right) and bool(left == right)


def _plain(value: Any) -> Any:
    """The answer with tensors, arrays and tuples turned into lists, and 0-d ones into numbers."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if hasattr(value, "tolist") and not isinstance(value, (str, bytes)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    if isinstance(value, (set, frozenset)):
        numbers = all(isinstance(member, (int, float)) for member in value)
        return sorted(value) if numbers else sorted(value, key=repr)
    return value


def is_untouched(answer: Any) -> bool:
    """Whether a stub was left as it was: None, `...`, or a list or dict of nothing else.

    Example:
        >>> is_untouched(...), is_untouched([None, ...]), is_untouched([]), is_untouched(0)
        (True, True, False, False)
    """
    if answer is None or answer is Ellipsis:
        return True
    if isinstance(answer, Mapping):
        answer = list(answer.values())
    return (
        isinstance(answer, (list, tuple))
        and bool(answer)
        and all(is_untouched(item) for item in answer)
    )


def grade(exercise: Exercise, answer: Any) -> Verdict:
    """Compare an answer with the solution, then with each stored mistake.

    Returns:
        A verdict whose text never holds the right answer.
    """
    label = f"exercise {exercise.id}"
    if is_untouched(answer):
        return Verdict(
            "not attempted", f"{label}: not attempted. Fill in the `...` and run it again."
        )
    if exercise.cases is not None and not callable(answer):
        return Verdict(
            "wrong", f"{label}: the answer must be a function, and this is {_short(answer)}."
        )

    try:
        observed = _observe(exercise, answer)
    except _CaseError as error:
        if error.untouched:
            return Verdict(
                "not attempted", f"{label}: not attempted. The function returns nothing yet."
            )
        return Verdict("wrong", f"{label}: not yet. {error}")

    right = _observe_stored(exercise, exercise.solution)
    if same(observed, right, exercise.tolerance):
        return Verdict("right", f"{label}: right: {exercise.compared}.")
    for mistake in exercise.mistakes:
        if same(observed, _observe_stored(exercise, mistake.answer), exercise.tolerance):
            return Verdict("hint", f"{label}: not yet. {mistake.hint}")
    return Verdict("wrong", f"{label}: not yet. {_locate(exercise, observed, right)}")


class _CaseError(Exception):
    """A reader's function that failed, or returned nothing, on a case."""

    def __init__(self, message: str, untouched: bool = False) -> None:
        super().__init__(message)
        self.untouched = untouched


def _observe_stored(exercise: Exercise, answer: Any) -> Any:
    """As `_observe`, of the solution or a stored mistake, once in a process: some start ranks."""
    if id(answer) not in exercise.known:
        exercise.known[id(answer)] = _observe(exercise, answer)
    return exercise.known[id(answer)]


def _observe(exercise: Exercise, answer: Any) -> Any:
    """The answer itself, what it comes to, or what the answer, a function, returns on each case."""
    if exercise.measure is not None:
        try:
            observed = exercise.measure(answer)
        except ValueError as error:
            raise _CaseError(str(error)) from error
        if is_untouched(observed):
            raise _CaseError("nothing returned", untouched=True)
        return observed

    if exercise.cases is None:
        return answer
    results = [_call(answer, case) for case in exercise.cases]
    if all(result is None or result is Ellipsis for result in results):
        raise _CaseError("nothing returned", untouched=True)
    return results


def _call(function: Callable[..., Any], case: tuple[Any, ...]) -> Any:
    """Call a function on a copy of the case, so that it cannot change the next call's input."""
    try:
        return function(*copy.deepcopy(case))
    except Exception as error:
        arguments = ", ".join(_short(argument) for argument in case)
        raise _CaseError(
            f"On ({arguments}) your function raised {type(error).__name__}: {error}"
        ) from error


def _locate(exercise: Exercise, observed: Any, right: Any) -> str:
    """Where the answer first goes wrong, without saying what would be right there."""
    if exercise.cases is not None:
        for case, actual, expected in zip(exercise.cases, observed, right, strict=True):
            if not same(actual, expected, exercise.tolerance):
                arguments = ", ".join(_short(argument) for argument in case)
                return (
                    f"The smallest case that differs: on ({arguments}) your function gives "
                    f"{_short(actual)}."
                )

    expects = f" An answer here is {exercise.shape}." if exercise.shape else ""
    if exercise.measure is not None:
        return f"It comes to {_short(observed)}.{expects}"

    actual = _plain(observed)
    expected = _plain(right)
    if isinstance(actual, list) and isinstance(expected, list):
        if len(actual) != len(expected):
            return (
                f"Your answer has {len(actual)} entries, and that is not the number of "
                f"entries.{expects}"
            )
        wrong = [
            i
            for i, pair in enumerate(zip(actual, expected, strict=True))
            if not same(*pair, exercise.tolerance)
        ]
        return f"Entry {wrong[0]} is the first that differs (yours: {_short(actual[wrong[0]])})."

    if isinstance(actual, dict) and isinstance(expected, dict):
        wrong = [
            key
            for key in actual
            if key not in expected or not same(actual[key], expected[key], exercise.tolerance)
        ]
        location = (
            f"{wrong[0]!r} is the first entry that differs" if wrong else "an entry is missing"
        )
        return f"{location[0].upper()}{location[1:]}.{expects}"
    return f"{_short(observed)} is not it.{expects}"


def _short(value: Any, limit: int = 80) -> str:
    """The value on one line of at most `limit` characters."""
    text = " ".join(repr(_plain(value)).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."

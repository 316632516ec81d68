"""Exercises and predictions: what a chapter asks, and what it says to an answer.

A chapter's exercises live in `teach/exercises/chNN.py`. In the notebook an exercise is a heading, a
stub cell that ends in `check.exercise("04.1", answer)`, and a hidden solution cell that ends the
same way. A prediction is a cell that calls `check.predict`, followed by a cell that calls
`check.reveal` and says what kind of evidence its answer is. Where the reader made no guess, the
answer is folded.

Example:
    >>> from tutorec.teach import check
    >>> check.predict("99.1", 2.0, unit="s")
    prediction 99.1: you guess 2 s.
    >>> check.reveal("99.1", 0.25, kind="measured")
    prediction 99.1: guessed 2 s, measured 250 ms: the guess is 8 times
      the measured value.
"""

from __future__ import annotations

import html
import importlib
import re
import sys
import textwrap
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tutorec.teach.canvas import ACCENT, RANK_COLORS
from tutorec.teach.grading import Exercise, Verdict, grade, is_untouched, same
from tutorec.teach.units import number, seconds, size

# of the text column of the book; longer lines would have to be scrolled next to a printed table
_COLUMNS = 68


Kind = Literal["measured", "counted", "simulated", "estimated"]


@dataclass(frozen=True)
class _Prediction:
    """A guess, None where none was made, and its unit."""

    guess: Any
    unit: str


@dataclass(frozen=True)
class Card:
    """A sentence about a prediction or an exercise.

    A notebook shows it as a card, a terminal as wrapped text.

    Args:
        title: What it is about, such as "Prediction 06.1".
        text: What a terminal shows.
        body: What a page shows below the title, in HTML.
        color: Of the card's left edge.
    """

    title: str
    text: str
    body: str
    color: str = ACCENT

    def _repr_html_(self) -> str:
        edge = f"border: 1px solid #8886; border-left: 4px solid {self.color}; border-radius: 4px"
        title = f'<div style="font-weight: 600">{html.escape(self.title)}</div>'
        return (
            f'<div class="check" style="{edge}; padding: 0.5rem 0.8rem; margin: 0.6rem '
            f'0">{title}{self.body}</div>'
        )

    def __repr__(self) -> str:
        return textwrap.fill(
            self.text,
            _COLUMNS,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )


_COLORS = {"right": RANK_COLORS[2], "hint": RANK_COLORS[5], "wrong": RANK_COLORS[6]}
_verdicts: dict[str, Verdict] = {}
_predictions: dict[str, _Prediction] = {}


def find(exercise_id: str) -> Exercise:
    """The exercise with this id, such as "04.1"; its chapter's module is imported on first use.

    Raises:
        ModuleNotFoundError: There is no such chapter.
        KeyError: There is no such exercise in it.
    """
    chapter = exercise_id.partition(".")[0]
    module = importlib.import_module(f"tutorec.teach.exercises.ch{chapter}")
    return {item.id: item for item in module.EXERCISES}[exercise_id]


def exercise(exercise_id: str, answer: Any) -> None:
    """Grade an answer and print one line: not attempted, right, or a hint.

    Args:
        exercise_id: Chapter and number, such as "04.1".
        answer: The reader's answer; None or `...` counts as not attempted.
    """
    verdict = grade(find(exercise_id), answer)
    _verdicts[exercise_id] = verdict

    body = _paragraph(verdict.text.removeprefix(f"exercise {exercise_id}: "))
    _show(Card(f"Exercise {exercise_id}", verdict.text, body, _COLORS.get(verdict.status, ACCENT)))


def status(exercise_id: str) -> str:
    """This process's last verdict on an exercise: "not attempted", "right", "hint" or "wrong"."""
    return _verdicts[exercise_id].status if exercise_id in _verdicts else "not attempted"


def all_right(chapter: str) -> bool:
    """Whether each exercise of a chapter was answered right; its hidden last cell asserts it."""
    module = importlib.import_module(f"tutorec.teach.exercises.ch{chapter}")
    return all(status(item.id) == "right" for item in module.EXERCISES)


def predict(prediction_id: str, guess: Any, *, unit: str = "") -> None:
    """Record a guess before the cell that has the answer.

    Args:
        prediction_id: Chapter and number, such as "05.1".
        guess: A number, a word, a bool or a list of them; None or `...` for no guess.
        unit: "s" and "B" are scaled for reading; any other word follows the number.
    """
    if is_untouched(guess):
        _predictions[prediction_id] = _Prediction(None, unit)
        unit_note = f" (in {unit})" if unit else ""
        _sentence(prediction_id, f"write your guess{unit_note} in place of the dots, then go on.")
        return

    _predictions[prediction_id] = _Prediction(guess, unit)
    _sentence(prediction_id, f"you guess {_say(guess, unit)}.")


def reveal(prediction_id: str, answer: Any, *, kind: Kind, unit: str = "") -> None:
    """Compare the guess with the answer; without a guess, show the answer folded.

    Args:
        prediction_id: The id given to `predict`.
        answer: In the unit of the guess.
        kind: What the answer is: "measured" with a clock or on data, "counted" exactly,
            "simulated", or "estimated" by a formula.
        unit: Used only where `predict` was not called.

    Raises:
        ValueError: There is no such kind.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind={kind!r}: choose one of {', '.join(get_args(Kind))}")

    prediction = _predictions.get(prediction_id, _Prediction(None, unit))
    title = f"Prediction {prediction_id}"
    answer_text = _say(answer, prediction.unit)
    if prediction.guess is None:
        text = f"prediction {prediction_id}: {kind} {answer_text}. You made no guess."
        summary = f"<summary>The answer ({kind})</summary>"
        body = f"<details>{summary}<div>{html.escape(answer_text)}</div></details>"
        _show(Card(title, text, body, RANK_COLORS[2]))
        return

    guess = prediction.guess
    guess_text = _say(guess, prediction.unit)
    verdict = _compare(guess, answer, kind)
    text = f"prediction {prediction_id}: guessed {guess_text}, {kind} {answer_text}: {verdict}."
    largest = max(guess, answer, 0) if _is_number(guess) and _is_number(answer) else 0
    rows = [
        _bar("Guess", guess_text, _percent(guess, largest), ACCENT),
        _bar(kind.capitalize(), answer_text, _percent(answer, largest), RANK_COLORS[2]),
    ]

    grid = "display: grid; grid-template-columns: 5rem fit-content(65%) 1fr; align-items: center"
    body = f'<div style="{grid}; column-gap: 0.5rem">{"".join(rows)}</div>'
    body += _paragraph(f"{verdict}.")
    _show(Card(title, text, body, RANK_COLORS[2]))


def _percent(value: Any, largest: float) -> float:
    """The length of a value's bar, in percent of the largest."""
    return 100 * max(value, 0) / largest if largest else 0.0


def _sentence(prediction_id: str, text: str) -> None:
    title = f"Prediction {prediction_id}"
    _show(Card(title, f"prediction {prediction_id}: {text}", _paragraph(text)))


def _paragraph(text: str) -> str:
    """A sentence in HTML, with a capital, and with code between its backticks."""
    markup = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text[:1].upper() + text[1:]))
    return f"<div>{markup}</div>"


def _bar(name: str, value: str, percent: float, color: str) -> str:
    """Three cells of a card: a label, its value, and a bar as long as the number is large."""
    bar = f'<span style="width: {percent:.1f}%; height: 0.5rem; background: {color}"></span>'
    return f"<span>{name}</span><span>{html.escape(value)}</span>{bar}"


def _show(card: Card) -> None:
    """A card where there is a notebook, else its text."""
    shell = sys.modules.get("IPython")
    if shell is not None and shell.get_ipython() is not None:
        from IPython.display import display

        display(card)
    else:
        print(card)


def _is_number(value: Any) -> bool:
    """Whether the value is an int or a float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _say(value: Any, unit: str) -> str:
    """The value with its unit, as in a sentence."""
    if not _is_number(value):
        return f"{value} {unit}".strip() if isinstance(value, str) else f"{value!r} {unit}".strip()
    if unit == "s":
        return seconds(value)
    if unit == "B":
        return size(value)
    return f"{number(value)} {unit}".strip()


def _compare(guess: Any, answer: Any, kind: Kind) -> str:
    """The distance of a guess: a factor for positive numbers, a difference for others."""
    if not (_is_number(guess) and _is_number(answer)):
        return "as predicted" if same(guess, answer) else "not as predicted"
    if guess == answer:
        return "exactly"
    if guess <= 0 or answer <= 0:
        return f"the guess is off by {number(abs(guess - answer))}"

    ratio = max(guess, answer) / min(guess, answer)
    if ratio < 1.1:
        return f"close, within {number(100 * (ratio - 1), 2)} %"
    known = f"{kind} value"
    larger, smaller = ("guess", known) if guess > answer else (known, "guess")
    return f"the {larger} is {number(ratio)} times the {smaller}"

import importlib
import pkgutil
from dataclasses import replace

import pytest
import torch

from tutorec.teach import check, exercises
from tutorec.teach.grading import Exercise, grade, same

CHAPTERS = [module.name for module in pkgutil.iter_modules(exercises.__path__)]
ALL = [
    one
    for name in CHAPTERS
    for one in importlib.import_module(f"{exercises.__name__}.{name}").EXERCISES
]

offsets = Exercise(
    id="99.1",
    compared="the three offsets",
    right=[0, 1, 3],
    mistakes={
        "Where does the first list begin?": [1, 3],
        "These are sizes, not positions.": [1, 2],
    },
    shape="a list of three integers",
)
double = Exercise(
    id="99.2",
    compared="twice the input, on 2 cases",
    right=[4, [6, 8]],
    mistakes={
        "3 becomes 6, not 9.": [4, [9, 16]],
        "The input came back unchanged.": [2, [3, 4]],
    },
    cases=((2,), (torch.tensor([3, 4]),)),
)


def sentences(capsys):
    """What was printed, in lines that fit the page, with wrapped lines joined."""
    lines = capsys.readouterr().out.strip()
    assert max(map(len, lines.split("\n"))) <= 68
    return lines.replace("\n  ", " ").split("\n")


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.id)
def test_every_exercise_tells_its_right_answer_from_each_mistake(one):
    assert grade(one, ...).status == "not attempted"
    assert grade(one, None).status == "not attempted"
    assert len(one.right) == len(one.cases) if one.cases else one.right is not None
    assert len(one.mistakes) >= 2
    one = replace(one, cases=(), measure=None)
    assert grade(one, one.right).status == "right"
    for hint, wrong in one.mistakes.items():
        verdict = grade(one, wrong)
        assert (verdict.status, hint in verdict.text) == ("hint", True)


@pytest.mark.parametrize("name", CHAPTERS)
def test_exercise_ids_belong_to_their_chapter_and_are_unique(name):
    ids = [one.id for one in importlib.import_module(f"{exercises.__name__}.{name}").EXERCISES]
    assert len(set(ids)) == len(ids)
    assert all(identity.startswith(f"{name.removeprefix('ch')}.") for identity in ids)


def test_answer_forms_that_mean_the_same_are_accepted():
    for answer in ([0, 1, 3], (0, 1, 3), torch.tensor([0, 1, 3]), [0.0, 1.0, 3.0]):
        assert grade(offsets, answer).status == "right"


def test_unknown_wrong_answer_is_located_and_not_given_away():
    assert "2 entries" in grade(offsets, [0, 3]).text
    located = grade(offsets, [0, 2, 3]).text
    assert "Entry [1]" in located and "yours: 2" in located and "[0, 1, 3]" not in located
    assert "a list of three integers" in grade(offsets, 5).text


def test_function_answers_are_compared_by_their_results():
    assert grade(double, lambda x: x + x).status == "right"
    assert "3 becomes 6" in grade(double, lambda x: x**2).text
    assert "(2)" in grade(double, lambda x: 3 * x).text
    assert grade(double, lambda x: None).status == "not attempted"
    assert "gives None" in grade(double, lambda x: 2 * x if isinstance(x, int) else None).text


def test_none_is_an_answer_where_it_is_right_on_some_cases():
    root = Exercise(
        id="99.4",
        compared="two squares",
        right=[None, 3],
        mistakes={
            "A.": [-4, 9],
            "B.": [4, -9],
        },
        cases=((-4,), (9,)),
    )
    assert grade(root, {9: 3}.get).status == "right"
    assert grade(root, lambda x: None).status == "not attempted"
    assert "ZeroDivisionError" in grade(double, lambda x: x / 0).text
    assert "must be a function" in grade(double, 4).text


def test_function_that_edits_its_input_does_not_spoil_the_case():
    def greedy(x):
        x *= 2
        return x

    assert grade(double, greedy).status == "right"
    assert grade(double, greedy).status == "right"


def length_of(answer):
    if not isinstance(answer, str):
        raise ValueError("An answer is a word.")
    return len(answer)


long_word = Exercise(
    id="99.4",
    compared="a word of five letters",
    right=5,
    mistakes={
        "Longer.": 3,
        "Shorter.": 6,
    },
    shape="a fruit",
    measure=length_of,
)


def test_answers_are_judged_by_what_they_come_to_where_many_are_right():
    assert grade(long_word, "lemon").status == "right"
    assert "Shorter." in grade(long_word, "cherry").text
    assert "4 is not it. An answer here is a fruit." in grade(long_word, "pear").text
    assert "An answer is a word." in grade(long_word, 5).text
    assert grade(long_word, ...).status == "not attempted"


def test_same_keeps_bools_apart_from_numbers_and_compares_nested_answers():
    assert not same(True, 1)
    assert same({"a": torch.tensor([1.0])}, {"a": [1]})
    assert same({2, 1}, {1, 2})
    assert not same({"a": 1}, {"b": 1})


def test_unknown_exercise_is_named():
    with pytest.raises(ModuleNotFoundError, match="ch98"):
        check.find("98.1")
    with pytest.raises(KeyError, match=r"00\.99"):
        check.find("00.99")


def test_exercise_prints_and_remembers_the_verdict(monkeypatch, capsys):
    monkeypatch.setattr(check, "find", lambda exercise_id: offsets)
    check.exercise("99.1", ...)
    assert check.status("99.1") == "not attempted"
    check.exercise("99.1", [0, 1, 3])
    assert check.status("99.1") == "right"
    assert sentences(capsys) == [
        "exercise 99.1: not attempted. Fill in the `...` and run it again.",
        "exercise 99.1: right: the three offsets.",
    ]


@pytest.mark.parametrize(
    ("guess", "measured", "unit", "said"),
    [
        (2.0, 0.25, "s", "guessed 2 s, measured 250 ms: the guess is 8 times the measured value"),
        (1024, 3072, "B", "guessed 1 KiB, measured 3 KiB: the measured value is 3 times the guess"),
        (100, 104, "ids", "guessed 100 ids, measured 104 ids: close, within 4 %"),
        (7, 7, "", "guessed 7, measured 7: exactly"),
        (0, 3, "rows", "guessed 0 rows, measured 3 rows: the guess is off by 3"),
        ("rank 1", "rank 0", "", "guessed rank 1, measured rank 0: not as predicted"),
        (True, True, "", "guessed True, measured True: as predicted"),
    ],
)
def test_reveal_compares_prediction_and_measurement(guess, measured, unit, said, capsys):
    check.predict("99.9", guess, unit=unit)
    check.reveal("99.9", measured, kind="measured")
    assert sentences(capsys)[-1] == f"prediction 99.9: {said}."


def test_reveal_without_a_guess_gives_the_answer_and_its_unit(capsys):
    check.predict("99.8", ..., unit="s")
    check.reveal("99.8", 3.0, kind="simulated")
    first, second = sentences(capsys)
    assert "(in s)" in first
    assert second.startswith("prediction 99.8: simulated 3 s.")


@pytest.mark.parametrize("kind", ["measured", "counted", "simulated", "estimated"])
def test_reveal_says_what_kind_of_evidence_its_answer_is(kind, capsys):
    check.predict("99.7", 1)
    check.reveal("99.7", 2, kind=kind)
    assert f"{kind} 2: the {kind} value is 2 times the guess" in sentences(capsys)[-1]


def test_reveal_refuses_another_kind():
    with pytest.raises(ValueError, match=r"guessed.*measured, counted, simulated, estimated"):
        check.reveal("99.7", 2, kind="guessed")  # type: ignore[arg-type]


def test_the_answer_is_folded_where_no_guess_was_made(monkeypatch):
    shown = cards(monkeypatch)
    check.predict("99.1", ..., unit="waits")
    check.reveal("99.1", 4, kind="counted")
    card = shown[1]._repr_html_()
    folded = card.split("<details>")[1].split("</details>")[0]
    assert "4 waits" in folded
    assert card.count("4 waits") == 1


def cards(monkeypatch):
    """What a notebook is shown."""
    import IPython

    shown = []
    monkeypatch.setattr(IPython, "get_ipython", object)
    monkeypatch.setattr("IPython.display.display", shown.append)
    return shown


def test_a_notebook_shows_a_card_with_bars_in_proportion(monkeypatch):
    shown = cards(monkeypatch)
    check.predict("99.1", 3, unit="waits")
    check.reveal("99.1", 4, kind="measured")
    guess, measured = (card._repr_html_() for card in shown)
    assert "Prediction 99.1" in guess and "You guess 3 waits" in guess
    assert (
        "width: 75.0%" in measured
        and "width: 100.0%" in measured
        and "The measured value is 1.33 times" in measured
    )
    assert "prediction 99.1: guessed 3 waits, measured 4 waits" in repr(shown[1])


def test_a_card_shows_a_guess_that_is_not_a_number_and_escapes_it(monkeypatch):
    shown = cards(monkeypatch)
    check.predict("99.2", "<b>row-wise</b>")
    check.reveal("99.2", "table-wise", kind="counted")
    assert (
        "&lt;b&gt;row-wise" in shown[1]._repr_html_()
        and "Not as predicted." in shown[1]._repr_html_()
    )


def test_the_card_of_an_exercise_has_the_colour_of_its_verdict(monkeypatch):
    monkeypatch.setattr(check, "find", lambda _: offsets)
    shown = cards(monkeypatch)
    for answer in (..., [0, 1, 3], [1, 3]):
        check.exercise("99.1", answer)
    untouched, right, hint = (card._repr_html_() for card in shown)
    assert (
        len({card.split("border-left")[1].split(";")[0] for card in (untouched, right, hint)}) == 3
    )
    assert "Fill in the <code>...</code>" in untouched
    assert "Exercise 99.1" in right and "Where does the first list begin?" in hint

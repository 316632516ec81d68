"""The solutions of chapter 20, and broken answers."""

from __future__ import annotations

from statistics import median

import pytest

from tutorec.teach import check
from tutorec.teach.grading import grade

LOADING = check.find("20.1")


@pytest.mark.parametrize("answer", [LOADING.solution, *(one.answer for one in LOADING.mistakes)])
def test_rows_are_loaded_where_the_solution_loads_them(answer):
    expected = "right" if answer is LOADING.solution else "hint"
    assert grade(LOADING, answer).status == expected


def test_a_stub_is_not_attempted():
    assert grade(LOADING, lambda model, saved: ...).status == "not attempted"


def test_an_answer_that_fails_on_a_rank_is_told_why():
    verdict = grade(LOADING, lambda model, saved: saved["user"])
    assert verdict.status == "wrong" and "KeyError: 'user'" in verdict.text


def test_the_ratio_of_the_solution_is_the_median_of_paired_ratios():
    exercise = check.find("20.2")
    assert exercise.cases is not None
    for theirs, ours in exercise.cases:
        ratios = [their_time / our_time for their_time, our_time in zip(theirs, ours, strict=True)]
        assert exercise.solution(theirs, ours) == pytest.approx(median(ratios))

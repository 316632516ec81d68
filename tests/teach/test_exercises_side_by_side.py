"""The solutions of chapter 20, against stored results and the harness of the benchmarks."""

from __future__ import annotations

import pytest

from tutorec.bench.harness import paired_ratio
from tutorec.teach import check, side_by_side


def test_rows_survive_where_the_stored_losses_say_so():
    runs = side_by_side.stored("parity")["runs"].values()
    assert [run["torchrec"] == run["tutorec"] for run in runs] == [True, False, True]
    assert check.find("20.1").solution == [True, False, True]


def test_the_ratio_of_the_solution_is_that_of_the_harness():
    exercise = check.find("20.2")
    assert exercise.cases is not None
    for theirs, ours in exercise.cases:
        assert exercise.solution(theirs, ours) == pytest.approx(paired_ratio(theirs, ours).median)

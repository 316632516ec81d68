"""The solutions of chapter 20, and broken answers."""

from __future__ import annotations

from statistics import median

import pytest

from tutorec.teach import check
from tutorec.teach.grading import grade

LOADING = check.find("20.1")


def load_rows(model, saved):
    """Each shard gets its rectangle of the table, a replica the whole table."""
    for name, value in model.state_dict().items():
        if not hasattr(value, "local_shards"):
            value.copy_(saved[name])
            continue
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            rows, columns = shard.metadata.shard_sizes
            shard.tensor.copy_(saved[name][row : row + rows, column : column + columns])


def test_rows_are_loaded_by_the_offsets_of_their_shards():
    assert grade(LOADING, load_rows).status == "right"


def test_a_stub_is_not_attempted():
    assert grade(LOADING, lambda model, saved: ...).status == "not attempted"


def test_an_answer_that_fails_on_a_rank_is_told_why():
    verdict = grade(LOADING, lambda model, saved: saved["user"])
    assert verdict.status == "wrong" and "KeyError: 'user'" in verdict.text


def test_the_ratio_of_the_solution_is_the_median_of_paired_ratios():
    exercise = check.find("20.2")
    for (theirs, ours), right in zip(exercise.cases, exercise.right, strict=True):
        ratios = [their_time / our_time for their_time, our_time in zip(theirs, ours, strict=True)]
        assert right == pytest.approx(median(ratios))

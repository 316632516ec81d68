"""The solutions of chapter 17's exercises, against the library that they are about."""

from __future__ import annotations

import pytest
import torch

from tutorec.distributed.planner.hit_rate import hit_rate
from tutorec.teach import check


def test_a_row_of_adam_comes_with_two_states():
    row = 4 * 128 + 2 * 4 * 128
    assert check.find("17.1").solution == round(2 * 2**30 / (40_000_000 * row), 3) == 0.035


def test_hits_of_the_most_popular_rows_are_those_of_a_settled_lfu_cache():
    exercise = check.find("17.2")
    assert exercise.cases is not None
    for counts, slots in exercise.cases:
        settled = hit_rate(torch.tensor(counts), slots, "lfu", ids=0.001)  # type: ignore[arg-type]
        assert exercise.solution(counts, slots) == pytest.approx(settled, abs=1e-3)

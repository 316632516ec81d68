"""The solutions of chapter 13's exercises, against the library that they are about."""

from __future__ import annotations

import pytest
import torch

from tutorec.quant.packing import pack_rows, unpack_rows
from tutorec.teach import check
from tutorec.teach.grading import grade
from tutorec.types import DataType


def test_two_numbers_in_a_byte_are_read_as_the_library_reads_them():
    unpack_row = check.find("13.1").solution
    packed = pack_rows(
        torch.randn(20, 8, generator=torch.Generator().manual_seed(13)), DataType.INT4
    )
    for row in packed:
        scale, bias = row[:4].view(torch.float16).tolist()
        expected = unpack_rows(row.unsqueeze(0), 8, DataType.INT4)[0]
        torch.testing.assert_close(
            torch.tensor(unpack_row(row[4:8].tolist(), scale, bias)), expected
        )


def test_packed_rows_arrive_and_a_stub_is_not_attempted():
    exercise = check.find("13.2")
    assert grade(exercise, lambda rows: ...).status == "not attempted"
    assert grade(exercise, exercise.solution).status == "right"


@pytest.mark.parametrize("answer", [lambda rows: rows.half(), lambda rows: [rows]])
def test_what_is_no_float_row_is_wrong(answer):
    verdict = grade(check.find("13.2"), answer)
    assert verdict.status == "wrong" and "float32 [2, 64]" in verdict.text


def test_the_checker_counts_the_bytes_that_a_rank_sends():
    exercise = check.find("13.2")
    assert exercise.measure is not None
    found = exercise.measure(exercise.solution)
    assert [sent for _, sent in found] == [136, 136]
    floats = exercise.measure(exercise.mistakes[0].answer)
    assert [sent for _, sent in floats] == [512, 512]
    for (read, _), (exact, _) in zip(found, floats, strict=True):
        steps = (exact.amax(1) - exact.amin(1)) / 255
        assert ((read - exact).abs().amax(1) <= 0.51 * steps).all()

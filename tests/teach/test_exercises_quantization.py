"""The solutions of chapter 13's exercises, against the library that they are about."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tutorec.quant.packing import pack_rows, unpack_rows
from tutorec.teach import check
from tutorec.teach.grading import grade
from tutorec.types import DataType


def test_two_numbers_in_a_byte_are_read_as_the_library_reads_them():
    exercise = check.find("13.1")
    for (payload, scale, bias), numbers in zip(exercise.cases, exercise.right, strict=True):
        grid = torch.tensor([scale, bias], dtype=torch.float16).view(torch.uint8)
        padding = 12 - len(payload)
        row = torch.cat([grid, torch.tensor(payload + [0] * padding, dtype=torch.uint8)])
        assert unpack_rows(row.unsqueeze(0), 2 * len(payload), DataType.INT4).tolist() == [numbers]


def swap(messages):
    arrived = torch.empty_like(messages)
    dist.all_to_all_single(arrived, messages)
    return arrived


def exchange(rows):
    return unpack_rows(swap(pack_rows(rows, DataType.INT8, alignment=4)), 64, DataType.INT8)


def test_packed_rows_arrive_and_a_stub_is_not_attempted():
    exercise = check.find("13.2")
    assert grade(exercise, lambda rows: ...).status == "not attempted"
    assert grade(exercise, exchange).status == "right"


@pytest.mark.parametrize("answer", [lambda rows: rows.half(), lambda rows: [rows]])
def test_what_is_no_float_row_is_wrong(answer):
    verdict = grade(check.find("13.2"), answer)
    assert verdict.status == "wrong" and "float32 [2, 64]" in verdict.text


def test_the_checker_counts_the_bytes_that_a_rank_sends():
    exercise = check.find("13.2")
    assert exercise.measure is not None
    found = exercise.measure(exchange)
    assert [sent for _, sent in found] == [136, 136]
    floats = exercise.measure(swap)
    assert [sent for _, sent in floats] == [512, 512]
    for (read, _), (exact, _) in zip(found, floats, strict=True):
        steps = (exact.amax(1) - exact.amin(1)) / 255
        assert ((read - exact).abs().amax(1) <= 0.51 * steps).all()

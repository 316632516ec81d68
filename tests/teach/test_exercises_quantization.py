"""The solutions of chapter 13's exercises, against the library that they are about."""

from __future__ import annotations

import torch

from tutorec.quant.packing import pack_rows, unpack_rows
from tutorec.teach import check
from tutorec.types import DataType


def test_bytes_of_four_rows_are_those_of_packed_rows():
    rows = ((48, DataType.INT8), (96, DataType.INT4), (96, DataType.INT2), (40, DataType.FP16))
    packed = [pack_rows(torch.rand(1, columns), kind).shape[1] for columns, kind in rows]
    assert packed == check.find("13.1").solution


def test_two_numbers_in_a_byte_are_read_as_the_library_reads_them():
    unpack_row = check.find("13.2").solution
    packed = pack_rows(
        torch.randn(20, 8, generator=torch.Generator().manual_seed(13)), DataType.INT4
    )
    for row in packed:
        scale, bias = row[:4].view(torch.float16).tolist()
        expected = unpack_rows(row.unsqueeze(0), 8, DataType.INT4)[0]
        torch.testing.assert_close(
            torch.tensor(unpack_row(row[4:8].tolist(), scale, bias)), expected
        )

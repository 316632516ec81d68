"""Ranges of columns of packed rows: the numbers of the whole row, and the row comes back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tutorec.quant.column_slices as module
from tutorec._kernels.packed_layout import PACKED_TYPES, row_layout
from tutorec.quant.column_slices import cut_columns, join_columns
from tutorec.quant.packing import pack_rows, unpack_rows
from tutorec.types import DataType


@given(data=st.data())
def test_slices_hold_the_numbers_of_the_whole_and_join_to_it(data):
    kind, columns = data.draw(st.sampled_from(PACKED_TYPES)), data.draw(st.integers(1, 40))
    rows, alignment = data.draw(st.integers(0, 5)), data.draw(st.sampled_from([16, 64]))
    packed = pack_rows(torch.randn(rows, columns), kind, alignment=alignment)
    whole = row_layout(columns, kind, alignment)
    cuts = [
        0,
        *sorted(data.draw(st.sets(st.integers(1, max(columns - 1, 1)), max_size=4))),
        columns,
    ]
    spans = [(start, stop - start) for start, stop in pairwise(cuts) if stop > start]
    layouts = [row_layout(width, kind, alignment) for _, width in spans]
    pieces = [
        cut_columns(packed, whole, start, one)
        for (start, _), one in zip(spans, layouts, strict=True)
    ]
    numbers = unpack_rows(packed, columns, kind)
    for (start, width), one in zip(spans, pieces, strict=True):
        assert torch.equal(unpack_rows(one, width, kind), numbers[:, start : start + width])
    assert torch.equal(join_columns(pieces, layouts, whole), packed)


@pytest.mark.parametrize("kind", [DataType.INT8, DataType.INT4, DataType.FP16])
def test_many_rows_are_taken_apart_in_chunks(kind, monkeypatch):
    packed = pack_rows(torch.randn(50, 12), kind)
    whole, half = row_layout(12, kind), row_layout(5, kind)
    at_once = cut_columns(packed, whole, 7, half)
    monkeypatch.setattr(module, "_AT_ONCE", 36)
    out = torch.full_like(at_once, 255)
    assert cut_columns(packed, whole, 7, half, out) is out
    assert torch.equal(out, at_once)

"""Jagged functions: fbgemm's operators and plain torch give the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY
from torch.testing import assert_close

from tutorec._kernels import jagged, reference
from tutorec._kernels.backend import use_backend

INTEGERS = st.sampled_from([torch.int32, torch.int64])


@pytest.fixture(params=["torch", "auto"], autouse=True)
def _each_backend(request: pytest.FixtureRequest):
    with use_backend(request.param):
        yield


@given(lengths=st.lists(st.integers(0, 5), max_size=20), dtype=INTEGERS)
@PROPERTY
def test_lengths_to_offsets_are_running_sums(lengths: list[int], dtype: torch.dtype):
    offsets = jagged.lengths_to_offsets(torch.tensor(lengths, dtype=dtype))
    assert offsets.dtype == dtype
    assert offsets.tolist() == [sum(lengths[:end]) for end in range(len(lengths) + 1)]


@given(
    lengths=st.lists(st.integers(0, 4), max_size=6),
    longest=st.integers(0, 5),
    columns=st.sampled_from([(), (1,), (3,), (2, 2)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8]),
    offsets_dtype=INTEGERS,
)
@PROPERTY
def test_padded_dense_equals_rows_cut_and_filled(
    lengths: list[int], longest: int, columns: tuple[int, ...], dtype: torch.dtype, offsets_dtype: torch.dtype
):
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(offsets_dtype)
    count = sum(lengths)
    values = torch.arange(1, 1 + count * torch.Size(columns).numel()).view(count, *columns).to(dtype)
    expected = torch.full((len(lengths), longest, *columns), 7, dtype=dtype)
    for row, length in enumerate(lengths):
        kept = min(length, longest)
        expected[row, :kept] = values[int(offsets[row]) : int(offsets[row]) + kept]
    dense = jagged.jagged_to_padded_dense(values, offsets, longest, 7)
    assert dense.dtype == dtype
    assert torch.equal(dense, expected)
    assert torch.equal(reference.jagged_to_padded_dense(values, offsets, longest, 7), expected)


def test_padded_dense_keeps_ids_that_a_float_cannot_hold():
    ids = torch.tensor([2**53 + 1, 2**62 + 3])
    assert jagged.jagged_to_padded_dense(ids, torch.tensor([0, 2]), 2).tolist() == [ids.tolist()]


def test_padded_dense_sends_gradients_back_to_the_rows_that_were_kept():
    values = torch.ones(4, 2, requires_grad=True)
    dense = jagged.jagged_to_padded_dense(values, torch.tensor([0, 3, 4]), 2)
    (dense * torch.arange(8.0).view(2, 2, 2)).sum().backward()
    assert_close(values.grad, torch.tensor([[0.0, 1.0], [2.0, 3.0], [0.0, 0.0], [4.0, 5.0]]))

from __future__ import annotations

import pytest
import torch

from tutorec.modules.sorted_index_select import maybe_sorted_index_select, sorted_index_select


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("use_sorted", [True, False])
def test_rows_and_gradients_are_those_of_index_select(dtype: torch.dtype, use_sorted: bool) -> None:
    torch.manual_seed(1)
    indices = torch.randint(0, 5, (40,))
    rows = torch.randn(6, 3, dtype=dtype, requires_grad=True)
    picked = maybe_sorted_index_select(rows, indices, use_sorted)
    assert picked.dtype == dtype
    assert torch.equal(picked, rows[indices])
    weights = torch.randn(40, 3, dtype=dtype)
    (picked * weights).sum().backward()
    expected = torch.zeros(6, 3, dtype=torch.float64).index_add_(0, indices, weights.double())
    torch.testing.assert_close(rows.grad, expected.to(dtype))


def test_a_row_of_half_precision_sums_more_gradients_than_it_can_count() -> None:
    # Rows of bfloat16 that are added one by one stop at 256.
    rows = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    sorted_index_select(rows, torch.zeros(4000, dtype=torch.long)).sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[4000.0, 4000.0]]


def test_it_is_scripted() -> None:
    rows, indices = torch.randn(4, 2), torch.tensor([3, 0, 3])
    scripted = torch.jit.script(maybe_sorted_index_select)
    for use_sorted in (True, False):
        assert torch.equal(scripted(rows, indices, use_sorted), rows[indices])

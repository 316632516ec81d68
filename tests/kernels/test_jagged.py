"""Jagged functions: fbgemm's operators and plain torch give the same."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tutorec._kernels import bucketize, jagged
from tutorec._kernels.backend import use_backend

INTEGERS = st.sampled_from([torch.int32, torch.int64])


@pytest.fixture(params=["torch", "auto"], autouse=True)
def _each_backend(request: pytest.FixtureRequest):
    with use_backend(request.param):
        yield


@given(lengths=st.lists(st.integers(0, 5), max_size=20), dtype=INTEGERS)
def test_lengths_to_offsets_are_running_sums(lengths: list[int], dtype: torch.dtype):
    offsets = jagged.lengths_to_offsets(torch.tensor(lengths, dtype=dtype))
    assert offsets.dtype == dtype
    assert offsets.tolist() == [sum(lengths[:end]) for end in range(len(lengths) + 1)]


@given(
    lengths=st.lists(st.integers(0, 4), max_size=6),
    longest=st.integers(0, 5),
    columns=st.sampled_from([(), (1,), (3,), (2, 2)]),
    dtype=st.sampled_from(
        [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8]
    ),
    offsets_dtype=INTEGERS,
)
def test_padded_dense_equals_rows_cut_and_filled(
    lengths: list[int],
    longest: int,
    columns: tuple[int, ...],
    dtype: torch.dtype,
    offsets_dtype: torch.dtype,
):
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(offsets_dtype)
    count = sum(lengths)
    values = (
        torch.arange(1, 1 + count * torch.Size(columns).numel()).view(count, *columns).to(dtype)
    )
    expected = torch.full((len(lengths), longest, *columns), 7, dtype=dtype)
    for row, length in enumerate(lengths):
        kept = min(length, longest)
        expected[row, :kept] = values[int(offsets[row]) : int(offsets[row]) + kept]
    dense = jagged.jagged_to_padded_dense(values, offsets, longest, 7)
    assert dense.dtype == dtype
    assert torch.equal(dense, expected)
    assert torch.equal(jagged._padded_in_torch(values, offsets, longest, 7), expected)


def test_padded_dense_keeps_ids_that_a_float_cannot_hold():
    ids = torch.tensor([2**53 + 1, 2**62 + 3])
    assert jagged.jagged_to_padded_dense(ids, torch.tensor([0, 2]), 2).tolist() == [ids.tolist()]


def test_padded_dense_sends_gradients_back_to_the_rows_that_were_kept():
    values = torch.ones(4, 2, requires_grad=True)
    dense = jagged.jagged_to_padded_dense(values, torch.tensor([0, 3, 4]), 2)
    (dense * torch.arange(8.0).view(2, 2, 2)).sum().backward()
    assert_close(values.grad, torch.tensor([[0.0, 1.0], [2.0, 3.0], [0.0, 0.0], [4.0, 5.0]]))


@dataclass(frozen=True)
class Dealt:
    """Bags of ids, ``bags[feature][sample]``, and the row ranges that they fall into."""

    bags: list[list[list[int]]]
    bounds: list[list[int]]

    def tensors(
        self, lengths_dtype: torch.dtype, ids_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = [len(bag) for of_feature in self.bags for bag in of_feature]
        ids = [number for of_feature in self.bags for bag in of_feature for number in bag]
        return torch.tensor(lengths, dtype=lengths_dtype), torch.tensor(ids, dtype=ids_dtype)

    def due(self) -> tuple[list[int], list[int], list[int]]:
        """Lengths, ids and, for each place of the result, which id of the input stands there."""
        lengths, ids, source = [], [], []
        for bucket in range(len(self.bounds[0]) - 1):
            number = 0
            for of_feature, bounds in zip(self.bags, self.bounds, strict=True):
                low, high = bounds[bucket], bounds[bucket + 1]
                for bag in of_feature:
                    mine = [
                        (id_ - low, number + at) for at, id_ in enumerate(bag) if low <= id_ < high
                    ]
                    number += len(bag)
                    lengths.append(len(mine))
                    ids += [id_ for id_, _ in mine]
                    source += [place for _, place in mine]
        return lengths, ids, source


@st.composite
def dealt_bags(draw: st.DrawFn) -> Dealt:
    """Features with bags of their own number, and ranges that may be empty; often the equal ones of
    row-wise.
    """
    buckets = draw(st.integers(1, 9))
    bags, bounds = [], []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 12))
        if draw(st.booleans()):
            block = -(-rows // buckets)
            bounds.append([min(block * bucket, rows) for bucket in range(buckets + 1)])
        else:
            cuts = draw(st.lists(st.integers(0, rows), min_size=buckets - 1, max_size=buckets - 1))
            bounds.append([0, *sorted(cuts), rows])
        bag = st.lists(st.integers(0, rows - 1), max_size=5)
        bags.append(draw(st.lists(bag, max_size=4)))
    return Dealt(bags, bounds)


@pytest.mark.parametrize("run", [bucketize.bucketize, bucketize._in_torch])
@given(
    dealt=dealt_bags(),
    lengths_dtype=INTEGERS,
    ids_dtype=INTEGERS,
    weighted=st.booleans(),
    places=st.booleans(),
)
def test_bucketize_deals_ids_out_by_row_range(
    run: Callable[..., Any],
    dealt: Dealt,
    lengths_dtype: torch.dtype,
    ids_dtype: torch.dtype,
    weighted: bool,
    places: bool,
):
    lengths, ids = dealt.tensors(lengths_dtype, ids_dtype)
    weights = torch.arange(ids.numel()).float() if weighted else None
    segments = [len(of_feature) for of_feature in dealt.bags]
    found = run(lengths, ids, weights, segments, dealt.bounds, places)
    due_lengths, due_ids, source = dealt.due()
    assert (found.lengths.dtype, found.lengths.tolist()) == (lengths_dtype, due_lengths)
    assert (found.values.dtype, found.values.tolist()) == (ids_dtype, due_ids)
    assert (found.weights is not None) == weighted
    if found.weights is not None:
        assert found.weights.tolist() == source
    assert (found.places is not None) == places
    if found.places is not None:
        assert found.places.dtype == torch.int64
        assert torch.equal(
            found.places[torch.tensor(source, dtype=torch.int64)], torch.arange(ids.numel())
        )


@pytest.mark.parametrize("buckets", [2, 4, 300])
def test_bucketize_of_a_large_batch_equals_that_in_torch(buckets: int):
    lengths = torch.randint(0, 40, (2 * 500,))
    ids = torch.randint(0, 1000, (int(lengths.sum()),), dtype=torch.int32)
    block = -(-1000 // buckets)
    bounds = [
        [min(bucket * block, 1000) for bucket in range(buckets + 1)],
        [0, *[700] * (buckets - 1), 1000],
    ]
    weights = torch.rand(ids.numel())
    found = bucketize.bucketize(lengths, ids, weights, [500, 500], bounds, keep_places=True)
    due = bucketize._in_torch(lengths, ids, weights, [500, 500], bounds, keep_places=True)
    for mine, wanted in zip(
        (found.lengths, found.values, found.weights, found.places),
        (due.lengths, due.values, due.weights, due.places),
        strict=True,
    ):
        assert mine is not None and wanted is not None
        assert torch.equal(mine, wanted)


def test_bucketize_without_features_gives_nothing():
    nothing = torch.empty(0, dtype=torch.int64)
    found = bucketize.bucketize(nothing, nothing, None, [], [], keep_places=True)
    assert found.lengths.numel() == found.values.numel() == 0
    assert found.places is not None and found.places.numel() == 0

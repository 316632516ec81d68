"""Laws of ids: shares, distinct rows and hot rows, against the law written out, and against ids
drawn from it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tutorec.datasets.ids import power_law_ids, uniform_ids
from tutorec.distributed.simulate.ids import IdLaw, PowerLaw, RowShares, Uniform


def each_row(rows: int, exponent: float) -> np.ndarray:
    mass = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return mass / mass.sum()


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.3])
@pytest.mark.parametrize("rows", [1, 3, 4096, 4097, 200_000])
def test_a_power_law_is_the_law_row_by_row(rows, exponent):
    shares = PowerLaw(exponent).over(rows)
    ends = np.unique(np.linspace(0, rows, 50).astype(np.int64))
    wanted = np.concatenate([[0.0], np.cumsum(each_row(rows, exponent))])[ends]
    assert shares.below(ends) == pytest.approx(wanted, rel=1e-3, abs=1e-12)
    assert shares.below(np.array([0, rows])).tolist() == [0.0, pytest.approx(1.0)]


@pytest.mark.parametrize("exponent", [0.8, 1.05])
def test_distinct_rows_of_a_power_law_are_those_of_the_law_row_by_row(exponent):
    rows, ids = 50_000, 20_000
    missed = np.exp(ids * np.log1p(-each_row(rows, exponent)))
    starts, ends = np.array([0, 1, 1000, 25_000]), np.array([rows, 1000, 25_000, rows])
    wanted = [(1 - missed[start:end]).sum() for start, end in zip(starts, ends, strict=True)]
    assert PowerLaw(exponent).over(rows).distinct(ids, starts, ends) == pytest.approx(
        wanted, rel=2e-3
    )


@pytest.mark.parametrize(
    ("law", "drawn"),
    [
        (Uniform(), lambda draw: uniform_ids(40_000, 9_000, draw)),
        (PowerLaw(1.05), lambda draw: power_law_ids(40_000, 9_000, 1.05, draw)),
    ],
)
def test_drawn_ids_follow_the_law(law: IdLaw, drawn):
    ids = drawn(torch.Generator().manual_seed(0)).numpy()
    shares = law.over(9_000)
    starts, ends = np.array([0, 10, 3_000, 6_000]), np.array([10, 3_000, 6_000, 9_000])
    counted = [
        np.count_nonzero((start <= ids) & (ids < end)) / len(ids)
        for start, end in zip(starts, ends, strict=True)
    ]
    assert shares.below(ends) - shares.below(starts) == pytest.approx(counted, abs=0.02)
    distinct = [
        len(np.unique(ids[(start <= ids) & (ids < end)]))
        for start, end in zip(starts, ends, strict=True)
    ]
    assert shares.distinct(len(ids), starts, ends) == pytest.approx(distinct, rel=0.05)


def test_hashed_ids_keep_their_shares_and_lose_their_places():
    sorted_by_use, hashed = PowerLaw(1.1).over(10**6), PowerLaw(1.1, scattered=3).over(10**6)
    hot, moved = sorted_by_use.hottest(5), hashed.hottest(5)
    assert [row for row, _ in hot] == [0, 1, 2, 3, 4]
    assert [share for _, share in moved] == pytest.approx([share for _, share in hot])
    assert len({row for row, _ in moved} & {0, 1, 2, 3, 4}) == 0
    assert hashed.shares.sum() == pytest.approx(1.0)
    # A quarter of the rows has most of the ids in the one, and about a quarter, with its luck, in
    # the other.
    quarter = np.array([250_000])
    assert sorted_by_use.below(quarter)[0] > 0.9
    assert 0.1 < hashed.below(quarter)[0] < 0.5
    whole = np.array([0]), np.array([10**6])
    assert hashed.distinct(1e5, *whole) == pytest.approx(sorted_by_use.distinct(1e5, *whole))
    halves = hashed.distinct(1e5, np.array([0, 500_000]), np.array([500_000, 10**6]))
    assert halves[0] == pytest.approx(halves[1], rel=0.05)
    assert PowerLaw(1.1, scattered=3).over(10**6).edges.tolist() == hashed.edges.tolist()


def test_rows_that_no_id_names_are_not_hot():
    assert RowShares(np.array([0, 2, 8]), np.array([1.0, 0.0])).hottest(5) == [(0, 0.5), (1, 0.5)]
    assert Uniform().over(3).distinct(0.0, np.array([0]), np.array([3])).tolist() == [0.0]


def test_laws_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"exponent=-1 .* at least 0"):
        PowerLaw(-1)
    with pytest.raises(ValueError, match="exponent=nan"):
        PowerLaw(float("nan"))

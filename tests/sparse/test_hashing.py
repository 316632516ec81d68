import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutorec.sparse.hashing import collision_meter, collision_rate, mixing_hash, modulo_hash


def splitmix64(number: int, seed: int) -> int:
    """The same mix in Python's unbounded integers."""
    mask = (1 << 64) - 1
    bits = (number + 0x9E3779B97F4A7C15 * (seed + 1)) & mask
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
    bits ^= bits >> 31
    return bits - (1 << 64) if bits >> 63 else bits


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(1, 10_000), st.integers(0, 5))
def test_mixing_hash_is_splitmix64(ids: list[int], rows: int, seed: int) -> None:
    hashed = mixing_hash(torch.tensor(ids, dtype=torch.int64), rows, seed)
    assert hashed.tolist() == [splitmix64(number, seed) % rows for number in ids]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(1, 10_000))
def test_modulo_hash_is_the_remainder(ids: list[int], rows: int) -> None:
    assert modulo_hash(torch.tensor(ids, dtype=torch.int64), rows).tolist() == [number % rows for number in ids]


def test_mixing_hash_breaks_a_pattern_that_modulo_keeps() -> None:
    ids = torch.arange(0, 64_000, 64)
    assert collision_rate(ids, 1024, modulo_hash) > 0.98
    assert collision_rate(ids, 1024) < 0.45


def test_collision_rate_is_the_birthday_formulas() -> None:
    ids, rows = torch.arange(5_000), 20_000
    expected = 1 - rows * (1 - (1 - 1 / rows) ** 5_000) / 5_000
    assert math.isclose(collision_rate(ids, rows), expected, abs_tol=0.01)
    assert collision_rate(ids.repeat(2), rows) == collision_rate(ids, rows)


def test_collision_rate_of_nothing_is_zero() -> None:
    assert collision_rate(torch.tensor([], dtype=torch.int64), 10) == 0.0


@pytest.mark.parametrize("rows", [0, -3, 2**63, 2**64])
def test_a_number_of_rows_that_cannot_be_is_refused(rows: int) -> None:
    for hashing in (modulo_hash, mixing_hash):
        with pytest.raises(ValueError, match=rf"must be from 1 to 2\*\*63 - 1, got {rows}"):
            hashing(torch.tensor([1]), rows)
        assert hashing(torch.tensor([-1]), 2**63 - 1).item() >= 0


@pytest.mark.parametrize("hash", [modulo_hash, mixing_hash])
def test_ids_that_are_not_whole_numbers_are_refused(hash):
    with pytest.raises(ValueError, match=r"torch\.float32 of shape \[2\]: convert them, ids\.long\(\)"):
        hash(torch.tensor([1.5, 2.0]), 10)


def company(ids: list[int], rows: int) -> dict[int, list[int]]:
    """For each distinct id the others of its row, in plain Python."""
    distinct = sorted(set(ids))
    return {one: [other for other in distinct if other != one and other % rows == one % rows] for one in distinct}


@given(st.lists(st.integers(-40, 40)), st.integers(1, 30))
def test_the_meter_counts_who_shares_a_row(ids: list[int], rows: int) -> None:
    found = collision_meter(torch.tensor(ids, dtype=torch.int64), rows, modulo_hash)
    others = company(ids, rows)
    assert (found.rows, found.ids, found.lookups) == (rows, len(others), len(ids))
    assert found.occupied_rows == len({one % rows for one in ids})
    assert found.colliding_ids == sum(1 for one in others if others[one])
    assert found.colliding_lookups == sum(1 for one in ids if others[one])
    assert {one: found.partners(one) for one in others} == others
    groups = {tuple(sorted([one, *others[one]])) for one in others if others[one]}
    assert sorted(map(tuple, found.groups(1000))) == sorted(groups)
    assert [len(group) for group in found.groups(1000)] == sorted(map(len, groups), reverse=True)
    assert found.groups(1) == found.groups(1000)[:1]
    rate = collision_rate(torch.tensor(ids, dtype=torch.int64), rows, modulo_hash)
    assert math.isclose(found.displaced_share, rate)


@pytest.mark.parametrize(("ids", "rows"), [(2_000, 20_000), (5_000, 5_000), (20_000, 1_000), (3, 1), (1, 1), (0, 7)])
def test_a_mixing_hash_collides_as_the_birthday_formula_expects(ids: int, rows: int) -> None:
    found = collision_meter(torch.arange(ids) * 977, rows)
    assert math.isclose(found.id_share, found.expected_share, abs_tol=0.02)
    assert math.isclose(found.lookup_share, found.expected_share, abs_tol=0.02)
    assert math.isclose(found.displaced_share, found.expected_displaced_share, abs_tol=0.02)


def test_expected_shares_are_those_of_a_fair_die() -> None:
    found = collision_meter(torch.arange(3), 6)
    assert math.isclose(found.expected_share, 1 - (5 / 6) ** 2)
    assert math.isclose(found.expected_displaced_share, 1 - 6 * (1 - (5 / 6) ** 3) / 3)


def test_look_ups_of_hot_ids_weigh_more() -> None:
    found = collision_meter(torch.tensor([1, 11, 2, 3] + [1] * 16), 10, modulo_hash)
    assert (found.id_share, found.lookup_share) == (0.5, 0.9)


def test_the_meter_prints_what_it_measured_beside_what_is_expected() -> None:
    assert str(collision_meter(torch.tensor([1, 11, 11, 11, 2, 3, 21, 31, 41, 51]), 10, modulo_hash)).splitlines() == [
        "8 distinct ids in 10 rows: 3 rows are used",
        "ids that share a row        75.00%   expected  52.17%",
        "look-ups of a shared row    80.00%   expected  52.17%",
        "ids beyond a row's first    62.50%   expected  28.81%",
        "most crowded row: 6 ids: 1, 11, 21, 31, 41, ...",
    ]


@pytest.mark.parametrize(
    "hash", [lambda ids, rows: ids, lambda ids, rows: ids[:1] % rows, lambda ids, rows: ids / rows]
)
def test_a_hash_that_gives_no_rows_is_refused(hash) -> None:
    with pytest.raises(ValueError, match=r"for 2 ids; it must give one row from 0 to 9 for each id"):
        collision_meter(torch.tensor([5, 25]), 10, hash)


def test_ids_that_are_no_tensor_are_refused() -> None:
    with pytest.raises(TypeError, match="ids are a tensor of whole numbers, got list"):
        collision_meter([1, 2], 10)  # type: ignore[arg-type]

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutorec.sparse.hashing import collision_meter, hash_strings, mixing_hash, modulo_hash


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


@given(st.lists(st.integers(0, 2**64 - 1)), st.integers(1, 10_000))
def test_mixing_hash_of_unsigned_ids_is_splitmix64(ids: list[int], rows: int) -> None:
    hashed = mixing_hash(torch.tensor(ids, dtype=torch.uint64), rows)
    assert hashed.tolist() == [splitmix64(number, 0) % rows for number in ids]


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64]
)
def test_a_number_has_one_row_whatever_its_type(dtype: torch.dtype) -> None:
    ids = torch.arange(200)
    assert torch.equal(mixing_hash(ids.to(dtype), 1000), mixing_hash(ids, 1000))


def test_hashes_are_those_of_every_process_and_version() -> None:
    # splitmix64 by its published constants, and the published FNV-1a of "foobar"
    assert mixing_hash(torch.tensor([0, 1, -1]), 2**63 - 1).tolist() == [
        splitmix64(number, 0) % (2**63 - 1) for number in (0, 1, -1)
    ]
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF - 2**64
    assert hash_strings(["foobar"]).item() == 0x85944171F73967E8 - 2**64


def test_numbers_are_sent_from_the_hash_of_strings_to_that_of_numbers() -> None:
    with pytest.raises(ValueError, match=r"1.*7, not.*mixing_hash"):
        hash_strings(["a", 7])  # type: ignore[list-item]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(1, 10_000))
def test_modulo_hash_is_the_remainder(ids: list[int], rows: int) -> None:
    assert modulo_hash(torch.tensor(ids, dtype=torch.int64), rows).tolist() == [
        number % rows for number in ids
    ]


def test_mixing_hash_breaks_a_pattern_that_modulo_keeps() -> None:
    ids = torch.arange(0, 64_000, 64)
    assert collision_meter(ids, 1024, modulo_hash).occupied_rows < 0.02 * len(ids)
    assert collision_meter(ids, 1024).occupied_rows > 0.55 * len(ids)


@pytest.mark.parametrize("rows", [0, -3, 2**63, 2**64])
def test_a_number_of_rows_that_cannot_be_is_refused(rows: int) -> None:
    for hashing in (modulo_hash, mixing_hash):
        with pytest.raises(ValueError, match=rf"must be from 1 to 2\*\*63 - 1, got {rows}"):
            hashing(torch.tensor([1]), rows)
        assert hashing(torch.tensor([-1]), 2**63 - 1).item() >= 0


@pytest.mark.parametrize("hash", [modulo_hash, mixing_hash])
def test_ids_that_are_not_whole_numbers_are_refused(hash):
    with pytest.raises(ValueError, match=r"torch\.float32.*\[2\].*ids\.long\(\)"):
        hash(torch.tensor([1.5, 2.0]), 10)


def company(ids: list[int], rows: int) -> dict[int, list[int]]:
    """For each distinct id the others of its row, in plain Python."""
    distinct = sorted(set(ids))
    return {
        one: [other for other in distinct if other != one and other % rows == one % rows]
        for one in distinct
    }


@given(st.lists(st.integers(-40, 40)), st.integers(1, 30))
def test_the_meter_counts_who_shares_a_row(ids: list[int], rows: int) -> None:
    meter = collision_meter(torch.tensor(ids, dtype=torch.int64), rows, modulo_hash)
    others = company(ids, rows)
    assert (meter.rows, meter.ids, meter.lookups) == (rows, len(others), len(ids))
    assert meter.occupied_rows == len({one % rows for one in ids})
    assert meter.colliding_ids == sum(1 for one in others if others[one])
    assert meter.colliding_lookups == sum(1 for one in ids if others[one])
    assert {one: meter.partners(one) for one in others} == others


@pytest.mark.parametrize(
    ("ids", "rows"), [(2_000, 20_000), (5_000, 5_000), (20_000, 1_000), (3, 1), (1, 1), (0, 7)]
)
def test_a_mixing_hash_collides_as_the_birthday_formula_expects(ids: int, rows: int) -> None:
    meter = collision_meter(torch.arange(ids) * 977, rows)
    assert math.isclose(meter.id_share, meter.expected_share, abs_tol=0.02)
    assert math.isclose(meter.lookup_share, meter.expected_share, abs_tol=0.02)


def test_expected_shares_are_those_of_a_fair_die() -> None:
    meter = collision_meter(torch.arange(3), 6)
    assert math.isclose(meter.expected_share, 1 - (5 / 6) ** 2)


def test_look_ups_of_hot_ids_weigh_more() -> None:
    meter = collision_meter(torch.tensor([1, 11, 2, 3] + [1] * 16), 10, modulo_hash)
    assert (meter.id_share, meter.lookup_share) == (0.5, 0.9)

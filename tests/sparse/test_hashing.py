import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY

from tutorec.sparse.hashing import collision_rate, mixing_hash, modulo_hash


def splitmix64(number: int, seed: int) -> int:
    """The same mix in Python's unbounded integers."""
    mask = (1 << 64) - 1
    bits = (number + 0x9E3779B97F4A7C15 * (seed + 1)) & mask
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
    bits ^= bits >> 31
    return bits - (1 << 64) if bits >> 63 else bits


@PROPERTY
@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(1, 10_000), st.integers(0, 5))
def test_mixing_hash_is_splitmix64(ids: list[int], rows: int, seed: int) -> None:
    hashed = mixing_hash(torch.tensor(ids, dtype=torch.int64), rows, seed)
    assert hashed.tolist() == [splitmix64(number, seed) % rows for number in ids]


@PROPERTY
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


@pytest.mark.parametrize("rows", [0, -3])
def test_a_table_without_rows_is_refused(rows: int) -> None:
    for hashing in (modulo_hash, mixing_hash):
        with pytest.raises(ValueError, match=f"must be positive, got {rows}"):
            hashing(torch.tensor([1]), rows)


@pytest.mark.parametrize("hash", [modulo_hash, mixing_hash])
def test_ids_that_are_not_whole_numbers_are_refused(hash):
    with pytest.raises(ValueError, match=r"torch\.float32 of shape \[2\]: convert them, ids\.long\(\)"):
        hash(torch.tensor([1.5, 2.0]), 10)

"""Indices of ids beside dictionaries."""

import random

import pytest
import torch

from tutorec._kernels.id_index import IdIndex, IdIndices

SIZES = [[1], [2, 100], [29, 58, 29], [3000, 10, 1000], [100, 100]]
LEAST, MOST = -(2**63), 2**63 - 1


def drawn(draw: random.Random, count: int, kind: str) -> list[int]:
    """Distinct ids."""
    if kind == "rising":
        return list(range(count))
    if kind == "high bits":
        return [number << 40 for number in range(count)]
    if kind == "strided":
        return [-7919 * number for number in range(count)]
    return draw.sample([LEAST, MOST, -1, *(draw.getrandbits(63) for _ in range(count))], count)


def filled(index: IdIndex, ids: list[int]) -> dict[int, int]:
    rows = list(range(len(ids)))
    index.fill(torch.tensor(ids, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64))
    return dict(zip(ids, rows, strict=True))


@pytest.mark.parametrize("kind", ["rising", "high bits", "strided", "any"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_indices_answer_as_dictionaries_do(sizes: list[int], kind: str) -> None:
    draw = random.Random(1)
    indices = IdIndices(sizes)
    oracles = [
        filled(index, drawn(draw, size, kind))
        for index, size in zip(indices.tables, sizes, strict=True)
    ]
    for _ in range(3):
        asked, expected, counts, absent = [], [], [], []
        for index, oracle in zip(indices.tables, oracles, strict=True):
            left = draw.sample(list(oracle), len(oracle) // 2)
            rows = [oracle.pop(number) for number in left]
            came = [number for number in drawn(draw, 4 * len(rows), "any") if number not in oracle]
            came = came[: len(rows)]
            index.replace(*(torch.tensor(each, dtype=torch.int64) for each in (left, came, rows)))
            oracle.update(zip(came, rows, strict=True))
            ids = [*oracle, *left, 0, 1, LEAST, MOST]
            draw.shuffle(ids)
            answer = [oracle.get(number, -1) for number in ids]
            assert index.find(torch.tensor(ids)).tolist() == answer
            last = sizes[len(counts)] - 1
            expected += [last if row < 0 else row for row in answer]
            asked, counts, absent = asked + ids, [*counts, len(ids)], [*absent, answer.count(-1)]
        rows, misses = indices.find(torch.tensor(asked), counts)
        assert rows.tolist() == expected
        assert misses == absent


@pytest.mark.parametrize("kind", ["rising", "high bits", "any"])
def test_slots_double_as_ids_come(kind: str) -> None:
    indices, draw = IdIndices([4000, 50]), random.Random(1)
    oracles = [filled(index, drawn(draw, 20, "any")) for index in indices.tables]
    index, oracle = indices.tables[0], oracles[0]
    for ids in torch.tensor(drawn(draw, 3900, kind)).split(300):
        came = ids[[number not in oracle for number in ids.tolist()]]
        rows = torch.arange(len(oracle), len(oracle) + len(came))
        index.replace(came[:0], came, rows)
        oracle.update(zip(came.tolist(), rows.tolist(), strict=True))
        for one, held in zip(indices.tables, oracles, strict=True):
            assert one.find(torch.tensor([*held])).tolist() == [*held.values()]
            assert len(held) <= 1 << one.bits <= max(32, 4 * len(held))


def test_other_hash_functions_are_taken_when_ids_find_no_slot() -> None:
    indices, draw = IdIndices([50, 100]), random.Random(1)
    indices.factors = (1, 1)  # both slots of an id have the same number
    oracles = [
        filled(index, drawn(draw, size, "any"))
        for index, size in zip(indices.tables, (50, 100), strict=True)
    ]
    assert indices.factors != (1, 1)
    for index, oracle in zip(indices.tables, oracles, strict=True):
        assert index.find(torch.tensor([*oracle])).tolist() == [*oracle.values()]


def test_an_id_that_is_there_more_than_twice_is_an_error() -> None:
    [index] = IdIndices([10]).tables
    with pytest.raises(RuntimeError, match="no slot for 1 ids"):
        index.fill(torch.tensor([5, 5, 5]), torch.tensor([0, 1, 2]))

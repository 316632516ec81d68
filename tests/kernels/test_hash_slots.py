"""Hash tables in tensors: equal to lists and loops, on both backends, whatever the order of the
batch.
"""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import torch
from kernels.implementations import needs_fbgemm
from kernels.slot_table import SlotTable, murmur3
from torch import Tensor

from tutorec._kernels import hash_slots
from tutorec._kernels.backend import use_backend
from tutorec._kernels.hash_slots import (
    Claims,
    Eviction,
    Probing,
    claim_slots,
    find_slots,
    find_slots_in_torch,
)

EDGES = [0, 1, 2, -2, 2**62, -(2**62), 2**63 - 1, -(2**63)]


@pytest.fixture(params=["torch", pytest.param("fbgemm", marks=needs_fbgemm)], autouse=True)
def _each_backend(request: pytest.FixtureRequest):
    with use_backend(request.param):
        yield


class TensorTable:
    """The same table as the oracle's, in tensors."""

    def __init__(self, oracle: SlotTable) -> None:
        self.oracle = oracle
        self.identities = torch.full([oracle.rows, 1], -1)
        self.ages = torch.full([oracle.rows, 1], -1, dtype=torch.int32)
        self.probing = Probing(oracle.max_probe, oracle.reserved, oracle.fallback)

    def buckets(self, ids: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if self.oracle.buckets == 1:
            return None, None
        size = self.oracle.rows // self.oracle.buckets
        return torch.full_like(ids, size), ids % self.oracle.buckets * size

    def find(self, numbers: list[int]) -> list[int]:
        ids = torch.tensor(numbers, dtype=torch.int64)
        return find_slots(ids, self.identities, *self.buckets(ids), self.probing).tolist()

    def learn(
        self, numbers: list[int], scores: list[int], threshold: int, opted_in: Tensor | None = None
    ) -> Claims:
        ids = torch.tensor(numbers, dtype=torch.int64)
        oldest = self.oracle.evicts == "oldest"
        eviction = Eviction(self.ages, torch.tensor(scores, dtype=torch.int32), threshold, oldest)
        if self.oracle.evicts == "never":
            eviction = None
        return claim_slots(
            ids, self.identities, *self.buckets(ids), self.probing, eviction, opted_in
        )


TABLES = [
    pytest.param(
        SlotTable(*numbers, evicts, fallback),
        id=f"{evicts}-{'-'.join(map(str, numbers))}-{fallback}",
    )
    for evicts in ("never", "first", "oldest")
    for numbers, fallback in [
        ((32, 1, 6, 0), True),
        ((40, 2, 4, 3), True),
        ((24, 1, 40, 0), False),
        ((64, 4, 1, 0), True),
    ]
]


@pytest.mark.parametrize("oracle", TABLES)
def test_a_stream_of_batches_gives_the_slots_of_the_oracle(oracle: SlotTable):
    oracle.__post_init__()
    table, draw = TensorTable(oracle), random.Random(str(oracle))
    evictions = 0
    for hour in range(40):
        numbers = [
            draw.choice(EDGES) if draw.random() < 0.1 else draw.randrange(hour, hour + 60)
            for _ in range(12)
        ]
        scores = [hour + draw.choice([1, 4]) for _ in numbers]
        expected, evicted = oracle.learn(numbers, scores, hour)
        claims = table.learn(numbers, scores, hour)
        assert claims.slots.tolist() == expected, f"hour {hour}"
        assert set(claims.evicted.tolist()) == evicted, f"hour {hour}"
        assert table.identities[:, 0].tolist() == oracle.ids
        assert claims.shared.numel() == sum(oracle.slot(number) is None for number in numbers)
        assert oracle.evicts == "never" or table.ages[:, 0].tolist() == oracle.scores
        asked = [*numbers, *range(hour + 60)]
        assert table.find(asked) == [oracle.answer(number) for number in asked]
        evictions += len(evicted)
    assert (evictions > 20) == (oracle.evicts != "never"), "the stream has to press on the table"


@pytest.mark.parametrize("evicts", ["never", "first", "oldest"])
def test_the_order_of_a_batch_and_the_number_of_steps_change_nothing(evicts: str):
    oracle, draw = SlotTable(60, 1, 5, 0, evicts), random.Random(3)
    given, shuffled = TensorTable(oracle), TensorTable(oracle)
    for hour in range(12):
        numbers = [draw.randrange(200) for _ in range(30)]
        given.learn(numbers, [hour + 2] * 30, hour)
        with patch.object(hash_slots, "_STEP_ENTRIES", 20):
            shuffled.learn(draw.sample(numbers, 30), [hour + 2] * 30, hour)
        assert torch.equal(given.identities, shuffled.identities)
        assert torch.equal(given.ages, shuffled.ages)


def test_an_id_is_inserted_once_when_one_of_its_places_in_the_batch_is_opted_in():
    oracle = SlotTable(20, 1, 15, 5)
    table = TensorTable(oracle)
    numbers = [7, 8, 7, 9]
    claims = table.learn(numbers, [0] * 4, 0, opted_in=torch.tensor([False, False, True, False]))
    inserted = table.identities[claims.slots, 0].tolist()
    assert (claims.inserted, claims.shared.numel()) == (1, 2)
    assert inserted == [7, -1, 7, -1]
    assert [int(claims.slots[place]) for place in (1, 3)] == [
        15 + murmur3(8) % 5,
        15 + murmur3(9) % 5,
    ]


def test_slots_found_in_plain_torch_and_by_fbgemm_are_equal_in_any_table():
    # Also in tables that no insertion makes: with empty slots in front of an id, and ids twice.
    numbers = torch.Generator().manual_seed(5)
    for rows, reserved, max_probe in [(8, 0, 3), (96, 4, 1), (1000, 0, 128), (50, 7, 200)]:
        identities = torch.randint(-1, 3 * rows, [rows, 1], generator=numbers)
        ids = torch.cat(
            [torch.randint(-(2**62), 2**62, [200], generator=numbers), torch.arange(3 * rows)]
        )
        for fallback in (False, True):
            for sizes, offsets in [
                (None, None),
                (torch.full_like(ids, rows // 2), ids % 2 * (rows // 2)),
            ]:
                given = (ids, identities, sizes, offsets, Probing(max_probe, reserved, fallback))
                assert torch.equal(find_slots(*given), find_slots_in_torch(*given))


def test_an_empty_batch_changes_nothing():
    table = TensorTable(SlotTable(8, evicts="first"))
    claims = table.learn([], [], 5)
    assert (claims.slots.tolist(), claims.inserted, claims.shared.numel()) == ([], 0, 0)
    assert table.find([]) == []


def test_plain_torch_compiles_under_torchscript():
    identities = torch.tensor([[7], [-1], [5], [-1]])

    def found(ids: Tensor, identities: Tensor) -> Tensor:
        return find_slots(ids, identities, None, None, Probing(4, 0, False))

    scripted = torch.jit.script(found)
    assert scripted(torch.tensor([5, 7, 6]), identities).tolist() == [2, 0, -1]

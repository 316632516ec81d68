"""The solutions of chapter 18's exercises, against the library that they are about."""

from __future__ import annotations

import torch

from tutorec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    MCHManagedCollisionModule,
)
from tutorec.sparse.jagged import JaggedTensor
from tutorec.spmd import device
from tutorec.teach import check


def test_the_remapping_table_takes_the_bytes_of_the_hashed_one():
    mapping = MCHManagedCollisionModule(1000, device(), DistanceLFU_EvictionPolicy(), 1)
    each = 4 * 64 + 4 + mapping.row_bytes()
    rows = check.find("18.1").right
    assert rows * each <= 100_000_000 * 260 < (rows + 1) * each


def test_a_new_id_gets_a_row_in_the_batch_that_the_solution_says():
    exercise = check.find("18.2")
    for (least, seen), right in zip(exercise.cases, exercise.right, strict=True):
        mapping = MCHManagedCollisionModule(3, device(), LFU_EvictionPolicy(), 1)

        def rows(*ids: int, mapping: MCHManagedCollisionModule = mapping) -> list[int]:
            lists = JaggedTensor(
                torch.tensor(ids, device=device()),
                lengths=torch.tensor([len(ids)], device=device()),
            )
            return mapping({"t": lists})["t"].values().tolist()

        rows(*[1] * 50, *[2] * least)
        batches = (k for k, count in enumerate(seen) if rows(*[9] * count, 8)[0] != 2 and count)
        assert next(batches, -1) == right

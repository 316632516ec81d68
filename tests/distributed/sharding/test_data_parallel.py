"""Tables that every rank has: copies that stay equal, gradients that travel as bags or as sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.cases import (
    batch,
    coefficients,
    collection,
    held,
    samples_of,
    seed_of,
    shard,
)

from tutorec._kernels.backend import use_backend

STEPS = 3


def train(rank: int, world_size: int, optimizer: str, backend: str, kernel: str = "fused") -> dict[str, Any]:
    with use_backend(backend):
        sharded = shard(collection(), optimizer, kernel, "data_parallel")
        outputs = []
        for step in range(STEPS):
            pooled = sharded(batch(seed_of(rank, step), samples_of(rank, step))).values()
            outputs.append(pooled.detach())
            (pooled * coefficients(pooled, seed_of(rank, step))).sum().backward()
    return {"outputs": outputs, "held": held(sharded)}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.world4)])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad"])
def test_copies_are_the_same_to_the_last_bit(ranks, optimizer, backend, world_size):
    first, *others = ranks(world_size).run(train, optimizer=optimizer, backend=backend)
    assert all(len(pieces) == 1 for pieces in first["held"].values())
    for other in others:
        for name, [(place, rows, state)] in first["held"].items():
            [(same_place, same_rows, same_state)] = other["held"][name]
            assert place == same_place == [0, 0] and torch.equal(rows, same_rows)
            assert (state is None) == (optimizer == "exact_sgd") and (state is None or torch.equal(state, same_state))

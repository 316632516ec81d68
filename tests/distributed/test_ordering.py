"""Ranks that come late to every collective compute the same bits: nothing depends on
who is first.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from distributed.cases import (
    KINDS,
    batch,
    coefficients,
    collection,
    held,
    samples_of,
    seed_of,
    shard,
)
from torch import Tensor

from tutorec.distributed import comm

LONGEST = 0.004  # seconds
STEPS = 3


@contextmanager
def late(rank: int, draw_from: int | None) -> Iterator[list[str]]:
    """Sleep before each collective, each rank for other times; gives the stages that were late."""
    draw = random.Random(1000 * (draw_from or 0) + rank)
    stages: list[str] = []

    def sleep(issue: comm.Issue) -> None:
        stages.append(issue.stage)
        if draw_from is not None:
            time.sleep(draw.random() * LONGEST)

    comm.observers.append(sleep)
    try:
        yield stages
    finally:
        comm.observers.remove(sleep)


def trained(
    rank: int, world_size: int, kinds: list[str], draw_from: int | None
) -> dict[str, list[Tensor]]:
    """Outputs of every step, then rows and state, of each kind."""
    found: dict[str, list[Tensor]] = {}
    for kind in kinds:
        with late(rank, draw_from) as stages:
            sharded = shard(collection(), "exact_row_wise_adagrad", kind=kind)
            outputs = []
            for step in range(STEPS):
                # Two batches are on their way at once, and the second is asked for first.
                first, second = (
                    sharded(batch(seed_of(rank, 10 * step + i), samples_of(rank, step)))
                    for i in range(2)
                )
                outputs += [second.values(), first.values()]
                loss = sum(
                    (out * coefficients(out, seed_of(rank, step))).sum() for out in outputs[-2:]
                )
                assert isinstance(loss, Tensor), "two batches have a loss"
                loss.backward()
        assert world_size == 1 or stages, "a step sends something"
        rest = [
            part
            for own in held(sharded).values()
            for _, rows, states in own
            for part in (rows, *states.values())
        ]
        found[kind] = [*(out.detach() for out in outputs), *rest]
    return found


@pytest.mark.parametrize(
    ("world_size", "hosts"),
    [(2, 1), pytest.param(4, 2, marks=pytest.mark.world4)],
    ids=["w2", "w4"],
)
def test_random_sleeps_before_every_collective_change_no_bit(ranks, world_size, hosts):
    kinds = [*KINDS, "mixed"]
    pool = ranks(world_size, hosts=hosts)
    calm = pool.run(trained, kinds=kinds, draw_from=None)
    for draw_from in (1, 2):
        shaken = pool.run(trained, kinds=kinds, draw_from=draw_from)
        for rank, kind in product(range(world_size), kinds):
            pairs = zip(calm[rank][kind], shaken[rank][kind], strict=True)
            assert all(torch.equal(x, y) for x, y in pairs), (
                f"{kind}, rank {rank}, sleeps {draw_from}"
            )

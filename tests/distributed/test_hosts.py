"""Bytes that cross between hosts: types made for several hosts use the groups of a host, and follow
the plan's host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from distributed.cases import batch, group, tables

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
)
from tutorec.distributed.traffic import Traffic, count_traffic
from tutorec.modules.embedding_modules import EmbeddingBagCollection

pytestmark = pytest.mark.world4

WORLD = 4
ROWS_HOME, GRADIENTS = "output rows", "output gradients"
WORDS: dict[str, Callable[[int, int], Any]] = {
    "row_wise": lambda host, hosts: row_wise(),
    "table_row_wise": lambda host, hosts: table_row_wise(host),
    "table_column_wise": lambda host, hosts: table_column_wise(host_index=host),
    "grid_shard": lambda host, hosts: grid_shard([(host + i) % hosts for i in range(hosts)]),
}


def one_step(rank: int, world_size: int, kind: str, host: int) -> Traffic:
    """A step of the table of 11 x 8, the first half of it on ``host`` where the type
    knows hosts.
    """
    ebc = EmbeddingBagCollection(tables()[:1])
    env = ShardingEnv.from_process_group(group())
    hosts = world_size // env.local_size
    words = {"t0": WORDS[kind](host % hosts, hosts)}
    plan = construct_module_sharding_plan(ebc, words, local_size=env.local_size)
    sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, env)
    features = batch(7, 5)  # alike on all ranks, so that bytes depend on places only
    sharded(features).values().sum().backward()
    with count_traffic() as traffic:
        sharded(features).values().sum().backward()
    return traffic


def steps(rank: int, world_size: int, hosts: list[int]) -> dict[tuple[str, int], Traffic]:
    return {
        (kind, host): one_step(rank, world_size, kind, host) for kind in WORDS for host in hosts
    }


@pytest.fixture(scope="module")
def counted(ranks) -> Callable[[int], dict[tuple[str, int], Traffic]]:
    """``counted(hosts)[kind, host]``: what all ranks sent in a step."""
    done: dict[int, dict[tuple[str, int], Traffic]] = {}

    def of_hosts(hosts: int) -> dict[tuple[str, int], Traffic]:
        if hosts not in done:
            of_ranks = ranks(WORLD, hosts=hosts).run(steps, hosts=[0, 1])
            done[hosts] = {
                key: Traffic.merge(found[key] for found in of_ranks) for key in of_ranks[0]
            }
        return done[hosts]

    return of_hosts


@pytest.mark.parametrize("kind", WORDS)
def test_only_on_two_hosts_do_bytes_cross(counted, kind):
    assert counted(1)[kind, 0].total(crossing=True) == 0
    assert counted(1)[kind, 0].total() > 0
    assert counted(2)[kind, 0].total(crossing=True) > 0


@pytest.mark.parametrize("kind", ["table_row_wise", "table_column_wise"])
def test_a_table_that_moves_to_the_other_host_turns_the_crossing_bytes_round(counted, kind):
    here, there = (counted(2)[kind, host] for host in (0, 1))
    for stage in ("input ids", ROWS_HOME, GRADIENTS):
        crossing = here.matrix(WORLD, stage, crossing=True)
        assert crossing != there.matrix(WORLD, stage, crossing=True)
        # Ranks 0, 1 and 2, 3 change places.
        turned = [
            [crossing[(i + 2) % WORLD][(j + 2) % WORLD] for j in range(WORLD)] for i in range(WORLD)
        ]
        assert there.matrix(WORLD, stage, crossing=True) == turned
    ids = here.matrix(WORLD, "input ids", crossing=True)
    assert ids[0] == ids[1] == [0] * WORLD  # the table's own host has no id to send away
    assert sum(ids[2][:2]) > 0


def test_slices_of_a_grid_that_change_hosts_swap_their_bytes(counted):
    here, there = (counted(2)["grid_shard", host] for host in (0, 1))
    # Both halves are equally wide: what is swapped inside is the same from outside.
    assert here.matrix(WORLD, ROWS_HOME) == there.matrix(WORLD, ROWS_HOME)
    assert here.total(ROWS_HOME, crossing=True) > 0


@pytest.mark.parametrize("kind", ["table_row_wise", "grid_shard"])
@pytest.mark.parametrize("stage", [ROWS_HOME, GRADIENTS])
def test_sums_are_made_inside_a_host_and_cross_between_ranks_of_one_local_index(
    counted, kind, stage
):
    sent = counted(2)[kind, 0].matrix(WORLD, stage)
    for source in range(WORLD):
        for destination in range(WORLD):
            if source // 2 != destination // 2 and source % 2 != destination % 2:
                assert sent[source][destination] == 0, f"{source} -> {destination}: {sent}"
    assert sent[0][1] > 0 and sent[1][0] > 0
    assert sent[0][2] > 0 or sent[2][0] > 0


@pytest.mark.parametrize("kind", ["table_row_wise", "table_column_wise", "grid_shard"])
def test_fewer_bytes_of_rows_cross_than_by_row_wise(counted, kind):
    rows = counted(2)["row_wise", 0].total(ROWS_HOME, crossing=True)
    assert 0 < counted(2)[kind, 0].total(ROWS_HOME, crossing=True) < rows

"""Faults in sharded training, in real processes: every rank ends, and the message names the rank
and what it did.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from distributed.cases import KINDS, batch, collection, group, shard, word

from tutorec.distributed import comm
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from tutorec.distributed.sharding_plan import construct_module_sharding_plan
from tutorec.errors import RankError, RankTimeoutError
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Kept, Ranks, device

# Ranks that hang are ended after so many seconds; new ranks import the library in a part of it.
DEADLINE = 15.0


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    """Two ranks; a test that breaks them leaves new ones to the next."""
    with Ranks(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def hasty() -> Iterator[Ranks]:
    """Two ranks with a short deadline."""
    with Ranks(2, timeout=DEADLINE) as pool:
        yield pool


def tables() -> list[EmbeddingBagConfig]:
    """A table for every type of sharding, all of one feature each."""
    return [EmbeddingBagConfig(9, 4, kind, feature_names=[f"f_{kind}"]) for kind in KINDS]


def sharded_in_all_ways() -> ShardedEmbeddingBagCollection:
    env = ShardingEnv.from_process_group(group())
    ebc = EmbeddingBagCollection(tables())
    words = {
        kind: word(kind, index, env.world_size, env.local_size) for index, kind in enumerate(KINDS)
    }
    plan = construct_module_sharding_plan(ebc, words, local_size=env.local_size)
    return EmbeddingBagCollectionSharder().shard(ebc, plan, env)


def ids(step: int, rank: int) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 3, (3 * len(KINDS),), generator=draw)
    values = torch.randint(0, 9, (int(lengths.sum()),), generator=draw)
    return KeyedJaggedTensor([f"f_{kind}" for kind in KINDS], values, lengths=lengths).to(device())


def build(world: Any) -> Kept:
    sharded = sharded_in_all_ways()
    sharded(ids(0, 0)).values().sum().backward()
    return world.keep(sharded)


def steps(sharded: Any, rank: int, fault: str, at: str, odd: int = 1) -> int:
    """Four steps; in the third, rank ``odd`` does not do what the others do."""

    def trip(place: str) -> None:
        if place != at or rank != odd:
            return
        if fault == "raises":
            raise ValueError("the log has no such day")
        if fault == "exits":
            os._exit(5)
        if fault == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stalls":
            read_the_next_day()

    done = 0
    for step in range(4):
        if step == 2 and rank == odd and fault == "runs out":
            return done
        if step == 2:
            trip("before the batch")
        out = sharded(ids(step, rank)).values()
        if step == 2:
            trip("before backward")
        out.sum().backward()
        done += 1
    return done


def read_the_next_day() -> None:
    time.sleep(600)


@pytest.fixture
def failure(still_running: Callable[..., list[int]]) -> Callable[..., RankError]:
    """The error of four steps with a fault, after which no rank may be left."""

    def run(pool: Ranks, fault: str, at: str = "before the batch", odd: int = 1) -> RankError:
        handle = pool.run(build, pool)[0]
        pids = pool.pids
        with pytest.raises(RankError) as caught:
            pool.run(steps, handle, fault=fault, at=at, odd=odd)
        assert still_running(pids) == []
        return caught.value

    return run


@pytest.mark.parametrize("at", ["before the batch", "before backward"])
def test_a_rank_that_raises_is_named_and_not_the_one_that_loses_it(world, failure, at):
    error = failure(world, "raises", at)
    assert error.rank == 1
    assert "rank 1 raised in" in str(error)
    assert "ValueError: the log has no such day" in str(error)


@pytest.mark.parametrize(("at", "odd"), [("before the batch", 0), ("before backward", 1)])
def test_a_rank_that_exits_is_named_at_either_place(world, failure, at, odd):
    error = failure(world, "exits", at, odd)
    assert error.rank == odd
    assert f"rank {odd} died in" in str(error)
    assert "exit code 5" in str(error)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="uses Linux signals")
def test_a_rank_that_is_killed_is_named_with_the_signal_and_new_ranks_train(world, failure):
    error = failure(world, "is killed", "before backward")
    assert (error.rank, "SIGKILL" in str(error)) == (1, True)
    handle = world.run(build, world)[0]
    assert world.run(steps, handle, fault="none", at="") == [4, 4]


@pytest.mark.slow
def test_a_rank_that_stalls_is_named_with_its_place_and_who_waits(hasty, failure):
    error = failure(hasty, "stalls")
    assert isinstance(error, RankTimeoutError)
    assert error.rank == 1
    assert str(error).startswith("rank 1 stalled: ")
    assert "in read_the_next_day" in str(error)
    assert "rank 0 only waits, in " in str(error)


@pytest.mark.slow
def test_a_rank_that_runs_out_of_batches_is_named_and_what_the_others_wait_for(hasty, failure):
    error = failure(hasty, "runs out")
    assert isinstance(error, RankTimeoutError)
    assert "rank 0 waits in " in str(error)
    assert "and rank 1 returned without that call" in str(error)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "data_parallel"])
def test_a_rank_that_skips_backward_is_named_as_that_where_gloo_ends_it(world, kind):
    def skip(rank: int) -> None:
        env = ShardingEnv.from_process_group(group())
        ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 64, "t", feature_names=["f"])])
        plan = construct_module_sharding_plan(
            ebc, {"t": word(kind, 0, env.world_size, env.local_size)}, local_size=env.local_size
        )
        sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, env)
        for step in range(4):
            features = KeyedJaggedTensor(["f"], torch.arange(9), lengths=torch.full((9,), 1)).to(
                device()
            )
            out = sharded(features).values()
            if step < 2 or rank == 0:
                out.sum().backward()

    world.run(len, ())
    if world.backend != "gloo":
        pytest.skip("gloo alone ends a process for this")
    with pytest.raises(RankError) as error:
        world.run(skip)
    message = str(error.value)
    assert error.value.rank == 1
    assert message.startswith("the ranks were at different exchanges in ")
    assert (
        "was 'output gradients' on rank 0 and 'input sizes' on rank 1: rank 1 skipped a backward; "
        "gloo "
    ) in message


def caught(action: Callable[[], Any]) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def shard_as(
    rank: int, world_size: int, kinds: list[str], columns: list[int], flip: bool = False
) -> tuple[str, str]:
    """Each rank shards two tables by its own kind, with its own width."""
    configs = [
        EmbeddingBagConfig(9, columns[rank], name, feature_names=[f"f_{name}"])
        for name in ("item", "user")
    ]
    ebc = EmbeddingBagCollection(configs)
    env = ShardingEnv.from_process_group(group())
    shift = rank if flip else 0
    words = {
        config.name: word(kinds[rank], index + shift, world_size, comm.get_local_size(world_size))
        for index, config in enumerate(configs)
    }
    plan = construct_module_sharding_plan(ebc, words, local_size=env.local_size)
    return caught(lambda: EmbeddingBagCollectionSharder().shard(ebc, plan, env))


def every_difference(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    found = {
        kind: shard_as(rank, world_size, ["table_wise", kind], [4, 4])
        for kind in KINDS
        if kind != "table_wise"
    }
    found |= {f"width, {kind}": shard_as(rank, world_size, [kind, kind], [4, 8]) for kind in KINDS}
    found["place"] = shard_as(rank, world_size, ["column_wise"] * 2, [4, 4], flip=True)
    return found


def test_ranks_that_differ_in_plan_or_tables_are_told_so_on_every_rank(ranks):
    zero, one = ranks(2).run(every_difference)
    for name, told in zero.items():
        assert told == one[name], name
        assert told[0] == "AgreementError", (name, told)
        fact = {"width": "table 'item': embedding_dim is 8 on rank 1 and 4 on rank 0"}.get(
            name.split(",")[0],
            f"table 'item': sharding type is {name} on rank 1 and table_wise on rank 0",
        )
        if name == "place":
            fact = "table 'item': "
        assert fact in told[1], (name, told)
        assert "on rank 1 and" in told[1]


def without_first_key(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return features.split([1, len(features.keys()) - 1])[1]


def keys_differ(rank: int, world_size: int) -> dict[str, list[tuple[str, str]]]:
    """A first batch in which rank 1 lacks a feature, then a good one; with the error of each."""
    found = {}
    for kind in KINDS:
        sharded = shard(collection(), kind=kind)
        good = batch(rank, 3)
        bad = without_first_key(good) if rank == 1 else good
        first = caught(lambda sharded=sharded, bad=bad: sharded(bad).values())
        second = caught(lambda sharded=sharded, good=good: sharded(good).values().sum().backward())
        found[kind] = [first, second]
    return found


def test_a_rank_whose_first_batch_lacks_a_key_stops_all_and_is_named(ranks):
    zero, one = ranks(2).run(keys_differ)
    for kind in KINDS:
        (other, fine), (own, also_fine) = zero[kind], one[kind]
        assert own[0] == "KeyError", kind
        assert "the batch has no feature 'f3', which table 't2' reads" in own[1]
        assert other[0] == "AgreementError", kind
        assert "rank 1 raised KeyError" in other[1]
        assert fine == also_fine == ("", ""), kind


def later_key(sharded: Any, rank: int) -> None:
    features = ids(5, rank)
    sharded(without_first_key(features) if rank == 1 else features).values().sum().backward()


def test_a_key_that_is_missing_later_ends_all_ranks_and_names_the_rank(world, still_running):
    handle = world.run(build, world)[0]
    pids = world.pids
    with pytest.raises(
        RankError, match=r"rank 1[\s\S]*KeyError[\s\S]*no feature 'f_row_wise'"
    ) as found:
        world.run(later_key, handle)
    assert found.value.rank == 1
    assert still_running(pids) == []


def other_orders(rank: int, world_size: int) -> dict[str, bool]:
    """The same samples with keys in another order on one rank, at a later step: legitimate."""
    found = {}
    for kind in KINDS:
        sharded = shard(collection(), kind=kind)
        features = batch(rank, 3)
        expected = sharded(features).values()
        turned = features.permute([2, 0, 3, 1]) if rank == 1 else features
        found[kind] = bool((sharded(turned).values() == expected).all())
    return found


def test_ranks_may_order_their_keys_differently_from_step_to_step(ranks):
    assert ranks(2).run(other_orders) == [dict.fromkeys(KINDS, True)] * 2

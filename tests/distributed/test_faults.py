"""Faults in sharded training, in real processes: every rank ends, and the message names the rank and what it did."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from distributed.cases import KINDS, batch, collection, group, shard, word

from tutorec.distributed import comm
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.sharding_plan import construct_module_sharding_plan
from tutorec.errors import RankError, RankTimeoutError
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Kept, Ranks

ALL = [*KINDS, "mixed"]
# A rank is ended when the others have waited so long. The steps before take a part of it.
DEADLINE = 8.0


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    """Two ranks with a short deadline."""
    with Ranks(2, timeout=DEADLINE) as pool:
        yield pool


def build(world: Any, kind: str) -> Kept:
    sharded = shard(collection(), kind=kind)
    sharded(batch(0, 3)).values().sum().backward()
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
        out = sharded(batch(10 * step + rank, 3)).values()
        if step == 2:
            trip("before backward")
        out.sum().backward()
        done += 1
    return done


def read_the_next_day() -> None:
    time.sleep(600)


@pytest.fixture
def failure(world: Ranks, still_running: Callable[..., list[int]]) -> Callable[..., RankError]:
    """The error of four steps with a fault, after which no rank may be left."""

    def run(kind: str, fault: str, at: str = "before the batch", odd: int = 1) -> RankError:
        handle = world.run(build, world, kind)[0]
        pids = world.pids
        with pytest.raises(RankError) as caught:
            world.run(steps, handle, fault=fault, at=at, odd=odd)
        assert still_running(pids) == []
        return caught.value

    return run


@pytest.mark.parametrize("kind", ALL)
def test_a_rank_that_raises_is_named_and_not_those_that_lose_it(failure, kind):
    error = failure(kind, "raises", "before backward")
    assert error.rank == 1
    assert "rank 1 raised in" in str(error)
    assert "ValueError: the log has no such day" in str(error)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("at", ["before the batch", "before backward"])
def test_a_rank_that_exits_is_named_at_either_place(failure, at, odd):
    error = failure("mixed", "exits", at, odd)
    assert error.rank == odd
    assert f"rank {odd} died in" in str(error)
    assert "exit code 5" in str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="uses Linux signals")
def test_a_rank_that_is_killed_is_named_with_the_signal(failure):
    error = failure("mixed", "is killed", "before backward")
    assert (error.rank, "SIGKILL" in str(error)) == (1, True)


@pytest.mark.slow
def test_a_rank_that_stalls_is_named_with_its_place_and_who_waits(failure):
    error = failure("mixed", "stalls")
    assert isinstance(error, RankTimeoutError)
    assert error.rank == 1
    assert str(error).startswith("rank 1 stalled: ")
    assert "in read_the_next_day" in str(error)
    assert "rank 0 only waits, in " in str(error)


@pytest.mark.slow
def test_a_rank_that_runs_out_of_batches_is_named_and_what_the_others_wait_for(failure):
    error = failure("mixed", "runs out")
    assert isinstance(error, RankTimeoutError)
    assert "rank 0 waits in " in str(error)
    assert "and rank 1 returned without that call" in str(error)


def test_new_ranks_train_after_a_fault(world, failure):
    failure("mixed", "raises")
    handle = world.run(build, world, "mixed")[0]
    assert world.run(steps, handle, fault="none", at="") == [4, 4]


def caught(action: Callable[[], Any]) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def shard_as(rank: int, world_size: int, kinds: list[str], columns: list[int], flip: bool = False) -> tuple[str, str]:
    """Each rank shards two tables by its own kind, with its own width."""
    configs = [EmbeddingBagConfig(9, columns[rank], name, feature_names=[f"f_{name}"]) for name in ("item", "user")]
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
    found = {kind: shard_as(rank, world_size, ["table_wise", kind], [4, 4]) for kind in KINDS if kind != "table_wise"}
    found |= {f"width, {kind}": shard_as(rank, world_size, [kind, kind], [4, 8]) for kind in KINDS}
    found["place"] = shard_as(rank, world_size, ["column_wise"] * 2, [4, 4], flip=True)
    return found


def test_ranks_that_differ_in_plan_or_tables_are_told_so_on_every_rank(ranks):
    zero, one = ranks(2).run(every_difference)
    for name, told in zero.items():
        assert told == one[name], name
        assert told[0] == "AgreementError", (name, told)
        fact = {"width": "table 'item': embedding_dim is 8 on rank 1 and 4 on rank 0"}.get(
            name.split(",")[0], f"table 'item': sharding type is {name} on rank 1 and table_wise on rank 0"
        )
        if name == "place":
            fact = "table 'item': "
        assert fact in told[1], (name, told)
        assert "on rank 1 and" in told[1]


def keys_differ(rank: int, world_size: int, kind: str) -> list[tuple[str, str]]:
    """A first batch in which rank 1 lacks a feature, then a good one, then one that lacks it again."""
    sharded = shard(collection(), kind=kind)
    good = batch(rank, 3)
    bad = good.split([1, 3])[1] if rank == 1 else good
    first = caught(lambda: sharded(bad).values())
    second = caught(lambda: sharded(good).values().sum().backward())
    return [first, second]


@pytest.mark.parametrize("kind", ALL)
def test_a_rank_whose_first_batch_lacks_a_key_stops_all_and_is_named(ranks, kind):
    (other, fine), (own, also_fine) = ranks(2).run(keys_differ, kind=kind)
    assert own[0] == "KeyError"
    assert "the batch has no feature 'f3', which table 't2' reads" in own[1]
    assert other[0] == "AgreementError"
    assert "rank 1 raised KeyError" in other[1]
    assert fine == also_fine == ("", "")


def later_key(sharded: Any, rank: int) -> None:
    features = batch(20 + rank, 3)
    sharded(features.split([1, 3])[1] if rank == 1 else features).values().sum().backward()


def test_a_key_that_is_missing_later_ends_all_ranks_and_names_the_rank(world, still_running):
    handle = world.run(build, world, "mixed")[0]
    pids = world.pids
    with pytest.raises(RankError, match=r"rank 1[\s\S]*KeyError[\s\S]*no feature 'f3'") as found:
        world.run(later_key, handle)
    assert found.value.rank == 1
    assert still_running(pids) == []


def other_orders(rank: int, world_size: int, kind: str) -> bool:
    """The same samples with keys in another order on one rank, at a later step: legitimate."""
    sharded = shard(collection(), kind=kind)
    features = batch(rank, 3)
    expected = sharded(features).values()
    turned: KeyedJaggedTensor = features.permute([2, 0, 3, 1]) if rank == 1 else features
    return bool((sharded(turned).values() == expected).all())


@pytest.mark.parametrize("kind", ALL)
def test_ranks_may_order_their_keys_differently_from_step_to_step(ranks, kind):
    assert ranks(2).run(other_orders, kind=kind) == [True, True]

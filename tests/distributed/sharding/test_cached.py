"""Tables in a file are trained as tables in memory are: the same outputs, weights and optimizer
state, bit for bit.
"""

from __future__ import annotations

from collections import deque
from itertools import product
from queue import Queue
from typing import Any
from unittest.mock import patch

import pytest
import torch
from distributed import cases, checkpoint_cases, row_cases
from distributed.cases import KINDS, OPTIMIZERS, batch, coefficients, samples_of, seed_of
from pairwise import pairwise_cover
from torch import Tensor
from torch.testing import assert_close

from tutorec._kernels.backend import use_backend
from tutorec._kernels.caches.row_cache import RowCache
from tutorec.distributed.checkpoint import load_checkpoint, save_checkpoint
from tutorec.distributed.core.cache_params import CacheAlgorithm, CacheParams
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.plan.plan import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.errors import BackendError
from tutorec.optim import RowWiseAdagrad, apply_optimizer_in_backward
from tutorec.spmd import device
from tutorec.types import DataType

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tables in files are on the CPU")

STEPS = 4
CACHES = {
    "no cache": ("fused_uvm", {}),
    "one row": ("fused_uvm_caching", {"cache_load_factor": 1e-6}),
    "30 % lfu": (
        "fused_uvm_caching",
        {"cache_load_factor": 0.3, "cache_algorithm": CacheAlgorithm.LFU},
    ),
    "60 % lru": ("fused_uvm_caching", {"cache_load_factor": 0.6}),
}
IN_FILES = [kind for kind in KINDS if kind != "data_parallel"]
MATRIX = (
    tuple(IN_FILES),
    ("bags", "rows"),
    OPTIMIZERS,
    (1, 2, 4),
    tuple(CACHES),
    ("fbgemm", "torch"),
)


def train(
    rank: int, world_size: int, kind: str, what: str, optimizer: str, cache: str, backend: str
) -> dict[str, Any]:
    """Some steps on one rank with tables in memory, then with tables in a file: what each computed
    and holds.
    """
    found = []
    with use_backend(backend):
        for kernel, params in (("fused", {}), CACHES[cache]):
            own = cases if what == "bags" else row_cases
            sharded = own.shard(own.collection(), optimizer, kernel=kernel, kind=kind, **params)
            outputs = []
            for step in range(STEPS):
                out = sharded(batch(seed_of(rank, step), samples_of(rank, step))).wait()
                rows = [out.values()] if what == "bags" else [one.values() for one in out.values()]
                outputs += [one.detach() for one in rows]
                sum((one * coefficients(one, step)).sum() for one in rows).backward()
            sharded.flush()
            found.append((outputs, own.held(sharded)))
    return {"in memory": found[0], "in a file": found[1]}


def assert_alike(first: Any, second: Any) -> None:
    """The same tensors, bit for bit, in the same nest of lists and dicts."""
    assert type(first) is type(second)
    if isinstance(first, Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        assert_alike(list(first.values()), list(second.values()))
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_alike(one, other)
    else:
        assert first == second


def params() -> list[Any]:
    chosen = pairwise_cover(MATRIX)
    found = []
    for case in product(*MATRIX):
        marks = [] if case in chosen else [pytest.mark.full]
        marks += [pytest.mark.world4] if case[3] == 4 else []
        found.append(pytest.param(*case, marks=marks, id="-".join(map(str, case))))
    return found


def skip_without(backend: str) -> None:
    try:
        with use_backend(backend):
            pass
    except BackendError as error:
        pytest.skip(f"no fbgemm here: {error}")


@pytest.mark.parametrize(("kind", "what", "optimizer", "world_size", "cache", "backend"), params())
def test_tables_in_a_file_train_as_in_memory(
    ranks, kind, what, optimizer, world_size, cache, backend
):
    skip_without(backend)
    pool = ranks(world_size, hosts=2) if world_size == 4 else ranks(world_size)
    words = {"kind": kind, "what": what, "optimizer": optimizer, "cache": cache, "backend": backend}
    for result in pool.run(train, **words):
        assert_alike(result["in memory"], result["in a file"])


@pytest.mark.parametrize("backend", ["fbgemm", "torch"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("own", [cases, row_cases])
def test_a_process_without_ranks_trains_in_a_file(own, cache, backend):
    """What the refusal of ``location=`` advises: one rank, and no process group."""
    skip_without(backend)
    sharder = EmbeddingBagCollectionSharder if own is cases else EmbeddingCollectionSharder
    rule = cases.optimizer_words("exact_row_wise_adagrad")
    with use_backend(backend):
        modules = [own.collection()]
        fuse = {"lr": cases.LEARNING_RATE, "eps": cases.EPS}
        apply_optimizer_in_backward(RowWiseAdagrad, modules[0].parameters(), fuse)
        for kernel, params in (("fused", {}), CACHES[cache]):
            words = {f"t{index}": table_wise(0, compute_kernel=kernel) for index in range(3)}
            made = own.collection()
            plan = construct_module_sharding_plan(made, words, world_size=1)
            modules.append(
                sharder({**rule, **params}).shard(made, plan, ShardingEnv.from_local(1, 0))
            )
        for step in range(STEPS):
            results = []
            for module in modules:
                out = module(batch(step, 4))
                rows = [out.values()] if own is cases else [one.values() for one in out.values()]
                results.append([one.detach() for one in rows])
                sum((one * coefficients(one, step)).sum() for one in rows).backward()
            unsharded, in_memory, in_file = results
            assert_alike(in_memory, in_file)
            assert_close(in_file, unsharded)
    modules[-1].flush()
    assert_close([*modules[-1].parameters()], [*modules[0].parameters()])
    assert_alike(own.held(modules[1]), own.held(modules[2]))


def pipelined(rank: int, world_size: int, what: str, kind: str, variable: bool) -> list[Any]:
    """Steps with three batches in flight: with tables in memory, with cached ones, and with cached
    and prefetched.
    """
    found, own = [], cases if what == "bags" else row_cases
    for kernel, ahead in (
        ("fused", False),
        ("fused_uvm_caching", False),
        ("fused_uvm_caching", True),
    ):
        sharded = own.shard(
            own.collection(),
            "exact_row_wise_adagrad",
            kernel=kernel,
            kind=kind,
            cache_load_factor=0.3,
        )
        coming, outputs = deque(), []
        for step in range(8):
            ctx = sharded.create_context()
            make = row_cases.lists if variable else batch
            arrived = (
                sharded.input_dist(ctx, make(seed_of(rank, step), samples_of(rank, step)))
                .wait()
                .wait()
            )
            if ahead:
                sharded.prefetch(arrived)
            coming.append((ctx, arrived))
            if step >= 2:
                ctx, arrived = coming.popleft()
                out = sharded.output_dist(ctx, sharded.compute(ctx, arrived)).wait()
                rows = [out.values()] if what == "bags" else [one.values() for one in out.values()]
                outputs += [one.detach() for one in rows]
                sum((one * coefficients(one, step)).sum() for one in rows).backward()
        sharded.flush()
        found.append((outputs, own.held(sharded)))
    return found


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize(
    ("what", "kind"), [("bags", "row_wise"), ("bags", "mixed"), ("rows", "table_wise")]
)
def test_prefetching_batches_in_flight_changes_no_bit(ranks, what, kind, variable):
    for in_memory, cached, prefetched in ranks(2).run(
        pipelined, what=what, kind=kind, variable=variable
    ):
        assert_alike(in_memory, cached)
        assert_alike(cached, prefetched)


@pytest.mark.parametrize("own", [cases, row_cases])
def test_prefetch_reads_the_rows_that_compute_looks_up(own):
    collection = own.collection()
    words = {
        f"t{index}": table_wise(0, compute_kernel="fused_uvm_caching" if index else "fused")
        for index in range(3)
    }
    plan = construct_module_sharding_plan(collection, words, world_size=1)
    sharder = EmbeddingBagCollectionSharder() if own is cases else EmbeddingCollectionSharder()
    sharded = sharder.shard(collection, plan, ShardingEnv.from_local(1, 0))
    ctx = sharded.create_context()
    arrived = sharded.input_dist(ctx, batch(0, 4)).wait().wait()
    shown, looked_up = Queue(), Queue()
    with patch.object(RowCache, "missing", lambda cache, rows: shown.put(rows.tolist()) or []):
        sharded.prefetch(arrived)
        prefetched = [shown.get(timeout=60) for _ in sharded.cache_counts()]
    with patch.object(RowCache, "place", autospec=True, side_effect=_recorded(looked_up)):
        sharded.compute(ctx, arrived)
    # Each cache reads ahead on its own thread: which one is first is left open.
    assert sorted(prefetched) == sorted(looked_up.get_nowait() for _ in prefetched) and all(
        prefetched
    )


def _recorded(rows_of_calls: Queue) -> Any:
    place = RowCache.place

    def recorded(cache: RowCache, rows: Tensor) -> Any:
        rows_of_calls.put(rows.tolist())
        return place(cache, rows)

    return recorded


def shards_of(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a state dict that are on this rank."""
    return {
        name: [shard.tensor for shard in value.local_shards()]
        if hasattr(value, "local_shards")
        else value
        for name, value in state.items()
    }


def states_without_flush(rank: int, world_size: int) -> list[Any]:
    """State dicts after training, and what is left when other tables' rows and state are loaded."""
    found = []
    for kernel in ("fused", "fused_uvm_caching"):
        sharded = cases.shard(
            cases.collection(),
            "exact_row_wise_adagrad",
            kernel=kernel,
            kind="row_wise",
            cache_load_factor=0.5,
        )
        for step in range(STEPS):
            sharded(batch(seed_of(rank, step), 4)).values().sum().backward()
        saved = shards_of({name: value.clone() for name, value in sharded.state_dict().items()})
        kept = {
            name: shards_of(of)
            for name, of in sharded.fused_optimizer.state_dict()["state"].items()
        }
        sharded(batch(seed_of(rank, STEPS), 4)).values().sum().backward()
        zeros = {"embedding_bags.t1.weight": torch.zeros(7, 4)}
        sharded.load_state_dict(zeros, strict=False)
        after = shards_of(sharded.state_dict())
        sharded.fused_optimizer.load_state_dict(sharded.fused_optimizer.state_dict())
        found.append([saved, kept, after, sharded(batch(rank, 4)).values().detach()])
    return found


def test_state_dicts_need_no_flush_and_loading_a_table_keeps_the_others(ranks):
    for in_memory, in_file in ranks(2).run(states_without_flush):
        assert_alike(in_memory, in_file)
        assert all(bool((rows == 0).all()) for rows in in_file[2]["embedding_bags.t1.weight"])


def test_a_sharded_collection_counts_its_hits():
    collection = cases.collection()
    words = {
        f"t{index}": table_wise(0, compute_kernel="fused_uvm_caching" if index else "fused")
        for index in range(3)
    }
    plan = construct_module_sharding_plan(collection, words, world_size=1)
    sharder = EmbeddingBagCollectionSharder({"cache_load_factor": 1.0})
    sharded = sharder.shard(collection, plan, ShardingEnv.from_local(1, 0))
    sharded(batch(0, 4))
    sharded(batch(0, 4))
    [counts] = sharded.cache_counts()
    assert 0 < counts.read <= counts.lookups // 2
    assert counts.hit_rate == 1 - counts.read / counts.lookups


def through_checkpoints(rank: int, world_size: int, folder: str) -> list[Any]:
    """Train, save, load under another plan, go on: with tables in memory, and with tables in a file
    now and then.
    """
    found = []
    for kernels in (
        ("fused", "fused"),
        ("fused_uvm_caching", "fused"),
        ("fused", "fused_uvm_caching"),
    ):
        path = f"{folder}/{'-'.join(kernels)}"
        model, optimizer = checkpoint_cases.sharded(0, kernel=kernels[0])
        checkpoint_cases.train(model, optimizer, rank, [0, 1, 2])
        save_checkpoint(path, model, optimizer)
        model, optimizer = checkpoint_cases.sharded(3, kernel=kernels[1])
        checkpoint_cases.train(model, optimizer, rank, [7])
        load_checkpoint(path, model, optimizer)
        loaded = checkpoint_cases.held(model)
        checkpoint_cases.train(model, optimizer, rank, [3, 4])
        found.append([loaded, checkpoint_cases.held(model)])
    return found


def test_checkpoints_go_from_file_to_memory_and_back(ranks, tmp_path):
    for in_memory, *others in ranks(2).run(through_checkpoints, folder=str(tmp_path)):
        for other in others:
            assert_alike(in_memory, other)


def test_cache_params_are_saved_with_the_plan(tmp_path):
    entry = ParameterSharding(
        "table_wise",
        "fused_uvm_caching",
        ranks=[0],
        cache_params=CacheParams(CacheAlgorithm.LFU, load_factor=0.25, folder="/data"),
    )
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan(item=entry)})
    plan.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == plan
    assert "load_factor=0.25" in repr(entry) and "cache_params" not in repr(
        ParameterSharding("row_wise", "fused")
    )
    damaged = plan.to_json().replace('"lfu"', '"mru"')
    with pytest.raises(ValueError, match=r"module '', table 'item'.*'mru'"):
        ShardingPlan.from_json(damaged)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (CacheParams(load_factor=1.5), r"table 't0': load_factor=1.5 .* above 0 and at most 1"),
        (
            CacheParams(algorithm="clock"),
            (
                r"table 't0': algorithm='clock' .* neither LRU nor "
                r"LFU"
            ),
        ),  # type: ignore[arg-type]
        (CacheParams(precision=DataType.FP16), r"table 't0': precision=FP16 .* DataType.FP32"),
        (
            CacheParams(folder="/nowhere/at/all"),
            r"tables \['t0'\] need .* a folder that does not exist",
        ),
    ],
)
def test_cache_that_cannot_be_built_is_refused(cache, message):
    collection = cases.collection()
    words = {f"t{index}": table_wise(0, compute_kernel="fused_uvm_caching") for index in range(3)}
    plan = construct_module_sharding_plan(collection, words, world_size=1)
    plan["t0"].cache_params = cache
    with pytest.raises((ValueError, OSError), match=message):
        EmbeddingBagCollectionSharder().shard(collection, plan, ShardingEnv.from_local(1, 0))


def test_copies_of_a_table_are_not_cached(ranks):
    with pytest.raises(Exception, match=r"table 't0'.*'fused_uvm_caching'.*row_wise"):
        ranks(1).run(
            train,
            kind="data_parallel",
            what="bags",
            optimizer="exact_sgd",
            cache="one row",
            backend="auto",
        )
    sharder = EmbeddingBagCollectionSharder()
    assert "fused_uvm_caching" in sharder.compute_kernels("row_wise", "cpu")
    assert "fused_uvm_caching" not in sharder.compute_kernels("data_parallel", "cpu")


@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_cache_params_without_a_cache_are_refused(kernel):
    collection = cases.collection()
    words = {f"t{index}": table_wise(0, compute_kernel=kernel) for index in range(3)}
    plan = construct_module_sharding_plan(collection, words, world_size=1)
    plan["t1"].cache_params = CacheParams(load_factor=0.1)
    message = (
        r"table 't1' cache_params and the compute kernel "
        rf"'{kernel}'.*compute_kernel='fused_uvm_caching'"
    )
    with pytest.raises(ValueError, match=message):
        EmbeddingBagCollectionSharder().shard(collection, plan, ShardingEnv.from_local(1, 0))


@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
def test_tables_in_a_file_do_not_move_to_another_device(kernel):
    collection = cases.collection()
    words = {
        f"t{index}": table_wise(0, compute_kernel=kernel if index else "fused")
        for index in range(3)
    }
    plan = construct_module_sharding_plan(collection, words, world_size=1)
    sharded = EmbeddingBagCollectionSharder().shard(collection, plan, ShardingEnv.from_local(1, 0))
    before = sharded(batch(0, 4)).values()
    message = (
        rf"table 't1' has the compute kernel '{kernel}' and cannot move from cpu to "
        r"meta.*shard the unsharded"
    )
    with pytest.raises(ValueError, match=message):
        sharded.to("meta")
    assert torch.equal(sharded.to(device())(batch(0, 4)).values(), before)

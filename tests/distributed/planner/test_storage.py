"""Storage of pieces: to the byte what sharded modules allocate, and buffers by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from distributed.cases import CUT_IN_TWO, KINDS, MIXES, group, kind_of, tables, word
from torch import nn

from tutorec._kernels.caches.row_cache import CacheSpec
from tutorec._kernels.id_index import IdIndex
from tutorec._kernels.specs import GroupSpec, OptimizerSpec, TableSpec
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_build import build_table_batch
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.fused_params import optimizer_spec
from tutorec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from tutorec.distributed.plan.geometry import data_parallel_shards, shards_in_plan
from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.planner import cost
from tutorec.distributed.planner.cost import KernelModel, register_kernel, shard_perf
from tutorec.distributed.planner.enumerators import EmbeddingEnumerator
from tutorec.distributed.planner.options import (
    ParameterConstraints,
    PartitionByType,
    Shard,
    ShardingOption,
    TableProfile,
)
from tutorec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
    shard_storage,
    stored_bytes,
)
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.sharding_plan import construct_module_sharding_plan
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tutorec.modules.growing import GrowingManagedCollisionModule
from tutorec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from tutorec.modules.hash_mc_modules import HashZchManagedCollisionModule
from tutorec.modules.mc_base import ManagedCollisionModule
from tutorec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from tutorec.modules.mc_evictions import DistanceLFU_EvictionPolicy
from tutorec.modules.mc_modules import ManagedCollisionCollection
from tutorec.modules.mch_module import MCHManagedCollisionModule
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

# Of 5 rows some ranks of 4 hold none; 6 and 10 columns are stored as 8 and 12 where fbgemm's
# kernels hold them.
ROW_TABLES = ((11, 8), (5, 8), (9, 8))
Shape = tuple[int, int]
LRU = HashZchEvictionPolicyName.LRU_EVICTION


def unsharded(pooled: bool) -> Any:
    if pooled:
        return EmbeddingBagCollection(
            [*tables(), EmbeddingBagConfig(5, 10, "t3", feature_names=["f4"])]
        )
    return EmbeddingCollection([EmbeddingConfig(rows, columns, f"t{i}", feature_names=[f"f{i}"])
                                for i, (rows, columns) in enumerate(ROW_TABLES)])  # fmt: skip


def shapes(module: nn.Module) -> dict[str, Shape]:
    return {name.split(".")[-2]: (w.shape[0], w.shape[1]) for name, w in module.named_parameters()}


def allocate(
    rank: int, world_size: int, kind: str, kernel: str, optimizer: str, pooled: bool
) -> tuple[int, dict[str, list[tuple[int, int, int]]]]:
    """Bytes of rows and state on this rank, and for each table (rank, rows, columns) of
    its pieces.
    """
    env = ShardingEnv.from_process_group(group())
    module = unsharded(pooled)
    words = {
        name: word(kind, index, world_size, env.local_size, kernel)
        for index, name in enumerate(sorted(shapes(module)))
    }
    plan = construct_module_sharding_plan(module, words, local_size=env.local_size)
    sharder: Any = (EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder)(
        {"optimizer": optimizer}
    )
    sharded = sharder.shard(module, plan, env)
    operators = [
        part
        for lookup in sharded._lookups
        for part in lookup.modules()
        if isinstance(part, TableBatch)
    ]
    buffers = [
        part
        for operator in operators
        for part in (operator._flat, *operator._kept, operator._counts)
    ]
    held = sum(part.untyped_storage().nbytes() for part in buffers)
    pieces = {
        name: [(p.rank, p.rows, p.columns) for p in shards_in_plan(entry)]
        or [
            (p.rank, p.rows, p.columns)
            for p in data_parallel_shards(*shapes(module)[name], world_size)
        ]
        for name, entry in plan.items()
    }
    return held, pieces


def check_allocated(
    ranks: Any, world_size: int, hosts: int, kind: str, kernel: str, optimizer: str, pooled: bool
):
    found = ranks(world_size, hosts=hosts).run(allocate, kind, kernel, optimizer, pooled)
    topology = Topology.hosts(hosts, world_size // hosts)
    estimated = np.zeros(world_size, dtype=np.int64)
    spec = optimizer_spec({"optimizer": optimizer})
    of_tables = shapes(unsharded(pooled))
    for index, (name, pieces) in enumerate(sorted(found[0][1].items())):
        rows, columns = of_tables[name]
        facts = TableProfile(
            "", name, rows, columns, features=("f",), pooled=pooled, optimizer=spec
        )
        sizes = np.array([[own_rows, own_columns] for _, own_rows, own_columns in pieces])
        stored = stored_bytes(facts, ShardingType(kind_of(kind, index)), kernel, sizes, topology)
        np.add.at(estimated, [rank for rank, _, _ in pieces], stored.weights + stored.state)
    assert estimated.tolist() == [held for held, _ in found]
    assert estimated.sum() > 0


ALL = [
    (kind, kernel, optimizer)
    for kind in (*KINDS, *MIXES)
    for kernel, optimizer in (
        ("fused", "exact_sgd"),
        ("fused", "exact_row_wise_adagrad"),
        ("dense", "exact_row_wise_adagrad"),
        ("fused", "exact_adagrad"),
        ("fused", "adam"),
        ("fused", "partial_row_wise_adam"),
    )
]


@pytest.mark.parametrize(("kind", "kernel", "optimizer"), ALL)
def test_estimated_rows_and_state_are_the_allocated_bytes_on_two_ranks(
    ranks, kind, kernel, optimizer
):
    check_allocated(ranks, 2, 1, kind, kernel, optimizer, pooled=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("kernel", "optimizer"), [("fused", "exact_row_wise_adagrad"), ("dense", "exact_sgd")]
)
def test_estimated_bytes_of_rows_that_are_not_pooled_are_the_allocated_ones(
    ranks, kind, kernel, optimizer
):
    check_allocated(ranks, 2, 2, kind, kernel, optimizer, pooled=False)


@pytest.mark.world4
@pytest.mark.parametrize(
    "optimizer", ["exact_sgd", "exact_row_wise_adagrad", "partial_row_wise_adam"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_estimated_rows_and_state_are_the_allocated_bytes_on_four_ranks(ranks, kind, optimizer):
    check_allocated(ranks, 4, 2, kind, "fused", optimizer, pooled=True)


MAPPINGS: dict[str, Callable[[], ManagedCollisionModule]] = {
    "mch": lambda: MCHManagedCollisionModule(4096, device(), DistanceLFU_EvictionPolicy(), 1),
    "hash": lambda: HashZchManagedCollisionModule(
        4096,
        device(),
        1,
        max_probe=4096,
        eviction_policy_name=LRU,
        eviction_config=HashZchEvictionConfig(["f"], 1),
    ),
    "growing": lambda: GrowingManagedCollisionModule(4096),
}


@pytest.mark.parametrize("kind", MAPPINGS)
def test_bytes_of_a_mapping_are_those_that_it_takes_and_are_in_the_plan(kind):
    tables = [EmbeddingBagConfig(4096, 8, "t", feature_names=["f"])]
    mapping = MAPPINGS[kind]()
    model = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables), ManagedCollisionCollection({"t": mapping}, tables)
    ).to(device())
    ids = KeyedJaggedTensor(["f"], torch.arange(4095) * 7919, lengths=torch.tensor([4095]))
    for _ in range(2):
        model(ids.to(device()))
    assert int(mapping.open_slots()) <= 1
    held = [
        value for name, value in mapping.state_dict().items() if name not in mapping.once_per_table
    ]
    index = getattr(mapping, "_index", None)
    taken = sum(tensor.untyped_storage().nbytes() for tensor in held)
    if isinstance(index, IdIndex):
        taken += index._slots.untyped_storage().nbytes()
    taken += sum(tensor.nbytes for tensor in getattr(mapping, "_sorted_rows", None) or ())
    assert (
        taken
        <= mapping.row_bytes() * 4096
        <= taken + (mapping.index_bytes * 4096 if kind != "hash" else 0)
    )
    words = {"t": ParameterConstraints(sharding_types=["row_wise"])}
    sharders = ManagedCollisionEmbeddingBagCollectionSharder(), EmbeddingBagCollectionSharder()
    for kind_of_device in ("cpu", "cuda"):
        options = [
            EmbeddingEnumerator(Topology(2, kind_of_device), 16, words).enumerate(part, [sharder])[
                0
            ]
            for part, sharder in zip(
                (model, model._embedding_bag_collection), sharders, strict=True
            )
        ]
        first, second = (
            option.shard_arrays().storage[:, option.shard_arrays().storage[0].argmax()]
            for option in options
        )
        assert (first - second).tolist() == [mapping.row_bytes() * 2048] * 2


def facts(**changes: Any) -> TableProfile:
    words: dict[str, Any] = {"features": ("f",), "samples": (10.0,), "ids": (20.0,)}
    return TableProfile("", "t", 1000, 32, **(words | changes))


ADAGRAD = OptimizerSpec("rowwise_adagrad")
WHOLE = np.array([[1000, 32]])


def test_buffers_of_a_table_are_those_of_the_hand():
    found = stored_bytes(
        facts(optimizer=ADAGRAD), ShardingType.TABLE_WISE, "fused", WHOLE, Topology(2, "cuda")
    )
    assert (found.weights[0], found.state[0], found.gradients[0]) == (128_000, 4000, 0)
    # 40 ids and 20 lengths of 8 bytes; 20 bags of 32 numbers.
    assert (found.input[0], found.output[0]) == (480, 20 * 128)
    weighted = stored_bytes(
        facts(weighted=True), ShardingType.TABLE_WISE, "fused", WHOLE, Topology(2, "cuda")
    )
    assert weighted.input[0] == 480 + 4 * 40


def test_a_dense_kernel_holds_a_gradient_and_no_state():
    found = stored_bytes(
        facts(optimizer=ADAGRAD), ShardingType.TABLE_WISE, "dense", WHOLE, Topology(2, "cuda")
    )
    assert (found.state[0], found.gradients[0]) == (0, 128_000)


def test_copies_take_the_whole_table_on_every_rank():
    sizes = np.array([[1000, 32]] * 2)
    found = stored_bytes(facts(), ShardingType.DATA_PARALLEL, "fused", sizes, Topology(2, "cuda"))
    assert found.weights.tolist() == [128_000] * 2
    assert found.gradients.tolist() == [0, 0]
    assert found.output.tolist() == [20 * 128] * 2  # gradients of all ranks' bags
    small = TableProfile("", "t", 4, 32, features=("f",), samples=(10.0,), ids=(20.0,))
    in_sum = stored_bytes(
        small, ShardingType.DATA_PARALLEL, "fused", np.array([[4, 32]] * 2), Topology(2, "cuda")
    )
    assert in_sum.gradients.tolist() == [2 * 4 * 4 * 32] * 2


@pytest.mark.parametrize(("device", "column"), [("cuda", 0), ("cpu", 1)])
def test_bytes_stand_in_the_memory_of_the_device(device, column):
    topology = Topology(2, device)
    memory = shard_storage(
        facts(optimizer=ADAGRAD), ShardingType.TABLE_WISE, "fused", WHOLE, topology
    )
    assert memory.shape == (1, 3)
    assert memory[0, column] == memory.sum() == 128_000 + 4000 + 480 + 2560
    inference = shard_storage(
        facts(optimizer=ADAGRAD), ShardingType.TABLE_WISE, "fused", WHOLE, topology, True
    )
    assert inference.sum() == 128_000


def test_a_kernel_may_keep_rows_elsewhere(monkeypatch):
    monkeypatch.setattr(cost, "_kernels", dict(cost._kernels))

    def on_host(topology: Topology, stored: Any) -> Any:
        return np.stack([0 * stored, stored, 0 * stored], axis=1)

    register_kernel("fused_uvm", KernelModel(memory=on_host))
    memory = shard_storage(
        facts(), ShardingType.TABLE_WISE, "fused_uvm", WHOLE, Topology(2, "cuda")
    )
    assert memory.tolist() == [[480 + 2560, 128_000, 0]]


def tensors_in(*owners: Any) -> list[torch.Tensor]:
    """The tensors that objects have as attributes, alone or in lists."""
    found: list[torch.Tensor] = []
    left = [value for owner in owners for value in vars(owner).values()]
    while left:
        value = left.pop()
        found += [value] if isinstance(value, torch.Tensor) else []
        left += list(value) if isinstance(value, list | tuple) else []
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="tables in files are on the CPU")
def test_cache_counts_its_rows_and_index_in_memory_and_the_table_in_the_file():
    cached = facts(optimizer=ADAGRAD, cached=0.1, miss_rate=0.5)
    topology = Topology(1, "cpu")
    found = stored_bytes(cached, ShardingType.TABLE_WISE, "fused_uvm_caching", WHOLE, topology)
    [memory] = shard_storage(
        cached, ShardingType.TABLE_WISE, "fused_uvm_caching", WHOLE, topology
    ).tolist()
    assert memory[1] == found.cache[0] + found.input[0] + found.output[0]
    group = GroupSpec((TableSpec("t", 1000, 32),), (0,))
    tables: Any = build_table_batch(
        group, optimizer=ADAGRAD, device=device(), cache=CacheSpec((100,))
    )
    # the file has a spare row for each slot
    assert memory[2] == sum(part.nbytes for part in (tables._flat, *tables._kept))
    assert memory[2] == (1000 + 100) * (128 + 4)
    [on_gpu] = shard_storage(
        cached, ShardingType.TABLE_WISE, "fused_uvm_caching", WHOLE, Topology(1, "cuda")
    ).tolist()
    assert on_gpu[1:] == [1000 * (128 + 4), 0]
    copied = sum(part.nbytes for of_table in tables._fingerprints for part in of_table)
    index = sum(part.nbytes for part in tensors_in(tables._cache)) + copied
    assert found.cache[0] == pytest.approx(100 * (128 + 4) + index, rel=0.05)
    slower = shard_perf(cached, ShardingType.TABLE_WISE, "fused_uvm_caching", WHOLE, topology)[0]
    assert slower[5] == pytest.approx(2 * 0.5 * 20 * (128 + 4) / topology.ssd_mem_bw)
    none = facts(miss_rate=1.0)
    assert stored_bytes(none, ShardingType.TABLE_WISE, "fused_uvm", WHOLE, topology).cache[0] == 0


def option(sharding_type: str = "table_wise") -> ShardingOption:
    module = EmbeddingBagCollection([EmbeddingBagConfig(1000, 32, "t", feature_names=["f"])])
    weight = torch.empty(1000, 32, device="meta")
    return ShardingOption(
        "t", weight, ("", module), [2.0], 10, sharding_type, PartitionByType.DEVICE.value, "fused",
        [Shard([1000, 32], [0, 0])],
    )  # fmt: skip


def test_estimators_fill_shards_that_are_objects():
    topology, made = Topology(2, "cuda", hbm_mem_bw=1.0, intra_host_bw=1.0), option()
    EmbeddingPerfEstimator(topology).estimate([made])
    EmbeddingStorageEstimator(topology, constraints={}).estimate([made], sharder_data_map={})
    [shard] = made.shards
    assert shard.perf is not None
    assert shard.storage is not None
    assert shard.perf.fwd_compute == 40 * (8 + 128) + 20 * 128
    assert shard.storage.hbm == 128_000 + 480 + 2560


def test_inference_has_no_backward_and_no_buffers():
    topology, made = Topology(2, "cuda"), option()
    EmbeddingPerfEstimator(topology, is_inference=True).estimate([made])
    EmbeddingStorageEstimator(topology, is_inference=True).estimate([made])
    perf, storage = made.shards[0].perf, made.shards[0].storage
    assert perf is not None
    assert storage is not None
    assert perf.bwd_compute == perf.bwd_comms == 0
    assert perf.fwd_compute > 0
    assert storage.hbm == 128_000


def test_cases_of_this_file_hold_odd_widths_and_empty_pieces():
    assert any(columns % 4 for _, columns in shapes(unsharded(True)).values())
    assert any(columns // 2 % 4 for _, columns in shapes(unsharded(True)).values())
    assert "column_wise" in CUT_IN_TWO
    assert min(rows for rows, _ in shapes(unsharded(True)).values()) == 5

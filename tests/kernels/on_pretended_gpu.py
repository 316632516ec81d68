"""Tables on a pretended GPU: the adapters of CUDA tables mix no devices, and compute what they
compute on the CPU.

Run in a process of its own, with pretended GPUs; prints how many cases were compared.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from itertools import product
from unittest.mock import patch

import torch
from kernels.pretended_fbgemm import pretended_cache
from torch import Tensor

from tutorec._kernels import packed
from tutorec._kernels.caches.row_cache import CacheSpec
from tutorec._kernels.packed import PackedTable, PackedTableLookup
from tutorec._kernels.specs import FBGEMM_KINDS, POOLINGS, GroupSpec, OptimizerSpec, TableSpec
from tutorec._kernels.tbe_build import build_table_batch
from tutorec._kernels.wheels import BackendChoice
from tutorec.distributed.core.cache_params import CacheParams
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.packing import pack_rows
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import DataType

# A table that two features apart read, one of no rows, and one that no feature reads.
TABLES = (TableSpec("a", 9, 8), TableSpec("b", 0, 8), TableSpec("c", 7, 8), TableSpec("d", 3, 8))
FEATURES = (0, 2, 1, 0)
IDS = torch.tensor([3, 3, 1, 5, 2, 6, 0, 1, 1, 1, 4, 2])
OFFSETS = torch.tensor([0, 2, 2, 3, 6, 7, 7, 7, 7, 7, 9, 10, 12])
CACHES = (CacheSpec(), CacheSpec((3, 1, 3, 1)), CacheSpec((3, 1, 3, 1), prefetch_pipeline=True))
DEVICES = (torch.device("cpu"), torch.device("cuda", 0))


def train(
    rule: OptimizerSpec,
    pooling: str,
    weighted: bool,
    steps: bool,
    device: torch.device,
    cache: CacheSpec | None = None,
) -> tuple[str, list[Tensor | None]]:
    """The kernel, and everything that two steps and one of a copy leave."""
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(table.rows, table.columns, generator=generator) for table in TABLES]
    spec = GroupSpec(TABLES, FEATURES, pooling, weighted)  # type: ignore[arg-type]
    op = build_table_batch(spec, optimizer=rule, device=device, weights=start, cache=cache)
    if steps:  # every table has made another number of them
        for number, state in enumerate(op.optimizer_state()):
            state["step"].fill_(number)
    weights = (torch.arange(12.0) + 1).to(device).requires_grad_() if weighted else None
    batch = IDS.to(device), OFFSETS.to(device), weights
    left: list[Tensor | None] = []
    for _ in range(2):
        with torch.no_grad():
            op(*batch)
        left.append(op(*batch))
        left[-1].square().sum().backward()
    op.learning_rate = 0.5
    other = copy.deepcopy(op)
    other(*batch).sum().backward()
    left += other.table_weights()
    left += [state for of_table in other.table_states() for state in of_table]
    left.append(None if weights is None else weights.grad)
    return op.kernel, [None if one is None else one.detach().cpu() for one in left]


def train_sharded(kernel: str, device: torch.device) -> list[Tensor]:
    """What a sharded collection gives and holds after three steps, with two batches prefetched."""
    torch.manual_seed(0)
    names = ("a", "b")
    ebc = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                num_embeddings=9, embedding_dim=8, name=f"t_{name}", feature_names=[name]
            )
            for name in names
        ]
    )
    plan = construct_module_sharding_plan(
        ebc,
        {f"t_{name}": table_wise(0, compute_kernel=kernel) for name in names},
        world_size=1,
        device_type=device.type,
    )
    if kernel == "fused_uvm_caching":
        for entry in plan.values():
            entry.cache_params = CacheParams(
                load_factor=0.5, reserved_memory=1e6, prefetch_pipeline=True
            )
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.1}
    )
    sharded = sharder.shard(ebc, plan, ShardingEnv.from_local(1, 0), device)
    given, outputs = [], []
    for shift in range(3):
        ids = KeyedJaggedTensor(
            list(names), (IDS + shift) % 9, lengths=torch.tensor([2, 0, 4, 1, 3, 2])
        ).to(device)
        ctx = sharded.create_context()
        given.append((ctx, sharded.input_dist(ctx, ids).wait().wait()))
        sharded.prefetch(given[-1][1])
    for ctx, arrived in given:
        outputs.append(sharded.output_dist(ctx, sharded.compute(ctx, arrived)).wait().values())
        outputs[-1].square().sum().backward()
    state = sharded.fused_optimizer.state_dict()["state"]
    held = [
        *sharded.state_dict().values(),
        *(value for of_table in state.values() for value in of_table.values()),
    ]
    return [one.detach().cpu() for one in (*outputs, *held)]


def look_up(pooling: str, kind: DataType, device: torch.device) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    tables = [PackedTable(name, 7, 6, kind) for name in ("a", "b")]
    op = PackedTableLookup(tables, [0, 1, 0, 1], pooling)  # type: ignore[arg-type]
    for index in range(2):
        pack_rows(torch.randn(7, 6, generator=generator), kind, out=op.table_rows(index))
    op = op.to(device)
    assert op._on_fbgemm or (kind is DataType.INT2 and op.weights.is_cuda)
    return [op(IDS.to(device), OFFSETS.to(device)).cpu()]


def main() -> None:
    # Without dense tables: fbgemm's operator has a gradient for CUDA tensors, and these are some
    # for Python alone.
    rules = [OptimizerSpec(kind, 0.1) for kind in FBGEMM_KINDS["cuda"]]
    compared = 0
    for rule, pooling, weighted, steps in product(rules, POOLINGS, (False, True), (False, True)):
        if (pooling == "none" and weighted) or (steps and not rule.counts_steps):
            continue
        (_, cpu), (kernel, cuda) = (
            train(rule, pooling, weighted, steps, device) for device in DEVICES
        )
        assert kernel == f"fbgemm.{rule.kind}", kernel
        torch.testing.assert_close(cuda, cpu, rtol=1e-4, atol=1e-4)
        compared += 1
    for rule, pooling, cache in product(rules, ("mean", "none"), CACHES):
        _, cpu = train(rule, pooling, False, False, DEVICES[0])
        kernel, cuda = train(rule, pooling, False, False, DEVICES[1], cache)
        assert kernel == f"{'cached' if cache.rows else 'managed'} fbgemm.{rule.kind}", kernel
        torch.testing.assert_close(cuda, cpu, rtol=1e-4, atol=1e-4)
        compared += 1
    expected = train_sharded("fused", DEVICES[0])
    for kernel in ("fused_uvm", "fused_uvm_caching"):
        torch.testing.assert_close(train_sharded(kernel, DEVICES[1]), expected)
        compared += 1
    for pooling, kind in product(
        POOLINGS, (DataType.FP16, DataType.INT8, DataType.INT4, DataType.INT2)
    ):
        cpu, cuda = (look_up(pooling, kind, device) for device in DEVICES)
        torch.testing.assert_close(cuda, cpu)
        compared += 1
    print(f"{compared} cases are equal")


if __name__ == "__main__":
    with ExitStack() as stack:
        stack.enter_context(pretended_cache())
        stack.enter_context(
            patch.object(BackendChoice, "serves", lambda choice, device: device in ("cpu", "cuda"))
        )
        # fbgemm's CPU kernel reads the rows
        stack.enter_context(patch.object(packed, "_ON_DEVICE", packed._ON_HOST))
        main()

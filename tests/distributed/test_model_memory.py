"""Models whose tables no rank could hold are built, trained, saved and loaded within a limit of
memory.

Memory of the CPU is what is measured and limited, so that all ranks are on it.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from process_memory import peak_during, resident
from torch import nn

from tutorec.distributed.checkpoint import load_checkpoint, save_checkpoint
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tutorec.optim.optimizers import in_backward_optimizer_filter
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Ranks

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_DATA of Linux"
)

COLUMNS, SAMPLES, IDS = 64, 256, 10
# of each table of one rank, and of each rank's part of the table that is cut up: 134 MB
ROWS = 525_000
MIB = 2**20


class Model(nn.Module):
    """One table that is cut by rows, one for each rank, a dense layer on top."""

    def __init__(self, rows: int, world_size: int) -> None:
        super().__init__()
        configs = [EmbeddingBagConfig(rows * world_size, COLUMNS, "cut", feature_names=["cut"])]
        configs += [
            EmbeddingBagConfig(rows, COLUMNS, f"t{i}", feature_names=[f"t{i}"])
            for i in range(world_size)
        ]
        self.tables = EmbeddingBagCollection(configs, device=torch.device("meta"))
        self.over = nn.Linear(COLUMNS * len(configs), 1, device="meta")

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.tables(features).values()).mean()


def build_train_save(
    rank: int, world_size: int, rows: int, path: str, kernel: str
) -> tuple[int, int]:
    """Bytes of this rank's rows and state, and the size of the largest table."""
    model = Model(rows, world_size)
    words: dict[str, Any] = {
        f"t{i}": table_wise(i, compute_kernel=kernel) for i in range(world_size)
    } | {"cut": row_wise(compute_kernel=kernel)}
    plan = construct_module_sharding_plan(model.tables, words, world_size=world_size)
    cache = {"cache_load_factor": 0.01} if kernel == "fused_uvm_caching" else {}
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.1, **cache}
    )
    parallel = DistributedModelParallel(
        model, plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )
    dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    optimizer = CombinedOptimizer(
        [parallel.fused_optimizer, KeyedOptimizerWrapper(dense, torch.optim.Adam)]
    )
    keys = ["cut", *(name for name in words if name != "cut")]
    numbers = torch.Generator().manual_seed(rank)
    for _ in range(3):
        ids = torch.randint(0, rows, (len(keys) * SAMPLES * IDS,), generator=numbers)
        ids[: SAMPLES * IDS] *= world_size
        lengths = torch.full((len(keys) * SAMPLES,), IDS)
        optimizer.zero_grad()
        parallel(KeyedJaggedTensor(keys, ids, lengths=lengths)).backward()
        optimizer.step()
    save_checkpoint(path, parallel, optimizer, step=3)
    if kernel != "fused":
        load_checkpoint(path, parallel, optimizer)
    mine = [value for name, value in parallel.named_parameters() if name.startswith("tables.")]
    states = [state for held in parallel.fused_optimizer.state.values() for state in held.values()]
    del optimizer
    return sum(_bytes(value) for value in mine) + sum(
        _bytes(_local(state)) for state in states
    ), 4 * rows * COLUMNS


def within(
    rank: int, world_size: int, folder: str, rows: int, factor: float, kernel: str = "fused"
) -> dict[str, int]:
    """Peak growth under a limit of ``factor`` shares more than the process holds after it has
    warmed up.
    """
    torch.set_num_threads(1)
    small, _ = build_train_save(rank, world_size, 1000, f"{folder}/small", kernel)
    share = small * rows // 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    used = (
        next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
        * 1024
    )
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(factor * share), hard))
    before = resident()
    found: list[int] = []
    try:
        path = f"{folder}/large"
        peak = peak_during(
            lambda: found.extend(build_train_save(rank, world_size, rows, path, kernel))
        )
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return {
        "share": found[0],
        "growth": peak - before,
        "largest table": world_size * 4 * rows * COLUMNS,
    }


@pytest.mark.world4
def test_four_ranks_build_train_and_save_what_none_of_them_could_hold(tmp_path):
    with Ranks(4, timeout=300, backend="gloo") as world:
        found = world.run(within, folder=str(tmp_path), rows=ROWS, factor=1.2)
    for of_rank in found:
        assert of_rank["share"] >= 256 * MIB
        assert of_rank["largest table"] > 1.2 * of_rank["share"]
        assert of_rank["growth"] < 1.2 * of_rank["share"], of_rank


@pytest.mark.parametrize(
    ("world_size", "rows"), [(1, 500_000), pytest.param(1, 8_300_000, marks=pytest.mark.full)]
)
def test_tables_in_files_train_in_a_quarter_of_their_size(tmp_path, world_size, rows):
    with Ranks(world_size, timeout=600, backend="gloo") as world:
        found = world.run(
            within, folder=str(tmp_path), rows=rows, factor=0.25, kernel="fused_uvm_caching"
        )
    # Pages of the files come and go, so that the limit says more than the growth would.
    # 4.2 GB in the large case
    assert all(of_rank["share"] >= 2 * rows * 4 * COLUMNS for of_rank in found)


def test_the_limit_is_one(tmp_path):
    with Ranks(2, timeout=120, backend="gloo") as world, pytest.raises(RuntimeError, match="alloc"):
        world.run(within, folder=str(tmp_path), rows=200_000, factor=0.9)


def _local(state: Any) -> torch.Tensor:
    return state if isinstance(state, torch.Tensor) else state.local_shards()[0].tensor


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()

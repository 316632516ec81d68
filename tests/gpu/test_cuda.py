"""The same code on a GPU: torch kernels on CUDA tensors, one rank on NCCL, two ranks that share one GPU over gloo."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from tutorec._kernels.backend import use_backend
from tutorec._kernels.optimizer_spec import OptimizerKind, OptimizerSpec
from tutorec._kernels.tbe import GroupSpec, TableSpec, build_table_batch
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

GROUP = GroupSpec((TableSpec("user", 50, 8), TableSpec("item", 30, 8)), feature_tables=(0, 1))
VALUES = torch.tensor([3, 3, 49, 0, 29, 29])
OFFSETS = torch.tensor([0, 2, 3, 4, 6])


@pytest.mark.parametrize("kind", get_args(OptimizerKind))
def test_torch_kernels_give_the_same_rows_on_cuda(kind):
    weights = [torch.rand(table.rows, table.columns) for table in GROUP.tables]
    rows = {}
    for device in ("cpu", "cuda"):
        with use_backend("torch"):
            op = build_table_batch(
                GROUP, optimizer=OptimizerSpec(kind, 0.1), device=torch.device(device), weights=weights
            )
        for _ in range(3):
            op(VALUES.to(device), OFFSETS.to(device)).square().sum().backward()
        rows[device] = torch.cat([table.detach().cpu() for table in op.table_weights()])
    torch.testing.assert_close(rows["cuda"], rows["cpu"])


def one_step(rank: int, world_size: int, device_type: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A forward and a fused step table-wise; the pooled rows and this rank's tables."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    names = ("user", "item")
    ebc = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(num_embeddings=30, embedding_dim=8, name=f"t_{name}", feature_names=[name])
            for name in names
        ]
    )
    placement = {"t_user": table_wise(rank=0), "t_item": table_wise(rank=world_size - 1)}
    plan = construct_module_sharding_plan(ebc, placement, world_size=world_size, device_type=device_type)
    group = torch.distributed.group.WORLD
    assert group is not None, "a rank has a process group"
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": "rowwise_adagrad", "learning_rate": 0.1})
    sharded = sharder.shard(ebc, plan, ShardingEnv.from_process_group(group), device)
    ids = KeyedJaggedTensor(list(names), torch.tensor([1, 2, 2, 7, 0, 29]), lengths=torch.tensor([2, 1, 1, 2]))
    pooled = sharded(ids.to(device)).wait().values()
    pooled.sum().backward()
    return pooled.detach().cpu(), {name: rows.detach().cpu() for name, rows in sharded.named_parameters()}


@pytest.mark.parametrize(("world_size", "backend"), [(1, "nccl"), (2, "gloo")])
def test_a_sharded_step_on_cuda_equals_the_cpu(world_size, backend):
    with Ranks(world_size, backend="gloo") as world:
        expected = world.run(one_step, "cpu")
    with Ranks(world_size, backend=backend) as world:
        actual = world.run(one_step, "cuda")
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_bad_id_on_the_device_is_told_at_the_next_sync_point():
    batch = KeyedJaggedTensor(["item"], torch.tensor([3, 9]), lengths=torch.tensor([1, 1])).to(torch.device("cuda"))
    check_ids(batch, [("item", "items", 8)])  # nothing is read from the device here
    with pytest.raises(ValueError, match="feature 'item', sample 1, holds id 9"):
        batch.unsync().sync()

"""Plans, and steps of a sharded collection on one rank."""

from __future__ import annotations

import importlib
from typing import Any

from registry import case, collection, jagged, numbers, of


def hand_written_plan(root: str, module: Any) -> Any:
    """Both tables on rank 0, fused kernel, one process on the CPU."""
    plans = of(root, "distributed.sharding_plan")
    sharder = of(root, "distributed.embeddingbag").EmbeddingBagCollectionSharder()
    per_table = {
        "t_item": plans.table_wise(rank=0, compute_kernel="fused"),
        "t_user": plans.table_wise(rank=0, compute_kernel="fused"),
    }
    return plans.construct_module_sharding_plan(
        module, per_table, sharder, local_size=1, world_size=1, device_type="cpu"
    )


@case
def printed_plan(root: str) -> Any:
    return str(hand_written_plan(root, collection(root)))


def fused_steps(root: str, optimizer: str, steps: int = 3) -> Any:
    """Weights of both tables after steps on one sharded rank; a pooled number's gradient is its
    column's number.
    """
    import torch

    sharders, types = of(root, "distributed.embeddingbag"), of(root, "distributed.types")
    module = collection(root)
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    fused = {"optimizer": exact_optimizer(root, optimizer), "learning_rate": 0.1, "eps": 1e-8}
    sharder = sharders.EmbeddingBagCollectionSharder(fused_params=fused)
    environment = types.ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    sharded = sharder.shard(
        module, hand_written_plan(root, module), environment, torch.device("cpu")
    )
    for name, tensor in sharded.state_dict().items():
        on_this_rank(tensor).copy_(start[name])
    for _ in range(steps):
        values = sharded(jagged(root)).values()
        (values * torch.arange(1, values.shape[1] + 1)).sum().backward()
    tables = {name: numbers(on_this_rank(t)) for name, t in sorted(sharded.state_dict().items())}
    return {"tables": tables, "learning_rate": sharded.fused_optimizer.param_groups[0]["lr"]}


def on_this_rank(tensor: Any) -> Any:
    """The rows that this rank holds: of a ShardedTensor its one shard, of a plain tensor itself."""
    return tensor.local_shards()[0].tensor if hasattr(tensor, "local_shards") else tensor.detach()


def exact_optimizer(root: str, name: str) -> Any:
    """fbgemm's member where torchrec asks for it; tutorec's own has the same names and values."""
    if root == "tutorec":
        return of(root, "optim").EmbOptimType[name]
    return getattr(importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType, name)


@case
def fused_sgd(root: str) -> Any:
    return fused_steps(root, "EXACT_SGD")


@case
def fused_adagrad(root: str) -> Any:
    return fused_steps(root, "EXACT_ADAGRAD")


@case
def fused_rowwise_adagrad(root: str) -> Any:
    return fused_steps(root, "EXACT_ROWWISE_ADAGRAD")

"""From a trained model to one that serves: quantized, and laid out over the devices of one process.

Corresponds to TorchRec's ``torchrec.inference.modules``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.plan import EmbeddingComputeKernel, ShardingPlan, ShardingType
from tutorec.distributed.quant_embedding import QuantEmbeddingCollectionSharder
from tutorec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from tutorec.distributed.shard import _shard_modules, collections_of

__all__ = ["shard_quant_model"]


def shard_quant_model(
    model: nn.Module,
    world_size: int = 1,
    compute_device: str = "cpu",
    sharding_device: str | None = None,
    sharders: Sequence[Any] | None = None,
    device_memory_size: int | None = None,
    constraints: Mapping[str, Any] | None = None,
    ddr_cap: int | None = None,
    sharding_plan: ShardingPlan | None = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Lay the tables of a quantized model out over the devices of this process.

    Args:
        model: The quantized model. Collections inside it are replaced in place; if it is a collection itself, its
            sharded form is returned.
        world_size: How many devices; on the CPU they are virtual and share its memory.
        compute_device: ``"cpu"``, or ``"cuda"`` for ``cuda:0`` to ``cuda:world_size-1``.
        sharding_device: Where the tables are laid out; by default ``compute_device``.
        sharders: One for each class of collections; those of both quantized ones by default.
        device_memory_size: Bytes of a device that tables may take; by default those of the GPU, or 128 GiB on the CPU.
        constraints: Table name -> what is laid down for it; by default every table stays whole, on one device.
        ddr_cap: Bytes of host memory for each device.
        sharding_plan: A plan that is to be carried out; made by `EmbeddingShardingPlanner` by default.

    Returns:
        The sharded model and its plan.

    Raises:
        PlannerError: No plan fits the devices; a table that is larger than one needs a constraint that cuts it.
        ValueError: There are not so many devices, nothing in the model is quantized, or the given plan does not fit.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.quant.embedding_modules import EmbeddingBagCollection
        >>> tables = [EmbeddingBagConfig(8, 4, name, feature_names=[name]) for name in ("item", "user")]
        >>> quantized = EmbeddingBagCollection(tables, is_weighted=False, device=torch.device("cpu"))
        >>> sharded, plan = shard_quant_model(nn.Sequential(quantized), world_size=2)
        >>> type(sharded[0]).__name__, {name: entry.ranks for name, entry in plan.plan["0"].items()}
        ('ShardedQuantEmbeddingBagCollection', {'item': [0], 'user': [1]})

    Source:
        TorchRec's ``torchrec.inference.modules.shard_quant_model``; its devices are GPUs, and it lays out on ``meta``.
    """
    sharders = default_quant_sharders() if sharders is None else list(sharders)
    env = ShardingEnv.from_local(world_size, 0)
    found = dict(collections_of(model, sharders))
    if not found:
        kinds = [sharder.module_type.__name__ for sharder in sharders]
        raise ValueError(
            f"the {type(model).__name__} holds no quantized collection ({' or '.join(kinds)}): quantize it first, "
            "tutorec.quantize(model)"
        )
    plan = sharding_plan
    if plan is None:
        if constraints is None:
            constraints = _whole_tables(
                name for part, each in found.values() for name in each.shardable_parameters(part)
            )
        plan = _planned(
            model, sharders, _topology(world_size, compute_device, device_memory_size, ddr_cap), constraints
        )
    device = torch.device(sharding_device or compute_device)
    return _shard_modules(model, env, device, plan, sharders), plan


def default_quant_sharders() -> list[Any]:
    """One sharder for each class of quantized collections."""
    return [QuantEmbeddingBagCollectionSharder(), QuantEmbeddingCollectionSharder()]


def _whole_tables(names: Any) -> dict[str, Any]:
    """Every table whole, on one device: whichever results come, they are those of the unsharded model, bit for bit."""
    from tutorec.distributed.planner.constraints import ParameterConstraints

    kinds, kernels = [ShardingType.TABLE_WISE.value], [EmbeddingComputeKernel.QUANT.value]
    return {name: ParameterConstraints(sharding_types=kinds, compute_kernels=kernels) for name in names}


def _topology(world_size: int, compute_device: str, device_bytes: int | None, ddr_cap: int | None) -> Any:
    """The devices as the planner sees them."""
    from tutorec.distributed.planner.topology import Topology

    if compute_device == "cpu":
        ddr_cap = device_bytes if ddr_cap is None else ddr_cap
        device_bytes = None
    elif device_bytes is None and compute_device == "cuda" and torch.cuda.is_available():
        device_bytes = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return Topology(world_size, compute_device, hbm_cap=device_bytes, ddr_cap=ddr_cap, local_world_size=world_size)


def _planned(model: nn.Module, sharders: Sequence[Any], topology: Any, constraints: Mapping[str, Any]) -> ShardingPlan:
    """The planner's plan, for one request at a time; all memory is the tables'."""
    from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
    from tutorec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    planner = EmbeddingShardingPlanner(
        topology,
        batch_size=1,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
    )
    return planner.plan(model, sharders)

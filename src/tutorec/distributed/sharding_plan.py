"""Plans written by hand: say for each table where it goes.

Corresponds to TorchRec's ``torchrec.distributed.sharding_plan``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tutorec.distributed import comm
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from tutorec.distributed.shard_geometry import table_wise_sharding
from tutorec.distributed.sharded_module import ModuleSharder


@dataclass(frozen=True)
class Machine:
    """For which ranks a plan is made.

    Args:
        world_size: W, ranks.
        local_size: Ranks per host.
        device_type: ``"cpu"`` or ``"cuda"``.
    """

    world_size: int
    local_size: int
    device_type: str


@dataclass(frozen=True)
class ParameterShardingGenerator:
    """How one table is to be sharded, before its shape is known; see `table_wise`.

    Args:
        rank: Where it goes.
        compute_kernel: How its rows are kept.
    """

    rank: int
    compute_kernel: EmbeddingComputeKernel

    def generate(self, table: str, shape: tuple[int, int], machine: Machine) -> ParameterSharding:
        """The entry of the plan for a table ``[R, D]``."""
        if not 0 <= self.rank < machine.world_size:
            raise ValueError(
                f"table_wise(rank={self.rank}) for table {table!r}: the world has {machine.world_size} ranks, "
                f"0 to {machine.world_size - 1}; pass world_size= to plan for another world"
            )
        return table_wise_sharding(shape, self.rank, machine.device_type, machine.local_size, self.compute_kernel)


def table_wise(rank: int, compute_kernel: str | None = None) -> ParameterShardingGenerator:
    """The whole table on one rank.

    Args:
        rank: Which.
        compute_kernel: An `EmbeddingComputeKernel` value; ``"fused"`` by default. (TorchRec's hand-written plans pick
            ``dense`` unless told otherwise, which ignores ``fused_params``.)

    Raises:
        ValueError: There is no such kernel.

    Example:
        >>> table_wise(rank=1).rank
        1
    """
    try:
        kernel = EmbeddingComputeKernel(compute_kernel or EmbeddingComputeKernel.FUSED)
    except ValueError:
        names = ", ".join(kernel.value for kernel in EmbeddingComputeKernel)
        raise ValueError(f"compute_kernel {compute_kernel!r} is unknown: use one of {names}") from None
    return ParameterShardingGenerator(rank, kernel)


def construct_module_sharding_plan(
    module: nn.Module,
    per_param_sharding: Mapping[str, ParameterShardingGenerator],
    sharder: ModuleSharder[Any] | None = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """The plan of one module, from a word for each of its tables.

    Args:
        module: An unsharded collection; it may be on the meta device.
        per_param_sharding: Table name -> `table_wise` ..., every table.
        sharder: Knows the tables of ``module``; the one for its class by default.
        local_size: Ranks per host; by default ``LOCAL_WORLD_SIZE``, else all on one.
        world_size: W; by default that of the process group, else 1.
        device_type: ``"cuda"`` where there is one, else ``"cpu"``.

    Raises:
        ValueError: A table is left out or does not exist, or a rank is outside of the world.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "products", feature_names=["item"])])
        >>> plan = construct_module_sharding_plan(ebc, {"products": table_wise(rank=1)}, world_size=2)
        >>> plan["products"].ranks, plan["products"].compute_kernel
        ([1], 'fused')

    Source:
        TorchRec's ``torchrec.distributed.sharding_plan.construct_module_sharding_plan``.
    """
    sharder = sharder if sharder is not None else _sharder_of(module)
    parameters = sharder.shardable_parameters(module)
    missing = [name for name in parameters if name not in per_param_sharding]
    surplus = [name for name in per_param_sharding if name not in parameters]
    if missing or surplus:
        raise ValueError(
            f"per_param_sharding must name each table of the module once: missing {missing}, unknown {surplus}; "
            f"its tables are {list(parameters)}"
        )
    group = comm.default_group()
    world_size = world_size or (group.size() if group is not None else 1)
    machine = Machine(
        world_size,
        local_size or int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        device_type or ("cuda" if torch.cuda.is_available() else "cpu"),
    )
    plan = EmbeddingModuleShardingPlan()
    for name, parameter in parameters.items():
        rows, columns = parameter.shape
        plan[name] = per_param_sharding[name].generate(name, (rows, columns), machine)
    return plan


def default_sharders() -> list[ModuleSharder[Any]]:
    """One sharder for each class of modules that can be sharded."""
    return [EmbeddingBagCollectionSharder()]


def check_plan_fits(plan: ShardingPlan, paths: Mapping[str, nn.Module]) -> None:
    """Check that every module that a plan names can be sharded.

    Args:
        plan: Path of a module -> its plan.
        paths: Path -> module, those that a sharder knows.

    Raises:
        ValueError: A path does not exist, or nothing there can be sharded.

    Example:
        >>> check_plan_fits(ShardingPlan({"sparse": EmbeddingModuleShardingPlan()}), {})
        Traceback (most recent call last):
            ...
        ValueError: the plan names module 'sparse', which the model does not have; modules that can be sharded: []
    """
    for path in plan.plan:
        if path not in paths:
            raise ValueError(
                f"the plan names module {path!r}, which the model does not have; modules that can be sharded: "
                f"{list(paths)}"
            )


def _sharder_of(module: nn.Module) -> ModuleSharder[Any]:
    for sharder in default_sharders():
        if type(module) is sharder.module_type:
            return sharder
    known = ", ".join(sharder.module_type.__name__ for sharder in default_sharders())
    raise ValueError(f"no sharder for a {type(module).__name__}: pass sharder=, or a module of {known}")

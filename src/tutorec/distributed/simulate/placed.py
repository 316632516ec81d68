"""A plan and its tables, in the form that the simulation uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec.distributed.fused_params import optimizer_spec_of_parameter
from tutorec.distributed.placed_pieces import placed_pieces
from tutorec.distributed.plan import ParameterSharding, ShardingPlan, ShardingType
from tutorec.distributed.planner.cost import kernel_model
from tutorec.distributed.simulate.work import SimulatedTable
from tutorec.distributed.tables import check_plan_covers
from tutorec.errors import PlannerError, PlannerErrorType
from tutorec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType

Configs = Sequence[BaseEmbeddingConfig]


def placed_tables(
    plan: ShardingPlan | Mapping[str, ParameterSharding],
    tables: nn.Module | Configs | Mapping[str, Configs],
    topology: Any,
    weighted: bool = False,
) -> list[SimulatedTable]:
    """The tables as placed by a plan, checked as in sharding.

    Args:
        plan: Plan of a model, or of one collection.
        tables: The model, the tables of its only collection, or path -> tables of each.
        topology: The ranks, their hosts and speeds.
        weighted: Whether ids carry weights, if ``tables`` is not a model.

    Raises:
        ValueError: Plan, tables and ranks do not match.
        PlannerError: A compute kernel is not supported.

    Example:
        >>> from tutorec.distributed.planner.topology import Topology
        >>> from tutorec.distributed.shard_geometry import table_wise_sharding
        >>> item = EmbeddingBagConfig(8, 4, "item", feature_names=["item"])
        >>> plan = {"item": table_wise_sharding((8, 4), rank=1, device_type="cpu")}
        >>> placed_tables(plan, [item], Topology(2, "cpu"))[0].pieces.tolist()
        [[1, 0, 8, 4]]
    """
    by_path = plan.plan if isinstance(plan, ShardingPlan) else {"": plan}
    if len(by_path) > 1 and not isinstance(tables, nn.Module | Mapping):
        raise ValueError(
            f"the plan is for modules {list(by_path)}: give path -> tables, or the model"
        )
    placed = []
    for path, module_plan in by_path.items():
        optimizers: dict[str, OptimizerSpec | None] = {}
        is_weighted = weighted
        if isinstance(tables, nn.Module):
            module: Any = tables.get_submodule(path)
            bags = hasattr(module, "embedding_bag_configs")
            configs = module.embedding_bag_configs() if bags else module.embedding_configs()
            is_weighted = module.is_weighted() if bags else weighted
            for name, weight in module.named_parameters():
                table = name.split(".")[-2]
                optimizers[table] = optimizer_spec_of_parameter(table, weight)
        else:
            configs = tables[path] if isinstance(tables, Mapping) else tables
        check_plan_covers([config.name for config in configs], module_plan)
        placed += [
            _placed(
                path,
                config,
                module_plan[config.name],
                topology,
                is_weighted,
                optimizers.get(config.name),
            )
            for config in configs
        ]
    return placed


def ranks_per_host(topology: Any) -> int:
    """L: the number of ranks per host.

    Example:
        >>> from tutorec.distributed.planner.topology import Topology
        >>> ranks_per_host(Topology.hosts(2, 4))
        4
    """
    return min(topology.intra_group_size, topology.world_size)


def _placed(
    path: str,
    config: BaseEmbeddingConfig,
    sharding: ParameterSharding,
    topology: Any,
    weighted: bool,
    optimizer: OptimizerSpec | None,
) -> SimulatedTable:
    kernel = kernel_model(sharding.compute_kernel)
    if sharding.compute_kernel in ("fused_uvm", "fused_uvm_caching"):
        raise PlannerError(
            f"table {config.name!r} has the compute kernel {sharding.compute_kernel!r}, and caches "
            "are not simulated: give it 'fused'",
            PlannerErrorType.INVALID_COMPUTE_KERNEL,
        )
    kind = ShardingType(sharding.sharding_type)
    shape = (config.num_embeddings, config.embedding_dim)
    pieces = placed_pieces(
        config.name, shape, sharding, topology.world_size, ranks_per_host(topology)
    )
    update_factor = topology.bwd_compute_multiplier
    if weighted:
        update_factor *= topology.weighted_feature_bwd_compute_multiplier
    return SimulatedTable(
        path=path,
        name=config.name,
        rows=shape[0],
        columns=shape[1],
        features=tuple(config.feature_names),
        pooled=isinstance(config, EmbeddingBagConfig) and config.pooling is not PoolingType.NONE,
        weighted=weighted,
        sharding_type=kind,
        pieces=np.array(
            [
                [piece.rank, piece.row_offset, piece.row_offset + piece.rows, piece.columns]
                for piece in pieces
            ]
        ),
        read_speed=kernel.row_bandwidth(topology),
        update_factor=update_factor,
        row_ms=topology.row_ms,
        leaves_gradient=not kernel.updates,
        optimizer=optimizer if kernel.updates else None,
    )

"""A plan and the tables that it is for, as the simulation reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec._text import ranks_text
from tutorec.distributed.fused_params import optimizer_spec_of_parameter
from tutorec.distributed.placed_pieces import placed_pieces
from tutorec.distributed.plan import ParameterSharding, ShardingPlan, ShardingType
from tutorec.distributed.planner.kernels import kernel_model
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
    """The tables as a plan places them, checked as they are where a module is sharded by it.

    Args:
        plan: Of a model, or of one collection.
        tables: The model, the tables of its only collection, or path -> tables of each.
        topology: The ranks, their hosts and speeds.
        weighted: Whether ids come with weights, where ``tables`` is no model that says so itself.

    Raises:
        TypeError: ``tables`` are none of these.
        ValueError: The plan and the tables or ranks do not belong together.
        PlannerError: Nothing is known of a compute kernel.

    Example:
        >>> from tutorec.distributed.planner.topology import Topology
        >>> from tutorec.distributed.shard_geometry import table_wise_sharding
        >>> item = EmbeddingBagConfig(8, 4, "item", feature_names=["item"])
        >>> plan = {"item": table_wise_sharding((8, 4), rank=1, device_type="cpu")}
        >>> placed_tables(plan, [item], Topology(2, "cpu"))[0].pieces.tolist()
        [[1, 0, 8, 4]]
    """
    by_path = plan.plan if isinstance(plan, ShardingPlan) else {"": plan}
    placed = []
    for path, module_plan in by_path.items():
        configs, is_weighted = _tables_of(path, tables, list(by_path), weighted)
        check_plan_covers([config.name for config in configs], module_plan)
        optimizers = _optimizers(path, tables)
        for config in configs:
            table = _placed(path, config, module_plan[config.name], topology, is_weighted)
            placed.append(table if table.leaves_gradient else replace(table, optimizer=optimizers.get(config.name)))
    return placed


def ranks_per_host(topology: Any) -> int:
    """L: ranks that are connected as inside a host.

    Example:
        >>> from tutorec.distributed.planner.topology import Topology
        >>> ranks_per_host(Topology.hosts(2, 4))
        4
    """
    return min(getattr(topology, "intra_group_size", None) or topology.local_world_size, topology.world_size)


def _placed(
    path: str, config: BaseEmbeddingConfig, sharding: ParameterSharding, topology: Any, weighted: bool
) -> SimulatedTable:
    kernel = kernel_model(sharding.compute_kernel)
    if sharding.compute_kernel in ("fused_uvm", "fused_uvm_caching"):
        raise PlannerError(
            f"table {config.name!r} has the compute kernel {sharding.compute_kernel!r}, and caches are not simulated: "
            "give it 'fused'",
            PlannerErrorType.INVALID_COMPUTE_KERNEL,
        )
    try:
        kind = ShardingType(sharding.sharding_type)
    except ValueError:
        names = ", ".join(each.value for each in ShardingType)
        raise ValueError(
            f"the plan gives table {config.name!r} the sharding type {sharding.sharding_type!r}; use one of {names}"
        ) from None
    shape = (config.num_embeddings, config.embedding_dim)
    if sharding.shape is not None and sharding.shape != shape:
        raise ValueError(
            f"the plan was made for a table {config.name!r} of {sharding.shape[0]} x {sharding.shape[1]} rows and "
            f"columns, and this one is {shape[0]} x {shape[1]}; make the plan from these tables"
        )
    pieces = ()
    everywhere = range(topology.world_size)
    if kind is ShardingType.DATA_PARALLEL and sharding.ranks is not None and set(sharding.ranks) != set(everywhere):
        raise ValueError(
            f"the plan replicates table {config.name!r} on ranks {ranks_text(sharding.ranks)}, and the topology has "
            f"world_size={topology.world_size}; simulate it on the machines that it was made for"
        )
    if kind is not ShardingType.DATA_PARALLEL:
        pieces = placed_pieces(config.name, shape, sharding, topology.world_size, ranks_per_host(topology))
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
            [[piece.rank, piece.row_offset, piece.row_offset + piece.rows, piece.columns] for piece in pieces],
            dtype=np.int64,
        ).reshape(-1, 4),
        read_speed=kernel.row_bandwidth(topology),
        update_factor=topology.bwd_compute_multiplier
        * (getattr(topology, "weighted_feature_bwd_compute_multiplier", 1.0) if weighted else 1.0),
        id_ms=getattr(topology, "id_ms", 0.0),
        leaves_gradient=not kernel.updates,
    )


def _optimizers(path: str, tables: Any) -> dict[str, OptimizerSpec | None]:
    """Table -> the optimizer that its weights bring along, which updates them in backward."""
    if not isinstance(tables, nn.Module):
        return {}
    named = [(name.split(".")[-2], weight) for name, weight in tables.get_submodule(path).named_parameters()]
    return {table: optimizer_spec_of_parameter(table, weight) for table, weight in named}


def _tables_of(path: str, tables: Any, paths: Sequence[str], weighted: bool) -> tuple[Configs, bool]:
    """The tables of a collection, and whether its ids come with weights."""
    if isinstance(tables, nn.Module):
        try:
            module: Any = tables.get_submodule(path)
        except AttributeError:
            raise ValueError(
                f"the plan is for a module {path!r}, which the model does not have; give its own"
            ) from None
        for name in ("embedding_bag_configs", "embedding_configs"):
            configs = getattr(module, name, None)
            if callable(configs):
                listed: Any = configs()
                says = getattr(module, "is_weighted", None)
                return list(listed), bool(says()) if callable(says) else weighted
        raise TypeError(
            f"module {path!r} is a {type(module).__name__}: give an EmbeddingBagCollection or EmbeddingCollection"
        )
    if isinstance(tables, Mapping):
        if path not in tables:
            raise ValueError(
                f"the plan is for module {path!r}, and tables are given for {list(tables)}; give its tables"
            )
        return list(tables[path]), weighted
    if not isinstance(tables, Sequence) or not all(isinstance(config, BaseEmbeddingConfig) for config in tables):
        raise TypeError(
            f"tables are a model, configs, or path -> configs, got {type(tables).__name__}: give one of these"
        )
    if len(paths) > 1:
        raise ValueError(f"the plan is for modules {list(paths)}: give path -> tables, or the model")
    return list(tables), weighted

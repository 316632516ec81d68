"""A plan and the tables that it is for, as the simulation reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from tutorec.distributed.placed_pieces import placed_pieces
from tutorec.distributed.plan import ParameterSharding, ShardingPlan, ShardingType
from tutorec.distributed.simulate.work import SimulatedTable
from tutorec.distributed.tables import check_plan_covers
from tutorec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType

Configs = Sequence[BaseEmbeddingConfig]


def placed_tables(
    plan: ShardingPlan | Mapping[str, ParameterSharding],
    tables: nn.Module | Configs | Mapping[str, Configs],
    world_size: int,
    local_size: int,
    weighted: bool = False,
) -> list[SimulatedTable]:
    """The tables as a plan places them, checked as they are where a module is sharded by it.

    Args:
        plan: Of a model, or of one collection.
        tables: The model, the tables of its only collection, or path -> tables of each.
        world_size: W.
        local_size: L, ranks per host.
        weighted: Whether ids come with weights, where ``tables`` is no model that says so itself.

    Raises:
        TypeError: ``tables`` are none of these.
        ValueError: The plan and the tables or ranks do not belong together.

    Example:
        >>> from tutorec.distributed.shard_geometry import table_wise_sharding
        >>> item = EmbeddingBagConfig(8, 4, "item", feature_names=["item"])
        >>> placed_tables({"item": table_wise_sharding((8, 4), 1, "cpu")}, [item], 2, 2)[0].pieces.tolist()
        [[1, 0, 8, 4]]
    """
    by_path = plan.plan if isinstance(plan, ShardingPlan) else {"": plan}
    found = []
    for path, module_plan in by_path.items():
        configs, is_weighted = _tables_of(path, tables, list(by_path), weighted)
        check_plan_covers([config.name for config in configs], module_plan)
        found += [
            _placed(path, config, module_plan[config.name], world_size, local_size, is_weighted) for config in configs
        ]
    return found


def _placed(
    path: str,
    config: BaseEmbeddingConfig,
    sharding: ParameterSharding,
    world_size: int,
    local_size: int,
    weighted: bool,
) -> SimulatedTable:
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
    pieces = (
        []
        if kind is ShardingType.DATA_PARALLEL
        else placed_pieces(config.name, shape, sharding, world_size, local_size)
    )
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
    )


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

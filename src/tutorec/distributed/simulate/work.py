"""The tables as placed by a plan, the work of ranks in a step, and its exchanges.

The bytes of exchanges are computed for all ranks of a class at once; tests compare them with the
traffic counter. The time of lookups and updates is that of the planner's cost model (`cost`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from tutorec._kernels.specs import OptimizerSpec
from tutorec.distributed.collectives import sparse_gradients
from tutorec.distributed.collectives.kjt import IDS_STAGE, SIZES_STAGE, STRIDES_STAGE, WEIGHTS_STAGE
from tutorec.distributed.collectives.rows import GRADIENTS_STAGE, ROWS_STAGE
from tutorec.distributed.core.tables import check_plan_covers
from tutorec.distributed.fused_params import optimizer_spec_of_parameter
from tutorec.distributed.plan.geometry import checked_shards
from tutorec.distributed.plan.plan import (
    SHARDING_TRAITS,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tutorec.distributed.planner.cost import (
    dense_gradient_bytes,
    fewer_bytes_as_sum,
    id_wire_bytes,
    kernel_model,
    moved_bytes,
    update_factor,
)
from tutorec.distributed.replicas import even_counts
from tutorec.distributed.simulate.exchanges import Exchange, Reach
from tutorec.distributed.simulate.ids import Floats, Ints
from tutorec.distributed.simulate.loads import RankLoads, most_samples
from tutorec.errors import PlannerError, PlannerErrorType
from tutorec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType

Configs = Sequence[BaseEmbeddingConfig]

_BAG_STAGES = (
    sparse_gradients.IDS_STAGE,
    sparse_gradients.WEIGHTS_STAGE,
    sparse_gradients.ROWS_STAGE,
)


@dataclass(frozen=True, eq=False)
class SimulatedTable:
    """A table as placed by a plan, in P shards.

    Args:
        path: Path of its collection in the model.
        name: Name of the table.
        rows: R.
        columns: D.
        features: Input features that read it.
        pooled: Whether bags are pooled.
        weighted: Whether each id carries a weight.
        sharding_type: Its sharding type.
        shards: ``[P, 4]``: rank, first row, end row, columns; for a replicated table one replica
            per rank.
        read_speed: Bandwidth of its kernel in bytes per ms.
        update_factor: Time of an update relative to a lookup.
        row_ms: Milliseconds per distinct row of an update, in addition to its bytes.
        leaves_gradient: Whether its kernel fills a dense gradient.
        optimizer: The optimizer in backward; None for one that neither updates rows with zero
            gradient nor clips gradients.
    """

    path: str
    name: str
    rows: int
    columns: int
    features: tuple[str, ...]
    pooled: bool
    weighted: bool
    sharding_type: ShardingType
    shards: Ints
    read_speed: float
    update_factor: float
    row_ms: float
    leaves_gradient: bool
    optimizer: OptimizerSpec | None = None

    def lookup_ms(self, ids: Floats, columns: Ints | int, numbers: Floats) -> Floats:
        """Milliseconds to look up ``ids`` ids in shards of ``columns`` columns."""
        return moved_bytes(ids, 4 * columns, numbers) / self.read_speed

    def whole_ms(self, numbers: Ints) -> Floats:
        """Additional milliseconds of a dense gradient of ``numbers`` elements."""
        return dense_gradient_bytes(numbers.astype(np.float64)) / self.read_speed


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
        >>> from tutorec.distributed.plan.geometry import table_wise_sharding
        >>> item = EmbeddingBagConfig(8, 4, "item", feature_names=["item"])
        >>> plan = {"item": table_wise_sharding((8, 4), rank=1, device_type="cpu")}
        >>> placed_tables(plan, [item], Topology(2, "cpu"))[0].shards.tolist()
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

    sharding_type = ShardingType(sharding.sharding_type)
    shape = (config.num_embeddings, config.embedding_dim)
    shards = checked_shards(
        config.name, shape, sharding, topology.world_size, topology.intra_group_size
    )

    return SimulatedTable(
        path=path,
        name=config.name,
        rows=shape[0],
        columns=shape[1],
        features=tuple(config.feature_names),
        pooled=isinstance(config, EmbeddingBagConfig) and config.pooling is not PoolingType.NONE,
        weighted=weighted,
        sharding_type=sharding_type,
        shards=np.array(
            [
                [shard.rank, shard.row_offset, shard.row_offset + shard.rows, shard.columns]
                for shard in shards
            ]
        ),
        read_speed=kernel.row_bandwidth(topology),
        update_factor=update_factor(topology, weighted),
        row_ms=topology.row_ms,
        leaves_gradient=not kernel.updates,
        optimizer=optimizer if kernel.updates else None,
    )


@dataclass(eq=False)
class RankWork:
    """The memory work of each rank in a step, ``[W]`` each.

    Args:
        lookups: Rows of shards that are looked up; a row in two column shards counts twice.
        distinct: Distinct rows of shards that the update changes.
        read_bytes: Bytes of the rows that are looked up.
        lookup_ms: Milliseconds of lookups.
        update_ms: Milliseconds of updates. For replicated tables every rank looks the batches of
            all ranks up again and applies their gradients or, if whole tables are summed, applies
            that of the table.
    """

    lookups: Floats
    distinct: Floats
    read_bytes: Floats
    lookup_ms: Floats
    update_ms: Floats

    def add(self, ranks: Ints, **amounts: Floats) -> None:
        """Add amounts ``[P]`` to the named fields of P ranks, which may repeat."""
        for name, amount in amounts.items():
            np.add.at(getattr(self, name), ranks, amount)


def step_work(
    tables: Sequence[SimulatedTable], loads: RankLoads, local_size: int, wire: tuple[int, int]
) -> tuple[RankWork, list[Exchange]]:
    """The work of a step, and its exchanges in stage order.

    Args:
        tables: The tables as placed by the plan.
        loads: The batches of the ranks.
        local_size: L, ranks per host.
        wire: Bytes of an element on the wire, of rows and of gradients.
    """
    work = RankWork(*np.zeros((5, len(loads.classes))))
    exchanges = list[Exchange]()
    groups: dict[tuple[str, ShardingType], list[SimulatedTable]] = {}
    for table in tables:
        groups.setdefault((table.path, table.sharding_type), []).append(table)

    for (_, sharding_type), members in groups.items():
        if sharding_type is ShardingType.DATA_PARALLEL:
            exchanges += _replicated(members, loads, local_size, work)
        else:
            exchanges += _sharded(members, loads, local_size, wire, work)

    return work, [exchange for exchange in exchanges if exchange.connects]


def _sharded(
    tables: Sequence[SimulatedTable],
    loads: RankLoads,
    local_size: int,
    wire: tuple[int, int],
    work: RankWork,
) -> list[Exchange]:
    """The exchanges of the tables of one sharding type; adds their work to ``work``."""
    world_size = len(loads.classes)
    classes = len(loads.members)
    sent, slots = _looked_up(tables, loads, work)

    def exchange(stage: str, left: Floats, right: Floats, reach: Reach = Reach.ALL) -> Exchange:
        return Exchange(stage, tables[0].path, left, right, local_size, reach)

    ids, bags, numbers = sent.T
    in_class = np.eye(classes)[loads.classes]
    ones = np.ones((world_size, 1))
    exchanges = [
        exchange(SIZES_STAGE, 24 * ones, ones.T),
        exchange(
            IDS_STAGE, in_class, id_wire_bytes(max(table.rows for table in tables)) * (bags + ids)
        ),
    ]
    if loads.variable:
        exchanges.append(exchange(STRIDES_STAGE, ones, 8 * slots[None]))

    if tables[0].weighted:
        exchanges.append(exchange(WEIGHTS_STAGE, in_class, 4 * ids))

    rows, gradients = (element_bytes * numbers for element_bytes in wire)
    if SHARDING_TRAITS[tables[0].sharding_type].splits_rows_in_host and tables[0].pooled:
        # Per class: the ranks with this local number, whose samples this rank reduces or forwards.
        alike = in_class.reshape(-1, local_size, classes).sum(axis=0)
        alike = np.tile(alike, (world_size // local_size, 1))
        return [
            *exchanges,
            exchange(ROWS_STAGE, rows.T, alike.T, Reach.HOST),
            exchange(ROWS_STAGE, rows.T, in_class.T, Reach.PEERS),
            exchange(GRADIENTS_STAGE, in_class, gradients, Reach.PEERS),
            exchange(GRADIENTS_STAGE, alike, gradients, Reach.HOST),
        ]

    return [
        *exchanges,
        exchange(ROWS_STAGE, rows.T, in_class.T),
        exchange(GRADIENTS_STAGE, in_class, gradients),
    ]


def _looked_up(
    tables: Sequence[SimulatedTable], loads: RankLoads, work: RankWork
) -> tuple[Floats, Floats]:
    """Add the work of tables to ``work``.

    Returns:
        What one rank of each class sends to each holder, ids, bags (or lists of ids) and numbers of
        rows ``[W, classes, 3]``; features of each holder ``[W]``.
    """
    world_size = len(loads.classes)
    sent = np.zeros((world_size, len(loads.members), 3))
    slots = np.zeros(world_size)
    for table in tables:
        ranks, starts, ends, columns = table.shards.T
        for feature in table.features:
            ids = loads.ids(feature, table.rows, starts, ends)
            bags = np.repeat(loads.samples(feature)[:, None], len(ranks), axis=1)
            numbers = (bags if table.pooled else ids) * columns
            np.add.at(sent, ranks, np.stack([ids, bags, numbers]).T)
            np.add.at(slots, ranks, 1.0)
            lookups = loads.members @ ids
            lookup_ms = table.lookup_ms(lookups, columns, loads.members @ numbers)
            work.add(
                ranks,
                lookups=lookups,
                read_bytes=4.0 * lookups * columns,
                lookup_ms=lookup_ms,
                update_ms=table.update_factor * lookup_ms,
            )

        if table.leaves_gradient:
            work.add(ranks, update_ms=table.whole_ms((ends - starts) * columns))

        distinct = loads.distinct(table.features, table.rows, starts, ends)
        work.add(ranks, distinct=distinct, update_ms=table.row_ms * distinct)

    return sent, slots


def _replicated(
    tables: Sequence[SimulatedTable], loads: RankLoads, local_size: int, work: RankWork
) -> list[Exchange]:
    """Replicated tables: gradients to every rank, as bags or as whole tables."""
    world_size = len(loads.classes)
    pooled = tables[0].pooled
    id_bytes = id_wire_bytes(max(table.rows for table in tables))
    weight_bytes = 4 * tables[0].weighted
    features = [feature for table in tables for feature in table.features]

    # bags are padded to the largest number of samples of a feature
    samples = most_samples(loads, features)
    # Tables whose gradients are sent as bags: bytes of a rank of each class, for ids and lengths,
    # weights, rows.
    as_bags: list[Floats] = []
    summed = 0
    first = np.array([0])
    for table in tables:
        end = np.array([table.rows])
        ids = sum(
            (loads.ids(f, table.rows, first, end)[:, 0] for f in table.features),
            np.zeros(len(samples)),
        )
        bags = len(table.features) * samples * pooled
        numbers = (bags if pooled else ids) * table.columns
        bag_bytes = float(loads.members @ (ids * (id_bytes + weight_bytes) + 4 * (bags + numbers)))
        optimizer = table.optimizer

        # Whole tables are fewer bytes; a rule that clips gradients needs those of each rank.
        clips = optimizer is not None and optimizer.max_gradient is not None
        smaller = fewer_bytes_as_sum(bag_bytes, table.rows * table.columns)
        in_sum = world_size > 1 and smaller and not clips
        _add_replica(table, loads, ids, numbers, in_sum, work)
        if in_sum:
            # A rule that moves rows without a gradient needs each row's number of gradients, too.
            counts = optimizer is not None and optimizer.moves_without_gradient
            summed += table.rows * (table.columns + counts)
        else:
            as_bags.append(np.stack([id_bytes * (bags + ids), weight_bytes * ids, 4.0 * numbers]))

    def to_all(
        stage: str, sources: Floats | float = 1.0, destinations: Floats | float = 1.0
    ) -> Exchange:
        left, right = (np.broadcast_to(factor, world_size) for factor in (sources, destinations))
        return Exchange(stage, tables[0].path, left[:, None], right[None], local_size)

    exchanges = [to_all(sparse_gradients.SIZES_STAGE, 8.0 * (len(features) + pooled))]
    if as_bags:
        for stage, count in zip(_BAG_STAGES, np.sum(as_bags, axis=0), strict=True):
            if weight_bytes or stage != sparse_gradients.WEIGHTS_STAGE:
                exchanges.append(to_all(stage, count[loads.classes]))

    if summed:
        sums = 4.0 * np.array(even_counts(summed, world_size))
        # Every rank adds up a share, and sends it to the others.
        exchanges += [
            to_all(sparse_gradients.SUMS_STAGE, 1.0, sums),
            to_all(sparse_gradients.SUMS_STAGE, sums),
        ]

    return exchanges


def _add_replica(
    table: SimulatedTable,
    loads: RankLoads,
    ids: Floats,
    numbers: Floats,
    in_sum: bool,
    work: RankWork,
) -> None:
    """Add the work of a replicated table with ``ids`` and ``numbers`` of rows of each class."""
    end = np.array([table.rows])
    lookup_ms = table.lookup_ms(ids, table.columns, numbers)
    whole_ms = table.whole_ms(end * table.columns)
    lookups = ids[loads.classes]
    distinct = loads.distinct(table.features, table.rows, np.array([0]), end)
    work.lookups += lookups
    work.read_bytes += 4.0 * table.columns * lookups
    work.lookup_ms += lookup_ms[loads.classes]
    work.distinct += distinct
    work.update_ms += table.row_ms * distinct + table.leaves_gradient * whole_ms
    if in_sum:
        work.update_ms += table.update_factor * lookup_ms[loads.classes] + whole_ms
    else:  # backward looks the batches of all ranks up again
        again = len(loads.classes) > 1
        work.update_ms += loads.members @ lookup_ms * (table.update_factor + again)

"""A sharded table, from the plan to the operator that looks it up.

`place_table` reads and checks the plan of a table; code that receives a `Table` can rely on a plan
that can be carried out. `group_tables` says which shards of a rank one operator looks up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar

import torch

from tutorec._check import warn_caller
from tutorec._kernels.caches.row_cache import CacheSpec
from tutorec._kernels.specs import GroupSpec, OptimizerSpec, PoolingKind, TableSpec
from tutorec.distributed.core.cache_params import (
    CacheParams,
    TableCache,
    cache_spec,
    is_fp32,
    table_cache,
)
from tutorec.distributed.fused_params import (
    names_optimizer,
    optimizer_spec,
    optimizer_spec_of_parameter,
)
from tutorec.distributed.plan.geometry import TableShard, checked_shards
from tutorec.distributed.plan.plan import (
    SHARDING_TRAITS,
    EmbeddingComputeKernel,
    ParameterSharding,
    ShardingType,
)
from tutorec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    PoolingType,
    get_embedding_names_by_table,
)
from tutorec.spmd.rank import device as own_device

_POOLINGS: dict[PoolingType, PoolingKind] = {
    PoolingType.SUM: "sum",
    PoolingType.MEAN: "mean",
    PoolingType.SQRTN: "sqrtn",
    PoolingType.NONE: "none",
}
IN_FILE = (EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING)
SUPPORTED_KERNELS = (EmbeddingComputeKernel.FUSED, *IN_FILE, EmbeddingComputeKernel.DENSE)
_E = TypeVar("_E", bound=Enum)


@dataclass(frozen=True)
class Table:
    """One table of a collection: its shape, its features, and the placement of its shards.

    Args:
        name: Name of the table.
        rows: R.
        columns: D.
        dtype: Data type of the rows.
        pooling: How the rows of a bag are pooled; ``"none"`` returns a row per id.
        weighted: Whether each id carries a weight.
        features: Input features that read this table.
        output_keys: Names of the outputs, one per feature: the feature's name, or ``feature@table``
            if several tables read the feature.
        sharding_type: Its sharding type.
        kernel: Its compute kernel.
        optimizer: The optimizer applied during backward; None for tables with gradients (dense).
        shards: Its shards, by columns and then by rows; for a replicated table the whole table once
            per rank.
        cache: The cache of a table stored in a file, else None.
        virtual: Whether its rows take memory when they are first written.
    """

    name: str
    rows: int
    columns: int
    dtype: torch.dtype
    pooling: PoolingKind
    weighted: bool
    features: tuple[str, ...]
    output_keys: tuple[str, ...]
    sharding_type: ShardingType
    kernel: EmbeddingComputeKernel
    optimizer: OptimizerSpec | None
    shards: tuple[TableShard, ...]
    cache: TableCache | None = None
    virtual: bool = False

    @property
    def splits_rows(self) -> bool:
        """Whether a bag's rows may be on several ranks, each of which pools a part."""
        return SHARDING_TRAITS[self.sharding_type].splits_rows

    @property
    def slice_widths(self) -> tuple[int, ...]:
        """Columns of each column shard, in column order; [D] if columns are not split."""
        return tuple(
            dict(sorted((shard.column_offset, shard.columns) for shard in self.shards)).values()
        )

    @property
    def lookup_pooling(self) -> PoolingKind:
        """The pooling of a lookup: split rows are summed, and divided after the exchange."""
        return "sum" if self.splits_rows and self.pooling != "none" else self.pooling

    def first_row_state(self, shard: TableShard) -> int:
        """Offset of a shard's values in a row-wise optimizer state.

        As in TorchRec, row-wise Adagrad stores ``[S * R]`` for a table with S column shards, R
        values per shard.
        """
        starts = sorted({other.column_offset for other in self.shards})
        return starts.index(shard.column_offset) * self.rows + shard.row_offset

    def describe(self) -> dict[str, str]:
        """Facts that ranks must agree on: fact -> value as text; the order of features counts."""
        values = {
            "rows": str(self.rows),
            "embedding_dim": str(self.columns),
            "dtype": str(self.dtype),
            "pooling": self.pooling,
            "weighted": str(self.weighted),
            "features": ", ".join(self.features),
            "sharding type": self.sharding_type.value,
            "compute kernel": self.kernel.value,
            "optimizer": str(self.optimizer),
            "cache": str(self.cache),
            "ranks": str([shard.rank for shard in self.shards]),
            "shard offsets": str([(s.row_offset, s.column_offset) for s in self.shards]),
            "shard sizes": str([(s.rows, s.columns) for s in self.shards]),
        }
        return {f"table {self.name!r}: {name}": value for name, value in values.items()}


@dataclass(frozen=True)
class LocalShards:
    """The shards of one table that one rank holds.

    Args:
        name: Parameter name in the unsharded collection, e.g. ``embedding_bags.item.weight``.
        table: The table.
        shards: This rank's shards; empty if other ranks hold the table.
        rows: Rows ``[R, D]`` of each shard, as live views.
    """

    name: str
    table: Table
    shards: tuple[TableShard, ...]
    rows: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class TableGroup:
    """The shards of one rank that one operator looks up.

    A table-batched operator pools and updates all its tables in the same way. The tables of a group
    therefore agree in pooling, weights, dtype, kernel, optimizer and the file that stores them.

    Args:
        tables: The table of each shard; features and columns follow their order.
        shards: The shards.
        parameter_names: ``table.weight`` of each shard; ``table.weight_1`` and so on for further
            shards of a table on the rank, which may be in several groups.
    """

    tables: tuple[Table, ...]
    shards: tuple[TableShard, ...]
    parameter_names: tuple[str, ...]

    @property
    def kernel(self) -> EmbeddingComputeKernel:
        """The compute kernel."""
        return self.tables[0].kernel

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """The optimizer applied during backward; None for tables with gradients."""
        return self.tables[0].optimizer

    @property
    def cache(self) -> CacheSpec | None:
        """For tables in a file: the cache, with its rows per shard."""
        caches = [
            (table.cache, shard.rows)
            for table, shard in zip(self.tables, self.shards, strict=True)
            if table.cache is not None
        ]
        return cache_spec(caches) if caches else None

    @property
    def virtual(self) -> bool:
        """Whether rows take memory when they are written."""
        return self.tables[0].virtual

    @property
    def features(self) -> list[str]:
        """Input features in the order in which the operator reads them."""
        return [feature for table in self.tables for feature in table.features]

    @property
    def output_keys(self) -> list[str]:
        """Names of the outputs, one per feature."""
        return [key for table in self.tables for key in table.output_keys]

    @property
    def columns(self) -> list[int]:
        """Width of each output."""
        return [
            shard.columns
            for table, shard in zip(self.tables, self.shards, strict=True)
            for _ in table.features
        ]

    def spec(self) -> GroupSpec:
        """The group in the operator's form, which knows shapes and no ranks."""
        specs = []
        feature_tables = []
        for index, (table, shard) in enumerate(zip(self.tables, self.shards, strict=True)):
            specs.append(TableSpec(table.name, shard.rows, shard.columns, table.dtype))
            feature_tables += [index] * len(table.features)

        first = self.tables[0]
        return GroupSpec(tuple(specs), tuple(feature_tables), first.lookup_pooling, first.weighted)


def group_tables(tables: Sequence[Table], rank: int) -> list[TableGroup]:
    """Group the shards of a rank; groups and their members keep the order of first appearance.

    Args:
        tables: The tables of one sharding.
        rank: The rank.
    """
    groups: dict[tuple[object, ...], list[tuple[Table, TableShard, str]]] = {}
    for table in tables:
        shards = [shard for shard in table.shards if shard.rank == rank]
        cache = None if table.cache is None else table.cache._replace(load_factor=0.0)

        for index, shard in enumerate(shards):
            name = f"{table.name}.weight_{index}" if index else f"{table.name}.weight"
            alike = (
                table.lookup_pooling,
                table.weighted,
                table.dtype,
                table.kernel,
                table.optimizer,
                cache,
                table.virtual,
                # Unpooled rows fit into one tensor only if they have equal widths.
                shard.columns if table.pooling == "none" else 0,
            )
            groups.setdefault(alike, []).append((table, shard, name))

    return [TableGroup(*zip(*members, strict=True)) for members in groups.values()]


@dataclass(frozen=True)
class SharderSupport:
    """What a sharder supports, and the ranks that it shards over.

    Args:
        world_size: W, the ranks that a plan may name.
        weighted: Whether each id carries a weight.
        sharding_types: Supported sharding types.
        kernels: Supported compute kernels.
        fused_params: The sharder's, for tables without an optimizer of their own.
        local_size: Ranks per host; None for one host.
    """

    world_size: int
    weighted: bool
    sharding_types: Sequence[ShardingType]
    kernels: Sequence[EmbeddingComputeKernel]
    fused_params: Mapping[str, Any] | None
    local_size: int | None = None

    @cached_property
    def default_optimizer(self) -> OptimizerSpec:
        """The optimizer of tables without one of their own."""
        return optimizer_spec(self.fused_params)


def check_plan_covers(tables: Sequence[str], plan: Mapping[str, ParameterSharding]) -> None:
    """Check that a module's plan names each of its tables, and no others.

    Raises:
        TypeError: It is not the plan of a module, or a value is not a `ParameterSharding`.
        ValueError: A table is missing or unknown.

    Example:
        >>> check_plan_covers(["item"], {})
        Traceback (most recent call last):
            ...
        ValueError: the plan says nothing about table 'item'; it names []
    """
    if not isinstance(plan, Mapping):
        raise TypeError(
            f"a module's plan maps table names to ParameterSharding, got {type(plan).__name__}; of "
            "a ShardingPlan, pass plan.plan[path of the module], which is plan.plan[''] for the "
            "model itself"
        )

    for table, sharding in plan.items():
        if not isinstance(sharding, ParameterSharding):
            raise TypeError(
                f"the plan gives table {table!r} a {type(sharding).__name__}, {sharding!r}, where "
                "a ParameterSharding is expected: construct_module_sharding_plan(module, "
                "per_param_sharding) makes a plan from table_wise() and its like"
            )

    source = next((f"{sharding.source}: " for sharding in plan.values() if sharding.source), "")
    missing = [name for name in tables if name not in plan]
    surplus = [name for name in plan if name not in tables]

    if missing:
        raise ValueError(
            f"{source}the plan says nothing about table {', '.join(map(repr, missing))}; it "
            f"names {list(plan)}"
        )
    if surplus:
        raise ValueError(
            f"{source}the plan names table {', '.join(map(repr, surplus))}, which the module does "
            f"not have: {list(tables)}"
        )


def place_tables(
    configs: Sequence[BaseEmbeddingConfig],
    weights: Mapping[str, torch.Tensor],
    plan: Mapping[str, ParameterSharding],
    rules: SharderSupport,
) -> list[Table]:
    """Read and check the plan of a collection; the tables keep its order.

    Args:
        configs: The tables.
        weights: Table name -> weights, as for `place_table`.
        plan: Table name -> how it is sharded.
        rules: What the sharder supports.

    Raises:
        TypeError: The plan is not that of a module.
        ValueError: The plan cannot be carried out.
    """
    check_plan_covers([config.name for config in configs], plan)
    output_keys = get_embedding_names_by_table(configs)
    return [
        place_table(config, keys, weights[config.name], plan[config.name], rules)
        for config, keys in zip(configs, output_keys, strict=True)
    ]


def place_table(
    config: BaseEmbeddingConfig,
    output_keys: Sequence[str],
    weight: torch.Tensor,
    sharding: ParameterSharding,
    rules: SharderSupport,
) -> Table:
    """Read and check the plan of one table.

    Args:
        config: The table.
        output_keys: Names of its outputs, one per feature.
        weight: Its weights, which may carry an optimizer set by ``apply_optimizer_in_backward``.
        sharding: Its entry in the plan.
        rules: What the sharder supports.

    Raises:
        ValueError: The plan cannot be carried out.
    """
    try:
        return _placed(config, output_keys, weight, sharding, rules)
    except ValueError as error:
        if not sharding.source:
            raise
        raise ValueError(f"{sharding.source}: {error}") from None


def _placed(
    config: BaseEmbeddingConfig,
    output_keys: Sequence[str],
    weight: torch.Tensor,
    sharding: ParameterSharding,
    rules: SharderSupport,
) -> Table:
    sharding_type = plan_member(
        ShardingType, sharding.sharding_type, rules.sharding_types, config.name, "sharding type"
    )
    kernel = plan_member(
        EmbeddingComputeKernel,
        sharding.compute_kernel,
        rules.kernels,
        config.name,
        "compute kernel",
    )

    if sharding.output_dtype is not None and not is_fp32(sharding.output_dtype):
        raise ValueError(
            f"the plan gives table {config.name!r} output_dtype={sharding.output_dtype}, and rows "
            "leave sharded tables in FP32; leave it out: get_qcomm_codecs_registry narrows what "
            "travels between ranks"
        )

    rows = config.num_embeddings
    columns = config.embedding_dim
    shards = checked_shards(
        config.name,
        (rows, columns),
        sharding,
        rules.world_size,
        rules.local_size or rules.world_size,
    )

    optimizer = None
    if kernel is not EmbeddingComputeKernel.DENSE:
        own = optimizer_spec_of_parameter(config.name, weight)
        rounding = bool((rules.fused_params or {}).get("stochastic_rounding"))
        optimizer = replace(own, stochastic_rounding=rounding) if own else rules.default_optimizer

    return Table(
        name=config.name,
        rows=rows,
        columns=columns,
        dtype=config.dtype,
        pooling=_POOLINGS[config.pooling] if isinstance(config, EmbeddingBagConfig) else "none",
        weighted=rules.weighted,
        features=tuple(config.feature_names),
        output_keys=tuple(output_keys),
        sharding_type=sharding_type,
        kernel=kernel,
        optimizer=optimizer,
        shards=shards,
        cache=_placed_cache(
            config.name, sharding_type, kernel, sharding.cache_params, rules.fused_params
        ),
        virtual=config.use_virtual_table,
    )


def _placed_cache(
    table: str,
    sharding_type: ShardingType,
    kernel: EmbeddingComputeKernel,
    params: CacheParams | None,
    fused_params: Mapping[str, Any] | None,
) -> TableCache | None:
    """The cache of a table stored in a file; None for a table in memory."""
    if kernel not in IN_FILE:
        if params is None:
            return None
        raise ValueError(
            f"the plan gives table {table!r} cache_params and the compute kernel {kernel.value!r}, "
            "which has no cache: compute_kernel='fused_uvm_caching', or leave cache_params out"
        )

    if sharding_type is ShardingType.DATA_PARALLEL:
        raise ValueError(
            f"the plan gives every rank a replica of table {table!r}, data_parallel, and the "
            f"compute kernel {kernel.value!r}, for tables larger than memory: shard the table, by "
            "row_wise for example, or use 'fused'"
        )
    return table_cache(
        table, params, fused_params, has_cache=kernel is EmbeddingComputeKernel.FUSED_UVM_CACHING
    )


def plan_member(kind: type[_E], value: str, built: Sequence[_E], table: str, what: str) -> _E:
    """Convert a value in a plan to its enum member, if the sharder supports it.

    Args:
        kind: The enum.
        value: The value in the plan.
        built: The supported members.
        table: Name of the table, for the message.
        what: What the value is, for the message.

    Raises:
        ValueError: The member does not exist or is not supported.

    Example:
        >>> plan_member(
        ...     ShardingType, "row_wise", [ShardingType.ROW_WISE], "item", "sharding type"
        ... ).name
        'ROW_WISE'
    """
    try:
        member = kind(value)
    except ValueError:
        member = None

    if member is None or member not in built:
        names = ", ".join(str(option.value) for option in built)
        raise ValueError(f"the plan gives table {table!r} {what} {value!r}; supported now: {names}")
    return member


def usable_device(
    device: torch.device | None, plan: Mapping[str, ParameterSharding]
) -> torch.device:
    """The device, by default the rank's own; the CPU, with a warning, if CUDA is not available."""
    chosen = torch.device(device) if device is not None else own_device()
    if chosen.type == "cuda" and not torch.cuda.is_available():
        warn_caller(
            "CUDA is not available here: tables that were to live on cuda are placed on cpu",
            RuntimeWarning,
        )
        return torch.device("cpu")

    entries = plan.values() if isinstance(plan, Mapping) else ()
    # Invalid entries of a plan are reported where the plan is read, on every rank.
    shards = [
        shard
        for entry in entries
        if isinstance(entry, ParameterSharding)
        for shard in entry.shards()
    ]

    if chosen.type == "cpu" and any("cuda" in str(shard.placement) for shard in shards):
        warn_caller(
            "the sharding plan was made for cuda: its tables are placed on cpu, on the same ranks",
            RuntimeWarning,
        )
    return chosen


def warn_who_trains(
    tables: Sequence[Table],
    weights: Mapping[str, torch.Tensor],
    fused_params: Mapping[str, Any] | None,
    collection: str,
) -> None:
    """Warn of tables for which no optimizer was named, and of those that do not use the named one.

    An optimizer from ``apply_optimizer_in_backward`` takes precedence over ``fused_params``.

    Args:
        tables: The tables.
        weights: Table name -> weights of the unsharded collection.
        fused_params: The sharder's.
        collection: Class name of the unsharded collection, for the message.
    """
    in_backward = {
        name for name, rows in weights.items() if getattr(rows, "_optimizer_classes", ())
    }
    trained = [table for table in tables if weights[table.name].requires_grad]
    fused = [table.name for table in trained if table.kernel is not EmbeddingComputeKernel.DENSE]
    dense = [table.name for table in trained if table.kernel is EmbeddingComputeKernel.DENSE]

    unnamed = [name for name in fused if name not in in_backward]
    if unnamed and not names_optimizer(fused_params):
        default = next(table.optimizer for table in trained if table.name in unnamed)
        assert default is not None, "a fused table has an optimizer"
        them = "it" if len(unnamed) == 1 else "them"
        warn_caller(
            f"no optimizer is named for {_named(unnamed)}: {default.kind.upper()} with a learning "
            f"rate of {default.learning_rate} updates {them} during backward, whatever optimizer "
            "the other parameters have. Name one: "
            "apply_optimizer_in_backward(torch.optim.Adam, collection.parameters(), {'lr': 0.01}) "
            "before sharding, or sharders=["
            f"{collection}Sharder({{'optimizer': 'adam', 'learning_rate': 0.01}})]",
        )

    marked = [name for name in dense if name in in_backward]
    if marked:
        warn_caller(
            f"the optimizer in backward of {_named(marked)} is not used: "
            f"{_own_optimizer_updates(marked)}"
        )
    others = [name for name in dense if name not in in_backward]
    if others and names_optimizer(fused_params):
        warn_caller(
            f"fused_params={dict(fused_params or {})} are not used for {_named(others)}: "
            f"{_own_optimizer_updates(others)}"
        )


def _own_optimizer_updates(names: Sequence[str]) -> str:
    it = "it" if len(names) == 1 else "them"
    return (
        f"with the compute kernel 'dense' your own optimizer has to update {it}, and "
        f"in_backward_optimizer_filter(model.named_parameters()) yields {it}; or give {it} "
        "compute_kernel='fused'"
    )


def _named(names: Sequence[str]) -> str:
    return ("table " if len(names) == 1 else "tables ") + ", ".join(map(repr, names))

"""Enumeration of every legal way to shard each table of a model.

An option is a sharding type, a compute kernel, and the shards of the table; the search chooses
their ranks. For everything that is not an option, the reason is recorded
(`EmbeddingEnumerator.refusals`), so that a plan can be explained.

Corresponds to TorchRec's ``torchrec.distributed.planner.enumerators``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import nn

from tutorec._check import require_int
from tutorec._kernels.specs import OptimizerSpec
from tutorec.distributed.core.cache_params import CacheParams, sharder_cache
from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.core.tables import IN_FILE
from tutorec.distributed.fused_params import optimizer_spec, optimizer_spec_of_parameter
from tutorec.distributed.plan.geometry import (
    calculate_shard_sizes_and_offsets as calculate_shard_sizes_and_offsets,
)
from tutorec.distributed.plan.plan import (
    SHARDING_TRAITS,
    EmbeddingComputeKernel,
    PlacementRule,
    ShardingType,
)
from tutorec.distributed.plan.sizes import MIN_CW_DIM, cut_arrays, slice_width
from tutorec.distributed.planner.constants import BATCH_SIZE
from tutorec.distributed.planner.cost import distinct_rows, registered_kernels
from tutorec.distributed.planner.options import (
    Constraints,
    ParameterConstraints,
    PartitionByType,
    ShardArrays,
    ShardingOption,
    TableProfile,
    check_names,
    check_numbers,
    members,
    warn_about,
    warn_without_effect,
)
from tutorec.distributed.planner.options import Shard as Shard
from tutorec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.planner.types import Enumerator, ShardEstimator
from tutorec.errors import PlannerError, PlannerErrorType, bad_input

_DENSE = EmbeddingComputeKernel.DENSE.value
_FUSED = EmbeddingComputeKernel.FUSED.value
_FLOAT = 4  # bytes of an element on the wire without a codec
_IN_FILE = [kernel.value for kernel in IN_FILE]
# each is about half of the next, and so is its memory
_LOAD_FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
# Kernels that a table has only if a constraint names them; none of them is implemented.
GUARDED_COMPUTE_KERNELS: set[EmbeddingComputeKernel] = {
    EmbeddingComputeKernel.KEY_VALUE,
    EmbeddingComputeKernel.SSD_VIRTUAL_TABLE,
    EmbeddingComputeKernel.DRAM_VIRTUAL_TABLE,
    EmbeddingComputeKernel.DRAM_SSD_VIRTUAL_TABLE,
}
_CARRIED = "enforce_hbm stochastic_rounding bounds_check_mode output_dtype key_value_params".split()
# TorchRec's names of the rules, for its partitioners.
_PARTITION_BY = {
    PlacementRule.ANY_RANK: PartitionByType.DEVICE,
    PlacementRule.ONE_HOST: PartitionByType.HOST,
    PlacementRule.ROWS_ON_HOST: PartitionByType.HOST,
    PlacementRule.ROW_BLOCKS_ON_HOSTS: PartitionByType.MULTI_HOST,
    PlacementRule.EVERY_RANK: PartitionByType.UNIFORM,
}


@dataclass(frozen=True)
class Refusal:
    """One way to shard one table that is not an option.

    Args:
        path: Path of the table's collection in the model.
        table: Its name.
        sharding_type: `ShardingType` value.
        compute_kernel: `EmbeddingComputeKernel` value; ``""`` if the type itself is refused.
        reason: The reason, as a clause: "the table may only be row_wise".

    Example:
        >>> print(Refusal("", "item", "grid_shard", "", "only if a constraint names it"))
        item: grid_shard: only if a constraint names it
    """

    path: str
    table: str
    sharding_type: str
    compute_kernel: str
    reason: str

    def __str__(self) -> str:
        kernel = f" with {self.compute_kernel}" if self.compute_kernel else ""
        return f"{self.table}: {self.sharding_type}{kernel}: {self.reason}"


class EmbeddingEnumerator(Enumerator):
    """Lists the options of every shardable table, with their costs.

    The options are the sharding types and kernels that the table's sharder supports, its
    constraints allow, and for which a cost model is registered (`register_kernel`), with these
    exceptions:

    - ``grid_shard`` is listed only if a constraint names it.
    - ``fused_uvm`` and ``fused_uvm_caching`` are listed only if a constraint names them or has
      ``cache_params``; without a load factor, caches of several sizes are listed.
    - ``dense`` is listed only if a constraint names it, or its sharder supports nothing else:
      the kernel decides which optimizer trains a table, and a plan must not.
    - A constraint with the kernel dense and no sharding type means replicated, as in TorchRec.
    - Column shards have equal widths: the smallest width that divides the table, is a multiple of 4
      and is at least ``min_partition`` (128 by default). A table without such a width is not split
      by columns.

    Args:
        topology: The machines.
        batch_size: B per rank.
        constraints: Table name -> its constraints.
        estimator: Writes costs into the options, one or several; by default
            `EmbeddingPerfEstimator` and `EmbeddingStorageEstimator`.
        use_exact_enumerate_order: Whether outer modules come before inner ones; by default the
            order is that in which the model prints them.

    Example:
        >>> from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection(
        ...     [EmbeddingBagConfig(8, 64, "products", feature_names=["item"])]
        ... )
        >>> constraint = ParameterConstraints(
        ...     sharding_types=["row_wise", "column_wise"], min_partition=32
        ... )
        >>> enumerator = EmbeddingEnumerator(
        ...     Topology(2, "cpu"), constraints={"products": constraint}
        ... )
        >>> options = enumerator.enumerate(ebc, [EmbeddingBagCollectionSharder()])
        >>> [(option.sharding_type, option.shard_arrays().sizes.tolist()) for option in options]
        [('column_wise', [[8, 32], [8, 32]]), ('row_wise', [[4, 64], [4, 64]])]

    Source:
        TorchRec's ``EmbeddingEnumerator``. There row-wise and its kin are left out on the CPU.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = BATCH_SIZE,
        constraints: Constraints | None = None,
        estimator: ShardEstimator | Sequence[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool | None = False,
    ) -> None:
        self._topology = topology
        self._batch_size = batch_size
        self._constraints = dict(constraints or {})
        if estimator is None:
            estimator = [EmbeddingPerfEstimator(topology), EmbeddingStorageEstimator(topology)]

        self._estimators = estimator if isinstance(estimator, Sequence) else [estimator]
        self._breadth_first = bool(use_exact_enumerate_order)
        self.sharder_map: dict[str, ModuleSharder[Any]] = {}
        """Full class name of a collection -> its sharder, in the last enumeration."""
        self.last_stored_search_space: list[ShardingOption] | None = None
        """The options of the last enumeration; None before the first."""
        self.refusals: list[Refusal] = []
        """What was no option in the last enumeration, and why."""

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> list[ShardingOption]:
        """Every legal option of every table, with estimates, table by table.

        Args:
            module: The model; it may be on the meta device.
            sharders: One sharder per class of collections.

        Raises:
            PlannerError: A constraint names an unknown table, has an invalid number, or leaves its
                table no option.
        """
        self.sharder_map = {sharder_name(sharder.module_type): sharder for sharder in sharders}
        for name, constraint in self._constraints.items():
            check_numbers(name, constraint, self._topology.world_size)

        tables = model_tables(
            module, sharders, self._batch_size, self._constraints, self._breadth_first
        )
        if self._constraints and sharders:
            check_names(self._constraints, dict.fromkeys(table.profile.name for table in tables))
        elif self._constraints:
            warn_about(
                list(self._constraints), "without sharders, sharders=[], no table is sharded"
            )

        self.refusals = []
        effects: dict[str, list[str]] = {}
        cut = cache(cut_arrays)  # tables of one shape share their arrays
        options = [option for table in tables for option in self._options(table, cut, effects)]
        self.populate_estimates(options)
        if self._constraints or effects:
            warn_without_effect(self._constraints, effects)

        self.last_stored_search_space = options
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Write costs into options, replacing those that they have."""
        for estimator in self._estimators:
            estimator.estimate(sharding_options, self.sharder_map)

    def _options(
        self, table: ModelTable, cut: Callable[..., Any], effects: dict[str, list[str]]
    ) -> Iterator[ShardingOption]:
        """The options of a table, without estimates."""
        profile = table.profile
        least_columns = table.constraint.min_partition
        types_and_kernels = self._types_and_kernels(table)
        if not types_and_kernels:
            return

        width = slice_width(profile.columns, least_columns or MIN_CW_DIM)
        sharding_types = {sharding_type for sharding_type, _ in types_and_kernels}
        if least_columns or _all_split_only_columns(sharding_types):
            effect = _without_effect(profile.columns, width, least_columns, sharding_types)
            if effect and (least_columns or self._topology.world_size > 1):
                effects.setdefault(effect, []).append(profile.name)

        world_size = self._topology.world_size
        local_size = self._topology.intra_group_size
        shape = (profile.rows, profile.columns)
        for sharding_type, kernel in types_and_kernels:
            columns = width if SHARDING_TRAITS[sharding_type].splits_columns else 0
            shards = ShardArrays(*cut(sharding_type, shape, world_size, local_size, columns))
            variants: list[tuple[CacheParams | None, TableProfile]] = [(None, profile)]
            if kernel in _IN_FILE:
                variants = list(_caches(kernel, table, world_size))
            for cache_params, cached_profile in variants:
                option = table.option.with_shards(shards)
                option.sharding_type = sharding_type.value
                option.compute_kernel = kernel
                option.partition_by = _PARTITION_BY[SHARDING_TRAITS[sharding_type].placement].value
                option.cache_params = cache_params
                option.profile = cached_profile
                yield option

    def _types_and_kernels(self, table: ModelTable) -> list[tuple[ShardingType, str]]:
        """The sharding types of a table, each with a kernel; the others are stored as refusals.

        Raises:
            PlannerError: There are none.
        """
        profile = table.profile
        planned_device = table.constraint.device_group
        device = self._topology.compute_device
        if planned_device not in (None, device):
            reason = f"it is left to a planner for {planned_device}, and this is {device}"
            self.refusals.append(Refusal(profile.path, profile.name, "", "", reason))
            return []

        allowed = []
        refusals = []
        for sharding_type, kernel, reason in self._considered(table):
            if reason:
                refusal = Refusal(profile.path, profile.name, sharding_type.value, kernel, reason)
                refusals.append(refusal)
            else:
                allowed.append((sharding_type, kernel))

        self.refusals += refusals
        if not allowed:
            raise self._nothing_allowed(table, refusals)
        return allowed

    def _nothing_allowed(self, table: ModelTable, refusals: Sequence[Refusal]) -> PlannerError:
        """The error for a table without an option, with the reasons and what would free it."""
        constrained = table.constraint.sharding_types or ()
        names = {ShardingType(sharding_type).value for sharding_type in constrained}
        reasons = [
            str(refusal) for refusal in refusals if refusal.sharding_type in names or not names
        ]
        head = (
            f"the constraints of table {table.profile.name!r} leave no way to shard it: "
            f"{self._remedy(table)}"
        )
        return PlannerError("\n  ".join([head, *reasons]), PlannerErrorType.STRICT_CONSTRAINTS)

    def _considered(self, table: ModelTable) -> Iterator[tuple[ShardingType, str, str]]:
        """Types and kernels in the sharder's order, each with why a table cannot have it.

        The reason is empty for an option, and the kernel where the type itself is refused.
        """
        device = self._topology.compute_device
        sharder_class = type(table.sharder).__name__
        allowed_types = table.constrained_types
        allowed_kernels = table.constrained_kernels
        supported = [ShardingType(value) for value in table.sharder.sharding_types(device)]
        for sharding_type in allowed_types:
            if sharding_type not in supported:
                yield sharding_type, "", f"{sharder_class} does not build it"

        for sharding_type in supported:
            reason = self._type_refused(table, sharding_type, allowed_types)
            if reason:
                yield sharding_type, "", reason
                continue

            offered = table.sharder.compute_kernels(sharding_type.value, device)
            # No table is put into a file unless a constraint names it, or its sharder supports
            # nothing else.
            in_file = table.constraint.cache_params is not None
            in_file = in_file or all(kernel in _IN_FILE for kernel in offered)
            kernels = [
                kernel
                for kernel in offered
                if in_file or kernel not in _IN_FILE or kernel in allowed_kernels
            ]
            for kernel in allowed_kernels:
                if kernel not in kernels:
                    yield sharding_type, kernel, f"{sharder_class} does not build this kernel"

            for kernel in kernels:
                reason = self._kernel_refused(sharding_type, kernel, kernels, allowed_kernels)
                # The kernel dense without a type requests a replicated table, as in TorchRec.
                typed = allowed_types or sharding_type is ShardingType.DATA_PARALLEL
                if kernel == _DENSE and _DENSE in allowed_kernels and not typed:
                    dense_means = "the kernel 'dense' without a sharding type means data_parallel"
                    reason = reason or dense_means
                yield sharding_type, kernel, reason

    def _kernel_refused(
        self,
        sharding_type: ShardingType,
        kernel: str,
        supported: Sequence[str],
        allowed: Sequence[str],
    ) -> str:
        """Why a table cannot have a kernel that its sharder supports; empty if it can."""
        costed = registered_kernels(self._topology.compute_device)
        if kernel not in costed:
            return "no cost model is registered for it: call register_kernel(...)"
        if allowed and kernel not in allowed:
            return f"its constraints allow only {', '.join(allowed)}"
        if kernel != _DENSE or _FUSED not in {*supported} & {*costed} & {*(allowed or supported)}:
            return ""

        types = f"sharding_types=[{sharding_type.value!r}], compute_kernels=[{kernel!r}]"
        return (
            "it leaves the table to the caller's optimizer, which only the caller can decide: "
            f"ParameterConstraints({types}) asks for it"
        )

    def _type_refused(
        self, table: ModelTable, sharding_type: ShardingType, allowed: Sequence[ShardingType]
    ) -> str:
        """Why a table cannot have a sharding type with any kernel; empty if it can."""
        if allowed and sharding_type not in allowed:
            return f"its constraints allow only {', '.join(member.value for member in allowed)}"
        if SHARDING_TRAITS[sharding_type].only_if_requested and not allowed:
            return (
                "it is taken only where "
                f"ParameterConstraints(sharding_types=[{sharding_type.value!r}]) asks for it"
            )
        if table.constraint.pin is not None:
            return self._pin_refused(sharding_type, set(table.constraint.pin))

        return ""

    def _pin_refused(self, sharding_type: ShardingType, ranks: set[int]) -> str:
        """Why a table pinned to some ranks cannot have a sharding type; empty if it can."""
        world_size = self._topology.world_size
        local_size = self._topology.intra_group_size
        placement = SHARDING_TRAITS[sharding_type].placement
        if placement is PlacementRule.EVERY_RANK and len(ranks) < world_size:
            return f"it takes all {world_size} ranks, and pin={sorted(ranks)} allows {len(ranks)}"

        hosts = [range(first, first + local_size) for first in range(0, world_size, local_size)]
        has_host = any(ranks.issuperset(host) for host in hosts)
        if SHARDING_TRAITS[sharding_type].splits_rows_in_host and not has_host:
            return (
                f"it takes all {local_size} ranks of a host, and pin={sorted(ranks)} holds no "
                "whole host"
            )
        return ""

    def _remedy(self, table: ModelTable) -> str:
        """For each constraint, the sharding types that the table would have without it."""
        freed_types = []
        for field in ("sharding_types", "compute_kernels", "pin"):
            if not getattr(table.constraint, field):
                continue
            freed = replace(table, constraint=replace(table.constraint, **{field: None}))
            considered = self._considered(freed)
            names = dict.fromkeys(member.value for member, _, reason in considered if not reason)
            if names:
                freed_types.append(f"without {field} it may be {', '.join(names)}")

        sharder_class = type(table.sharder).__name__
        nothing = f"{sharder_class} builds nothing that the planner can estimate"
        return "; ".join(freed_types) or nothing


def _caches(
    kernel: str, table: ModelTable, world_size: int
) -> Iterator[tuple[CacheParams, TableProfile]]:
    """The caches that a table in a file may have, and its numbers with each.

    Several sizes are tried if the caller sets none.
    """
    profile = table.profile
    requested = table.constraint.cache_params or sharder_cache(
        getattr(table.sharder, "fused_params", None)
    )
    stats = requested.stats
    ids = world_size * profile.total_ids

    # Without statistics all rows are assumed to be equally popular.
    rows = stats.expected_lookups if stats else distinct_rows(ids, profile.rows)
    factors: Sequence[float | None] = [requested.load_factor]
    if kernel == EmbeddingComputeKernel.FUSED_UVM.value:
        factors = [None]
    elif requested.load_factor is None:
        factors = _LOAD_FACTORS

    for factor in factors:
        cached = factor or 0.0
        missed = stats.expected_miss_rate(cached) if stats else 1 - cached
        miss_rate = min(1.0, missed * rows / ids) if ids else 0.0
        params = replace(requested, load_factor=factor)
        yield params, replace(profile, cached=cached, miss_rate=miss_rate)


def get_partition_by_type(sharding_type: str) -> str:
    """Where a sharding type may place its shards, a `PartitionByType` value.

    Example:
        >>> get_partition_by_type("table_wise"), get_partition_by_type("row_wise")
        ('device', 'uniform')

    Source:
        TorchRec's ``torchrec.distributed.planner.enumerators.get_partition_by_type``.
    """
    return _PARTITION_BY[SHARDING_TRAITS[ShardingType(sharding_type)].placement].value


def _all_split_only_columns(sharding_types: set[ShardingType]) -> bool:
    traits = [SHARDING_TRAITS[sharding_type] for sharding_type in sharding_types]
    return all(type_traits.splits_columns and not type_traits.splits_rows for type_traits in traits)


def _without_effect(
    columns: int, width: int, least: int | None, sharding_types: set[ShardingType]
) -> str:
    """Why a width constraint, or the default width, has no effect; empty if it has."""
    cuts = [kind for kind in sharding_types if SHARDING_TRAITS[kind].splits_columns]
    if least is not None and not cuts:
        return f"min_partition={least} has no effect: no remaining sharding type splits columns"
    if least is not None and width != least and width == slice_width(columns, MIN_CW_DIM):
        return (
            f"min_partition={least} has no effect: {columns} columns have no equal slices of "
            f"{least} to {width - 1} columns that are multiples of 4"
        )

    only_cuts = _all_split_only_columns(sharding_types)
    if least is None and width == columns and only_cuts and slice_width(columns, 1) < columns:
        half = slice_width(columns, -(-columns // 2))
        fitting = half if half < columns else slice_width(columns, 1)
        return (
            f"column-wise does not split {columns} columns, as column shards have at least "
            f"{MIN_CW_DIM} columns: min_partition={fitting} makes {columns // fitting}"
        )

    return ""


def sharder_name(t: type[nn.Module]) -> str:
    """The full name of a class of modules, as in the keys of an enumerator's ``sharder_map``.

    Example:
        >>> sharder_name(nn.EmbeddingBag)
        'torch.nn.modules.sparse.EmbeddingBag'

    Source:
        TorchRec's ``sharder_name``.
    """
    return f"{t.__module__}.{t.__qualname__}"


# The tables of a model


@dataclass(frozen=True, eq=False)
class ModelTable:
    """A table of a model.

    Args:
        option: Its option without sharding type, kernel and shards.
        sharder: The sharder of the collection.
        constraint: Its constraints; empty `ParameterConstraints` by default.
    """

    option: ShardingOption
    sharder: ModuleSharder[Any]
    constraint: ParameterConstraints

    @property
    def profile(self) -> TableProfile:
        """The table in numbers."""
        return self.option.profile

    @property
    def constrained_types(self) -> list[ShardingType]:
        """The sharding types of its constraints; empty if all are allowed."""
        values = self.constraint.sharding_types
        if values is None:
            return []
        return members(ShardingType, values, "sharding_types", self.option.name)

    @property
    def constrained_kernels(self) -> list[str]:
        """The kernels of its constraints; empty if all are allowed."""
        values = self.constraint.compute_kernels
        if values is None:
            return []
        kernels = members(EmbeddingComputeKernel, values, "compute_kernels", self.option.name)
        return [kernel.value for kernel in kernels]


def shardable_modules(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]], breadth_first: bool = False
) -> Iterator[tuple[str, nn.Module, ModuleSharder[Any]]]:
    """Path, module and sharder of each outermost collection of a model.

    Args:
        module: The model, or a collection.
        sharders: One per class; of several for one class the last is used.
        breadth_first: Whether outer modules come before inner ones; by default the order is that in
            which the model prints them.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> list(
        ...     shardable_modules(
        ...         nn.Sequential(EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item")])),
        ...         [],
        ...     )
        ... )
        []
    """
    by_type = {sharder.module_type: sharder for sharder in sharders}
    waiting = [("", module)]
    while waiting:
        path, child_module = waiting.pop(0)
        sharder = by_type.get(type(child_module))
        if sharder is not None:
            yield path, child_module, sharder
            continue

        children = [
            (f"{path}.{name}" if path else name, child)
            for name, child in child_module.named_children()
        ]
        waiting = [*waiting, *children] if breadth_first else [*children, *waiting]


def model_tables(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    batch_size: int,
    constraints: Constraints | None = None,
    breadth_first: bool = False,
) -> list[ModelTable]:
    """Every table that a sharder of tutorec can shard, in model order.

    Args:
        module: The model, or a collection; it may be on the meta device.
        sharders: One sharder per class of collections.
        batch_size: B per rank.
        constraints: Constraints of the tables, by name.
        breadth_first: See `shardable_modules`.

    Raises:
        PlannerError: A constraint does not fit its table, or the batch size is not positive.
        ValueError: A table's optimizer in backward has no fused form.

    Example:
        >>> from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection(
        ...     [EmbeddingBagConfig(8, 4, "products", feature_names=["item", "seen"])]
        ... )
        >>> constraints = {"products": ParameterConstraints(pooling_factors=[1.0, 3.0])}
        >>> [table] = model_tables(
        ...     ebc, [EmbeddingBagCollectionSharder()], batch_size=2, constraints=constraints
        ... )
        >>> table.profile.samples, table.profile.ids
        ((2.0, 2.0), (2.0, 6.0))
    """
    batch_size = require_int("batch_size", batch_size, 1, error=bad_input)
    return [
        table
        for path, collection, sharder in shardable_modules(module, sharders, breadth_first)
        for table in _collection_tables(path, collection, sharder, batch_size, constraints or {})
    ]


def _collection_tables(
    path: str,
    module: nn.Module,
    sharder: ModuleSharder[Any],
    batch_size: int,
    constraints: Constraints,
) -> Iterator[ModelTable]:
    """The tables of one collection."""
    configs = _table_configs(module)
    shared_optimizer = _shared_optimizer(getattr(sharder, "fused_params", None))
    is_weighted = bool(getattr(module, "is_weighted", bool)())
    packed_table: Any = getattr(module, "packed_table", None)
    collection: Any = getattr(module, "_managed_collision_collection", None)
    mappings: Any = {} if collection is None else collection._managed_collision_modules
    for name, tensor in sharder.shardable_parameters(module).items():
        constraint = constraints.get(name) or ParameterConstraints()
        features = _features(name, configs.get(name), constraint)
        lengths = _per_feature(name, "pooling_factors", constraint.pooling_factors, features)
        bags = _per_feature(name, "num_poolings", constraint.num_poolings or [1.0], features)
        sizes = _per_feature(name, "batch_sizes", constraint.batch_sizes or [batch_size], features)
        samples = tuple(float(size * count) for size, count in zip(sizes, bags, strict=True))
        ids = tuple(length * count for length, count in zip(lengths, samples, strict=True))
        pooled = ShardingOption.module_pooled(module, name)
        row_bytes, gradient_bytes = _wire_bytes(sharder, pooled)
        packed: Any = packed_table(name) if callable(packed_table) else None
        profile = TableProfile(
            path,
            name,
            rows=tensor.shape[0],
            columns=tensor.shape[1],
            element_bytes=tensor.element_size(),
            features=features,
            pooled=pooled,
            weighted=is_weighted or constraint.is_weighted,
            samples=samples,
            ids=ids,
            optimizer=optimizer_spec_of_parameter(name, tensor) or shared_optimizer,
            row_wire_bytes=row_bytes,
            gradient_wire_bytes=gradient_bytes,
            packed=packed,
            mapping_row_bytes=mappings[name].row_bytes() if name in mappings else 0,
        )
        option = ShardingOption(
            name,
            tensor,
            (path, module),
            lengths,
            batch_size,
            sharding_type="",
            partition_by="",
            compute_kernel="",
            shards=[],
            is_pooled=pooled,
            feature_names=list(features),
            num_poolings=bags if constraint.num_poolings else None,
            profile=profile,
            **{field: getattr(constraint, field) for field in _CARRIED},
        )
        yield ModelTable(option, sharder, constraint)


def _table_configs(module: nn.Module) -> dict[str, Any]:
    """Table name -> its configuration; empty for an unknown module."""
    bags: Any = getattr(module, "embedding_bag_configs", None)
    ask: Any = bags or getattr(module, "embedding_configs", None)
    configs: Any = ask() if callable(ask) else ()
    return {config.name: config for config in configs}


def _features(name: str, config: Any, constraint: ParameterConstraints) -> tuple[str, ...]:
    """The features of a table: from its configuration, else its constraint, else numbered."""
    constrained = tuple(constraint.feature_names or ())
    if config is not None:
        known = tuple(config.feature_names)
        surplus = [feature for feature in constrained if feature not in known]
        if surplus:
            raise bad_input(
                f"ParameterConstraints(feature_names={list(constrained)}) of table {name!r} names "
                f"{surplus}, which do not read it: its features are {list(known)}"
            )

        return known

    return constrained or tuple(
        f"{name}[{index}]" for index in range(len(constraint.pooling_factors))
    )


def _per_feature(
    name: str, field: str, numbers: Sequence[float], features: Sequence[str]
) -> list[float]:
    """One number per feature; a single number applies to all."""
    if len(numbers) == 1:
        return [numbers[0]] * len(features)
    if len(numbers) == len(features):
        return list(numbers)

    raise bad_input(
        f"ParameterConstraints({field}={list(numbers)}) of table {name!r} lists {len(numbers)} "
        f"numbers, and {len(features)} features read the table, {list(features)}: give one "
        "number for each, or one for all"
    )


def _shared_optimizer(fused_params: Mapping[str, Any] | None) -> OptimizerSpec | None:
    """The optimizer in a sharder's ``fused_params``; None if they have another format."""
    try:
        return optimizer_spec(fused_params)
    except ValueError:
        # Sharders of tutorec check fused_params at construction, so this is another sharder.
        return None


def _wire_bytes(sharder: ModuleSharder[Any], pooled: bool) -> tuple[int, int]:
    """Bytes on the wire of a row element and of a gradient element."""
    registry = getattr(sharder, "qcomm_codecs_registry", None)
    if not registry:
        return _FLOAT, _FLOAT

    exchange = "POOLED_EMBEDDINGS_ALL_TO_ALL" if pooled else "SEQUENCE_EMBEDDINGS_ALL_TO_ALL"
    codecs: Any = registry.get(exchange)
    forward = getattr(codecs, "forward", None)
    backward = getattr(codecs, "backward", None)
    row_bytes = _FLOAT if forward is None else forward.dtype.itemsize
    gradient_bytes = _FLOAT if backward is None else backward.dtype.itemsize
    return row_bytes, gradient_bytes

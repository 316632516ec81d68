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
from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec.distributed.core.cache_params import CacheParams, sharder_cache
from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.core.tables import IN_FILE
from tutorec.distributed.fused_params import optimizer_spec, optimizer_spec_of_parameter
from tutorec.distributed.plan.geometry import (
    calculate_shard_sizes_and_offsets as calculate_shard_sizes_and_offsets,
)
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ShardingType
from tutorec.distributed.plan.sizes import (
    COLUMN_CUTS,
    HOST_ROW_CUTS,
    MIN_CW_DIM,
    cut_arrays,
    slice_width,
)
from tutorec.distributed.planner.constants import BATCH_SIZE
from tutorec.distributed.planner.cost import distinct_rows, registered_kernels
from tutorec.distributed.planner.options import (
    Constraints,
    ParameterConstraints,
    PartitionByType,
    Pieces,
    ShardingOption,
    TableFacts,
    check_names,
    check_numbers,
    members,
    warn_of,
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

_DENSE, _FUSED = EmbeddingComputeKernel.DENSE.value, EmbeddingComputeKernel.FUSED.value
_IN_FILE = [kernel.value for kernel in IN_FILE]
# each is about half of the next, and so is its memory
_LOAD_FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_EVERY_RANK = (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)
# Kernels that a table has only if a constraint asks for them; none of them is implemented.
GUARDED_COMPUTE_KERNELS: set[EmbeddingComputeKernel] = {
    EmbeddingComputeKernel.KEY_VALUE,
    EmbeddingComputeKernel.SSD_VIRTUAL_TABLE,
    EmbeddingComputeKernel.DRAM_VIRTUAL_TABLE,
    EmbeddingComputeKernel.DRAM_SSD_VIRTUAL_TABLE,
}
_CARRIED = "enforce_hbm stochastic_rounding bounds_check_mode output_dtype key_value_params".split()
_PARTITION_BY = {
    ShardingType.TABLE_WISE: PartitionByType.DEVICE,
    ShardingType.COLUMN_WISE: PartitionByType.DEVICE,
    ShardingType.TABLE_ROW_WISE: PartitionByType.HOST,
    ShardingType.TABLE_COLUMN_WISE: PartitionByType.HOST,
    ShardingType.ROW_WISE: PartitionByType.UNIFORM,
    ShardingType.DATA_PARALLEL: PartitionByType.UNIFORM,
    ShardingType.GRID_SHARD: PartitionByType.MULTI_HOST,
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
        >>> print(
        ...     Refusal("", "item", "grid_shard", "", "it is taken only where it is asked for")
        ... )
        item: grid_shard: it is taken only where it is asked for
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

    - ``grid_shard`` is listed only if a constraint asks for it.
    - ``fused_uvm`` and ``fused_uvm_caching`` are listed only if a constraint asks for them or has
      ``cache_params``; without a load factor, caches of several sizes are listed.
    - ``dense`` is listed only if a constraint asks for it, or its sharder supports nothing else:
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
        >>> words = ParameterConstraints(
        ...     sharding_types=["row_wise", "column_wise"], min_partition=32
        ... )
        >>> enumerator = EmbeddingEnumerator(
        ...     Topology(2, "cpu"), constraints={"products": words}
        ... )
        >>> options = enumerator.enumerate(ebc, [EmbeddingBagCollectionSharder()])
        >>> [(option.sharding_type, option.pieces().sizes.tolist()) for option in options]
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
        if sharders:
            check_names(self._constraints, dict.fromkeys(table.facts.name for table in tables))
        else:
            warn_of(list(self._constraints), "without sharders, sharders=[], no table is sharded")
        self.refusals = []
        effects: dict[str, list[str]] = {}
        cut = cache(cut_arrays)  # tables of one shape share their arrays
        options = [option for table in tables for option in self._options_of(table, cut, effects)]
        self.populate_estimates(options)
        warn_without_effect(self._constraints, effects)
        self.last_stored_search_space = options
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Write costs into options, replacing those that they have."""
        for estimator in self._estimators:
            estimator.estimate(sharding_options, self.sharder_map)

    def _options_of(
        self, table: ModelTable, cut: Callable[..., Any], effects: dict[str, list[str]]
    ) -> Iterator[ShardingOption]:
        facts, constraint = table.facts, table.constraint
        device = self._topology.compute_device
        if constraint.device_group not in (None, device):
            reason = f"it is left to a planner for {constraint.device_group}, and this is {device}"
            self.refusals.append(Refusal(facts.path, facts.name, "", "", reason))
            return
        considered = list(self._considered(table))
        ways = [(kind, kernel) for kind, kernel, reason in considered if not reason]
        refusals = [
            Refusal(facts.path, facts.name, kind.value, kernel, reason)
            for kind, kernel, reason in considered
            if reason
        ]
        self.refusals += refusals
        if not ways:
            kinds = {ShardingType(kind).value for kind in constraint.sharding_types or ()}
            removed = [str(each) for each in refusals if each.sharding_type in kinds or not kinds]
            head = (
                f"the constraints of table {facts.name!r} leave no way to shard it: "
                f"{self._remedy(table)}"
            )
            raise PlannerError("\n  ".join([head, *removed]), PlannerErrorType.STRICT_CONSTRAINTS)
        width = slice_width(facts.columns, constraint.min_partition or MIN_CW_DIM)
        effect = _without_effect(
            facts.columns, width, constraint.min_partition, {kind for kind, _ in ways}
        )
        if effect and (constraint.min_partition or self._topology.world_size > 1):
            effects.setdefault(effect, []).append(facts.name)
        for kind, kernel in ways:
            columns = width if kind in COLUMN_CUTS else 0
            ranks = self._topology.world_size, self._topology.intra_group_size
            pieces = Pieces(*cut(kind, (facts.rows, facts.columns), *ranks, columns))
            for params, numbers in _caches(kernel, table, self._topology.world_size):
                option = table.option.with_pieces(pieces)
                option.sharding_type, option.compute_kernel = kind.value, kernel
                option.partition_by = get_partition_by_type(kind.value)
                option.cache_params, option.facts = params, numbers
                yield option

    def _considered(self, table: ModelTable) -> Iterator[tuple[ShardingType, str, str]]:
        """Types and kernels in the sharder's order, each with why a table cannot have it.

        The reason is empty for an option, and the kernel where the type itself is refused.
        """
        name, constraint = table.facts.name, table.constraint
        wanted_types = members(ShardingType, constraint.sharding_types, "sharding_types", name)
        kernels_of = EmbeddingComputeKernel, constraint.compute_kernels, "compute_kernels"
        wanted = [kernel.value for kernel in members(*kernels_of, name)]
        device, sharder = self._topology.compute_device, type(table.sharder).__name__
        built = [ShardingType(value) for value in table.sharder.sharding_types(device)]
        for kind in wanted_types:
            if kind not in built:
                yield kind, "", f"{sharder} does not build it"
        for kind in built:
            if reason := self._type_refused(table, kind, wanted_types):
                yield kind, "", reason
                continue
            offered = table.sharder.compute_kernels(kind.value, device)
            # No table is put into a file unless a constraint asks for it, or its sharder supports
            # nothing else.
            in_file = constraint.cache_params is not None or all(
                each in _IN_FILE for each in offered
            )
            kernels = [
                each for each in offered if in_file or each not in _IN_FILE or each in wanted
            ]
            for kernel in wanted:
                if kernel not in kernels:
                    yield kind, kernel, f"{sharder} does not build this kernel"
            for kernel in kernels:
                why = self._kernel_refused(table, kind, kernel, kernels, wanted)
                # The kernel dense without a type asks for a replicated table, as in TorchRec.
                typed = wanted_types or kind is ShardingType.DATA_PARALLEL
                if kernel == _DENSE and _DENSE in wanted and not typed:
                    why = why or "the kernel 'dense' without a sharding type means data_parallel"
                yield kind, kernel, why

    def _kernel_refused(
        self,
        table: ModelTable,
        kind: ShardingType,
        kernel: str,
        built: Sequence[str],
        wanted: Sequence[str],
    ) -> str:
        """Why a table cannot have a kernel that its sharder supports; empty if it can."""
        costed = registered_kernels(self._topology.compute_device)
        if kernel not in costed:
            return "its cost is not known: register_kernel(...) tells it"
        if wanted and kernel not in wanted:
            return f"its constraints allow only {', '.join(wanted)}"
        if kernel != _DENSE or _FUSED not in {*built} & {*costed} & {*(wanted or built)}:
            return ""
        ask = f"sharding_types=[{kind.value!r}], compute_kernels=[{kernel!r}]"
        return (
            "it leaves the table to the caller's optimizer, which only the caller can decide: "
            f"ParameterConstraints({ask}) asks for it"
        )

    def _type_refused(
        self, table: ModelTable, kind: ShardingType, wanted: Sequence[ShardingType]
    ) -> str:
        """Why a table cannot have a sharding type with any kernel; empty if it can."""
        if wanted and kind not in wanted:
            return f"its constraints allow only {', '.join(each.value for each in wanted)}"
        if kind is ShardingType.GRID_SHARD and not wanted:
            return (
                "it is taken only where ParameterConstraints(sharding_types=['grid_shard']) "
                "asks for it"
            )
        pin = table.constraint.pin
        if pin is None:
            return ""
        ranks, world_size, local_size = (
            set(pin),
            self._topology.world_size,
            self._topology.intra_group_size,
        )
        if kind in _EVERY_RANK and len(ranks) < world_size:
            return f"it takes all {world_size} ranks, and pin={sorted(ranks)} allows {len(ranks)}"
        whole = any(
            ranks.issuperset(range(first, first + local_size))
            for first in range(0, world_size, local_size)
        )
        if kind in HOST_ROW_CUTS and not whole:
            return (
                f"it takes all {local_size} ranks of a host, and pin={sorted(ranks)} holds no "
                "whole host"
            )
        return ""

    def _remedy(self, table: ModelTable) -> str:
        """For each constraint, the sharding types that the table would have without it."""
        freed_types = []
        for field in ("sharding_types", "compute_kernels", "pin"):
            if getattr(table.constraint, field):
                freed = replace(table, constraint=replace(table.constraint, **{field: None}))
                considered = self._considered(freed)
                kinds = list(dict.fromkeys(kind.value for kind, _, why in considered if not why))
                freed_types += [f"without {field} it may be {', '.join(kinds)}"] if kinds else []
        return (
            "; ".join(freed_types)
            or f"{type(table.sharder).__name__} builds nothing that the planner can estimate"
        )


def _caches(
    kernel: str, table: ModelTable, world_size: int
) -> Iterator[tuple[CacheParams | None, TableFacts]]:
    """The caches that a table may have with a kernel, and its numbers with each.

    Several sizes are tried if the caller sets none.
    """
    facts = table.facts
    if kernel not in _IN_FILE:
        yield None, facts
        return
    asked_for = table.constraint.cache_params or sharder_cache(
        getattr(table.sharder, "fused_params", None)
    )
    stats, ids = asked_for.stats, world_size * facts.total_ids
    # Without statistics all rows are assumed to be equally popular.
    rows = stats.expected_lookups if stats else distinct_rows(ids, facts.rows)
    factors: Sequence[float | None] = [asked_for.load_factor]
    if kernel == EmbeddingComputeKernel.FUSED_UVM.value:
        factors = [None]
    elif asked_for.load_factor is None:
        factors = _LOAD_FACTORS
    for factor in factors:
        cached = factor or 0.0
        missed = stats.expected_miss_rate(cached) if stats else 1 - cached
        miss_rate = min(1.0, missed * rows / ids) if ids else 0.0
        params = replace(asked_for, load_factor=factor)
        yield params, replace(facts, cached=cached, miss_rate=miss_rate)


def get_partition_by_type(sharding_type: str) -> str:
    """Where a sharding type may place its shards, a `PartitionByType` value.

    Example:
        >>> get_partition_by_type("table_wise"), get_partition_by_type("row_wise")
        ('device', 'uniform')

    Source:
        TorchRec's ``torchrec.distributed.planner.enumerators.get_partition_by_type``.
    """
    return _PARTITION_BY[ShardingType(sharding_type)].value


def _without_effect(columns: int, width: int, least: int | None, kinds: set[ShardingType]) -> str:
    """Why a width constraint, or the default width, has no effect; empty if it has."""
    cuts = kinds.intersection(COLUMN_CUTS)
    if least is not None and not cuts:
        return f"min_partition={least} has no effect: no remaining sharding type splits columns"
    if least is not None and width != least and width == slice_width(columns, MIN_CW_DIM):
        return (
            f"min_partition={least} has no effect: {columns} columns have no equal slices of "
            f"{least} to {width - 1} columns that are multiples of 4"
        )
    only_cuts = kinds <= {ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE}
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
    def facts(self) -> TableFacts:
        """Its numbers."""
        return self.option.facts


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
        path, part = waiting.pop(0)
        sharder = by_type.get(type(part))
        if sharder is not None:
            yield path, part, sharder
            continue
        children = [
            (f"{path}.{name}" if path else name, child) for name, child in part.named_children()
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
        >>> words = {"products": ParameterConstraints(pooling_factors=[1.0, 3.0])}
        >>> [table] = model_tables(
        ...     ebc, [EmbeddingBagCollectionSharder()], batch_size=2, constraints=words
        ... )
        >>> table.facts.samples, table.facts.ids
        ((2.0, 2.0), (2.0, 6.0))
    """
    batch_size = require_int("batch_size", batch_size, 1, error=bad_input)
    return [
        table
        for path, part, sharder in shardable_modules(module, sharders, breadth_first)
        for table in _tables_of(path, part, sharder, batch_size, constraints or {})
    ]


def _tables_of(
    path: str,
    module: nn.Module,
    sharder: ModuleSharder[Any],
    batch_size: int,
    constraints: Constraints,
) -> Iterator[ModelTable]:
    """The tables of one collection."""
    configs = _configs_of(module)
    fused_params = getattr(sharder, "fused_params", None)
    shared_optimizer = _optimizer_of(fused_params)
    packed_table: Any = getattr(module, "packed_table", None)
    collection: Any = getattr(module, "_managed_collision_collection", None)
    mappings: Any = {} if collection is None else collection._managed_collision_modules
    for name, tensor in sharder.shardable_parameters(module).items():
        constraint = constraints.get(name) or ParameterConstraints()
        features = _features_of(name, configs.get(name), constraint)
        lengths = _per_feature(name, "pooling_factors", constraint.pooling_factors, features)
        bags = _per_feature(name, "num_poolings", constraint.num_poolings or [1.0], features)
        sizes = _per_feature(name, "batch_sizes", constraint.batch_sizes or [batch_size], features)
        samples = tuple(float(size * count) for size, count in zip(sizes, bags, strict=True))
        own_optimizer = optimizer_spec_of_parameter(name, tensor)
        packed: Any = packed_table(name) if callable(packed_table) else None
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
            feature_names=list(features),
            num_poolings=bags if constraint.num_poolings else None,
            **{field: getattr(constraint, field) for field in _CARRIED},
        )
        row_bytes, gradient_bytes = _wire_bytes(sharder, option.facts.pooled)
        option.facts = replace(
            option.facts,
            weighted=option.facts.weighted or constraint.is_weighted,
            samples=samples,
            ids=tuple(length * count for length, count in zip(lengths, samples, strict=True)),
            optimizer=own_optimizer or shared_optimizer,
            row_wire_bytes=row_bytes,
            gradient_wire_bytes=gradient_bytes,
            packed=packed,
            mapping_row_bytes=mappings[name].row_bytes() if name in mappings else 0,
        )
        yield ModelTable(option, sharder, constraint)


def _configs_of(module: nn.Module) -> dict[str, Any]:
    """Table name -> its configuration; empty for an unknown module."""
    bags: Any = getattr(module, "embedding_bag_configs", None)
    ask: Any = bags or getattr(module, "embedding_configs", None)
    configs: Any = ask() if callable(ask) else ()
    return {config.name: config for config in configs}


def _features_of(name: str, config: Any, constraint: ParameterConstraints) -> tuple[str, ...]:
    """The features of a table: from its configuration, else its constraint, else numbered."""
    given = tuple(constraint.feature_names or ())
    if config is not None:
        known = tuple(config.feature_names)
        surplus = [feature for feature in given if feature not in known]
        if surplus:
            raise bad_input(
                f"ParameterConstraints(feature_names={list(given)}) of table {name!r} names "
                f"{surplus}, which do not read it: its features are {list(known)}"
            )
        return known
    return given or tuple(f"{name}[{index}]" for index in range(len(constraint.pooling_factors)))


def _per_feature(
    name: str, what: str, numbers: Sequence[float], features: Sequence[str]
) -> list[float]:
    """One number per feature; a single number applies to all."""
    if len(numbers) == 1:
        return [numbers[0]] * len(features)
    if len(numbers) != len(features):
        raise bad_input(
            f"ParameterConstraints({what}={list(numbers)}) of table {name!r} lists {len(numbers)} "
            f"numbers, and {len(features)} features read the table, {list(features)}: give one "
            "number for each, or one for all"
        )
    return list(numbers)


def _optimizer_of(fused_params: Mapping[str, Any] | None) -> OptimizerSpec | None:
    """The optimizer in a sharder's ``fused_params``; None if they have another format."""
    try:
        return optimizer_spec(fused_params)
    except ValueError:
        # Sharders of tutorec check fused_params at construction, so this is another sharder.
        return None


def _wire_bytes(sharder: ModuleSharder[Any], pooled: bool) -> tuple[int, int]:
    """Bytes on the wire of a row element and of a gradient element."""
    move = "POOLED_EMBEDDINGS_ALL_TO_ALL" if pooled else "SEQUENCE_EMBEDDINGS_ALL_TO_ALL"
    codecs: Any = (getattr(sharder, "qcomm_codecs_registry", None) or {}).get(move)
    ways = (getattr(codecs, "forward", None), getattr(codecs, "backward", None))
    forward, backward = (4 if codec is None else codec.dtype.itemsize for codec in ways)
    return forward, backward

"""Every legal way to shard each table of a model.

An option is a sharding type, a compute kernel, and the pieces that the table falls into; on which ranks they lie is the
search's business. What is no option is written down with the reason (`EmbeddingEnumerator.refusals`), so that a plan
can be explained.

Corresponds to TorchRec's ``torchrec.distributed.planner.enumerators``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tutorec.distributed.cache_params import CacheParams, sharder_cache
from tutorec.distributed.plan import EmbeddingComputeKernel, ShardingType
from tutorec.distributed.planner.constants import BATCH_SIZE
from tutorec.distributed.planner.constraints import (
    ParameterConstraints,
    asked_kernels,
    asked_types,
    check_names,
    check_numbers,
    warn_of,
    warn_without_effect,
)
from tutorec.distributed.planner.interfaces import Enumerator, ShardEstimator
from tutorec.distributed.planner.kernels import registered_kernels
from tutorec.distributed.planner.model_tables import ModelTable, model_tables
from tutorec.distributed.planner.options import CachedRows, PartitionByType, Pieces, ShardingOption
from tutorec.distributed.planner.options import Shard as Shard
from tutorec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.planner.utils import sharder_name
from tutorec.distributed.shard_geometry import MIN_CW_DIM, cut_arrays, slice_width
from tutorec.distributed.shard_geometry import calculate_shard_sizes_and_offsets as calculate_shard_sizes_and_offsets
from tutorec.distributed.sharded_module import ModuleSharder
from tutorec.distributed.tables import IN_FILE
from tutorec.errors import PlannerError, PlannerErrorType

_IN_FILE = [kernel.value for kernel in IN_FILE]
_LOAD_FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # half an order of magnitude apart: each halves the memory or so
_COLUMN_CUTS = (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD)
_BLOCK = 1024  # options that are estimated at once
_ONLY_COLUMN_CUTS = {ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE}
_EVERY_RANK = (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)
_WHOLE_HOSTS = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)
# A table has these only where a constraint asks for them; none of them is built here.
GUARDED_COMPUTE_KERNELS: set[EmbeddingComputeKernel] = {
    EmbeddingComputeKernel.KEY_VALUE,
    EmbeddingComputeKernel.SSD_VIRTUAL_TABLE,
    EmbeddingComputeKernel.DRAM_VIRTUAL_TABLE,
    EmbeddingComputeKernel.DRAM_SSD_VIRTUAL_TABLE,
}
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
        path: Of the table's collection in the model.
        table: Its name.
        sharding_type: `ShardingType` value.
        compute_kernel: `EmbeddingComputeKernel` value; ``""`` where the type itself is refused.
        reason: Why, as the end of a sentence: "the table may only be row_wise".

    Example:
        >>> print(Refusal("", "item", "grid_shard", "", "it is taken only where it is asked for"))
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
    """Lists the options of every table that a sharder can shard, with their costs.

    Taken are the sharding types and kernels that the table's sharder builds, its constraints allow, and whose costs are
    known (`kernels.register_kernel`), except that

    - grid_shard is taken only where a constraint asks for it;
    - so are ``fused_uvm`` and ``fused_uvm_caching``, or where it gives ``cache_params``: without a load factor caches
      of several sizes are taken;
    - of fused and dense, which compute the same, one is taken: fused, and for replicated tables dense, unless an
      optimizer is named for them;
    - a constraint that names the kernel dense and no type means replicated, as in TorchRec;
    - columns are cut into slices of at least ``min_partition`` (128 by default) columns, equal ones, each a multiple
      of 4: the narrowest that divide the table. A table that has no such slices stays whole.

    Args:
        topology: The machines.
        batch_size: B of a rank.
        constraints: Table name -> what is laid down for it.
        estimator: What writes costs into the options, one or several; by default `EmbeddingPerfEstimator` and
            `EmbeddingStorageEstimator`.
        use_exact_enumerate_order: Take outer modules before inner ones; by default they come as the model prints them.

    Example:
        >>> from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 64, "products", feature_names=["item"])])
        >>> words = ParameterConstraints(sharding_types=["row_wise", "column_wise"], min_partition=32)
        >>> enumerator = EmbeddingEnumerator(Topology(2, "cpu"), constraints={"products": words})
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
        constraints: Mapping[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | Sequence[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool | None = False,
    ) -> None:
        self._topology = topology
        self._local_size = min(topology.intra_group_size, topology.world_size)
        self._batch_size = batch_size
        self._constraints = dict(constraints or {})
        if estimator is None:
            self._estimators: list[ShardEstimator] = [
                EmbeddingPerfEstimator(topology, self._constraints),
                EmbeddingStorageEstimator(topology, self._constraints),
            ]
        else:
            self._estimators = list(estimator) if isinstance(estimator, Sequence) else [estimator]
        self._breadth_first = bool(use_exact_enumerate_order)
        self._sharder_map: dict[str, ModuleSharder[Any]] = {}
        self._last_options: list[ShardingOption] | None = None
        self._costed: frozenset[str] = frozenset()
        self.refusals: list[Refusal] = []
        """What was no option in the last enumeration, and why."""
        self.progress: Callable[[float], None] | None = None
        """Called with the part of the estimates that is done, for a bar."""

    @property
    def sharder_map(self) -> dict[str, ModuleSharder[Any]]:
        """Class of a collection, by its full name -> who shards it; of the last enumeration."""
        return self._sharder_map

    @property
    def last_stored_search_space(self) -> list[ShardingOption] | None:
        """The options of the last enumeration; None before the first."""
        return self._last_options

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> list[ShardingOption]:
        """Every legal option of every table, estimated, table after table.

        Args:
            module: The model; it may be on the meta device.
            sharders: One for each class of collections.

        Raises:
            PlannerError: A constraint names a table that does not exist, has a number that makes no sense, or leaves
                its table no option.
        """
        self._sharder_map = {sharder_name(sharder.module_type): sharder for sharder in sharders}
        for name, constraint in self._constraints.items():
            check_numbers(name, constraint, self._topology.world_size)
        tables = model_tables(module, sharders, self._batch_size, self._constraints, self._breadth_first)
        if sharders:
            check_names(self._constraints, list(dict.fromkeys(table.facts.name for table in tables)))
        else:
            warn_of(list(self._constraints), "without sharders, sharders=[], no table is sharded")
        self.refusals = []
        self._costed = frozenset(registered_kernels(self._topology.compute_device))
        cuts = _Cuts(self._topology.world_size, self._local_size)
        effects = _Effects(self._topology.world_size)
        options = [option for table in tables for option in self._options_of(table, cuts, effects)]
        self.populate_estimates(options)
        effects.warn()
        warn_without_effect(self._constraints)
        self._last_options = options
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Write costs into options, in place of those that they had."""
        done, total = 0, len(sharding_options) * len(self._estimators)
        for estimator in self._estimators:
            for first in range(0, len(sharding_options), _BLOCK):
                block = sharding_options[first : first + _BLOCK]
                estimator.estimate(block, self._sharder_map)
                done += len(block)
                if self.progress is not None:
                    self.progress(done / total)

    def _options_of(self, table: ModelTable, cuts: _Cuts, effects: _Effects) -> Iterator[ShardingOption]:
        facts, constraint = table.facts, table.constraint
        device = self._topology.compute_device
        if constraint.device_group not in (None, device):
            self._refuse(table, "", "", f"it is left to a planner for {constraint.device_group}, and this is {device}")
            return
        first_refusal = len(self.refusals)
        ways = list(self._ways(table))
        if not ways:
            kinds = {kind.value for kind in asked_types(constraint, facts.name)}
            removed = [str(each) for each in self.refusals[first_refusal:] if each.sharding_type in kinds or not kinds]
            head = f"the constraints of table {facts.name!r} leave no way to shard it: {self._remedy(table)}"
            raise PlannerError("\n  ".join([head, *removed]), PlannerErrorType.STRICT_CONSTRAINTS)
        width = slice_width(facts.columns, constraint.min_partition or MIN_CW_DIM)
        effects.note(facts.name, facts.columns, width, constraint, {kind for kind, _ in ways})
        words = {
            "input_lengths": table.input_lengths,
            "num_poolings": table.num_poolings,
            "batch_size": self._batch_size,
            "enforce_hbm": constraint.enforce_hbm,
            "stochastic_rounding": constraint.stochastic_rounding,
            "bounds_check_mode": constraint.bounds_check_mode,
            "output_dtype": constraint.output_dtype,
            "key_value_params": constraint.key_value_params,
        }
        cache = constraint.cache_params or sharder_cache(getattr(table.sharder, "fused_params", None))
        kept = [(*way, *sized) for way in ways for sized in _caches(way[1], cache)]
        for kind, kernel, cache_params, cached_rows in kept:
            yield ShardingOption.from_pieces(
                replace(facts, cache=cached_rows) if cached_rows else facts,
                table.tensor,
                table.module,
                cuts.pieces(kind, (facts.rows, facts.columns), width),
                sharding_type=kind.value,
                partition_by=get_partition_by_type(kind.value),
                compute_kernel=kernel,
                cache_params=cache_params,
                **words,
            )

    def _ways(self, table: ModelTable) -> Iterator[tuple[ShardingType, str]]:
        """The types and kernels that a table may have, in its sharder's order; the others are refused with a reason."""
        wanted_types = asked_types(table.constraint, table.facts.name)
        wanted_kernels = asked_kernels(table.constraint, table.facts.name)
        wanted_values = [kernel.value for kernel in wanted_kernels]
        device = self._topology.compute_device
        built = [ShardingType(value) for value in table.sharder.sharding_types(device)]
        for kind in wanted_types:
            if kind not in built:
                self._refuse(table, kind.value, "", f"{type(table.sharder).__name__} does not build it")
        for kind in built:
            reason = self._type_refused(table, kind, wanted_types)
            if reason is not None:
                self._refuse(table, kind.value, "", reason)
                continue
            offered = table.sharder.compute_kernels(kind.value, device)
            # Nobody gets a table in a file unasked: a constraint asks for it, or a sharder that builds nothing else.
            in_file = table.constraint.cache_params is not None or all(each in _IN_FILE for each in offered)
            kernels = [each for each in offered if in_file or each not in _IN_FILE or each in wanted_values]
            for kernel in _known(wanted_kernels, kernels):
                self._refuse(table, kind.value, kernel, f"{type(table.sharder).__name__} does not build this kernel")
            for kernel, why in _kernels(table, kind, kernels, wanted_kernels, self._costed):
                if why is None and kernel == EmbeddingComputeKernel.DENSE.value and kernel in wanted_values:
                    why = _dense_refused(kind, wanted_types)
                if why is None:
                    yield kind, kernel
                else:
                    self._refuse(table, kind.value, kernel, why)

    def _type_refused(self, table: ModelTable, kind: ShardingType, wanted: Sequence[ShardingType]) -> str | None:
        """Why a table cannot be sharded so whatever the kernel, or None."""
        if wanted and kind not in wanted:
            return f"its constraints allow only {', '.join(each.value for each in wanted)}"
        if kind is ShardingType.GRID_SHARD and not wanted:
            return "it is taken only where ParameterConstraints(sharding_types=['grid_shard']) asks for it"
        pin = table.constraint.pin
        if pin is None:
            return None
        ranks, world_size, local_size = set(pin), self._topology.world_size, self._local_size
        if kind in _EVERY_RANK and len(ranks) < world_size:
            return f"it takes all {world_size} ranks, and pin={sorted(ranks)} allows {len(ranks)}"
        whole = any(ranks.issuperset(range(first, first + local_size)) for first in range(0, world_size, local_size))
        if kind in _WHOLE_HOSTS and not whole:
            return f"it takes all {local_size} ranks of a host, and pin={sorted(ranks)} holds no whole host"
        return None

    def _remedy(self, table: ModelTable) -> str:
        """For each constraint the sharding types that the table could have without it."""
        kept, freed_types = self.refusals, []
        for field in ("sharding_types", "compute_kernels", "pin"):
            if getattr(table.constraint, field):
                self.refusals = []
                freed = replace(table, constraint=replace(table.constraint, **{field: None}))
                kinds = list(dict.fromkeys(kind.value for kind, _ in self._ways(freed)))
                freed_types += [f"without {field} it may be {', '.join(kinds)}"] if kinds else []
        self.refusals = kept
        return "; ".join(freed_types) or f"{type(table.sharder).__name__} builds nothing that the planner can estimate"

    def _refuse(self, table: ModelTable, kind: str, kernel: str, reason: str) -> None:
        self.refusals.append(Refusal(table.facts.path, table.facts.name, kind, kernel, reason))


def _caches(kernel: str, asked_for: CacheParams) -> list[tuple[CacheParams | None, CachedRows | None]]:
    """The caches that a table may have with a kernel: of several sizes where the caller leaves that to the planner."""
    if kernel not in _IN_FILE:
        return [(None, None)]
    if kernel == EmbeddingComputeKernel.FUSED_UVM.value:
        return [(replace(asked_for, load_factor=None), CachedRows(0.0, 1.0))]
    return [
        (
            replace(asked_for, load_factor=factor),
            CachedRows(factor, asked_for.stats.expected_miss_rate(factor) if asked_for.stats else 1 - factor),
        )
        for factor in (_LOAD_FACTORS if asked_for.load_factor is None else [asked_for.load_factor])
    ]


def _known(wanted: Sequence[EmbeddingComputeKernel], built: Sequence[str]) -> list[str]:
    """The kernels that are asked for and not built."""
    return [kernel.value for kernel in wanted if kernel.value not in built]


def _kernels(
    table: ModelTable,
    kind: ShardingType,
    built: Sequence[str],
    wanted: Sequence[EmbeddingComputeKernel],
    costed: frozenset[str],
) -> Iterator[tuple[str, str | None]]:
    """Each kernel that a sharder builds, with the reason why it is no option, or None."""
    names = [kernel.value for kernel in wanted]
    left = [kernel for kernel in built if kernel in costed and (not names or kernel in names)]
    dense, fused = EmbeddingComputeKernel.DENSE.value, EmbeddingComputeKernel.FUSED.value
    spare, instead = dense, "fused computes the same and keeps no gradient"
    if kind is ShardingType.DATA_PARALLEL and not table.names_optimizer:
        spare, instead = fused, "replicated tables are dense unless an optimizer is named for them"
    for kernel in built:
        if kernel not in costed:
            yield kernel, "its cost is not known: register_kernel(...) tells it"
        elif kernel not in left:
            yield kernel, f"its constraints allow only {', '.join(names)}"
        elif kernel == spare and dense in left and fused in left:
            ask = f"sharding_types=[{kind.value!r}], compute_kernels=[{kernel!r}]"
            yield kernel, f"{instead}; ParameterConstraints({ask}) asks for it"
        else:
            yield kernel, None


def get_partition_by_type(sharding_type: str) -> str:
    """Which ranks a sharding type spreads a table over, a `PartitionByType` value.

    Example:
        >>> get_partition_by_type("table_wise"), get_partition_by_type("row_wise")
        ('device', 'uniform')

    Source:
        TorchRec's ``torchrec.distributed.planner.enumerators.get_partition_by_type``.
    """
    return _PARTITION_BY[ShardingType(sharding_type)].value


def _dense_refused(kind: ShardingType, wanted_types: Sequence[ShardingType]) -> str | None:
    """The kernel dense alone asks for a replicated table, as in TorchRec; with a type it may be any."""
    if wanted_types or kind is ShardingType.DATA_PARALLEL:
        return None
    return "the kernel 'dense' without a sharding type means data_parallel; sharding_types names another one"


class _Cuts:
    """Pieces of tables; tables of one shape share their arrays."""

    def __init__(self, world_size: int, local_size: int) -> None:
        self._world_size, self._local_size = world_size, local_size
        self._known: dict[tuple[ShardingType, tuple[int, int], int], Any] = {}

    def pieces(self, kind: ShardingType, shape: tuple[int, int], width: int) -> Pieces:
        """Those of a table ``[R, D]`` that is cut so."""
        key = (kind, shape, width if kind in _COLUMN_CUTS else 0)
        if key not in self._known:
            self._known[key] = cut_arrays(kind, shape, self._world_size, self._local_size, width)
        return Pieces(*self._known[key])


class _Effects:
    """Constraints on the width of slices that change nothing, gathered into a warning of each kind."""

    def __init__(self, world_size: int) -> None:
        self._several = world_size > 1
        self._found: dict[str, list[str]] = {}

    def note(
        self, table: str, columns: int, width: int, constraint: ParameterConstraints, kinds: set[ShardingType]
    ) -> None:
        """Look at one table."""
        least, cuts = constraint.min_partition, kinds.intersection(_COLUMN_CUTS)
        if least is not None and not cuts:
            self._add(table, f"min_partition={least} has no effect: no sharding type that is left cuts columns")
        elif least is not None and width != least and width == slice_width(columns, MIN_CW_DIM):
            self._add(
                table,
                f"min_partition={least} has no effect: {columns} columns have no equal slices of {least} to "
                f"{width - 1} columns that are multiples of 4",
            )
        elif least is None and width == columns and kinds <= _ONLY_COLUMN_CUTS and slice_width(columns, 1) < columns:
            if not self._several:
                return
            half = slice_width(columns, -(-columns // 2))
            fitting = half if half < columns else slice_width(columns, 1)
            self._add(
                table,
                f"column-wise leaves {columns} columns in one slice, as slices have at least {MIN_CW_DIM} columns: "
                f"min_partition={fitting} makes {columns // fitting}",
            )

    def warn(self) -> None:
        """One warning of each kind."""
        for what, tables in self._found.items():
            warn_of(tables, what)

    def _add(self, table: str, what: str) -> None:
        self._found.setdefault(what, []).append(table)

"""Sharding options: one way to shard a table, with the cost of each shard; and its constraints.

Corresponds to TorchRec's ``torchrec.distributed.planner.types``, with its names, signatures and
printed forms. An option of a row-wise table on 512 ranks has 512 shards, and there are thousands of
options: shards are stored as arrays (`ShardArrays`) and converted to `Shard` objects on request.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from tutorec._check import did_you_mean
from tutorec._kernels.packed import PackedTable
from tutorec._kernels.specs import OptimizerSpec
from tutorec.distributed.core.cache_params import CacheParams
from tutorec.distributed.planner.constants import DEVICES, POOLING_FACTOR
from tutorec.distributed.planner.topology import PERF_FIELDS, Floats, Ints, Perf, Storage
from tutorec.errors import PlannerError, bad_input

_Amounts = TypeVar("_Amounts", Floats, Ints)
_E = TypeVar("_E", bound=Enum)
_NAMED = 5  # tables named in a message; others are counted
_WITHOUT_EFFECT = {
    "enforce_hbm": (
        "the rows of a cache, and their optimizer state, are always in the faster memory"
    ),
    "stochastic_rounding": "name it in fused_params of the sharder, for rows of 16 bits",
    "bounds_check_mode": "ids are always checked: tutorec.validation(False) switches that off",
    "key_value_params": "there is no key-value store; the kernel fused_uvm keeps tables in files",
    "use_virtual_table": "there is no key-value store; the kernel fused_uvm keeps tables in files",
    "output_dtype": (
        "rows are looked up as float32: get_qcomm_codecs_registry narrows them while they travel"
    ),
}


@dataclass
class Shard:
    """A shard of a table.

    Args:
        size: ``[R, D]``.
        offset: ``[row, column]`` of its first row and column.
        storage: Bytes on its rank.
        perf: Milliseconds on its rank in a step.
        rank: Its rank; None until it is placed.
    """

    size: list[int]
    offset: list[int]
    storage: Storage | None = None
    perf: Perf | None = None
    rank: int | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.size), tuple(self.offset), self.storage, self.perf, self.rank))

    def __str__(self) -> str:
        return (
            f"Shard size: {tuple(self.size)}, offset: {tuple(self.offset)}, storage: "
            f"{self.storage}, perf: {self.perf}, rank: {self.rank}"
        )


class PartitionByType(Enum):
    """Where the shards of an option may be placed.

    ``DEVICE``: each on any rank. ``HOST``: all on one host. ``UNIFORM``: one on each rank.
    ``MULTI_HOST``: on several hosts, a block of shards on each.
    """

    DEVICE = "device"
    HOST = "host"
    UNIFORM = "uniform"
    MULTI_HOST = "multi_host"


@dataclass
class ShardArrays:
    """The shards of an option as arrays, one row per shard; P is the number of shards.

    Args:
        sizes: ``[P, 2]``: rows and columns.
        offsets: ``[P, 2]``: first row and first column.
        perf: ``[P, 6]`` milliseconds, columns in the order of the fields of `Perf`; None until
            estimated.
        storage: ``[P, 3]`` bytes: HBM, DDR, SSD; None until estimated.
        ranks: ``[P]``, -1 for a shard that is not placed; None if none is.

    Example:
        >>> halves = ShardArrays(
        ...     np.array([[2, 4], [2, 4]]), np.array([[0, 0], [2, 0]]), ranks=np.array([0, 1])
        ... )
        >>> [shard.rank for shard in halves.as_shards()]
        [0, 1]
    """

    sizes: Ints
    offsets: Ints
    perf: Floats | None = None
    storage: Ints | None = None
    ranks: Ints | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def as_shards(self) -> list[Shard]:
        """One `Shard` object per row."""
        unknown = [None] * len(self)
        perf = unknown if self.perf is None else [Perf(*line) for line in self.perf.tolist()]
        storage = unknown
        if self.storage is not None:
            storage = [Storage(*line) for line in self.storage.tolist()]

        ranks = unknown
        if self.ranks is not None:
            ranks = [None if rank < 0 else rank for rank in self.ranks.tolist()]

        return [*map(Shard, self.sizes.tolist(), self.offsets.tolist(), storage, perf, ranks)]

    @classmethod
    def from_shards(cls, shards: Sequence[Any]) -> ShardArrays:
        """Arrays from `Shard` objects; a field that one object lacks is None for all."""

        def table(name: str, columns: Sequence[str], dtype: type) -> Any:
            values = [getattr(shard, name) for shard in shards]
            if None in values:
                return None
            rows = [*map(attrgetter(*columns), values)]
            return np.array(rows, dtype).reshape(len(shards), len(columns))

        corners = np.array([(shard.size, shard.offset) for shard in shards], np.int64)
        sizes, offsets = corners.reshape(-1, 2, 2).swapaxes(0, 1)
        return cls(
            sizes,
            offsets,
            table("perf", PERF_FIELDS, np.float64),
            table("storage", ("hbm", "ddr", "ssd"), np.int64),
            np.array([-1 if shard.rank is None else shard.rank for shard in shards], np.int64),
        )


@dataclass(frozen=True)
class TableProfile:
    """A table of a collection, as numbers.

    Args:
        path: Path of its collection in the model; ``""`` for the model itself.
        name: Name of the table.
        rows: R.
        columns: D.
        element_bytes: Bytes of a row element; 0 for packed rows.
        features: Input features that read it.
        pooled: Whether bags are pooled.
        weighted: Whether each id carries a weight.
        samples: Bags of each feature in one rank's batch, B.
        ids: Expected ids of each feature in one rank's batch, N = B * pooling factor.
        optimizer: The optimizer of its fused kernel; None if unknown.
        row_wire_bytes: Bytes of a row element on the wire: 4, or 2 with a codec.
        gradient_wire_bytes: Bytes of a gradient element on the wire, likewise.
        packed: Row layout of a quantized table; None for float rows.
        cached: Of a table in a file: fraction of its rows in memory, 0 to 1.
        miss_rate: Of a table in a file: fraction of all ids that miss the cache; a row that a batch
            looks up several times misses once.
        mapping_row_bytes: Bytes that a mapping of raw ids keeps for each row.

    Example:
        >>> TableProfile(
        ...     "", "item", 8, 4, features=("a", "b"), samples=(2.0, 2.0), ids=(6.0, 2.0)
        ... ).total_ids
        8.0
    """

    path: str
    name: str
    rows: int
    columns: int
    element_bytes: int = 4
    features: tuple[str, ...] = ()
    pooled: bool = True
    weighted: bool = False
    samples: tuple[float, ...] = ()
    ids: tuple[float, ...] = ()
    optimizer: OptimizerSpec | None = None
    row_wire_bytes: int = 4
    gradient_wire_bytes: int = 4
    packed: PackedTable | None = None
    cached: float = 0.0
    miss_rate: float = 0.0
    mapping_row_bytes: int = 0

    def row_bytes(self, columns: int) -> int:
        """Bytes of a stored row with this number of columns."""
        if self.packed is not None:
            return replace(self.packed, columns=columns).layout.row_bytes
        return columns * self.element_bytes

    @property
    def total_samples(self) -> float:
        """Bags in one rank's batch, of all features."""
        return float(sum(self.samples))

    @property
    def total_ids(self) -> float:
        """Expected ids in one rank's batch, of all features."""
        return float(sum(self.ids))


class _Shards:
    """The shards of an option as objects, made on request; changes to them take effect."""

    def __get__(self, option: ShardingOption | None, owner: object) -> list[Shard]:
        if option is None:
            raise AttributeError(f"{owner} has no shards: ask an option")
        if isinstance(option._shards, ShardArrays):
            option._shards = option._shards.as_shards()
        return option._shards

    def __set__(self, option: ShardingOption, shards: list[Shard] | ShardArrays) -> None:
        option._shards = shards


@dataclass(eq=False, repr=False)
class ShardingOption:
    """One way to shard one table. A plan has one option per table, with placed shards.

    Args:
        name: Name of the table.
        tensor: Its weight ``[R, D]``, usually on the meta device.
        module: ``(path, module)`` of its collection.
        input_lengths: Pooling factor of each feature: mean ids per bag.
        batch_size: B per rank.
        sharding_type: `ShardingType` value.
        partition_by: `PartitionByType` value.
        compute_kernel: `EmbeddingComputeKernel` value.
        shards: Its shards, as objects or as arrays.
        cache_params: The cache, if the kernel has one.
        enforce_hbm: Passed on to the plan.
        stochastic_rounding: Passed on to the plan.
        bounds_check_mode: Passed on to the plan.
        dependency: Options with the same value are placed together on one host or device.
        is_pooled: Whether bags are pooled; by default as in the module.
        feature_names: Features that read the table.
        output_dtype: TorchRec's; has no effect, rows are looked up as float32.
        key_value_params: Passed on to the plan.
        num_poolings: Bags per sample, for each feature; 1 by default.
        profile: The table in numbers, if already known.

    Source:
        TorchRec's ``ShardingOption``.
    """

    name: str
    tensor: torch.Tensor
    module: tuple[str, nn.Module]
    input_lengths: list[float]
    batch_size: int
    sharding_type: str
    partition_by: str
    compute_kernel: str
    shards: _Shards = _Shards()
    cache_params: Any = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: Any = None
    dependency: str | None = None
    is_pooled: bool | None = None
    feature_names: list[str] | None = None
    output_dtype: Any = None
    key_value_params: Any = None
    num_poolings: list[float] | None = None
    profile: TableProfile = field(default=None, kw_only=True)  # type: ignore[assignment]
    _shards: list[Shard] | ShardArrays = field(init=False)

    def __post_init__(self) -> None:
        """Compute the fields that are None."""
        if self.is_pooled is None:
            self.is_pooled = self.module_pooled(self.module[1], self.name)
        if self.profile is None:
            self.profile = self._default_profile(self.is_pooled)

    def _default_profile(self, is_pooled: bool) -> TableProfile:
        """The table in numbers, from the other fields."""
        poolings = self.num_poolings or [1.0] * self.num_inputs
        samples = tuple(self.batch_size * count for count in poolings)
        lengths = zip(self.input_lengths, samples, strict=True)
        numbered = [f"{self.name}[{index}]" for index in range(self.num_inputs)]
        return TableProfile(
            path=self.path,
            name=self.name,
            rows=self.tensor.shape[0],
            columns=self.tensor.shape[1],
            element_bytes=self.tensor.element_size(),
            features=tuple(self.feature_names or numbered),
            pooled=is_pooled,
            weighted=self.is_weighted,
            samples=samples,
            ids=tuple(length * bags for length, bags in lengths),
        )

    def with_shards(self, shards: ShardArrays) -> ShardingOption:
        """The same option with other shards; table and module are shared."""
        other = object.__new__(type(self))  # copy() would take the state for pickling
        vars(other).update(vars(self))
        other.shards = shards
        return other

    @property
    def path(self) -> str:
        """Path of the table's collection in the model."""
        return self.module[0]

    @property
    def fqn(self) -> str:
        """Path of the collection and name of the table."""
        return f"{self.path}.{self.name}"

    def shard_arrays(self) -> ShardArrays:
        """The shards as arrays, rebuilt if there are objects."""
        return (
            self._shards
            if isinstance(self._shards, ShardArrays)
            else ShardArrays.from_shards(self._shards)
        )

    def times(self) -> Floats:
        """Milliseconds of each shard, ``[P]``.

        Raises:
            PlannerError: They have not been estimated, are negative, or are not finite.
        """
        times = self._estimated("time", self.shard_arrays().perf).sum(axis=1)
        self._check(times, "ms: an estimator writes finite times from 0 into Perf")
        return times

    def memory(self) -> Ints:
        """Bytes of each shard, ``[P, 3]``: HBM, DDR, SSD.

        Raises:
            PlannerError: They have not been estimated, or are negative.
        """
        storage = self._estimated("storage", self.shard_arrays().storage)
        self._check(storage.min(axis=1), "bytes: an estimator writes bytes from 0 into Storage")
        return storage

    def _check(self, amounts: Floats | Ints, rule: str) -> None:
        valid = np.isfinite(amounts) & (amounts >= 0)
        if not valid.all():
            wrong = int(valid.argmin())
            raise bad_input(
                f"{self._named}: shard {wrong} is estimated to take {amounts[wrong]:,} {rule}"
            )

    def placed_ranks(self, world_size: int) -> Ints:
        """The rank of each shard, ``[P]``.

        Raises:
            PlannerError: A shard is not placed, or its rank is not below ``world_size``.
        """
        ranks = self.shard_arrays().ranks
        if ranks is None or not len(ranks) or (ranks < 0).any():
            raise bad_input(
                f"{self._named} has not been placed: call a partitioner's partition() first"
            )
        if ranks.max() >= world_size:
            raise bad_input(
                f"{self._named} has a shard on rank {ranks.max()}, and the topology has ranks 0 to "
                f"{world_size - 1}: place it on the topology that the plan is for"
            )

        return ranks

    @property
    def _named(self) -> str:
        return f"table {self.name!r} as {self.sharding_type}"

    def _estimated(self, quantity: str, amounts: _Amounts | None) -> _Amounts:
        if amounts is None:
            raise bad_input(
                f"{self._named} has no estimate of its {quantity}: call the enumerator's "
                "populate_estimates([option]), with an estimator that writes it"
            )

        return amounts

    def set_estimates(self, **estimates: Floats | Ints) -> None:
        """Store estimates: ``perf``, milliseconds ``[P, 6]``, or ``storage``, bytes ``[P, 3]``."""
        self.shards = replace(self.shard_arrays(), **estimates)

    def place(self, ranks: Sequence[int] | Ints) -> None:
        """Set the rank of each shard.

        Raises:
            ValueError: The number of ranks is not the number of shards.
        """
        if len(ranks) != self.num_shards:
            raise ValueError(
                f"table {self.name!r}: {len(ranks)} ranks for {self.num_shards} shards: give "
                "one for each"
            )

        self.shards = replace(self.shard_arrays(), ranks=np.asarray(ranks, dtype=np.int64))

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self._shards)

    @property
    def num_inputs(self) -> int:
        """Number of features that read the table."""
        return len(self.input_lengths)

    @property
    def total_storage(self) -> Storage:
        """Bytes of all shards; see `memory`."""
        return Storage(*self.memory().sum(axis=0).tolist())

    @property
    def total_perf(self) -> float:
        """Milliseconds of all shards; see `times`."""
        return float(self.times().sum())

    @property
    def cache_load_factor(self) -> float | None:
        """The load factor of the cache, if one is set."""
        return getattr(self.cache_params, "load_factor", None)

    @property
    def is_weighted(self) -> bool:
        """Whether each id carries a weight."""
        return bool(getattr(self.module[1], "is_weighted", bool)())

    @staticmethod
    def module_pooled(module: nn.Module, sharding_option_name: str) -> bool:
        """Whether the collection of a table pools; one with ``embedding_configs`` does not."""
        if hasattr(module, "embedding_bag_configs"):
            return True

        for child in module.modules():
            configs: Any = getattr(child, "embedding_configs", None)
            if callable(configs) and (
                child is module or any(config.name == sharding_option_name for config in configs())  # type: ignore[union-attr]
            ):
                return False

        return True

    def __hash__(self) -> int:
        return hash(self._compared())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardingOption):
            return NotImplemented
        return self._compared() == other._compared()

    def _compared(self) -> tuple[Any, ...]:
        return (
            self.fqn,
            self.sharding_type,
            self.compute_kernel,
            self.cache_load_factor,
            tuple(self.shards),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardingOption:
        """A copy whose shards can be placed independently; table and module are shared."""
        return self.with_shards(self.shard_arrays())

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling: everything but the weights and the module."""
        weight = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="meta")
        return {**self.__dict__, "tensor": weight, "module": (self.path, nn.Module())}

    def __str__(self) -> str:
        head = f"name: {self.name}\nsharding type: {self.sharding_type}\n"
        head += f"compute kernel: {self.compute_kernel}\nnum shards: {self.num_shards}"
        return "\n\t".join([head, *map(str, self.shards)])


def check_tables_are_distinct(source: str, options: Sequence[ShardingOption]) -> None:
    """Check that there is at most one option per table.

    Args:
        source: Source of the options, for the message.
        options: The options.

    Raises:
        PlannerError: A table has two.
    """
    seen: dict[str, ShardingOption] = {}
    for option in options:
        if option.fqn in seen:
            raise bad_input(
                f"{source} has table {option.name!r} twice, as {seen[option.fqn].sharding_type} "
                f"and as {option.sharding_type}: take one option for each table"
            )
        seen[option.fqn] = option


# --- constraints


@dataclass
class ParameterConstraints:
    """Constraints of one table; passed to a planner as ``{table name: ParameterConstraints(...)}``.

    Args:
        sharding_types: Allowed `ShardingType` values; None for all.
        compute_kernels: Allowed `EmbeddingComputeKernel` values; None for all but those with files.
        min_partition: Minimum columns of a column shard; 128 by default.
        pooling_factors: Mean ids per bag, for each feature of the table. A single number applies to
            all features.
        num_poolings: Bags per sample, for each feature; 1 by default.
        batch_sizes: B per rank, for each feature; the planner's batch size by default.
        is_weighted: Whether ids carry weights.
        cache_params: The cache of the kernel ``fused_uvm_caching``, which it also allows. Without a
            ``load_factor`` the planner chooses one, from ``stats`` if given, else for uniform
            lookups.
        enforce_hbm: TorchRec's; has no effect: the cache and its optimizer state are always in the
            faster memory.
        stochastic_rounding: TorchRec's, for 16-bit tables.
        bounds_check_mode: TorchRec's; ids are always checked here.
        feature_names: Features that read the table; those of its configuration by default.
        output_dtype: Type of the looked-up rows; float32 by default.
        device_group: ``"cpu"`` or ``"cuda"``: a planner for another device ignores the table.
        key_value_params: TorchRec's, for tables on disk.
        use_virtual_table: TorchRec's, for tables on disk.
        pin: Ranks that may hold a shard of the table; None for all. Not in TorchRec.
        colocate: Tables with the same value are sharded in the same way on the same ranks. Not in
            TorchRec.

    Source:
        TorchRec's ``ParameterConstraints``.
    """

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=lambda: [POOLING_FACTOR])
    num_poolings: list[float] | None = None
    batch_sizes: list[int] | None = None
    is_weighted: bool = False
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: Any = None
    feature_names: list[str] | None = None
    output_dtype: Any = None
    device_group: str | None = None
    key_value_params: Any = None
    use_virtual_table: bool = False
    pin: Sequence[int] | None = None
    colocate: str | None = None

    def __hash__(self) -> int:
        # Hash by value, as in TorchRec, though lists have no hash. Equal constraints print alike.
        return hash(repr(self))


Constraints = Mapping[str, ParameterConstraints]  # table name -> its constraints


def members(
    enumeration: type[_E], values: Sequence[Any] | None, field: str, table: str
) -> list[_E]:
    """The members of an enumeration that a constraint lists, as values or members.

    Args:
        enumeration: `ShardingType` or `EmbeddingComputeKernel`.
        values: The constraint's list; None for an empty one.
        field: Name of the constraint, for the message.
        table: Name of the table, for the message.

    Raises:
        PlannerError: There is no such member, or a single name is given instead of a list.

    Example:
        >>> from tutorec.distributed.plan.plan import ShardingType
        >>> members(
        ...     ShardingType, ["row_wise", ShardingType.TABLE_WISE], "sharding_types", "item"
        ... )
        [<ShardingType.ROW_WISE: 'row_wise'>, <ShardingType.TABLE_WISE: 'table_wise'>]
    """
    if isinstance(values, str):
        raise bad_input(
            f"ParameterConstraints({field}={values!r}) of table {table!r} is not a list: "
            f"{field}=[{values!r}]"
        )

    named = []
    for value in values or ():
        try:
            named.append(enumeration(value))
        except ValueError:
            known = [member.value for member in enumeration]
            raise bad_input(
                f"ParameterConstraints({field}=...) of table {table!r} names {value!r}, which "
                f"{enumeration.__name__} does not have{did_you_mean(value, known)} (there are "
                f"{', '.join(known)})"
            ) from None

    return named


def check_names(constraints: Constraints, tables: Collection[str]) -> None:
    """Check that each constraint is for a table that exists.

    Raises:
        PlannerError: A table does not exist.

    Example:
        >>> check_names({"itme": ParameterConstraints()}, ["item", "user"])
        Traceback (most recent call last):
            ...
        tutorec.errors.PlannerError: constraints name table 'itme', which no module has; ...
    """
    for name in constraints:
        if name in tables:
            continue
        if not tables:
            raise bad_input(
                f"constraints name table {name!r}, which no sharded module has; the sharders shard "
                "no table of this model: give one for the class of each collection"
            )

        hint = did_you_mean(name, tables) or f"; the tables are {_listed(tables)}"
        raise bad_input(f"constraints name table {name!r}, which no module has{hint}")


def check_numbers(name: str, constraint: ParameterConstraints, world_size: int) -> None:
    """Check the numbers of a table's constraints.

    Args:
        name: Name of the table.
        constraint: Its constraints.
        world_size: W.

    Raises:
        PlannerError: A number is out of range, or a rank does not exist.

    Example:
        >>> check_numbers("item", ParameterConstraints(pin=[4]), world_size=4)
        Traceback (most recent call last):
            ...
        tutorec.errors.PlannerError: ParameterConstraints(pin=[4]) of table 'item' names ...
    """

    def wrong(field: str, problem: str) -> PlannerError:
        return bad_input(
            f"ParameterConstraints({field}={getattr(constraint, field)!r}) of table {name!r} "
            f"{problem}"
        )

    if constraint.min_partition is not None and not constraint.min_partition >= 1:
        raise wrong(
            "min_partition", "is not a number of columns: at least 1, and usually a multiple of 4"
        )

    for counts, least in (("pooling_factors", 0), ("num_poolings", 0), ("batch_sizes", 1)):
        numbers = getattr(constraint, counts)
        for number in () if numbers is None else numbers:
            if isinstance(number, str) or not least <= number < math.inf:
                raise wrong(counts, f"has {number!r}, where a number of at least {least} belongs")

        if numbers is not None and not len(numbers):
            raise wrong(counts, "lists no numbers, one per feature")

    if isinstance(constraint.feature_names, str):
        raise wrong("feature_names", "is not a list of names: feature_names=['feature']")
    if constraint.device_group not in (None, *DEVICES):
        raise wrong("device_group", f"is not one of {', '.join(DEVICES)}, or None")

    pin = constraint.pin
    for rank in () if pin is None else pin:
        if rank not in range(world_size):
            raise wrong("pin", f"names rank {rank!r}; there are ranks 0 to {world_size - 1}")

    if pin is not None and not len(pin):
        raise wrong("pin", "leaves it no rank: name one, or pin=None for all")


def warn_without_effect(constraints: Constraints, effects: Mapping[str, Sequence[str]]) -> None:
    """Warn about constraints without effect, and about a ``colocate`` value of a single table.

    Args:
        constraints: Constraints of the tables.
        effects: Further reason -> tables without effect.
    """
    for reason, tables in effects.items():
        warn_about(tables, reason)

    for unused, reason in _WITHOUT_EFFECT.items():
        tables = [
            name
            for name, constraint in constraints.items()
            if getattr(constraint, unused) not in (None, False)
        ]
        warn_about(tables, f"{unused} has no effect: {reason}")

    labels = Counter(constraint.colocate for constraint in constraints.values())
    for name, constraint in constraints.items():
        label = constraint.colocate
        if label is not None and labels[label] == 1:
            warn_about([name], f"colocate={label!r} has no effect: no other table has that value")


def warn_about(tables: Sequence[str], reason: str) -> None:
    """One warning for all tables concerned, none if there are none."""
    if tables:
        # The caller of a planner, beyond the enumerator.
        warnings.warn(
            f"constraints of table {_listed(tables)}: {reason}", UserWarning, stacklevel=4
        )


def _listed(names: Collection[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(map(repr, list(names)[:_NAMED])) + (f" and {more} more" if more > 0 else "")

"""Sharding options: one way to shard a table, with the cost of each shard.

Corresponds to TorchRec's ``torchrec.distributed.planner.types``, with its names, signatures and
printed forms. An option of a row-wise table on 512 ranks has 512 shards, and there are thousands of
options: shards are stored as arrays (`Pieces`) and converted to `Shard` objects on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import astuple, dataclass, field, fields, replace
from enum import Enum
from operator import add, attrgetter, le, sub
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec._kernels.packed import PackedTable
from tutorec.errors import bad_input

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_Amounts = TypeVar("_Amounts", Floats, Ints)


@dataclass(unsafe_hash=True)
class Perf:
    """Expected milliseconds of a shard in one training step.

    Args:
        fwd_compute: Lookup and pooling.
        fwd_comms: Sending rows to the ranks of their samples.
        bwd_compute: Update of the rows.
        bwd_comms: Sending gradients back.
        input_dist_comms: Sending ids to the shard.
        prefetch_compute: Reading rows into a cache before the lookup.

    Example:
        >>> (Perf(1, 2, 3, 4) + Perf(1, 0, 0, 0)).total
        11.0

    Source:
        TorchRec's ``Perf``. There ``total`` leaves ``input_dist_comms`` out, which a training
        pipeline hides.
    """

    fwd_compute: float
    fwd_comms: float
    bwd_compute: float
    bwd_comms: float
    input_dist_comms: float = 0.0
    prefetch_compute: float = 0.0

    @property
    def total(self) -> float:
        """Total milliseconds of the shard on its rank."""
        return float(sum(astuple(self)))

    def __add__(self, other: Perf) -> Perf:
        return Perf(*map(add, astuple(self), astuple(other)))


PERF_FIELDS = tuple(each.name for each in fields(Perf))


@dataclass(order=True, unsafe_hash=True)
class Storage:
    """Bytes by kind of memory.

    Args:
        hbm: Memory of an accelerator.
        ddr: Memory of the host.
        ssd: Disk.

    Example:
        >>> Storage(hbm=1, ddr=2) + Storage(hbm=1, ddr=0), Storage(1, 2).fits_in(Storage(1, 1))
        (Storage(hbm=2, ddr=2, ssd=0), False)
    """

    hbm: int
    ddr: int
    ssd: int = 0

    def __add__(self, other: Storage) -> Storage:
        return Storage(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: Storage) -> Storage:
        return Storage(*map(sub, astuple(self), astuple(other)))

    def fits_in(self, other: Storage) -> bool:
        """Whether it fits into ``other``, in each kind of memory."""
        return all(map(le, astuple(self), astuple(other)))


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
class Pieces:
    """The shards of an option as arrays, one row per shard; P is the number of shards.

    Args:
        sizes: ``[P, 2]``: rows and columns.
        offsets: ``[P, 2]``: first row and first column.
        perf: ``[P, 6]`` milliseconds, columns in the order of the fields of `Perf`; None until
            estimated.
        storage: ``[P, 3]`` bytes: HBM, DDR, SSD; None until estimated.
        ranks: ``[P]``, -1 for a shard that is not placed; None if none is.

    Example:
        >>> halves = Pieces(
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
    def of_shards(cls, shards: Sequence[Any]) -> Pieces:
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
class CachedRows:
    """The cache of a table in a file.

    Args:
        load_factor: Fraction of its rows in memory, 0 to 1.
        miss_rate: Fraction of all ids, 0 to 1, that miss the cache; a row that a batch looks up
            several times misses once.
    """

    load_factor: float
    miss_rate: float


@dataclass(frozen=True)
class TableFacts:
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
        cache: Cache of a table in a file; None if all rows are in memory.
        mapping_row_bytes: Bytes that a mapping of raw ids keeps for each row.

    Example:
        >>> TableFacts(
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
    cache: CachedRows | None = None
    mapping_row_bytes: int = 0

    def row_bytes(self, columns: int) -> int:
        """Bytes of a stored row with this number of columns.

        Example:
            >>> TableFacts("", "item", 8, 64).row_bytes(64)
            256
        """
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
            raise AttributeError("the class has no shards, so that dataclass sees no default")
        if isinstance(option._shards, Pieces):
            option._shards = option._shards.as_shards()
        return option._shards

    def __set__(self, option: ShardingOption, shards: list[Shard] | Pieces) -> None:
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
        facts: The numbers of the table, if already known.

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
    facts: TableFacts = field(default=None, kw_only=True)  # type: ignore[assignment]
    _shards: list[Shard] | Pieces = field(init=False)

    def __post_init__(self) -> None:
        """Compute what is not given."""
        if self.is_pooled is None:
            self.is_pooled = self.module_pooled(self.module[1], self.name)
        if self.facts is None:
            poolings = self.num_poolings or [1.0] * self.num_inputs
            samples = tuple(self.batch_size * each for each in poolings)
            self.facts = TableFacts(
                path=self.path,
                name=self.name,
                rows=self.tensor.shape[0],
                columns=self.tensor.shape[1],
                element_bytes=self.tensor.element_size(),
                features=tuple(
                    self.feature_names or (f"{self.name}[{i}]" for i in range(self.num_inputs))
                ),
                pooled=self.is_pooled,
                weighted=self.is_weighted,
                samples=samples,
                ids=tuple(
                    length * bags for length, bags in zip(self.input_lengths, samples, strict=True)
                ),
            )

    def with_pieces(self, pieces: Pieces) -> ShardingOption:
        """The same option with other shards; table and module are shared."""
        other = copy(self)
        other.shards = pieces
        return other

    @property
    def path(self) -> str:
        """Path of the table's collection in the model."""
        return self.module[0]

    @property
    def fqn(self) -> str:
        """Path of the collection and name of the table."""
        return f"{self.path}.{self.name}"

    def pieces(self) -> Pieces:
        """The shards as arrays, rebuilt if there are objects."""
        return self._shards if isinstance(self._shards, Pieces) else Pieces.of_shards(self._shards)

    def times(self) -> Floats:
        """Milliseconds of each shard, ``[P]``.

        Raises:
            PlannerError: They have not been estimated, are negative, or are not finite.
        """
        times = self._estimated("time", self.pieces().perf).sum(axis=1)
        self._check(times, "ms: an estimator writes finite times from 0 into Perf")
        return times

    def memory(self) -> Ints:
        """Bytes of each shard, ``[P, 3]``: HBM, DDR, SSD.

        Raises:
            PlannerError: They have not been estimated, or are negative.
        """
        storage = self._estimated("storage", self.pieces().storage)
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

        Args:
            world_size: W.

        Raises:
            PlannerError: A shard is not placed, or its rank does not exist.
        """
        ranks = self.pieces().ranks
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

    def _estimated(self, what: str, amounts: _Amounts | None) -> _Amounts:
        if amounts is None:
            raise bad_input(
                f"{self._named} has no estimate of its {what}: call the enumerator's "
                "populate_estimates([option]), with an estimator that writes it"
            )
        return amounts

    def set_estimates(self, **estimates: Floats | Ints) -> None:
        """Store estimates: ``perf``, milliseconds ``[P, 6]``, or ``storage``, bytes ``[P, 3]``."""
        self.shards = replace(self.pieces(), **estimates)

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
        self.shards = replace(self.pieces(), ranks=np.asarray(ranks, dtype=np.int64))

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
        for part in module.modules():
            configs: Any = getattr(part, "embedding_configs", None)
            if callable(configs) and (
                part is module or any(config.name == sharding_option_name for config in configs())  # type: ignore[union-attr]
            ):
                return False
        return True

    def get_shards_assignment(self) -> list[int | None]:
        """The rank of each shard."""
        return [shard.rank for shard in self.shards]

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
        return self.with_pieces(self.pieces())

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling: everything but the weights and the module."""
        weight = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="meta")
        return {**self.__dict__, "tensor": weight, "module": (self.path, nn.Module())}

    def __str__(self) -> str:
        lines = [
            f"name: {self.name}",
            f"sharding type: {self.sharding_type}",
            f"compute kernel: {self.compute_kernel}",
        ]
        lines += [f"num shards: {self.num_shards}", *(f"\t{shard}" for shard in self.shards)]
        return "\n".join(lines)


def check_one_each(what: str, options: Sequence[ShardingOption]) -> None:
    """Check that there is at most one option per table.

    Args:
        what: Source of the options, for the message.
        options: The options.

    Raises:
        PlannerError: A table has two.
    """
    seen: dict[str, ShardingOption] = {}
    for option in options:
        if option.fqn in seen:
            raise bad_input(
                f"{what} has table {option.name!r} twice, as {seen[option.fqn].sharding_type} and "
                f"as {option.sharding_type}: take one option for each table"
            )
        seen[option.fqn] = option

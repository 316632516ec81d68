"""Sharding of quantized tables over the devices of one process.

::

    batch  | split |  the features of each device  | lookup |  | concatenate or add |  one result

There is no process group: one process copies ids to its devices and results back. The three
sharding types need two implementations. For table-wise and column-wise tables a device gets all ids
of a feature, and results are concatenated. For row-wise tables a device gets the ids in its range
of rows, and the partial sums of a bag are added.
"""

# No `from __future__ import annotations`: TorchScript compiles the functions below from a traced
# graph.
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.bucketize import bucketize
from tutorec._kernels.packed import PackedTable
from tutorec._kernels.pooling import bag_weights
from tutorec._kernels.specs import PoolingKind
from tutorec.distributed.core.orders import OutputColumns
from tutorec.distributed.core.tables import plan_member
from tutorec.distributed.lookup.quant import DeviceLookup, QuantShard
from tutorec.distributed.plan.geometry import TableShard, checked_shards
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ParameterSharding, ShardingType
from tutorec.fx.utils import fx_marker, is_fx_symbolic_tracing
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

INFER_TYPES = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE)
INFER_KERNELS = (EmbeddingComputeKernel.QUANT,)

torch.fx.wrap("bag_weights")


@dataclass(frozen=True)
class QuantTable:
    """A quantized table and the devices of its shards.

    Args:
        table: Its name, rows, columns and number format.
        pooling: How the rows of a bag are pooled; ``"none"`` returns a row per id.
        features: Input features that read it.
        output_keys: Names of the outputs, one per feature.
        sharding_type: Its sharding type.
        shards: Its shards, by columns and then by rows; a row-wise shard may be empty.
    """

    table: PackedTable
    pooling: PoolingKind
    features: tuple[str, ...]
    output_keys: tuple[str, ...]
    sharding_type: ShardingType
    shards: tuple[TableShard, ...]

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.table.name

    @property
    def shard_tables(self) -> list[PackedTable]:
        """Return each shard as a table of its own.

        A column shard keeps the row alignment of its table, in bytes. ``row_alignment="fast"``
        chose it for all columns, so it may not be the fastest alignment for fewer columns; the
        values read are the same bit for bit.
        """
        return [
            replace(self.table, rows=shard.rows, columns=shard.columns) for shard in self.shards
        ]


def place_quant_table(
    table: PackedTable,
    pooling: PoolingKind,
    names: tuple[Sequence[str], Sequence[str]],
    sharding: ParameterSharding,
    devices: int,
) -> QuantTable:
    """Return a quantized table with the placement that the plan gives it, checked.

    Args:
        table: The table.
        pooling: How bags are pooled.
        names: Features that read it, and the output name of each.
        sharding: Its entry in the plan.
        devices: Number of devices.

    Raises:
        ValueError: The plan does not fit the table or the devices.
    """
    name = table.name
    shape = (table.rows, table.columns)
    sharding_type = plan_member(
        ShardingType, sharding.sharding_type, INFER_TYPES, name, "sharding type"
    )
    plan_member(
        EmbeddingComputeKernel, sharding.compute_kernel, INFER_KERNELS, name, "compute kernel"
    )

    shards = checked_shards(name, shape, sharding, devices, devices)
    return QuantTable(table, pooling, tuple(names[0]), tuple(names[1]), sharding_type, shards)


class Home(NamedTuple):
    """Rows of unpooled lookups after they were copied to the output device.

    Args:
        shards: The column shards that the rows belong to, in order.
        features: The batch whose lengths give the number of rows of each.
        first: Position in that batch of the first shard's feature.
        rows: ``[N, D]``.
    """

    shards: list[OutputColumns]
    features: Any
    first: int
    rows: Any


@dataclass
class InferContext:
    """State of one sharding and one batch that the output step needs from the input step.

    Args:
        features: The input of the sharding.
        parts: For whole rows, the features of each device, on the device of the batch.
        places: For split rows, the position of each id's row among the rows that return ``[N]``.
    """

    features: Any = None
    parts: Any = None
    places: Any = None


class InferSharding(ABC):
    """The tables of one module whose ids reach their devices in the same way.

    Args:
        tables: The tables, in the module's order.
        packed: Table name -> packed rows ``[R, row_bytes]``.
        devices: The device of each rank of the plan.
        weighted: Whether each id carries a weight.
        output_dtype: Data type of the results.
    """

    features: list[str]
    """Features that `dist` takes, in that order; a name may occur twice."""
    calls: list[list[OutputColumns]]
    """For each operator call, device after device, the column shards that it returns."""
    lookups: list[DeviceLookup]
    """The lookups, one per device that holds tables that are read."""

    def __init__(
        self,
        tables: Sequence[QuantTable],
        packed: Mapping[str, Tensor],
        devices: Sequence[torch.device],
        weighted: bool,
        output_dtype: torch.dtype,
    ) -> None:
        self.tables = list(tables)
        self._output_dtype = output_dtype
        self._weighted = weighted
        self._pooling = tables[0].pooling
        adds = tables[0].sharding_type is ShardingType.ROW_WISE and self._pooling != "none"
        weighs = weighted or (adds and self._pooling == "sqrtn")

        # (table, number of its shard) -> the lookup that holds it, and its number there
        self._positions: dict[tuple[str, int], tuple[DeviceLookup, int]] = {}
        self.lookups = []
        reads_per_lookup = []
        for rank, device in enumerate(devices):
            members = [
                (table, number)
                for table in tables
                for number, shard in enumerate(table.shards)
                if shard.rank == rank
            ]
            shards = [
                QuantShard(
                    table.shard_tables[number],
                    table.table,
                    packed[table.name],
                    table.shards[number].row_offset,
                    table.shards[number].column_offset,
                    table.features,
                    "sum" if adds else table.pooling,
                )
                for table, number in members
            ]

            lookup = DeviceLookup(shards, device, weighs, torch.float32 if adds else output_dtype)
            for position, (table, number) in enumerate(members):
                self._positions[table.name, number] = lookup, position
            ordered = [members[position] for position in lookup.order]
            reads = [(table, table.shards[number]) for table, number in ordered if table.features]
            # A device without rows gets no batch. Its range of rows is empty, so no id is lost.
            if any(shard.rows for _, shard in reads):
                self.lookups.append(lookup)
                reads_per_lookup.append(reads)

        self._set_up(reads_per_lookup)

    @abstractmethod
    def _set_up(self, asked: Sequence[Sequence[tuple[QuantTable, TableShard]]]) -> None:
        """Set ``features`` and ``calls``, from the shards that each lookup returns, in order."""

    def rows_of(self, table: str) -> list[Tensor]:
        """Packed rows ``[R, row_bytes]`` of each shard of a table, as views, in shard order."""
        entries = [self._positions[key] for key in sorted(self._positions) if key[0] == table]
        return [lookup.rows_of(shard) for lookup, shard in entries]

    def dist(self, features: Any, ctx: InferContext) -> list[Any]:
        """Return the batch of each device, on that device."""
        ctx.features = features
        traced = is_fx_symbolic_tracing()
        if traced:
            fx_marker("KJT_ONE_TO_ALL_FORWARD_BEGIN", features)
        batches = [
            on_device(batch, lookup.device)
            for batch, lookup in zip(self._split(features, ctx), self.lookups, strict=True)
        ]
        if traced:
            fx_marker("KJT_ONE_TO_ALL_FORWARD_END", features)
        return batches

    @abstractmethod
    def _split(self, features: Any, ctx: InferContext) -> list[Any]:
        """Return the batch of each device, on the device of ``features``."""

    @abstractmethod
    def gather(self, pooled: list[Any], ctx: InferContext, device: torch.device) -> Any:
        """Join the pooled rows of each device to ``[B, D]``, with the columns of ``calls``."""

    @abstractmethod
    def rows_home(self, rows: list[Any], ctx: InferContext, device: torch.device) -> list[Home]:
        """Copy each call's rows ``[N, D]`` to the output device, with their column shards."""


class InferWholeRowsSharding(InferSharding):
    """Table-wise and column-wise tables: a device gets all ids of the features that it looks up."""

    def _set_up(self, asked: Sequence[Sequence[tuple[QuantTable, TableShard]]]) -> None:
        self.calls = []
        lists: dict[tuple[str, ...], int] = {}
        self._part_of: list[int] = []
        for reads, lookup in zip(asked, self.lookups, strict=True):
            self.calls += _cut(_slots(reads), lookup.counts)
            # Devices that look up the same features, such as the column shards of one table, share
            # a batch.
            self._part_of.append(lists.setdefault(tuple(lookup.features), len(lists)))
        self.features = [feature for features in lists for feature in features]
        self._counts = [len(features) for features in lists]

    def _split(self, features: Any, ctx: InferContext) -> list[Any]:
        several = is_fx_symbolic_tracing() or len(self._counts) > 1
        batches: Any = features.split(self._counts) if several else [features]
        every = [batches[index] for index in range(len(self._counts))]
        ctx.parts = [every[number] for number in self._part_of]
        return ctx.parts

    def gather(self, pooled: list[Any], ctx: InferContext, device: torch.device) -> Any:
        """Copy each call's rows ``[N, D]`` to the output device, with their column shards."""
        arrived = [columns.to(device) for columns in pooled]
        return arrived[0] if len(arrived) == 1 else torch.cat(arrived, dim=1)

    def rows_home(self, rows: list[Any], ctx: InferContext, device: torch.device) -> list[Home]:
        """Copy each call's rows ``[N, D]`` to the output device, with their column shards."""
        homes = []
        call = 0
        for lookup, features in zip(self.lookups, ctx.parts, strict=True):
            first = 0
            for count in lookup.counts:
                homes.append(Home(self.calls[call], features, first, rows[call].to(device)))
                first = first + count
                call = call + 1
        return homes


class InferSplitRowsSharding(InferSharding):
    """Row-wise tables: a device gets the ids in its range of rows, and partial sums are added.

    All tables have the same pooling. Devices return sums in float32. A mean is divided by the bag
    length at the end, since no device knows it; the weights of SQRTN are computed before bags are
    split.
    """

    def _set_up(self, asked: Sequence[Sequence[tuple[QuantTable, TableShard]]]) -> None:
        self.features = self.lookups[0].features if asked else []
        self.calls = [_slots(reads) for reads in asked[:1]]
        self._columns = [slot.columns for slots in self.calls for slot in slots]
        # For each feature the first row of each device, and the end of the last.
        self._bounds = [
            [*(shard.row_offset for _, shard in table_reads), table_reads[0][0].table.rows]
            for table_reads in zip(*asked, strict=True)
            for _ in table_reads[0][0].features
        ]

    def _split(self, features: Any, ctx: InferContext) -> list[Any]:
        traced = is_fx_symbolic_tracing() or torch.compiler.is_compiling()
        split: Any = split_by_rows if traced else _split_at_once
        batches, ctx.places = split(features, self._bounds, self._pooling, self._weighted)
        return [batches[index] for index in range(len(self.lookups))]

    def gather(self, pooled: list[Any], ctx: InferContext, device: torch.device) -> Any:
        """Add the partial sums of each device to ``[B, D]``, with the columns of ``calls``."""
        total = pooled[0].to(device)
        for partial in pooled[1:]:
            total = total + partial.to(device)

        if self._pooling == "mean":
            total = divide_by_lengths(total, ctx.features.lengths(), self._columns)
        return total if self._output_dtype == torch.float32 else total.to(self._output_dtype)

    def rows_home(self, rows: list[Any], ctx: InferContext, device: torch.device) -> list[Home]:
        """Return the rows ``[N, D]`` of all devices in the order of the batch's ids."""
        arrived = torch.cat([device_rows.to(device) for device_rows in rows])
        return [
            Home(self.calls[0], ctx.features, 0, arrived.index_select(0, ctx.places.to(device)))
        ]


def shard_quant_tables(
    tables: Sequence[QuantTable],
    packed: Mapping[str, Tensor],
    devices: Sequence[torch.device],
    weighted: bool,
    output_dtype: torch.dtype,
) -> list[InferSharding]:
    """Shardings of a module: one for all whole-row tables, one per pooling of row-wise ones.

    Args:
        tables: All tables of the module.
        packed: Table name -> packed rows ``[R, row_bytes]``.
        devices: The device of each rank of the plan.
        weighted: Whether each id carries a weight.
        output_dtype: Data type of the results.
    """
    unsplit = [table for table in tables if table.sharding_type is not ShardingType.ROW_WISE]

    groups: dict[tuple[Any, ...], list[QuantTable]] = {}
    for table in tables:
        if table.sharding_type is ShardingType.ROW_WISE:
            layout = table.table.layout
            width = (layout.columns, layout.stored_columns) if table.pooling == "none" else None
            groups.setdefault((table.pooling, width, table.table.alignment), []).append(table)

    shardings: list[InferSharding] = (
        [InferWholeRowsSharding(unsplit, packed, devices, weighted, output_dtype)]
        if unsplit
        else []
    )
    return shardings + [
        InferSplitRowsSharding(group, packed, devices, weighted, output_dtype)
        for group in groups.values()
    ]


@torch.fx.wrap
def split_by_rows(
    features: KeyedJaggedTensor, bounds: list[list[int]], pooling: str, weighted: bool
) -> tuple[list[KeyedJaggedTensor], Tensor]:
    """Split a batch by ranges of rows; ids count from the first row of their range.

    It runs eagerly, in a traced graph and in TorchScript. An id outside its table falls into the
    first or last range, where it is outside the shard too: the bounds check of the lookup finds it.

    Args:
        features: The batch.
        bounds: For each feature the first row of each range, and the end of the last range.
        pooling: ``"sqrtn"`` gives ids the weights of that pooling, which need the whole bag.
        weighted: Whether the tables use the batch's weights.

    Returns:
        One batch per range, and the position of each id in the concatenated ranges ``[N]``.
    """
    ids = features.values()
    offsets = features.offsets()
    stride = features.stride()
    count = len(features.keys())

    weights: Tensor | None = None
    if weighted:
        weights = features.weights_or_none()
    if pooling == "sqrtn":
        weights = bag_weights(pooling, offsets, weights)
    ends = offsets[torch.arange(count + 1, device=offsets.device) * stride]
    feature = torch.arange(count, device=ids.device).repeat_interleave(
        ends.diff(), output_size=ids.shape[0]
    )
    starts = torch.tensor(bounds, dtype=ids.dtype, device=ids.device)
    ranges = starts.shape[1] - 1

    batches: list[KeyedJaggedTensor] = []
    positions_per_range: list[Tensor] = []
    for index in range(ranges):
        low = starts[:, index][feature]
        in_range = torch.ones_like(ids, dtype=torch.bool)
        if index > 0:
            in_range = ids >= low
        if index + 1 < ranges:
            in_range = in_range & (ids < starts[:, index + 1][feature])

        positions = in_range.nonzero().view(-1)
        own_weights = weights
        if weights is not None:
            own_weights = weights[positions]
        running = torch.cat([offsets.new_zeros([1]), in_range.cumsum(0).type_as(offsets)])
        batches.append(
            _batch(
                features.keys(),
                ids[positions] - low[positions],
                own_weights,
                running[offsets.long()],
                stride,
            )
        )
        positions_per_range.append(positions)

    sources = torch.cat(positions_per_range)
    destinations = torch.empty_like(sources)
    destinations[sources] = torch.arange(sources.shape[0], device=sources.device)
    return batches, destinations


@torch.fx.wrap
def divide_by_lengths(total: Tensor, lengths: Tensor, columns: list[int]) -> Tensor:
    """Divide the sums of bags by their lengths.

    Args:
        total: Sums of bags ``[B, D]``.
        lengths: Ids in each bag ``[F * B]``.
        columns: D of each feature.

    Example:
        >>> divide_by_lengths(
        ...     torch.tensor([[6.0, 4.0], [1.0, 0.0]]), torch.tensor([3, 1, 2, 0]), [1, 1]
        ... )
        tensor([[2., 2.],
                [1., 0.]])
    """
    widths = torch.tensor(columns, device=total.device)
    counts = lengths.to(total.device).view(len(columns), -1).clamp(min=1).to(total.dtype)
    return total / counts.repeat_interleave(widths, dim=0, output_size=total.shape[1]).t()


def _split_at_once(
    features: KeyedJaggedTensor, bounds: list[list[int]], pooling: str, weighted: bool
) -> tuple[list[KeyedJaggedTensor], Tensor | None]:
    """`split_by_rows` with one kernel call, for ids that have been checked."""
    weights = features.weights_or_none() if weighted else None
    if pooling == "sqrtn":
        weights = bag_weights(pooling, features.offsets(), weights, features.values().shape[0])
    keys = features.keys()
    stride = features.stride()
    bucketized = bucketize(
        features.lengths(),
        features.values(),
        weights,
        [stride] * len(keys),
        bounds,
        keep_places=pooling == "none",
    )

    lengths = bucketized.lengths.view(len(bounds[0]) - 1, -1)
    sizes = lengths.sum(1).tolist()
    values = bucketized.values.split(sizes)
    split_weights = (
        [None] * len(sizes) if bucketized.weights is None else bucketized.weights.split(sizes)
    )

    batches = [
        KeyedJaggedTensor._from_parts(
            keys, values[index], split_weights[index], lengths[index], None, stride
        )
        for index in range(len(sizes))
    ]
    return batches, bucketized.places


def on_device(features: Any, device: torch.device) -> Any:
    """Copy a batch, eager or traced, to a device. A copy to the CPU is synchronous."""
    if not is_fx_symbolic_tracing() and features.device() == device:
        return features
    return features.to(device, non_blocking=device.type != "cpu")


def _slots(reads: Sequence[tuple[QuantTable, TableShard]]) -> list[OutputColumns]:
    """The column shards that a lookup returns."""
    return [
        OutputColumns(key, shard.column_offset, shard.columns)
        for table, shard in reads
        for key in table.output_keys
    ]


def _cut(slots: list[OutputColumns], counts: Sequence[int]) -> list[list[OutputColumns]]:
    starts = [0, *accumulate(counts)]
    return [slots[start : start + count] for start, count in zip(starts, counts, strict=False)]


def _batch(
    keys: list[str], values: Tensor, weights: Tensor | None, offsets: Tensor, stride: int
) -> KeyedJaggedTensor:
    """Build a batch without checks; a feature that two tables read occurs twice."""
    if is_scripting():
        # fmt: off
        return KeyedJaggedTensor(
            keys, values, weights, None, offsets, stride, None, None, None, None, None, None, None, None,  # noqa: E501
        )
        # fmt: on
    else:
        return KeyedJaggedTensor._from_parts(keys, values, weights, None, offsets, stride)

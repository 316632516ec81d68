"""Base classes of sharded quantized collections: tables over the devices of one process.

One process drives all devices, so ranks need no agreement and no exchange;
`ShardingEnv.from_local(n, 0)` sets the number of devices. On the CPU the devices share one memory
and are virtual, which lets a plan for a GPU machine run on a machine without GPUs.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from tutorec._kernels.packed import PackedTable
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.orders import FeatureOrder
from tutorec.distributed.core.sharded_module import ShardedModule
from tutorec.distributed.core.sharders import CollectionSharder, M
from tutorec.distributed.core.tables import check_plan_covers
from tutorec.distributed.plan.plan import ParameterSharding
from tutorec.distributed.quant_sharding import (
    INFER_KERNELS,
    INFER_TYPES,
    InferContext,
    QuantTable,
    place_quant_table,
    shard_quant_tables,
)
from tutorec.distributed.state.state_dict import copy_when_loading
from tutorec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    PoolingType,
    get_embedding_names_by_table,
)
from tutorec.quant.column_slices import cut_columns, join_columns
from tutorec.quant.packed_tables import (
    PackedTables,
    check_format,
    check_parts,
    note_formats,
    parts_of_rows,
)
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.tensor_dict import maybe_td_to_kjt
from tutorec.spmd.rank import device as own_device

_Out = TypeVar("_Out")


@dataclass(frozen=True)
class QuantSource:
    """A quantized collection and what is needed to shard it.

    Args:
        kind: Its class name, for messages.
        path: Path of its tables in the module: buffers are named ``<path>.<table>.weight``.
        configs: Configuration of each table.
        tables: The module.
        weighted: Whether each id must carry a weight.
        output_dtype: Data type of its results.
    """

    kind: str
    path: str
    configs: Sequence[BaseEmbeddingConfig]
    tables: PackedTables
    weighted: bool
    output_dtype: torch.dtype


class QuantContext(list[InferContext]):
    """State of one batch: one entry per sharding.

    Attributes:
        features: The batch as the caller passed it, checked.
        of_lists: Whether features have different numbers of bags (inverse indices).
        remapped: The batch of rows, where its ids were remapped.
    """

    features: Any = None
    remapped: Any = None
    of_lists: bool = False


class ShardedQuantModule(
    ShardedModule[QuantContext, list[list[Any]], list[list[Any]], _Out], Generic[_Out]
):
    """A quantized collection sharded over the devices of one process.

    Everything is built at construction, so a graph can be traced before any batch.

    Args:
        source: The quantized collection. A table that stays whole, or is split by rows only, is not
            copied if it is on the right device; both modules then share its memory. Tables on the
            meta device are allocated on the plan's devices as zeros and filled by
            ``load_state_dict``; a lookup before that warns.
        plan: Table name -> how it is sharded.
        env: ``ShardingEnv.from_local(n, 0)`` for n devices.
        device: Device type: ``cpu``, or ``cuda`` for ``cuda:0`` to ``cuda:n-1``; by default that of
            the tables.

    Raises:
        TypeError: ``env`` or the plan has another type.
        ValueError: The plan does not fit, ``env`` has several processes, or there are fewer
            devices.

    Source:
        TorchRec's ``torchrec.distributed.quant_state.ShardedQuantEmbeddingModuleState``.
    """

    # Tracers enter this module: it has no exchange between ranks.
    _fx_leaf = False
    # Whether rows are pooled.
    _pools: ClassVar[bool]

    def __init__(
        self,
        source: QuantSource,
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        if env.process_group is not None and env.world_size > 1:
            raise ValueError(
                "quantized tables are served by one process that drives all devices, and this "
                f"ShardingEnv has a process group of {env.world_size} ranks: "
                f"ShardingEnv.from_local({env.world_size}, 0)"
            )

        self._env = env
        self._path = source.path
        self._split_scale_bias = source.tables.split_scale_bias
        self._is_weighted = source.weighted
        self._output_dtype = source.output_dtype

        target = torch.device(device if device is not None else source.tables.device)
        on_meta = device is None and target.type == "meta"
        self._devices = serving_devices(own_device().type if on_meta else target, env.world_size)
        self._output_device = self._devices[0]

        self._tables = self._placed(source, plan)
        packed = {table.name: source.tables.packed_rows(table.name) for table in self._tables}
        self._not_loaded = {name for name, rows in packed.items() if rows.is_meta}
        self._shardings = shard_quant_tables(
            self._tables, packed, self._devices, source.weighted, source.output_dtype
        )

        active = [sharding for sharding in self._shardings if sharding.features]
        self._active_shardings = active
        self._lookups: list[nn.Module] = [self._lookup_of(sharding.lookups) for sharding in active]
        # TorchRec's attribute, set at its first batch; here functions collect the results.
        self._output_dists = nn.ModuleList()

        table_names: dict[str, list[str]] = {}
        for table in self._tables:
            for feature in table.features:
                table_names.setdefault(feature, []).append(table.name)
        self._feature_names = list(table_names)
        self._feature_rows = [
            (feature, t.name, t.table.rows) for t in self._tables for feature in t.features
        ]

        order = [feature for sharding in active for feature in sharding.features]
        self._order = FeatureOrder(order, table_names)

        self._show_tables()
        self.register_state_dict_post_hook(_store_whole)
        self.register_load_state_dict_pre_hook(_load_pieces)

    @staticmethod
    @abstractmethod
    def _lookup_of(per_device: Sequence[Any]) -> nn.Module:
        """The lookups of a sharding as one module."""

    # --- one batch

    def create_context(self) -> QuantContext:
        """Return an empty context for one batch."""
        return QuantContext(InferContext() for _ in self._active_shardings)

    def compute(self, ctx: QuantContext, dist_input: list[list[Any]]) -> list[list[Any]]:
        """Look rows up on every device."""
        # `forward`, not a call: modules in a plain list are not part of a traced graph.
        return [
            lookup.forward(batches)
            for lookup, batches in zip(self._lookups, dist_input, strict=True)
        ]

    def _run(self, features: KeyedJaggedTensor) -> Any:
        """Send ids to devices, look rows up, and send results back."""
        ctx = self.create_context()
        arrived: Any = self.input_dist(ctx, features)
        return self.output_dist(ctx, self.compute(ctx, arrived))

    def _checked(self, features: Any) -> Any:
        """The checked batch, as the caller passed it and with its features in sharding order."""
        features = maybe_td_to_kjt(features, self._feature_names)
        if self._not_loaded:
            warnings.warn(
                f"tables {sorted(self._not_loaded)} were sharded on the meta device and are all "
                "zeros: load the quantized model's rows, load_state_dict(state)",
                stacklevel=2,
            )
            self._not_loaded.clear()

        weighted = self._is_weighted if self._pools else None
        return check_ids(features, self._feature_rows, weighted, self)

    # --- interface of the unsharded module

    def table_names(self) -> list[str]:
        """The tables, in order."""
        return [table.name for table in self._tables]

    def packed_table(self, table: str) -> PackedTable:
        """Rows, columns and number format of a table, and its row layout."""
        return self._table(table).table

    def packed_rows(self, table: str) -> Tensor:
        """A table's packed rows [R, row_bytes] uint8: a view if it is contiguous, else a copy."""
        return _joined(self._table(table), self._own_rows(table))

    def _table(self, name: str) -> QuantTable:
        for table in self._tables:
            if table.name == name:
                return table
        raise KeyError(f"there is no table {name!r}; the tables are {self.table_names()}")

    def _own_rows(self, table: str) -> list[Tensor]:
        """The packed rows of each shard of a table, as live views."""
        return [rows for sharding in self._shardings for rows in sharding.rows_of(table)]

    @property
    def env(self) -> ShardingEnv:
        """The environment; its world size is the number of devices."""
        return self._env

    @property
    def devices(self) -> list[torch.device]:
        """The device of each rank of the plan."""
        return list(self._devices)

    @property
    def device(self) -> torch.device:
        """Device of the results; ``.to(device)`` changes it and does not move tables."""
        return self._output_device

    def is_weighted(self) -> bool:
        """Whether each id carries a weight."""
        return self._is_weighted

    def output_dtype(self) -> torch.dtype:
        """Data type of the results."""
        return self._output_dtype

    def extra_repr(self) -> str:
        """Lookups, which are in a plain list so that their buffers are not registered twice."""
        if not self._lookups:
            return ""
        lines = ["(lookups): ", *(repr(lookup).replace("\n", "\n  ") for lookup in self._lookups)]
        return "\n ".join(lines)

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedQuantModule[_Out]:
        """``.to(device)`` changes the device of the results; rows stay on the plan's devices."""
        self._output_device = fn(
            torch.empty(0, dtype=torch.uint8, device=self._output_device)
        ).device
        return self

    # --- construction

    def _placed(
        self, source: QuantSource, plan: Mapping[str, ParameterSharding]
    ) -> list[QuantTable]:
        """Read and check the plan."""
        check_plan_covers([config.name for config in source.configs], plan)
        placed = []
        for config, keys in zip(
            source.configs, get_embedding_names_by_table(source.configs), strict=True
        ):
            table: PackedTable = source.tables.packed_table(config.name)
            pooling: Any = getattr(config, "pooling", PoolingType.NONE)
            names = config.feature_names, keys
            placed.append(
                place_quant_table(
                    table, pooling.value.lower(), names, plan[config.name], len(self._devices)
                )
            )
        return placed

    def _show_tables(self) -> None:
        """Register each table's packed rows as buffers that share the operators' memory."""
        holder = nn.ModuleDict({table.name: nn.Module() for table in self._tables})
        for sharding in self._shardings:
            for table in sharding.tables:
                for index, rows in enumerate(sharding.rows_of(table.name)):
                    holder[table.name].register_buffer(
                        "weight" if index == 0 else f"weight_{index}", rows
                    )

        for table in holder.values():
            copy_when_loading(table)
        self.add_module(self._path, holder)


def serving_devices(device: torch.device | str, count: int) -> list[torch.device]:
    """The devices of a serving process: the CPU ``count`` times, or ``count`` GPUs.

    Args:
        device: Device type, or the first device: ``cpu``, ``cuda``, ``cuda:2``.
        count: Number of devices.

    Raises:
        ValueError: There are fewer devices, or the device cannot compute, such as meta.

    Example:
        >>> serving_devices("cpu", 2)
        [device(type='cpu'), device(type='cpu')]
    """
    device = torch.device(device)
    if device.type == "cpu":
        return [torch.device("cpu")] * count
    if device.type != "cuda":
        raise ValueError(
            f"quantized tables are served from 'cpu' or 'cuda', not from {str(device)!r}: pass "
            "device=torch.device('cpu')"
        )

    first = device.index or 0
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if first + count > have:
        span = f"cuda:{first}" if count == 1 else f"cuda:{first} to cuda:{first + count - 1}"
        raise ValueError(
            f"{count} devices from {span} are requested, and this process sees {have} GPUs: take "
            f"fewer with ShardingEnv.from_local({max(have - first, 1)}, 0), or "
            "device=torch.device('cpu'), where devices are virtual"
        )

    return [torch.device("cuda", first + index) for index in range(count)]


class BaseQuantEmbeddingSharder(CollectionSharder[M]):
    """Base of the sharders of quantized collections.

    Args:
        fused_params: TorchRec's; has no effect. Number formats are those of the quantized module.
        shardable_params: Names of the tables to shard; must be all tables, the default.

    Source:
        TorchRec's ``torchrec.distributed.embedding_types.BaseQuantEmbeddingSharder``.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        shardable_params: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._fused_params = dict(fused_params) if fused_params else None
        self._shardable_params = None if shardable_params is None else list(shardable_params)

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """``fused_params`` as given."""
        return self._fused_params

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Table name -> a parameter ``[R, D]`` on the meta device, for the planner.

        The packed rows themselves, ``[R, row_bytes]``, are buffers of the module.

        Raises:
            ValueError: ``shardable_params`` does not name all tables.
        """
        packed: Any = module
        tables = {name: packed.packed_table(name) for name in packed.table_names()}
        if self._shardable_params is not None and set(self._shardable_params) != set(tables):
            raise ValueError(
                f"shardable_params={self._shardable_params} must name all tables of the module, "
                f"{list(tables)}, or be left out: one operator holds them"
            )

        return {
            name: nn.Parameter(
                torch.empty(t.rows, t.columns, dtype=torch.uint8, device="meta"),
                requires_grad=False,
            )
            for name, t in tables.items()
        }

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The supported `ShardingType` values, the same on any device."""
        return [sharding_type.value for sharding_type in INFER_TYPES]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The supported `EmbeddingComputeKernel` values, the same on any device."""
        return [kernel.value for kernel in INFER_KERNELS]


def _store_whole(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Save hook: every table whole, under unsharded names; joining shards copies them."""
    note_formats([table.table for table in module._tables], local_metadata)
    for table in module._tables:
        key = f"{prefix}{module._path}.{table.name}.weight"
        if key not in state_dict:
            continue

        packed_rows = state_dict.pop(key)
        if len(table.shards) > 1:
            packed_rows = _joined(
                table,
                [packed_rows, *(state_dict.pop(f"{key}_{i}") for i in range(1, len(table.shards)))],
            )
        for suffix, view in parts_of_rows(packed_rows, table.table, module._split_scale_bias):
            state_dict[f"{prefix}{module._path}.{table.name}.{suffix}"] = view


def _load_pieces(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    _strict: bool,
    missing: list[str],
    *_: Any,
) -> None:
    """Load hook: split each table into its shards; a missing table keeps the module's rows."""
    for table in module._tables:
        stem = f"{prefix}{module._path}.{table.name}"
        key = f"{stem}.weight"
        own = module._own_rows(table.name)
        shape = table.table.rows, table.table.layout.row_bytes
        views = parts_of_rows(
            torch.empty(shape, dtype=torch.uint8, device="meta"),
            table.table,
            module._split_scale_bias,
        )

        check_parts(
            table.table, views, {suffix: state_dict.get(f"{stem}.{suffix}") for suffix, _ in views}
        )
        absent = [f"{stem}.{suffix}" for suffix, _ in views if f"{stem}.{suffix}" not in state_dict]
        missing.extend(absent)
        if len(absent) == len(views):
            state_dict.update(
                (key if index == 0 else f"{key}_{index}", rows) for index, rows in enumerate(own)
            )
            continue

        check_format(table.table, metadata)
        module._not_loaded.discard(table.name)
        packed_rows = state_dict[key] if not module._split_scale_bias else None
        if packed_rows is None:
            device = own[0].device
            packed_rows = (
                _joined(table, own).clone()
                if absent
                else torch.zeros(shape, dtype=torch.uint8, device=device)
            )
            for suffix, view in parts_of_rows(packed_rows, table.table, split=True):
                view.copy_(state_dict.pop(f"{stem}.{suffix}", view))

        for index, rows in enumerate(_cut(table, packed_rows)):
            state_dict[key if index == 0 else f"{key}_{index}"] = rows


def _cut(table: QuantTable, whole: Tensor) -> Iterator[Tensor]:
    """Split a table's packed rows into its shards."""
    for shard, own in zip(table.shards, table.shard_tables, strict=True):
        rows = whole[shard.row_offset : shard.row_offset + shard.rows]
        if _cuts_columns(table):
            rows = cut_columns(rows, table.table.layout, shard.column_offset, own.layout)
        yield rows


def _joined(table: QuantTable, shards: Sequence[Tensor]) -> Tensor:
    """Join a table's packed rows from its shards."""
    if _cuts_columns(table):
        return join_columns(
            shards, [shard_table.layout for shard_table in table.shard_tables], table.table.layout
        )
    return shards[0] if len(shards) == 1 else _joined_rows(shards)


def _joined_rows(shards: Sequence[Tensor]) -> Tensor:
    """Join ranges of rows: a view if they are still contiguous in memory."""
    ends = [shard.data_ptr() + shard.numel() for shard in shards if shard.numel()]
    begins = [shard.data_ptr() for shard in shards if shard.numel()]
    storages = {shard.untyped_storage().data_ptr() for shard in shards if shard.numel()}
    if len(storages) == 1 and ends[:-1] == begins[1:]:
        first = next(shard for shard in shards if shard.numel())
        return first.as_strided(
            (sum(shard.shape[0] for shard in shards), first.shape[1]), first.stride()
        )
    return torch.cat([shard.to(shards[0].device) for shard in shards])


def _cuts_columns(table: QuantTable) -> bool:
    return any(shard.columns != table.table.columns for shard in table.shards)

"""What sharded quantized collections have in common: tables over the devices of one process, and their state.

One process drives all devices, so that nothing is agreed on and nothing is exchanged; `ShardingEnv.from_local(n, 0)`
says how many devices there are. On the CPU they share one memory and are devices in name only, which is how a plan for
a machine with GPUs is tried out on one without.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from tutorec._kernels.packed import PackedTable
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.layout import FeatureOrder
from tutorec.distributed.plan import ParameterSharding
from tutorec.distributed.sharded_module import M, ShardedModule
from tutorec.distributed.sharders import CollectionSharder
from tutorec.distributed.sharding.infer_sharding import (
    INFER_KERNELS,
    INFER_TYPES,
    InferContext,
    QuantTable,
    place_quant_table,
    shard_quant_tables,
)
from tutorec.distributed.state_dict import copy_when_loading
from tutorec.distributed.tables import check_plan_covers
from tutorec.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from tutorec.modules.embedding_tables import get_embedding_names_by_table
from tutorec.quant.column_slices import cut_columns, join_columns
from tutorec.quant.packed_tables import (
    PackedTables,
    check_format,
    check_parts,
    note_formats,
    parts_of_rows,
    write_parts,
)
from tutorec.sparse.id_check import FeatureRows, check_ids
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.tensor_dict import maybe_td_to_kjt
from tutorec.spmd.devices import device as own_device

_Out = TypeVar("_Out")


@dataclass(frozen=True)
class QuantSource:
    """A quantized collection that is to be sharded.

    Args:
        kind: Its class, for messages.
        path: Where its tables stand in it: buffers are ``<path>.<table>.weight``.
        configs: What each table is.
        tables: The module.
        weighted: Whether each id must carry a weight.
        output_dtype: Of what it returns.
    """

    kind: str
    path: str
    configs: Sequence[BaseEmbeddingConfig]
    tables: PackedTables
    weighted: bool
    output_dtype: torch.dtype


class QuantContext(list[InferContext]):
    """What the moves of one batch tell each other: an entry for each sharding.

    Attributes:
        features: The batch as it was given, after it was checked.
        of_lists: Whether it stores lists, and not samples: features differ in their number.
    """

    features: Any = None
    of_lists: bool = False


class ShardedQuantModule(ShardedModule[QuantContext, list[list[Any]], list[list[Any]], _Out], Generic[_Out]):
    """A quantized collection over the devices of one process.

    Everything is built here: a graph can be traced before any batch has been seen.

    Args:
        source: The quantized collection. A table that stays whole, or loses rows only, is not copied where its device
            is the one that it is on: both modules then show the same rows. Tables on the meta device are allocated
            where the plan puts them, as zeros, and loaded by ``load_state_dict``; a lookup before that warns.
        plan: Table name -> how it is sharded.
        env: How many devices.
        device: Their kind: ``cpu``, or ``cuda`` for ``cuda:0`` to ``cuda:n-1``; by default that of the tables.

    Raises:
        TypeError: ``env`` or the plan is something else.
        ValueError: The plan does not fit, ranks are processes, or there are not so many devices.

    Source:
        TorchRec's ``torchrec.distributed.quant_state.ShardedQuantEmbeddingModuleState``.
    """

    # A tracer looks into it: nothing of it is exchanged between ranks.
    _fx_leaf = False

    def __init__(
        self,
        source: QuantSource,
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self._env = _serving(env)
        self._kind, self._path = source.kind, source.path
        self._split_scale_bias = source.tables.split_scale_bias
        self._is_weighted, self._output_dtype = source.weighted, source.output_dtype
        given = torch.device(device if device is not None else source.tables.device)
        on_meta = device is None and given.type == "meta"
        self._devices = serving_devices(own_device().type if on_meta else given, env.world_size)
        self._output_device = self._devices[0]
        self._tables = self._placed(source, plan)
        packed = {table.name: source.tables.packed_rows(table.name) for table in self._tables}
        self._not_loaded = {name for name, rows in packed.items() if rows.is_meta}
        self._shardings = shard_quant_tables(self._tables, packed, self._devices, source.weighted, source.output_dtype)
        asked = [sharding for sharding in self._shardings if sharding.features]
        self._asked = asked
        self._lookups: list[nn.Module] = [self._lookup_of(sharding.lookups) for sharding in asked]
        # TorchRec's, which fills it at the first batch; here results come home by functions.
        self._output_dists = nn.ModuleList()
        tables_of: dict[str, list[str]] = {}
        for table in self._tables:
            for feature in table.features:
                tables_of.setdefault(feature, []).append(table.name)
        self._feature_names = list(tables_of)
        self._feature_rows = FeatureRows(
            (feature, t.name, t.table.rows) for t in self._tables for feature in t.features
        )
        order = [feature for sharding in asked for feature in sharding.features]
        self._order = FeatureOrder(order, tables_of)
        self._show_tables()
        self.register_state_dict_post_hook(_store_whole)
        self.register_load_state_dict_pre_hook(_load_pieces)

    @staticmethod
    @abstractmethod
    def _lookup_of(per_device: Sequence[Any]) -> nn.Module:
        """The lookups of a sharding as one module."""

    # --- one batch

    def create_context(self) -> QuantContext:
        """What one batch's moves tell each other."""
        return QuantContext(InferContext() for _ in self._asked)

    def compute(self, ctx: QuantContext, dist_input: list[list[Any]]) -> list[list[Any]]:
        """Look rows up, on every device."""
        # `forward`, not a call: what stands in a plain list is no part of a traced graph by itself.
        return [lookup.forward(parts) for lookup, parts in zip(self._lookups, dist_input, strict=True)]

    def _run(self, features: KeyedJaggedTensor) -> Any:
        """Ids to their devices, lookups there, results back."""
        ctx = self.create_context()
        arrived: Any = self.input_dist(ctx, features)
        return self.output_dist(ctx, self.compute(ctx, arrived))

    def _checked(self, features: Any) -> Any:
        """The batch as it was given, checked; with its features in the order of the shardings."""
        features = maybe_td_to_kjt(features, self._feature_names)
        pooled = self._kind == "EmbeddingBagCollection"
        if self._not_loaded:
            warnings.warn(
                f"tables {sorted(self._not_loaded)} were sharded on the meta device and are all zeros: load the "
                "quantized model's rows, load_state_dict(state)",
                stacklevel=2,
            )
            self._not_loaded.clear()
        check_ids(features, self._feature_rows, self._is_weighted if pooled else None, self)
        return features

    # --- what it shares with the unsharded module

    def table_names(self) -> list[str]:
        """The tables, in order."""
        return [table.name for table in self._tables]

    def packed_table(self, table: str) -> PackedTable:
        """Rows, columns and number format of a table, and the layout of a row."""
        return self._table(table).table

    def packed_rows(self, table: str) -> Tensor:
        """A table's packed rows [R, row_bytes] uint8: a view where it lies in one piece, else a copy."""
        return _joined(self._table(table), self._own_rows(table))

    def write_rows(self, table: str, payload: Tensor, scale_bias: Tensor | None = None) -> None:
        """Write a table's packed rows: payload [R, bytes] and, for integers, scale and bias [R, 4], both uint8."""
        found, own = self._table(table), self._own_rows(table)
        self._not_loaded.discard(table)
        shape = found.table.rows, found.table.layout.row_bytes
        whole = torch.empty(shape, dtype=torch.uint8, device=own[0].device)
        write_parts(table, whole, found.table, payload, scale_bias)
        for rows, piece in zip(own, _cut(found, whole), strict=True):
            rows.copy_(piece)

    def _table(self, name: str) -> QuantTable:
        for table in self._tables:
            if table.name == name:
                return table
        raise KeyError(f"there is no table {name!r}; the tables are {self.table_names()}")

    def _own_rows(self, table: str) -> list[Tensor]:
        """The packed rows of each piece of a table, live."""
        return [rows for sharding in self._shardings for rows in sharding.rows_of(table)]

    @property
    def env(self) -> ShardingEnv:
        """How many devices there are."""
        return self._env

    @property
    def devices(self) -> list[torch.device]:
        """The device of each rank of the plan."""
        return list(self._devices)

    @property
    def device(self) -> torch.device:
        """Where results are; ``.to(device)`` changes it, and leaves the tables where the plan put them."""
        return self._output_device

    def is_weighted(self) -> bool:
        """Whether each id carries a weight."""
        return self._is_weighted

    def output_dtype(self) -> torch.dtype:
        """Of what it returns."""
        return self._output_dtype

    def extra_repr(self) -> str:
        """Lookups, which are a plain list so that their buffers are not counted twice."""
        if not self._lookups:
            return ""
        lines = ["(lookups): ", *(repr(lookup).replace("\n", "\n  ") for lookup in self._lookups)]
        return "\n ".join(lines)

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedQuantModule[_Out]:
        """``.to(device)`` says where results go; rows stay where the plan put them."""
        self._output_device = fn(torch.empty(0, dtype=torch.uint8, device=self._output_device)).device
        return self

    # --- set-up

    def _placed(self, source: QuantSource, plan: Mapping[str, ParameterSharding]) -> list[QuantTable]:
        """The plan, read and checked."""
        check_plan_covers([config.name for config in source.configs], plan)
        placed = []
        for config, keys in zip(source.configs, get_embedding_names_by_table(source.configs), strict=True):
            table: PackedTable = source.tables.packed_table(config.name)
            pooling: Any = getattr(config, "pooling", PoolingType.NONE)
            names = config.feature_names, keys
            placed.append(place_quant_table(table, pooling.value.lower(), names, plan[config.name], len(self._devices)))
        return placed

    def _show_tables(self) -> None:
        """Each table's packed rows as buffers, which are those that the operators read."""
        holder = nn.ModuleDict({table.name: nn.Module() for table in self._tables})
        for sharding in self._shardings:
            for table in sharding.tables:
                for index, rows in enumerate(sharding.rows_of(table.name)):
                    holder[table.name].register_buffer("weight" if index == 0 else f"weight_{index}", rows)
        for table in holder.values():
            copy_when_loading(table)
        self.add_module(self._path, holder)


def serving_devices(device: torch.device | str, count: int) -> list[torch.device]:
    """The devices of a process that serves: the CPU ``count`` times, or as many GPUs.

    Args:
        device: Their kind, or the first of them: ``cpu``, ``cuda``, ``cuda:2``.
        count: How many.

    Raises:
        ValueError: There are not so many, or it is a device that computes nothing.

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
        wanted = f"cuda:{first}" if count == 1 else f"cuda:{first} to cuda:{first + count - 1}"
        raise ValueError(
            f"{count} devices from {wanted} are asked for, and this process sees {have} GPUs: take fewer with "
            f"ShardingEnv.from_local({max(have - first, 1)}, 0), or device=torch.device('cpu'), where devices are "
            "virtual"
        )
    return [torch.device("cuda", first + index) for index in range(count)]


def _serving(env: ShardingEnv) -> ShardingEnv:
    """The environment, if it is one of a single process."""
    if env.process_group is not None and env.world_size > 1:
        raise ValueError(
            f"quantized tables are served by one process that drives all devices, and this ShardingEnv has a process "
            f"group of {env.world_size} ranks: ShardingEnv.from_local({env.world_size}, 0)"
        )
    return env


class BaseQuantEmbeddingSharder(CollectionSharder[M]):
    """What the sharders of both quantized collections have in common.

    Args:
        fused_params: TorchRec's; what it says there (formats, registered operators) the quantized module says here.
        shardable_params: Names of the tables to be sharded; TorchRec's, all by default and nothing else.

    Source:
        TorchRec's ``torchrec.distributed.embedding_types.BaseQuantEmbeddingSharder``.
    """

    _arguments = ("fused_params",)

    def __init__(
        self, fused_params: Mapping[str, Any] | None = None, shardable_params: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self._fused_params = dict(fused_params) if fused_params else None
        self._shardable_params = None if shardable_params is None else list(shardable_params)

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """As they were given."""
        return self._fused_params

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Table name -> a stand-in without rows, ``[R, D]`` on the meta device: a plan is about rows and columns.

        The packed rows themselves, ``[R, bytes of a row]``, are buffers of the module.

        Raises:
            ValueError: ``shardable_params`` leaves tables out.
        """
        packed: Any = module
        tables = {name: packed.packed_table(name) for name in packed.table_names()}
        if self._shardable_params is not None and set(self._shardable_params) != set(tables):
            raise ValueError(
                f"shardable_params={self._shardable_params} must name all tables of the module, {list(tables)}, or be "
                "left out: one operator holds them"
            )
        return {
            name: nn.Parameter(torch.empty(t.rows, t.columns, dtype=torch.uint8, device="meta"), requires_grad=False)
            for name, t in tables.items()
        }

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """`ShardingType` values that it can build, on any device."""
        return [kind.value for kind in INFER_TYPES]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """`EmbeddingComputeKernel` values that it can build, on any device."""
        return [kernel.value for kernel in INFER_KERNELS]


def _store_whole(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Name every table in the state dict as the unsharded module does, and put cut ones together, which copies them."""
    note_formats([table.table for table in module._tables], local_metadata)
    for table in module._tables:
        key = f"{prefix}{module._path}.{table.name}.weight"
        if key not in state_dict:
            continue
        whole = state_dict.pop(key)
        if len(table.pieces) > 1:
            whole = _joined(table, [whole, *(state_dict.pop(f"{key}_{i}") for i in range(1, len(table.pieces)))])
        for part, view in parts_of_rows(whole, table.table, module._split_scale_bias):
            state_dict[f"{prefix}{module._path}.{table.name}.{part}"] = view


def _load_pieces(
    module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any, _strict: bool, missing: list[str], *_: Any
) -> None:
    """Leave in the state dict the pieces of each table; those of a table that it does not have are the module's own."""
    for table in module._tables:
        stem = f"{prefix}{module._path}.{table.name}"
        key, own = f"{stem}.weight", module._own_rows(table.name)
        shape = table.table.rows, table.table.layout.row_bytes
        parts = parts_of_rows(
            torch.empty(shape, dtype=torch.uint8, device="meta"), table.table, module._split_scale_bias
        )
        check_parts(table.table, parts, {part: state_dict.get(f"{stem}.{part}") for part, _ in parts})
        absent = [f"{stem}.{part}" for part, _ in parts if f"{stem}.{part}" not in state_dict]
        missing.extend(absent)
        if len(absent) == len(parts):
            state_dict.update((key if index == 0 else f"{key}_{index}", rows) for index, rows in enumerate(own))
            continue
        check_format(table.table, metadata)
        module._not_loaded.discard(table.name)
        whole = state_dict[key] if not module._split_scale_bias else None
        if whole is None:
            device = own[0].device
            whole = _joined(table, own).clone() if absent else torch.zeros(shape, dtype=torch.uint8, device=device)
            for part, view in parts_of_rows(whole, table.table, split=True):
                view.copy_(state_dict.pop(f"{stem}.{part}", view))
        for index, rows in enumerate(_cut(table, whole)):
            state_dict[key if index == 0 else f"{key}_{index}"] = rows


def _cut(table: QuantTable, whole: Tensor) -> Iterator[Tensor]:
    """The packed rows of a table's pieces, from those of the table."""
    for piece, own in zip(table.pieces, table.piece_tables, strict=True):
        rows = whole[piece.row_offset : piece.row_offset + piece.rows]
        if _cuts_columns(table):
            rows = cut_columns(rows, table.table.layout, piece.column_offset, own.layout)
        yield rows


def _joined(table: QuantTable, pieces: Sequence[Tensor]) -> Tensor:
    """A table's packed rows, from those of its pieces."""
    if _cuts_columns(table):
        return join_columns(pieces, [each.layout for each in table.piece_tables], table.table.layout)
    return pieces[0] if len(pieces) == 1 else _joined_rows(pieces)


def _joined_rows(pieces: Sequence[Tensor]) -> Tensor:
    """Ranges of rows as one table: a view where they still lie one behind the other."""
    ends = [piece.data_ptr() + piece.numel() for piece in pieces if piece.numel()]
    begins = [piece.data_ptr() for piece in pieces if piece.numel()]
    held = {piece.untyped_storage().data_ptr() for piece in pieces if piece.numel()}
    if len(held) == 1 and ends[:-1] == begins[1:]:
        first = next(piece for piece in pieces if piece.numel())
        return first.as_strided((sum(piece.shape[0] for piece in pieces), first.shape[1]), first.stride())
    return torch.cat([piece.to(pieces[0].device) for piece in pieces])


def _cuts_columns(table: QuantTable) -> bool:
    return any(piece.columns != table.table.columns for piece in table.pieces)

"""Base class of both quantized collections: tables of packed rows and their operators.

An operator looks up all tables of one pooling (or of one width, for unpooled rows) in one call, and
stores their rows contiguously in one buffer. Each table has a buffer of its own,
``embedding_bags.<table>.weight``, which is a view of the operator's buffer. The two keep sharing
memory when a module's tensors are moved or written to (``to``, ``load_state_dict``, deep copies,
``torch.save``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from tutorec._kernels.packed import PackedTable, PackedTableLookup
from tutorec._kernels.packed_layout import RowAlignment, row_alignment
from tutorec._kernels.specs import PoolingKind
from tutorec._loaded import is_sharded
from tutorec.modules.embedding_configs import BaseEmbeddingConfig
from tutorec.quant.packing import OnNonfinite, check_numbers, pack_checked
from tutorec.quant.preparing import device_of, prepared, quantized_configs, weight_of
from tutorec.quant.table_formats import packed_type

Packed = Mapping[str, tuple[Tensor, Tensor | None]]

# Passed instead of packed rows that the caller will write later, so that no zeros are allocated.
ROWS_FOLLOW: Packed = {}

_FORMATS = "packed_formats"  # key in the metadata of a state


class PackedTables(nn.Module):
    """The base of the quantized collections; see this module's docstring.

    Attributes:
        register_tbes: Whether the operators are submodules, ``tbes``.
        row_alignment: Row sizes are multiples of this many bytes; or ``"fast"`` or ``"small"``.
        split_scale_bias: Whether scale and bias are separate buffers.
        packed_from: The dtype of the float table that each table was packed from.
        errors: The maximum and the mean error of each table, if they were measured when it was
            packed.
    """

    packed_from: dict[str, torch.dtype]
    errors: dict[str, tuple[float, float]]
    register_tbes: bool
    row_alignment: RowAlignment
    split_scale_bias: bool

    _output_dtype: torch.dtype
    _holder: str  # name of the submodule with the tables' buffers
    _configs: str  # method of the float collection that returns the tables' configs
    _flag: str  # method of the float collection, and argument of the quantized one
    _operators: list[tuple[PackedTableLookup, tuple[str, ...]]]
    _features: list[str]
    _feature_splits: list[int]
    _feature_rows: list[tuple[str, str, int]]  # feature, table, its rows

    @classmethod
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> Self:
        """Quantize a float collection, which is not changed; ``module.qconfig`` gives the formats.

        Args:
            module: Its attribute ``qconfig`` is a ``QuantConfig``, or torch's ``QConfig``.
            use_precomputed_fake_quant: Part of torch's convention; has no effect.

        Raises:
            ValueError: It is already quantized, or a table cannot be packed.
        """
        if isinstance(module, PackedTables):
            tables = f"(tables {module.table_names()})"
            raise ValueError(
                f"this {cls.__name__} is already quantized {tables}; quantize the float model"
            )
        return cls.packed(module, module.qconfig)

    @classmethod
    def packed(cls, module: Any, qconfig: Any, **more: Any) -> Self:
        """The quantized form of a float collection; ``more`` for its constructor."""
        quantized = cls.without_rows(module, qconfig, **more)
        for name, table in getattr(module, cls._holder).items():
            quantized.pack(name, weight_of(table))
        return quantized

    @classmethod
    def without_rows(
        cls, module: Any, qconfig: Any, row_alignment: RowAlignment | None = None, **more: Any
    ) -> Self:
        """The quantized form of a float collection, packed later; ``more`` for its constructor."""
        arguments: dict[str, Any] = prepared(module, qconfig, row_alignment) | more
        arguments[cls._flag] = getattr(module, cls._flag)()
        configs = quantized_configs(getattr(module, cls._configs)(), qconfig, module)
        device = device_of(getattr(module, cls._holder), module.device)
        return cls(
            tables=configs, device=device, table_name_to_quantized_weights=ROWS_FOLLOW, **arguments
        )

    def _hold(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        poolings: Sequence[PoolingKind],
        split_scale_bias: bool,
        device: torch.device,
    ) -> None:
        """Create the operators and the tables' buffers.

        Args:
            tables: The tables.
            poolings: The pooling of each table.
            split_scale_bias: Whether scale and bias are separate buffers.
            device: Device of the rows.
        """
        self.split_scale_bias = split_scale_bias
        self._device = device
        self.packed_from = {}
        self.errors = {}
        self._operators = []
        self._feature_splits = []
        self._features = []

        rows = [_packed_table(table, self.row_alignment, device) for table in tables]
        # One call reads rows of one alignment, without pooling also of one stored width.
        keys: list[tuple[PoolingKind, int, object]] = [
            (pooling, row.alignment, pooling == "none" and (row.columns, row.layout.stored_columns))
            for pooling, row in zip(poolings, rows, strict=True)
        ]
        self._feature_rows = [
            (feature, table.name, row.rows)
            for table, row in zip(tables, rows, strict=True)
            for feature in table.feature_names
        ]

        for key in dict.fromkeys(keys):
            members = [
                table for table, table_key in zip(tables, keys, strict=True) if table_key == key
            ]
            packed = [row for row, table_key in zip(rows, keys, strict=True) if table_key == key]
            readers = [index for index, table in enumerate(members) for _ in table.feature_names]
            operator = PackedTableLookup(
                packed, readers, key[0], output_dtype=self._output_dtype, device=device
            )
            operator.asserts_ids = False  # `check_ids` does, with names of features
            self._operators.append((operator, tuple(table.name for table in members)))
            self._feature_splits.append(len(readers))
            self._features += [name for table in members for name in table.feature_names]

        for table in tables:
            self._shown[table.name] = nn.Module()
        self._show()
        if self.register_tbes:
            self.tbes = nn.ModuleList(operator for operator, _ in self._operators)

        self.register_state_dict_post_hook(_note_formats)
        self.register_load_state_dict_pre_hook(_refuse_other_rows)
        self.register_load_state_dict_post_hook(_take_rows)

    def _columns_of(self, tables: Sequence[BaseEmbeddingConfig]) -> list[tuple[int, int, int]]:
        """For each table its operator, and its first and end column in the output."""
        columns_by_table: dict[str, tuple[int, int, int]] = {}
        widths = {table.name: table.embedding_dim * len(table.feature_names) for table in tables}
        for index, (_, names) in enumerate(self._operators):
            start = 0
            for name in names:
                columns_by_table[name] = (index, start, start + widths[name])
                start += widths[name]

        merged: list[tuple[int, int, int]] = []
        for index, start, stop in (columns_by_table[table.name] for table in tables):
            if merged and merged[-1][0] == index and merged[-1][2] == start:
                start = merged.pop()[1]
            merged.append((index, start, stop))
        return merged

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self._device

    def output_dtype(self) -> torch.dtype:
        """Dtype of the looked-up rows."""
        return self._output_dtype

    @property
    def _shown(self) -> nn.ModuleDict:
        """The submodules with each table's buffers."""
        return self._modules[self._holder]  # pyright: ignore[reportReturnType]

    def table_names(self) -> list[str]:
        """The tables, in order."""
        return list(self._shown)

    def pack(self, table: str, weight: Tensor, on_nonfinite: OnNonfinite = "raise") -> None:
        """Pack a table's values [R, D] in chunks; rows beyond the pruned number are dropped."""
        rows = self.packed_rows(table)
        packed = self.packed_table(table)
        self.packed_from[table] = weight.dtype
        if rows.is_meta:
            return

        weight = weight[: packed.rows]
        if on_nonfinite == "raise":
            check_numbers(weight, packed.layout, table)
        pack_checked(weight, packed.layout, rows)

    def packed_rows(self, table: str) -> Tensor:
        """A table's packed rows [R, row_bytes] uint8, with scale, bias and padding: a view."""
        operator, index = self._position(table)
        return operator.table_rows(index)

    def packed_table(self, table: str) -> PackedTable:
        """Rows, columns, number format and row layout of a table."""
        operator, index = self._position(table)
        return operator.tables[index]

    def clear_rows(self) -> None:
        """Set all packed rows to zero bytes, which are values of zero."""
        self.errors.clear()
        for operator, _ in self._operators:
            operator.weights.zero_()

    def write_rows(self, table: str, payload: Tensor, scale_bias: Tensor | None = None) -> None:
        """Write packed rows: payload [R, bytes] and, for integers, scale and bias [R, 4], uint8."""
        self.errors.pop(table, None)
        write_parts(table, self.packed_rows(table), self.packed_table(table), payload, scale_bias)

    def _position(self, table: str) -> tuple[PackedTableLookup, int]:
        for operator, names in self._operators:
            if table in names:
                return operator, names.index(table)
        raise KeyError(f"there is no table {table!r}; the tables are {self.table_names()}")

    def _fill(self, weights: Packed | None) -> None:
        """Write (payload, scale and bias) per table; zeros by default, nothing for ROWS_FOLLOW."""
        if weights is ROWS_FOLLOW:
            return
        if weights is None:
            self.clear_rows()
            return

        for name in self._shown:
            if name not in weights:
                raise KeyError(f"no packed rows for table {name!r}; some for {sorted(weights)}")
            self.write_rows(name, *weights[name])

    def _show(self) -> None:
        """Make the tables' buffers views of the operators' buffers."""
        for operator, names in self._operators:
            for index, name in enumerate(names):
                for buffer_name, view in parts_of_rows(
                    operator.table_rows(index), operator.tables[index], self.split_scale_bias
                ):
                    self._shown[name].register_buffer(buffer_name, view)
            self._device = operator.weights.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedTables:
        # Rows are moved once, as the operators' buffers; then the tables' views are recreated.
        for table in self._shown.values():
            for buffer_name in table._buffers:
                table._buffers[buffer_name] = None

        try:
            super()._apply(fn, recurse)
            for operator, _ in self._operators:
                if not self.register_tbes:
                    operator._apply(fn)
        finally:
            self._show()
        return self


def _packed_table(
    table: BaseEmbeddingConfig, requested: RowAlignment, device: torch.device
) -> PackedTable:
    """The quantized table; with the rows that pruning left, if the config has their number."""
    rows = table.num_embeddings
    left = table.num_embeddings_post_pruning
    if left is not None and not 0 < left <= rows:
        raise ValueError(
            f"table {table.name!r} has {rows} rows: num_embeddings_post_pruning={left}"
        )

    data_type = packed_type(table.data_type, table.name)
    alignment = row_alignment(table.embedding_dim, data_type, requested, device.type)
    return PackedTable(table.name, left or rows, table.embedding_dim, data_type, alignment)


def parts_of_rows(rows: Tensor, table: PackedTable, split: bool) -> list[tuple[str, Tensor]]:
    """The buffers of a table: its whole rows, or payload, scale and bias separately.

    Args:
        rows: Its packed rows [R, row_bytes].
        table: Its layout.
        split: Whether scale and bias are separate buffers.

    Returns:
        Names and views of the rows.

    Example:
        >>> from tutorec.types import DataType
        >>> table = PackedTable("item", rows=3, columns=8, data_type=DataType.INT8)
        >>> parts = parts_of_rows(
        ...     torch.zeros(3, table.layout.row_bytes, dtype=torch.uint8), table, split=True
        ... )
        >>> [(name, tuple(part.shape)) for name, part in parts]
        [('weight', (3, 8)), ('weight_qscale', (3, 2)), ('weight_qbias', (3, 2))]
    """
    if not split:
        return [("weight", rows)]

    layout = table.layout
    buffers = [("weight", rows[:, layout.scale_bytes : layout.scale_bytes + layout.payload_bytes])]
    if layout.scale_bytes:
        # The two bytes of each float16: torch.save does not support two dtypes on one storage.
        buffers += [("weight_qscale", rows[:, :2]), ("weight_qbias", rows[:, 2:4])]
    return buffers


def write_parts(
    name: str, rows: Tensor, table: PackedTable, payload: Tensor, scale_bias: Tensor | None
) -> None:
    """Write the parts of a table's rows that the caller packed.

    Args:
        name: Name of the table.
        rows: Destination [R, row_bytes].
        table: The layout.
        payload: Codes, or floats, of each row [R, bytes] uint8.
        scale_bias: Scale and bias of each row [R, 4] uint8, None for float formats.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: A tensor does not match the layout.
    """
    check_packed(name, table, payload, scale_bias)
    layout = table.layout
    end = layout.scale_bytes + layout.payload_bytes
    rows[:, end:] = 0
    rows[:, layout.scale_bytes : end] = payload
    if scale_bias is not None:
        rows[:, : layout.scale_bytes] = scale_bias


def check_packed(name: str, table: PackedTable, payload: Tensor, scale_bias: Tensor | None) -> None:
    """Check that packed parts match a table's layout.

    Args:
        name: Name of the table.
        table: The layout.
        payload: As in ``write_parts``.
        scale_bias: As in ``write_parts``.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: A tensor does not match the layout.
    """
    layout = table.layout
    expected = [table.rows, layout.payload_bytes]
    shape = list(payload.shape)
    if (
        shape != expected
        or payload.dtype != torch.uint8
        or (scale_bias is None) != (layout.scale_bytes == 0)
    ):
        expects = (
            f"packed rows are uint8 {expected} {'with' if layout.scale_bytes else 'without'} "
            "scale and bias"
        )
        actual = f"{payload.dtype} {shape} {'without' if scale_bias is None else 'with'}"
        raise ValueError(f"table {name!r} in {table.data_type}: {expects}, got {actual}")

    if scale_bias is not None and (
        list(scale_bias.shape) != [table.rows, 4] or scale_bias.dtype != torch.uint8
    ):
        expects = [table.rows, 4]
        actual = f"{scale_bias.dtype} {list(scale_bias.shape)}"
        raise ValueError(
            f"table {name!r} in {table.data_type}: scale and bias are uint8 {expects}, got {actual}"
        )


def note_formats(tables: Iterable[PackedTable], metadata: dict[str, Any]) -> None:
    """Store the formats of tables in a state's metadata; row sizes do not determine them.

    Args:
        tables: The tables.
        metadata: Metadata of their module's state.
    """
    metadata[_FORMATS] = {table.name: [table.data_type.value, table.columns] for table in tables}


def check_format(table: PackedTable, metadata: Mapping[str, Any]) -> None:
    """Check the format of a table in a state, if its metadata has one.

    Args:
        table: The table to load into.
        metadata: Metadata of the module's state.

    Raises:
        ValueError: The formats differ, so the bytes would be read as other values.
    """
    stored = metadata.get(_FORMATS, {}).get(table.name)
    if stored is not None and tuple(stored) != (table.data_type.value, table.columns):
        holds = (
            f"table {table.name!r} holds rows of {table.columns} numbers in {table.data_type.value}"
        )
        raise ValueError(
            f"{holds}, and the state has rows of {stored[1]} in {stored[0]}: quantize both alike"
        )


def check_parts(
    table: PackedTable, buffers: Sequence[tuple[str, Tensor]], stored: Mapping[str, Any]
) -> None:
    """Check that a state's values for a table can be copied into its buffers without conversion.

    Args:
        table: The table.
        buffers: Its buffers by name, see ``parts_of_rows``.
        stored: The state's values for them, or None.

    Raises:
        ValueError: The state has floats, which would be converted element by element, or rows in
            another layout.
    """
    for name, buffer in buffers:
        value = stored.get(name)
        if value is None:
            continue
        if is_sharded(value):
            raise ValueError(
                f"table {table.name!r} holds packed rows, and the state has a "
                f"{type(value).__name__}, of a sharded model: load "
                "tutorec.distributed.checkpoint.full_state_dict(sharded_model) into the float "
                "model, and quantize that"
            )

        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if not isinstance(value, Tensor) or value.dtype != torch.uint8:
            dtype = f" of {value.dtype}" if isinstance(value, Tensor) else ""
            holds = f"table {table.name!r} holds packed rows, uint8 {list(buffer.shape)}"
            raise ValueError(
                f"{holds}, and the state has {name} {shape}{dtype}; load it into the float model"
            )

        if value.shape != buffer.shape:
            numbers = f"{table.rows} x {table.columns} numbers in {table.data_type.value}"
            holds = (
                f"table {table.name!r} holds packed rows, {name} {list(buffer.shape)} of {numbers}"
            )
            raise ValueError(
                f"{holds}, and the loaded state has {shape}{_why(table, buffers, value)}"
            )


def _why(table: PackedTable, buffers: Sequence[tuple[str, Tensor]], loaded: Tensor) -> str:
    """An explanation of a wrong layout, and the remedy."""
    layout = table.layout
    if loaded.shape[:1] != (table.rows,):
        return (
            ": it is of a table with other rows; load it into a model with the same configs, "
            "and the same pruning"
        )

    widths = {True: layout.payload_bytes, False: layout.row_bytes}
    other = len(buffers) == 1
    if layout.scale_bytes and loaded.shape[1:] == (widths[other],):
        return (
            f": it was stored {'with' if other else 'without'} separate buffers for scale and "
            "bias, see quant_prep_enable_quant_state_dict_split_scale_bias; quantize both models "
            "alike"
        )

    return (
        ": it is of other columns, another number format or another row_alignment; quantize "
        "both models alike"
    )


def _note_formats(
    module: PackedTables, _state: object, _prefix: str, metadata: dict[str, Any]
) -> None:
    note_formats([module.packed_table(name) for name in module.table_names()], metadata)


def _refuse_other_rows(
    module: PackedTables,
    state_dict: Mapping[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *_: object,
) -> None:
    """Load hook: refuse values that are not packed rows of this layout."""
    for table, packed in module._shown.items():
        buffers = [
            (entry, buffer) for entry, buffer in packed._buffers.items() if buffer is not None
        ]
        stored = {
            entry: state_dict.get(f"{prefix}{module._holder}.{table}.{entry}")
            for entry, _ in buffers
        }

        check_parts(module.packed_table(table), buffers, stored)
        if any(entry is not None for entry in stored.values()):
            check_format(module.packed_table(table), metadata)


def _take_rows(module: PackedTables, _: object) -> None:
    """Load hook: copy rows that were assigned, not copied, into the operators' buffers."""
    module.errors.clear()  # of the previous rows
    for operator, names in module._operators:
        weights = [module._shown[name].get_buffer("weight") for name in names]
        device = weights[0].device
        if device != operator.weights.device:
            operator.to_empty(device=device) if operator.weights.is_meta else operator.to(device)

        for index, name in enumerate(names):
            packed = module._shown[name]
            for buffer_name, view in parts_of_rows(
                operator.table_rows(index), operator.tables[index], module.split_scale_bias
            ):
                if packed.get_buffer(buffer_name).data_ptr() != view.data_ptr():
                    view.copy_(packed.get_buffer(buffer_name))
    module._show()

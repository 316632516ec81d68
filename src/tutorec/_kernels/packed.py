"""Lookups of quantized tables: all tables of a group in one call, their packed rows in one buffer.

The buffer holds the rows of each table as ``packed_layout`` describes them, whatever their number
formats; a few small tensors say where each feature's table begins, and what it is. fbgemm's
inference operator takes exactly these, so the call is made to the operator itself: its Python
module would cost more than the lookup of a small batch. On CUDA it is the same operator, where
fbgemm's CUDA wheel fits: it reads words of 4 bytes, and makes numbers of codes in half precision,
which it adds in float32. INT2 rows are looked up by torch there.

In eager mode ids are not checked here: the module that owns the tables has done it, with names. A
traced, scripted or exported graph has no such module around it, so there a check stands in front of
the lookup.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.jit import is_scripting, is_tracing  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.backend import backend, fbgemm_module
from tutorec._kernels.memory import ask_for_large_pages
from tutorec._kernels.packed_layout import LEAST_ALIGNMENT, ROW_ALIGNMENT, RowLayout, row_layout
from tutorec._kernels.packed_torch import assert_rows, check_rows, packed_lookup, sqrtn_weights
from tutorec._kernels.specs import PoolingKind, kernel_pooling, memory_of_tables
from tutorec._kernels.tbe_layout import column_slices, pick_columns
from tutorec.types import DataType

__all__ = ["PackedTable", "PackedTableLookup", "are_rows"]

# Tables begin at multiples of a cache line, as fbgemm's do.
_TABLE_ALIGNMENT = 128
# fbgemm's codes of the memory of a CUDA and of a CPU table
_ON_DEVICE = 0
_ON_HOST = 3
_CUDA_ALIGNMENT = 16  # bytes that the CUDA kernels read at once
_CUDA_COLUMNS = 4080  # the widest rows that they take
_TYPE_CODES = {
    DataType.FP32: 0,
    DataType.FP16: 1,
    DataType.INT8: 2,
    DataType.INT4: 3,
    DataType.INT2: 4,
}
_POOLING_CODES = {"sum": 0, "mean": 1, "none": 2}
_OUTPUT_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 5}
# The operator asks for the largest width of each format, in this order.
_WIDTH_ORDER = (DataType.INT2, DataType.INT4, DataType.INT8, DataType.FP16, DataType.FP32)
_FATAL = 0  # a wrong id raises

torch.fx.wrap("packed_lookup")
torch.fx.wrap("check_rows")
torch.fx.wrap("assert_rows")
torch.fx.wrap("sqrtn_weights")


@dataclass(frozen=True)
class PackedTable:
    """One quantized table.

    Attributes:
        name: For messages.
        rows: R.
        columns: D, as the table shows it.
        data_type: FP32, FP16, INT8, INT4 or INT2.
        alignment: Rows are padded to a multiple of so many bytes.

    Example:
        >>> PackedTable("item", rows=100, columns=64, data_type=DataType.INT8).layout.row_bytes
        80
    """

    name: str
    rows: int
    columns: int
    data_type: DataType
    alignment: int = ROW_ALIGNMENT

    @property
    def layout(self) -> RowLayout:
        """Where the parts of a row are."""
        return row_layout(self.columns, self.data_type, self.alignment)


def are_rows(last_rows: Tensor, ids: Tensor, offsets: Tensor) -> bool:
    """Whether all ids are rows, by fbgemm's operator; TorchScript compiles this.

    Args:
        last_rows: R - 1 of the table of each feature [F].
        ids: Ids [N], feature by feature.
        offsets: Where each bag begins and the last one ends [F*B+1].
    """
    # The operator takes -1 for an id that was pruned: with ids and rows one lower it does not.
    # Called with 2, it writes 0 in the place of a wrong id and says nothing.
    lowered = ids - 1
    unused = torch.zeros(1, dtype=torch.int64, device=ids.device)
    torch.ops.fbgemm.bounds_check_indices(last_rows, lowered, offsets.type_as(ids), 2, unused, None)
    return torch.equal(lowered, ids - 1)


class PackedTableLookup(nn.Module):
    """The lookup of a group of quantized tables, by fbgemm's inference operator or in torch.

    Args:
        tables: The tables, of any number formats.
        feature_tables: For each feature the index of its table.
        pooling: ``"sum"``, ``"mean"``, ``"sqrtn"``, or ``"none"`` for one row an id (all tables of
            one width).
        output_dtype: float32, float16 or bfloat16.
        device: Where the rows are; ``"meta"`` for none.
        storage: Bytes in which rows lie already, such as ``weights`` of another operator; nothing
            is copied then.
        table_offsets: The byte of ``storage`` at which each table begins, a multiple of 4.

    Attributes:
        weights: All rows, uint8, one buffer for all tables.
        asserts_ids: Whether an exported graph asserts here that ids are rows; not if the owner of
            the tables does it, with names.
        table_offsets: The byte at which each table begins in it.

    Raises:
        ValueError: There are no features, or one names no table, tables of different widths are not
            pooled, the pooling or the output type is unknown, or ``storage`` does not hold the
            tables.

    Shapes: ids [N] and offsets [F*B+1], feature by feature, weights [N] or None -> [B, sum of D],
    or [N, D].

    Example:
        >>> import torch
        >>> op = PackedTableLookup([PackedTable("item", 3, 2, DataType.FP32)], [0], "sum")
        >>> rows = op.table_rows(0)  # uint8 [3, 16]: two numbers and padding
        >>> _ = rows[:, :8].copy_(
        ...     torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).view(torch.uint8)
        ... )
        >>> op(torch.tensor([2, 0]), torch.tensor([0, 2])).tolist()
        [[6.0, 8.0]]
    """

    # Known while it is scripted, so that a branch for the other backend is not compiled.
    __constants__ = ("_on_fbgemm",)
    # Python's own; a graph has no use for them.
    __jit_ignored_attributes__ = (
        "tables",
        "feature_tables",
        "table_offsets",
        "output_dtype",
        "_head",
        "_tail",
    )
    __jit_unused_properties__ = ("pooling", "total_columns")

    weights: Tensor
    _starts: Tensor
    _placements: Tensor
    _types: Tensor
    _column_offsets: Tensor
    _no_rows: Tensor
    _last_rows: Tensor
    _warning: Tensor
    _pooling: str
    _total: int
    _widths: list[int]
    _blocks: list[list[int]]
    _slices: list[tuple[int, int]]
    _rows: list[int]
    _names: list[str]

    def __init__(
        self,
        tables: Sequence[PackedTable],
        feature_tables: Sequence[int],
        pooling: PoolingKind,
        *,
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        storage: Tensor | None = None,
        table_offsets: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.tables = tuple(tables)
        self.feature_tables = tuple(feature_tables)
        self.asserts_ids: bool = True
        self.output_dtype = output_dtype
        self._pooling = pooling

        if storage is None:
            sizes = [table.rows * table.layout.row_bytes for table in self.tables]
            aligned = [-(-size // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT for size in sizes]
            starts = list(accumulate(aligned, initial=0))
            # Not filled: pages without written rows take no memory.
            needed = [
                (table.name, table.rows, table.columns, table.layout.row_bytes)
                for table in self.tables
            ]
            with memory_of_tables(needed, "shard it over more devices"):
                storage = torch.empty(starts[-1], dtype=torch.uint8, device=device)
            table_offsets = starts[:-1]
            ask_for_large_pages(storage)

        self.table_offsets: tuple[int, ...] = tuple(table_offsets or ())
        self._check_storage(storage)
        self.register_buffer("weights", storage, persistent=False)
        self._describe()

    def _get_name(self) -> str:
        """The fbgemm class with this operator, so that modules print as TorchRec's do."""
        return "IntNBitTableBatchedEmbeddingBagsCodegen"

    @property
    def pooling(self) -> str:
        """How bags are pooled: the argument of this name."""
        return self._pooling

    @property
    def total_columns(self) -> int:
        """Columns of the output."""
        columns = [self.tables[table].columns for table in self.feature_tables]
        return columns[0] if columns and self._pooling == "none" else sum(columns)

    def table_rows(self, index: int) -> Tensor:
        """Packed rows of a table, uint8 [R, row_bytes]: a view to read and to write."""
        table = self.tables[index]
        start = self.table_offsets[index]
        row_bytes = table.layout.row_bytes
        return self.weights[start : start + table.rows * row_bytes].view(table.rows, row_bytes)

    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Ids [N], offsets [F*B+1], weights [N] or None -> [B, sum of D], or [N, D] unpooled."""
        if not is_scripting():  # noqa: SIM102 (alone, so that it is not compiled)
            if type(indices) is Tensor and not torch.compiler.is_compiling() and not is_tracing():
                return self._eager(indices, offsets, per_sample_weights)
        return self._in_graph(indices, offsets, per_sample_weights)

    @torch.jit.unused
    def _eager(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        # The operator would read beyond the end of such tensors; the caller has checked the ids.
        if (offsets.shape[0] - 1) % len(self._names) or (
            weights is not None and weights.shape != indices.shape
        ):
            raise ValueError(self._describe_bad_batch(indices, offsets, weights))
        if indices.dtype != offsets.dtype:
            if indices.is_floating_point():
                raise ValueError(self._describe_bad_batch(indices, offsets, weights))
            indices = indices.long()
            offsets = offsets.long()

        if self._pooling == "sqrtn":
            weights = sqrtn_weights(indices, offsets, weights)
        if weights is not None:
            weights = weights.detach().float().contiguous()

        if self._is_meta and not indices.is_meta:
            # fbgemm would read whatever is in memory.
            raise ValueError(
                f"tables {sorted(set(self._names))} are on the meta device and hold no rows to "
                "look up: allocate them with tutorec.quant.utils.meta_to_cpu_placement(model), "
                "and load packed rows"
            )
        if not self._on_fbgemm:
            return self._in_torch(indices, offsets, weights)

        # Contiguous, because the operator ignores strides.
        pooled = _operator()(
            *self._head,
            indices.contiguous(),
            offsets.contiguous(),
            self._mode,
            weights,
            *self._tail,
        )
        return pick_columns(pooled, self._slices)

    def _in_graph(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """The same after a check of the ids, in calls that can be traced, scripted and exported."""
        indices = indices.contiguous()
        offsets = offsets.type_as(indices).contiguous()
        if self._pooling == "sqrtn":
            weights = sqrtn_weights(indices, offsets, weights)
        if weights is not None:
            weights = weights.float().contiguous()

        exporting = False
        if not is_scripting():
            exporting = torch.compiler.is_compiling()
        if exporting and self.asserts_ids:
            assert_rows(self._last_rows, indices, offsets)

        if not self._on_fbgemm:
            if not exporting:
                indices = check_rows(self._rows, self._names, indices, offsets)
            return self._in_torch(indices, offsets, weights)

        if not exporting:
            # The operator skips an id of -1, which stands for a pruned row. Ids and last rows one
            # lower have no such exception.
            torch.ops.fbgemm.bounds_check_indices(
                self._last_rows, indices - 1, offsets, self._on_wrong_id, self._warning, None
            )
        pooled = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            dev_weights=self.weights,
            uvm_weights=self._no_rows,
            weights_placements=self._placements,
            weights_offsets=self._starts,
            weights_tys=self._types,
            D_offsets=self._column_offsets,
            total_D=self._total,
            max_int2_D=self._widths[0],
            max_int4_D=self._widths[1],
            max_int8_D=self._widths[2],
            max_float16_D=self._widths[3],
            max_float32_D=self._widths[4],
            indices=indices,
            offsets=offsets,
            pooling_mode=self._mode,
            indice_weights=weights,
            output_dtype=self._output_code,
            lxu_cache_weights=None,
            lxu_cache_locations=None,
            row_alignment=self._alignment,
        )
        if len(self._slices) == 0:
            return pooled

        slices: list[Tensor] = []
        for start, stop in self._slices:
            slices.append(pooled[:, start:stop])
        return torch.cat(slices, dim=1)

    def _in_torch(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        pooling = "sum" if self._pooling == "sqrtn" else self._pooling
        pooled = packed_lookup(
            self.weights, self._starts, self._blocks, indices, offsets, pooling, weights
        )
        return pooled.to(self._output_dtype)

    @torch.jit.unused
    def _describe_bad_batch(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> str:
        weighted = "" if weights is None else f", {list(weights.shape)} weights"
        return (
            f"tables {sorted(set(self._names))}: {list(indices.shape)} ids of {indices.dtype}, "
            f"{list(offsets.shape)} offsets{weighted} are not a batch of {len(self._names)} "
            "features: "
            "it has int32 or int64 ids [N], features * samples + 1 offsets, and no weights or [N]"
        )

    @torch.jit.unused
    def _describe(self) -> None:
        """Set the operator's arguments: the start and the format of each feature's rows."""
        weights = self.weights
        features = [self.tables[table] for table in self.feature_tables]
        layouts = [table.layout for table in features]
        on_cuda = _is_on_cuda(weights)
        stored = [layout.word_columns if on_cuda else layout.stored_columns for layout in layouts]
        fits_one_tensor = self._pooling != "none" or len(set(stored)) < 2
        served = backend().serves("cpu" if weights.is_meta else weights.device.type)
        if on_cuda:
            aligned = all(table.alignment % _CUDA_ALIGNMENT == 0 for table in features)
            # fbgemm 1.8 reads only the first byte of each word of INT2 rows; seen on an H100.
            right = all(table.data_type is not DataType.INT2 for table in features)
            served = served and aligned and right and max(stored) <= _CUDA_COLUMNS

        self._is_meta = weights.is_meta
        self._on_fbgemm = fits_one_tensor and served
        if on_cuda and self._on_fbgemm:
            fbgemm_module("fbgemm_gpu")  # loads the operators' CUDA libraries

        put = self._put
        put("_starts", [self.table_offsets[table] for table in self.feature_tables], torch.int64)
        put("_last_rows", [table.rows - 1 for table in features], torch.int64)
        put("_placements", [_ON_DEVICE if on_cuda else _ON_HOST] * len(features), torch.int32)
        put("_types", [_TYPE_CODES[table.data_type] for table in features], torch.uint8)
        put("_column_offsets", [*accumulate(stored, initial=0)], torch.int32)
        put("_no_rows", [], torch.uint8)
        put("_warning", [0], torch.int64)
        self._total = sum(stored)

        widest: dict[DataType, int] = dict.fromkeys(_WIDTH_ORDER, 0)
        for table, width in zip(features, stored, strict=True):
            widest[table.data_type] = max(widest[table.data_type], width)
        self._widths = list(widest.values())

        pooling = kernel_pooling(cast(PoolingKind, self._pooling), weighted=False)
        self._mode = _POOLING_CODES[pooling]
        self._output_code = _OUTPUT_CODES[self.output_dtype]
        self._output_dtype = self.output_dtype

        row_formats = [(layout.bits, layout.columns, layout.row_bytes) for layout in layouts]
        self._blocks = [[len(list(run)), *format_] for format_, run in groupby(row_formats)]
        self._rows = [table.rows for table in features]
        self._names = [table.name for table in features]
        self._slices = self._cuts([table.columns for table in features], stored)

        self._head = (
            weights,
            self._no_rows,
            self._placements,
            self._starts,
            self._types,
            self._column_offsets,
            self._total,
            *self._widths,
        )
        # Numbers for the graph: a scripted method knows attributes, and no numbers of this file.
        self._on_wrong_id = _FATAL
        self._alignment = self.tables[0].alignment if self.tables else ROW_ALIGNMENT
        self._tail = (self._output_code, None, None, self._alignment)

    @torch.jit.unused
    def _put(self, name: str, numbers: Sequence[int], dtype: torch.dtype) -> None:
        """Store numbers on the device of the rows, outside of the state dict."""
        buffer = torch.tensor(numbers, dtype=dtype, device=self.weights.device)
        self.register_buffer(name, buffer, persistent=False)

    @torch.jit.unused
    def _cuts(self, columns: Sequence[int], stored: Sequence[int]) -> list[tuple[int, int]]:
        """The slices of the operator's output without padding; none if there is no padding."""
        if list(columns) == list(stored):
            return []
        if self._pooling == "none":
            return [(0, columns[0])]
        return list(column_slices(range(len(columns)), columns, stored))

    def _check_storage(self, storage: Tensor) -> None:
        names = [table.name for table in self.tables]
        size = storage.numel()
        if storage.dtype != torch.uint8 or storage.dim() != 1 or not storage.is_contiguous():
            raise ValueError(
                f"tables {names}: storage must be a row of bytes, uint8 [n], got {storage.dtype} "
                f"{list(storage.shape)}; pass another operator's weights"
            )

        for table, start in zip(self.tables, self.table_offsets, strict=True):
            stop = start + table.rows * table.layout.row_bytes
            if start < 0 or start % LEAST_ALIGNMENT or stop > size:
                raise ValueError(
                    f"table {table.name!r}: bytes {start} to {stop} are not in a storage of {size} "
                    f"bytes, or do not begin at a multiple of {LEAST_ALIGNMENT}; take "
                    "table_offsets from the operator that owns it"
                )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._describe()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._describe()


def _is_on_cuda(rows: Tensor) -> bool:
    return rows.is_cuda


@cache
def _operator() -> Any:
    """The lookup of fbgemm without its Python layers, which take a third of a small call."""
    operator: Any = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default
    return getattr(operator, "_op", operator)

"""Memory layout of a row of a quantized table: scale and bias, then the numbers, then padding.

    fp16 scale | fp16 bias | payload: 8, 4 or 2 bits for each column | zeros up to the row alignment

A number is ``scale * code + bias``. FP16 and FP32 rows have neither scale nor bias. It is the
layout that fbgemm's inference operators read; the plain-torch lookup reads the same bytes, so that
a saved model moves between the two.

The distance between rows (``row_bytes``) decides how fast they are read. fbgemm's CPU kernels
prefetch the rows of coming ids by cache lines of 64 bytes, counted from the beginning of a row: one
line for each 64 bytes of payload, and one more where ``row_bytes % 64`` is between 1 and 4 (INT8:
8). If a row reaches into a line that was not prefetched, the lookup waits for memory. Source:
``GenEmbeddingSpMDMLookup`` in FBGEMM's ``src/EmbeddingSpMDM.cc`` (8 bits and more) and
``GenEmbeddingSpMDMNBitLookup`` in ``src/EmbeddingSpMDMNBit.cc`` (4 and 2 bits).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Literal

from tutorec.types import DataType

__all__ = [
    "LEAST_ALIGNMENT",
    "PACKED_TYPES",
    "ROW_ALIGNMENT",
    "RowAlignment",
    "RowLayout",
    "lines_of_row",
    "row_alignment",
    "row_layout",
]

RowAlignment = int | Literal["fast", "small"]

ROW_ALIGNMENT = 16  # TorchRec's, and that of fbgemm's CUDA kernels
LEAST_ALIGNMENT = 4
_LINE = 64
# Bytes in the last line of a row up to which the kernel prefetches that line, too.
_PREFETCHED_TAIL = {DataType.INT8: 8, DataType.INT4: 4, DataType.INT2: 4}
_SCALE_AND_BIAS = 4
# Bits of a column, and the columns that kernels handle at once: narrower rows are padded up to a
# multiple of them.
_BITS = {DataType.FP32: 32, DataType.FP16: 16, DataType.INT8: 8, DataType.INT4: 4, DataType.INT2: 2}
_COLUMNS_AT_ONCE = {DataType.INT4: 4, DataType.INT2: 8}
PACKED_TYPES: tuple[DataType, ...] = tuple(_BITS)


@dataclass(frozen=True)
class RowLayout:
    """Where the parts of a row are; ``row_layout`` makes it.

    Attributes:
        columns: D, as the table shows it.
        data_type: Number format.
        bits: Of one column.
        stored_columns: Columns in the row: D, or the next multiple of 4 (INT4) or 8 (INT2).
        scale_bytes: In front of the payload: 4, or 0 where numbers are floats.
        payload_bytes: Of all stored columns.
        row_bytes: Of the whole row, padding included.
    """

    columns: int
    data_type: DataType
    bits: int
    stored_columns: int
    scale_bytes: int
    payload_bytes: int
    row_bytes: int

    @property
    def word_columns(self) -> int:
        """Columns of the payload counted in whole words of 4 bytes, which the row has room for."""
        return -(-self.stored_columns * self.bits // 32) * 32 // self.bits

    @property
    def levels(self) -> int:
        """The largest code of a column."""
        return (1 << self.bits) - 1


@lru_cache(maxsize=4096)
def row_layout(columns: int, data_type: DataType, alignment: int = ROW_ALIGNMENT) -> RowLayout:
    """The layout of rows of ``columns`` numbers.

    Args:
        columns: D, at least 1.
        data_type: FP32, FP16, INT8, INT4 or INT2.
        alignment: Rows are padded to a multiple of so many bytes.

    Raises:
        ValueError: No columns, a format that has no packed rows, or an alignment that is not a
            multiple of 4.

    Example:
        >>> from tutorec.types import DataType
        >>> [
        ...     row_layout(64, kind).row_bytes
        ...     for kind in (DataType.FP32, DataType.INT8, DataType.INT4, DataType.INT2)
        ... ]
        [256, 80, 48, 32]
        >>> row_layout(6, DataType.INT4).stored_columns
        8
    """
    if data_type not in _BITS:
        known = ", ".join(str(packed_type) for packed_type in _BITS)
        raise ValueError(f"rows of {data_type} have no packed form; choose one of {known}")
    if columns < 1:
        raise ValueError(f"a row of {columns} columns cannot be packed; it needs at least 1")
    if not isinstance(alignment, int) or alignment < 4 or alignment % 4:
        raise ValueError(f"row alignment {alignment!r} is not a multiple of 4; use {ROW_ALIGNMENT}")

    bits = _BITS[data_type]
    step = _COLUMNS_AT_ONCE.get(data_type, 1)
    stored = -(-columns // step) * step
    scale = _SCALE_AND_BIAS if bits <= 8 else 0
    payload = stored * bits // 8
    total = -(-(scale + payload) // alignment) * alignment
    return RowLayout(columns, data_type, bits, stored, scale, payload, total)


@lru_cache(maxsize=4096)
def row_alignment(
    columns: int, data_type: DataType, wanted: RowAlignment, device_type: str = "cpu"
) -> int:
    """The alignment in bytes of a table's rows.

    Args:
        columns: D.
        data_type: Number format.
        wanted: ``"small"``: the fewest bytes that the format allows. ``"fast"``: the fewest bytes
            with which fbgemm's CPU kernel prefetches every line of every row. A number: that
            alignment.
        device_type: On ``"cuda"`` both words mean 16, the only alignment that fbgemm's CUDA kernels
            read.

    Raises:
        ValueError: Another word, or as ``row_layout``.

    Example:
        >>> from tutorec.types import DataType
        >>> def row_bytes(wanted):
        ...     kinds = DataType.INT8, DataType.INT4, DataType.INT2
        ...     return [
        ...         row_layout(64, kind, row_alignment(64, kind, wanted)).row_bytes
        ...         for kind in kinds
        ...     ]
        >>> row_bytes(16), row_bytes("fast"), row_bytes("small")
        ([80, 48, 32], [68, 64, 32], [68, 36, 20])
    """
    if not isinstance(wanted, str):
        return wanted
    if wanted not in ("fast", "small"):
        raise ValueError(f"row_alignment={wanted!r}: use 'fast', 'small' or a number of bytes")
    if device_type == "cuda":
        return ROW_ALIGNMENT

    row = row_layout(columns, data_type, LEAST_ALIGNMENT)
    if wanted == "small" or _is_prefetched(row):
        return LEAST_ALIGNMENT
    while not _is_prefetched(row):
        row = replace(row, row_bytes=row.row_bytes + LEAST_ALIGNMENT)
    return gcd(row.row_bytes, _LINE)


def lines_of_row(row: RowLayout, number: int) -> tuple[set[int], set[int]]:
    """The cache lines of a row of a table, and those that fbgemm's CPU kernel prefetches.

    Args:
        row: Layout of all rows of the table.
        number: Which row; row 0 begins line 0.

    Example:
        >>> lines_of_row(row_layout(64, DataType.INT8, alignment=4), 1)  # bytes 68 to 135
        ({1, 2}, {1, 2})
        >>> lines_of_row(
        ...     row_layout(64, DataType.INT8, alignment=16), 1
        ... )  # bytes 80 to 147, then padding
        ({1, 2}, {1})
    """
    start = number * row.row_bytes
    used_bytes = row.scale_bytes + row.payload_bytes
    prefetched = list(range(0, row.payload_bytes, _LINE))
    tail = row.row_bytes % _LINE
    if 0 < tail <= _PREFETCHED_TAIL.get(row.data_type, 0):
        prefetched.append(row.row_bytes - tail)

    touched = range(start // _LINE, (start + used_bytes - 1) // _LINE + 1)
    return set(touched), {(start + offset) // _LINE for offset in prefetched}


def _is_prefetched(row: RowLayout) -> bool:
    """Whether the kernel prefetches every cache line of every row."""
    every = (lines_of_row(row, number) for number in range(_LINE // LEAST_ALIGNMENT))
    return all(touched <= prefetched for touched, prefetched in every)

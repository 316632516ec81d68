"""Number formats of packed tables: conversion from what callers pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tutorec._kernels.packed_layout import PACKED_TYPES
from tutorec.types import DataType, data_type_to_dtype, dtype_to_data_type

# torch's 8-bit dtypes, as its observers have them.
_BYTES = (torch.int8, torch.qint8, torch.quint8)
_OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)
_CHOICE = (
    "torch.int8, torch.quint4x2 (4 bits), torch.quint2x4 (2 bits), torch.float16 or torch.float32"
)
_OTHERS = {
    DataType.UINT8: "torch.int8 is what has 8 bits a number here",
    DataType.BF16: "torch.float16 has as many bits",
    DataType.INT32: "it has as many bits as the float32 that the table is made of",
    DataType.INT64: "it has more bits than the float32 that the table is made of",
}


def packed_type(requested: Any, table: str = "") -> DataType:
    """The format of a dtype, a ``DataType``, or an observer (or observer factory) with a dtype.

    Args:
        requested: The caller's value.
        table: Name of the table, for messages; empty for all tables.

    Returns:
        INT8, INT4, INT2, FP16 or FP32.

    Raises:
        TypeError: The value has no dtype.
        ValueError: Tables cannot be packed in this format.

    Example:
        >>> packed_type(torch.quint4x2)
        <DataType.INT4: 'INT4'>
        >>> packed_type(torch.int64, "item")
        Traceback (most recent call last):
            ...
        ValueError: table 'item' cannot be quantized to torch.int64: it has more bits than ...
    """
    number_format = _format_of(requested, table, _CHOICE)
    if isinstance(number_format, DataType):
        if number_format in PACKED_TYPES:
            return number_format
        number_format, reason = data_type_to_dtype(number_format), _OTHERS[number_format]
    elif number_format in _BYTES:
        return DataType.INT8
    else:
        reason = "no operator reads it"

    raise ValueError(
        f"{_of(table)} cannot be quantized to {number_format}: {reason}; use {_CHOICE}"
    )


def output_type(requested: Any) -> torch.dtype:
    """The dtype of the looked-up rows, from a dtype, a ``DataType`` or an observer.

    Args:
        requested: The caller's value.

    Returns:
        float32, float16 or bfloat16.

    Raises:
        TypeError: The value has no dtype.
        ValueError: The output dtype is not supported.

    Example:
        >>> output_type(torch.float)
        torch.float32
    """
    choice = ", ".join(map(str, _OUTPUTS))
    number_format = _format_of(requested, "", choice)
    dtype = (
        data_type_to_dtype(number_format) if isinstance(number_format, DataType) else number_format
    )
    if dtype not in _OUTPUTS:
        raise ValueError(f"looked-up rows cannot be {dtype}; the output dtype is one of {choice}")
    return dtype


def enumerate_chunks(weight: Tensor, numbers: int = 1 << 18) -> Iterable[tuple[int, Tensor]]:
    """Split a table [R, D] into chunks of rows: (first row, rows), to bound temporary memory.

    Args:
        weight: The table.
        numbers: Approximate number of elements per chunk.

    Example:
        >>> [
        ...     (start, tuple(rows.shape))
        ...     for start, rows in enumerate_chunks(torch.zeros(5, 2), numbers=4)
        ... ]
        [(0, (2, 2)), (2, (2, 2)), (4, (1, 2))]
    """
    step = max(1, numbers // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        yield start, weight[start : start + step].detach()


def _format_of(requested: Any, table: str, choice: str) -> DataType | torch.dtype:
    """The caller's value as a DataType, if there is one."""
    carried = requested
    if not isinstance(carried, torch.dtype | DataType):
        if not hasattr(carried, "dtype") and callable(carried):
            carried = carried()
        carried = getattr(carried, "dtype", carried)

    if isinstance(carried, DataType):
        return carried
    if not isinstance(carried, torch.dtype):
        raise TypeError(f"{_of(table)}: {requested!r} is not a number format; use {choice}")
    try:
        return dtype_to_data_type(carried)
    except ValueError:
        return carried


def _of(table: str) -> str:
    return f"table {table!r}" if table else "a table"

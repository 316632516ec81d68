"""Splitting and joining of packed rows by columns: codes are moved, scale and bias are copied.

A column shard is not quantized again. It has the scale and bias of the whole row, so its values
equal those of the whole row bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutorec._kernels.packed_layout import RowLayout
from tutorec._kernels.packed_torch import split_codes
from tutorec.quant.packing import join_codes
from tutorec.quant.table_formats import enumerate_chunks

__all__ = ["cut_columns", "join_columns"]

# Bytes processed at once.
_AT_ONCE = 1 << 20


def cut_columns(
    packed: Tensor,
    layout: RowLayout,
    start: int,
    shard_layout: RowLayout,
    out: Tensor | None = None,
) -> Tensor:
    """Copy columns ``start`` to ``start + shard_layout.columns`` of packed rows, as packed rows.

    Args:
        packed: ``[R, layout.row_bytes]``.
        layout: Their layout.
        start: The first column.
        shard_layout: The layout of the result, of the same number format.
        out: Tensor to write to, ``[R, shard_layout.row_bytes]``; a new tensor by default.

    Returns:
        The packed rows of these columns.

    Example:
        >>> from tutorec._kernels.packed_layout import row_layout
        >>> from tutorec.types import DataType
        >>> row = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).view(torch.uint8)
        >>> whole, half = row_layout(4, DataType.FP32), row_layout(2, DataType.FP32)
        >>> cut_columns(row, whole, 2, half).view(torch.float32)[:, :2]
        tensor([[3., 4.]])
    """
    if out is None:
        out = torch.zeros(
            packed.shape[0], shard_layout.row_bytes, dtype=torch.uint8, device=packed.device
        )
    for first, rows in enumerate_chunks(packed, _AT_ONCE):
        codes = _codes(rows, layout)[:, start : start + shard_layout.columns]
        _write(out[first : first + len(rows)], shard_layout, rows[:, : layout.scale_bytes], codes)
    return out


def join_columns(
    shards: Sequence[Tensor], shard_layouts: Sequence[RowLayout], layout: RowLayout
) -> Tensor:
    """Join packed rows of all columns from the shards that `cut_columns` returned.

    Args:
        shards: ``[R, row_bytes]`` each, in column order; together all columns.
        shard_layouts: Their layouts.
        layout: The layout of the result.

    Example:
        >>> from tutorec._kernels.packed_layout import row_layout
        >>> from tutorec.types import DataType
        >>> whole, half = row_layout(4, DataType.FP32), row_layout(2, DataType.FP32)
        >>> row = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).view(torch.uint8)
        >>> halves = [cut_columns(row, whole, start, half) for start in (0, 2)]
        >>> torch.equal(join_columns(halves, [half, half], whole), row)
        True
    """
    first_shard = shards[0]
    out = torch.zeros(
        first_shard.shape[0], layout.row_bytes, dtype=torch.uint8, device=first_shard.device
    )

    for first, rows in enumerate_chunks(out, _AT_ONCE):
        chunk = slice(first, first + len(rows))
        codes = [
            _codes(shard[chunk].to(out.device), shard_layout)
            for shard, shard_layout in zip(shards, shard_layouts, strict=True)
        ]
        scale_and_bias = first_shard[chunk, : layout.scale_bytes]
        _write(rows, layout, scale_and_bias, torch.cat(codes, dim=1))
    return out


def _codes(packed: Tensor, layout: RowLayout) -> Tensor:
    """The codes of packed rows ``[R, D]``, or for floats their bytes ``[R, D, bytes]``."""
    payload = packed[:, layout.scale_bytes : layout.scale_bytes + layout.payload_bytes]
    if layout.bits >= 8:
        return payload.unflatten(1, (layout.stored_columns, layout.bits // 8))[:, : layout.columns]
    return split_codes(payload, layout.bits)[:, : layout.columns]


def _write(out: Tensor, layout: RowLayout, scale_and_bias: Tensor, codes: Tensor) -> None:
    """Write rows: scale and bias, codes, and zeros as padding."""
    out.zero_()
    out[:, : layout.scale_bytes] = scale_and_bias
    payload = out[:, layout.scale_bytes : layout.scale_bytes + layout.payload_bytes]
    payload.copy_(codes.flatten(1) if layout.bits >= 8 else join_codes(codes, layout))

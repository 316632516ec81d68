"""Quantization of rows in plain torch: rows of values to packed rows and back.

Each row is quantized separately: its minimum is code 0, its maximum the largest code, and codes are
equally spaced. A packed row has the step (``scale``) and the minimum (``bias``), both in float16,
and the codes.

::

    value = scale * code + bias        scale = (maximum - minimum) / (2**bits - 1)

Scale and bias are rounded before codes are chosen, so the codes compensate for that rounding.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tutorec._check import require_one_of
from tutorec._kernels.packed_layout import LEAST_ALIGNMENT, ROW_ALIGNMENT, RowLayout, row_layout
from tutorec._kernels.packed_torch import numbers_of_rows
from tutorec.quant.table_formats import enumerate_chunks
from tutorec.types import DataType

__all__ = ["OnNonfinite", "pack_rows", "round_trip_bound", "unpack_rows"]

OnNonfinite = Literal["raise", "keep"]
_LARGEST_HALF = 65504.0
_LARGEST_FLOAT = torch.finfo(torch.float32).max


def pack_rows(
    rows: Tensor,
    data_type: DataType,
    *,
    out: Tensor | None = None,
    name: str = "",
    on_nonfinite: OnNonfinite = "raise",
    alignment: int = ROW_ALIGNMENT,
) -> Tensor:
    """Pack rows of values [R, D] into uint8 [R, row_bytes].

    Args:
        rows: float32 or float16.
        data_type: FP32, FP16, INT8, INT4 or INT2.
        out: Tensor to write to; a new tensor by default.
        name: Name of the table, for messages.
        on_nonfinite: What to do with a row with a value that is not finite: raise, or keep it as a
            row that reads as NaN.
        alignment: Row sizes are multiples of this many bytes.

    Returns:
        ``out``, or a new tensor.

    Raises:
        ValueError: The rows are not a float32 or float16 matrix, ``out`` has another shape than the
            packed rows, or a value is not finite or out of the format's range.

    Example:
        >>> import torch
        >>> packed = pack_rows(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), DataType.INT2)
        >>> (
        ...     packed.shape,
        ...     packed[0, 4].item() == 0b11_10_01_00,
        ... )  # after scale and bias; the first column lowest
        (torch.Size([1, 16]), True)

    See Also:
        fbgemm's ``FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf``, which produces the same bytes,
        with scale and bias in front. The sign of a bias of 0 may differ for rows with both zeros.
    """
    layout = _layout_of(rows, data_type, name, alignment)
    require_one_of("on_nonfinite", on_nonfinite, ("raise", "keep"))
    if on_nonfinite == "raise":
        check_numbers(rows, layout, name)

    shape = (rows.shape[0], layout.row_bytes)
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=rows.device)
    elif out.shape != shape or out.dtype != torch.uint8:
        actual = f"out is {out.dtype} {list(out.shape)}"
        raise ValueError(
            f"table {name!r}: {actual}, and packed rows are uint8 {list(shape)}; pass out=None"
        )
    pack_checked(rows, layout, out)
    return out


def check_numbers(rows: Tensor, layout: RowLayout, name: str) -> None:
    """Check that rows of values can be packed.

    Args:
        rows: Of any floating dtype [R, D].
        layout: The layout of the packed rows.
        name: Name of the table, for messages.

    Raises:
        ValueError: A value is not finite, or out of the format's range.

    Example:
        >>> rows = torch.tensor([[0.5, 1.0], [2.0, float("nan")]])
        >>> check_numbers(rows, row_layout(2, DataType.INT8), "item")
        Traceback (most recent call last):
            ...
        ValueError: table 'item' holds nan in row 1, column 1 (1 of its 2 rows ...
    """
    if rows.is_meta or rows.numel() == 0:
        return
    low, high = (float(end) for end in rows.detach().aminmax())  # NaN propagates
    largest = _LARGEST_FLOAT if layout.bits == 32 else _LARGEST_HALF
    if -largest <= low and high <= largest:
        return

    for first, chunk in enumerate_chunks(rows):
        unfit = _unfit_rows(chunk, layout)
        if bool(unfit.any()):
            raise ValueError(_describe_unfit(rows, first + int(unfit.nonzero()[0]), layout, name))


def pack_checked(rows: Tensor, layout: RowLayout, out: Tensor) -> None:
    """Pack rows of values [R, D] of any floating dtype into ``out`` [R, row_bytes]."""
    for first, chunk in enumerate_chunks(rows):
        _pack_chunk(chunk, layout, out[first : first + chunk.shape[0]])


def unpack_rows(packed: Tensor, columns: int, data_type: DataType) -> Tensor:
    """Unpack rows [R, row_bytes] into float32 [R, D].

    Args:
        packed: uint8, as ``pack_rows`` returns it, with any row alignment.
        columns: D.
        data_type: The format in which they were packed.

    Raises:
        ValueError: ``packed`` does not have the shape of such rows.

    Example:
        >>> import torch
        >>> row = torch.tensor([[0.0, 0.5, 1.0]])
        >>> unpack_rows(
        ...     pack_rows(row, DataType.INT8), 3, DataType.INT8
        ... )  # 0.5 is between codes 127 and 128
        tensor([[0.0000, 0.5020, 1.0000]])
    """
    layout = row_layout(columns, data_type, LEAST_ALIGNMENT)
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] < layout.row_bytes:
        expects = (
            f"packed rows of {columns} columns in {data_type} are uint8 [R, "
            f"{layout.row_bytes} or more]"
        )
        raise ValueError(f"{expects}, got {packed.dtype} {list(packed.shape)}")
    return numbers_of_rows(packed, layout.bits, columns)


def round_trip_bound(rows: Tensor, data_type: DataType) -> Tensor:
    """An upper bound on the quantization error of each row's values, float32 [R].

    With minimum m and maximum M of a row, bias b, scale s and largest code L, a value x becomes
    code ``round((x - b) / s)``, clamped to 0 and L. Its error is at most the largest of

    * ``s / 2``, where the code was rounded (at most ``M - b`` if every code is 0),
    * ``b - m``, where b, rounded to float16, is above the minimum,
    * ``M - b - s * L``, where s, rounded to float16, does not reach the maximum,

    plus the float32 rounding of both conversions, ``2**-22 * (|b| + s * L)``.

    Args:
        rows: [R, D]
        data_type: FP32, FP16, INT8, INT4 or INT2.

    Returns:
        The bound of each row; infinite or NaN for a row that cannot be packed.

    Raises:
        ValueError: The rows are not a float32 or float16 matrix.

    Example:
        >>> import torch
        >>> row = torch.tensor([[0.0, 0.4, 1.0]])
        >>> bound = round_trip_bound(row, DataType.INT2).item()  # half of a third
        >>> (
        ...     round(bound, 3),
        ...     (row - unpack_rows(pack_rows(row, DataType.INT2), 3, DataType.INT2)).abs().max()
        ...     <= bound,
        ... )
        (0.167, tensor(True))
    """
    layout = _layout_of(rows, data_type)
    bounds = [_bound_of_chunk(chunk.float(), layout) for _, chunk in enumerate_chunks(rows)]
    return torch.cat(bounds) if bounds else torch.empty(0)


def _bound_of_chunk(rows: Tensor, layout: RowLayout) -> Tensor:
    if layout.bits == 32:
        return rows.new_zeros(rows.shape[0])
    low, high = (end.double() for end in rows.aminmax(dim=1))
    if layout.bits == 16:
        bound = torch.maximum(low.abs(), high.abs()) * 2**-11 + 2**-25
        return bound.masked_fill(torch.maximum(-low, high) > _LARGEST_HALF, torch.inf).float()

    scale, bias = (column.squeeze(1).double() for column in _scale_and_bias(rows, layout))
    above = (high - bias).clamp(min=0)
    rounded = torch.minimum(scale / 2, above)
    bound = torch.maximum(torch.maximum(rounded, bias - low), above - scale * layout.levels)
    return (bound + 2**-22 * (bias.abs() + scale * layout.levels)).float()


def _unfit_rows(rows: Tensor, layout: RowLayout) -> Tensor:
    """Which rows cannot be packed: a value is not finite, or scale or bias exceeds float16 [R]."""
    rows = rows.float()
    low, high = rows.aminmax(dim=1)
    fit = low.isfinite() & high.isfinite()
    if layout.bits == 16:
        fit &= low.half().isfinite() & high.half().isfinite()
    elif layout.bits < 16:
        scale, bias = _scale_and_bias(rows, layout)
        fit &= (scale.isfinite() & bias.isfinite()).squeeze(1)
    return ~fit


def _describe_unfit(rows: Tensor, row: int, layout: RowLayout, name: str) -> str:
    numbers = rows[row].detach().float()
    bad = (~numbers.isfinite()).nonzero().view(-1)
    if len(bad):
        column = int(bad[0])
        count = sum(int((~chunk.isfinite()).any(1).sum()) for _, chunk in enumerate_chunks(rows))
        are = f"{count} of its {rows.shape[0]} rows {'is' if count == 1 else 'are'} not finite"
        return (
            f"table {name!r} holds {float(numbers[column])} in row {row}, column {column} ({are}): "
            "restore or zero the row, or pass on_nonfinite='keep' to tutorec.quantize: it reads as "
            "NaN there"
        )

    low, high = (end.item() for end in numbers.aminmax())
    return (
        f"table {name!r}: row {row} reaches from {low:g} to {high:g}, too far for "
        f"{layout.data_type}: its "
        f"{'numbers' if layout.bits == 16 else 'smallest number and its step'} are kept in "
        f"float16, up to {_LARGEST_HALF:g}; keep this table in FP32"
    )


def _pack_chunk(rows: Tensor, layout: RowLayout, out: Tensor) -> None:
    out[:, layout.scale_bytes + layout.payload_bytes :] = 0
    if layout.bits > 8:
        numbers = rows.float() if layout.bits == 32 else rows.half()
        out[:, : layout.payload_bytes] = numbers.contiguous().view(torch.uint8)
        return

    codes, scale, bias = _quantize(rows.float(), layout)
    out[:, : layout.scale_bytes] = torch.cat([scale, bias], dim=1).view(torch.uint8)
    out[:, layout.scale_bytes : layout.scale_bytes + layout.payload_bytes] = join_codes(
        codes, layout
    )


def _quantize(rows: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [R, D], scale and bias in float16 [R, 1]."""
    scale, bias = _scale_and_bias(rows, layout)
    codes = (
        ((rows - bias.float()) * (1.0 / scale.float()))
        .round_()
        .nan_to_num_(0.0)
        .clamp_(0, layout.levels)
    )
    return codes.to(torch.uint8), scale, bias


def _scale_and_bias(rows: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    """Step and minimum of each row, in float16 [R, 1]."""
    low, high = rows.aminmax(dim=1, keepdim=True)
    bias = low.half()
    scale = ((high - bias.float()) / layout.levels).half()
    # For a constant row any step is valid; a step with an infinite inverse cannot be divided by.
    unusable = (scale == 0) | (1.0 / scale.float()).isinf()
    return scale.masked_fill(unusable, 1.0), bias


def join_codes(codes: Tensor, layout: RowLayout) -> Tensor:
    """Codes [R, D] -> payload bytes; codes of 4 or 2 bits share a byte, the first lowest."""
    if layout.bits == 8:
        return codes

    padded = codes.new_zeros(codes.shape[0], layout.stored_columns)
    padded[:, : layout.columns] = codes
    groups = padded.view(codes.shape[0], layout.payload_bytes, 8 // layout.bits)
    joined = groups[:, :, 0].clone()
    for index in range(1, groups.shape[2]):
        joined |= groups[:, :, index] << (index * layout.bits)
    return joined


def _layout_of(
    rows: Tensor, data_type: DataType, name: str = "", alignment: int = ROW_ALIGNMENT
) -> RowLayout:
    if rows.dim() != 2 or rows.dtype not in (torch.float32, torch.float16):
        actual = f"{rows.dtype} {list(rows.shape)}"
        raise ValueError(
            f"table {name!r}: rows to pack are float32 or float16 [R, D], got {actual}"
        )
    return row_layout(rows.shape[1], data_type, alignment)

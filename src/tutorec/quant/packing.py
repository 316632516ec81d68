"""Rows of numbers to packed rows and back: the quantization itself, in plain torch.

One row at a time: its smallest number becomes code 0, its largest the largest code, and the codes between stand at
equal steps. What is kept is the step (``scale``), the smallest number (``bias``), both in float16, and the codes.

    number = scale * code + bias        scale = (largest - smallest) / (2**bits - 1)

Scale and bias are rounded before the codes are chosen, so that the codes make up for what that rounding changed.
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


def pack_rows(
    rows: Tensor,
    data_type: DataType,
    *,
    out: Tensor | None = None,
    name: str = "",
    on_nonfinite: OnNonfinite = "raise",
    alignment: int = ROW_ALIGNMENT,
) -> Tensor:
    """Rows of numbers [R, D] -> packed rows, uint8 [R, row_bytes].

    Args:
        rows: float32 or float16.
        data_type: FP32, FP16, INT8, INT4 or INT2.
        out: Where packed rows are written; new memory by default.
        name: Of the table, for messages.
        on_nonfinite: What becomes of a row with a number that is not finite: an error, or packed rows that read as NaN.
        alignment: Rows are padded to a multiple of so many bytes.

    Returns:
        ``out``, or a new tensor.

    Raises:
        ValueError: The rows are no matrix of float32 or float16, ``out`` has not the shape of the packed rows, or a
            number is not finite, or is beyond the range of the format.

    Example:
        >>> import torch
        >>> packed = pack_rows(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), DataType.INT2)
        >>> packed.shape, packed[0, 4].item() == 0b11_10_01_00  # after scale and bias; the first column lowest
        (torch.Size([1, 16]), True)

    See Also:
        fbgemm's ``FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf``, whose bytes these are, with scale and bias in front
        (but for the sign of a bias 0 in rows that hold both zeros).
    """
    layout = _layout_of(rows, data_type, name, alignment)
    require_one_of("on_nonfinite", on_nonfinite, ("raise", "keep"))
    shape = (rows.shape[0], layout.row_bytes)
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=rows.device)
    elif out.shape != shape or out.dtype != torch.uint8:
        given = f"out is {out.dtype} {list(out.shape)}"
        raise ValueError(f"table {name!r}: {given}, and packed rows are uint8 {list(shape)}; pass out=None")
    for first, some in enumerate_chunks(rows):
        unfit = _unfit_rows(some, layout)
        if on_nonfinite == "raise" and bool(unfit.any()):
            raise ValueError(_describe_unfit(some, unfit, first, layout, name))
        _pack_chunk(some, layout, out[first : first + some.shape[0]])
    return out


def unpack_rows(packed: Tensor, columns: int, data_type: DataType) -> Tensor:
    """Packed rows [R, row_bytes] -> numbers, float32 [R, D].

    Args:
        packed: uint8, as ``pack_rows`` returns it, of any row alignment.
        columns: D.
        data_type: As it was packed.

    Raises:
        ValueError: ``packed`` does not have the shape of such rows.

    Example:
        >>> import torch
        >>> row = torch.tensor([[0.0, 0.5, 1.0]])
        >>> unpack_rows(pack_rows(row, DataType.INT8), 3, DataType.INT8)  # 0.5 is between codes 127 and 128
        tensor([[0.0000, 0.5020, 1.0000]])
    """
    layout = row_layout(columns, data_type, LEAST_ALIGNMENT)
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] < layout.row_bytes:
        expects = f"packed rows of {columns} columns in {data_type} are uint8 [R, {layout.row_bytes} or more]"
        raise ValueError(f"{expects}, got {packed.dtype} {list(packed.shape)}")
    return numbers_of_rows(packed, layout.bits, columns)


def round_trip_bound(rows: Tensor, data_type: DataType) -> Tensor:
    """How far any number of a row can be from what is read back, float32 [R].

    With smallest m and largest M of a row, bias b, scale s and largest code L, a number x becomes code
    ``round((x - b) / s)``, cut to 0 and L. So it is off by at most

    * ``s / 2`` where the code was rounded (no more than ``M - b`` where every code is 0),
    * ``b - m`` where b, rounded to float16, is above the smallest number,
    * ``M - b - s * L`` where s, rounded to float16, does not reach the largest,

    and by float32's rounding on the way there and back, ``2**-22 * (|b| + s * L)``.

    Args:
        rows: [R, D]
        data_type: FP32, FP16, INT8, INT4 or INT2.

    Returns:
        The bound of each row; infinite or NaN where a row cannot be packed.

    Raises:
        ValueError: The rows are no matrix of float32 or float16.

    Example:
        >>> import torch
        >>> row = torch.tensor([[0.0, 0.4, 1.0]])
        >>> bound = round_trip_bound(row, DataType.INT2).item()  # half of a third
        >>> round(bound, 3), (row - unpack_rows(pack_rows(row, DataType.INT2), 3, DataType.INT2)).abs().max() <= bound
        (0.167, tensor(True))
    """
    layout = _layout_of(rows, data_type)
    bounds = [_bound_of_chunk(some.float(), layout) for _, some in enumerate_chunks(rows)]
    return torch.cat(bounds) if bounds else torch.empty(0)


def _bound_of_chunk(rows: Tensor, layout: RowLayout) -> Tensor:
    if layout.bits == 32:
        return rows.new_zeros(rows.shape[0])
    low, high = (end.double() for end in rows.aminmax(dim=1))
    if layout.bits == 16:
        bound = torch.maximum(low.abs(), high.abs()) * 2**-11 + 2**-25
        return bound.masked_fill(torch.maximum(-low, high) > _LARGEST_HALF, torch.inf).float()
    scale, bias = (part.squeeze(1).double() for part in _scale_and_bias(rows, layout))
    above = (high - bias).clamp(min=0)
    rounded = torch.minimum(scale / 2, above)
    bound = torch.maximum(torch.maximum(rounded, bias - low), above - scale * layout.levels)
    return (bound + 2**-22 * (bias.abs() + scale * layout.levels)).float()


def _unfit_rows(rows: Tensor, layout: RowLayout) -> Tensor:
    """Which rows cannot be read back: a number is not finite, or scale or bias is beyond float16 [R]."""
    low, high = rows.aminmax(dim=1)
    fit = low.isfinite() & high.isfinite()
    if layout.bits == 16:
        fit &= low.half().isfinite() & high.half().isfinite()
    elif layout.bits < 16:
        scale, bias = _scale_and_bias(rows.float(), layout)
        fit &= (scale.isfinite() & bias.isfinite()).squeeze(1)
    return ~fit


def _describe_unfit(rows: Tensor, unfit: Tensor, first: int, layout: RowLayout, name: str) -> str:
    row = int(unfit.nonzero()[0])
    numbers = rows[row]
    bad = (~numbers.isfinite()).nonzero().view(-1)
    if len(bad):
        column = int(bad[0])
        return (
            f"table {name!r}: row {first + row}, column {column} is {numbers[column].item()}; find out where training "
            "went wrong, or pass on_nonfinite='keep' for rows that read as NaN"
        )
    low, high = (end.item() for end in numbers.aminmax())
    return (
        f"table {name!r}: row {first + row} reaches from {low:g} to {high:g}, too far for {layout.data_type}: its "
        f"{'numbers' if layout.bits == 16 else 'smallest number and its step'} are kept in float16, up to "
        f"{_LARGEST_HALF:g}; keep this table in FP32"
    )


def _pack_chunk(rows: Tensor, layout: RowLayout, out: Tensor) -> None:
    out[:, layout.scale_bytes + layout.payload_bytes :] = 0
    if layout.bits > 8:
        numbers = rows.float() if layout.bits == 32 else rows.half()
        out[:, : layout.payload_bytes] = numbers.contiguous().view(torch.uint8)
        return
    codes, scale, bias = _quantize(rows.float(), layout)
    out[:, : layout.scale_bytes] = torch.cat([scale, bias], dim=1).view(torch.uint8)
    out[:, layout.scale_bytes : layout.scale_bytes + layout.payload_bytes] = join_codes(codes, layout)


def _quantize(rows: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [R, D], scale and bias in float16 [R, 1]."""
    scale, bias = _scale_and_bias(rows, layout)
    codes = ((rows - bias.float()) * (1.0 / scale.float())).round_().nan_to_num_(0.0).clamp_(0, layout.levels)
    return codes.to(torch.uint8), scale, bias


def _scale_and_bias(rows: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    """Step and smallest number of each row, in float16 [R, 1]."""
    low, high = rows.aminmax(dim=1, keepdim=True)
    bias = low.half()
    scale = ((high - bias.float()) / layout.levels).half()
    # Where a row is constant, any step does; and a step whose inverse is infinite cannot be divided by.
    unusable = (scale == 0) | (1.0 / scale.float()).isinf()
    return scale.masked_fill(unusable, 1.0), bias


def join_codes(codes: Tensor, layout: RowLayout) -> Tensor:
    """Codes [R, D] -> payload bytes: codes of 4 or 2 bits share a byte, the first column in its lowest bits."""
    if layout.bits == 8:
        return codes
    padded = codes.new_zeros(codes.shape[0], layout.stored_columns)
    padded[:, : layout.columns] = codes
    groups = padded.view(codes.shape[0], layout.payload_bytes, 8 // layout.bits)
    joined = groups[:, :, 0].clone()
    for place in range(1, groups.shape[2]):
        joined |= groups[:, :, place] << (place * layout.bits)
    return joined


def _layout_of(rows: Tensor, data_type: DataType, name: str = "", alignment: int = ROW_ALIGNMENT) -> RowLayout:
    if rows.dim() != 2 or rows.dtype not in (torch.float32, torch.float16):
        given = f"{rows.dtype} {list(rows.shape)}"
        raise ValueError(f"table {name!r}: rows to be packed are float32 or float16 [R, D], got {given}")
    return row_layout(rows.shape[1], data_type, alignment)

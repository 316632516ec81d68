"""Errors of a quantized table: the bound that follows from its rows, and the measured error."""

from __future__ import annotations

import torch
from torch import Tensor

from tutorec._kernels.packed import PackedTable
from tutorec.quant.packing import unpack_rows
from tutorec.quant.table_formats import enumerate_chunks


def measured_errors(weight: Tensor, packed: Tensor, table: PackedTable) -> tuple[float, float]:
    """The maximum and the mean absolute error of a quantized table.

    Args:
        weight: The float table [R, D]; rows beyond those of the packed table are ignored.
        packed: Its packed rows [R, row_bytes].
        table: Their layout.

    Returns:
        (maximum, mean); NaN if a value is not finite, 0 for an empty table.

    Example:
        >>> import torch
        >>> from tutorec.quant.packing import pack_rows
        >>> from tutorec.types import DataType
        >>> weight = torch.tensor(
        ...     [[0.0, 0.4, 1.0]]
        ... )  # of the numbers that 2 bits leave, 1/3 is nearest to 0.4
        >>> table = PackedTable("t", rows=1, columns=3, data_type=DataType.INT2)
        >>> largest, mean = measured_errors(weight, pack_rows(weight, DataType.INT2), table)
        >>> round(largest, 2), round(mean, 2)
        (0.07, 0.02)
    """
    largest = 0.0
    total = 0.0
    weight = weight.detach()[: table.rows]

    for start, rows in enumerate_chunks(weight):
        read = unpack_rows(packed[start : start + len(rows)], table.columns, table.data_type)
        error = (rows.float() - read).abs_()
        total += float(error.sum(dtype=torch.float64))
        high = float(error.max())
        largest = high if high != high or high > largest else largest
    return largest, total / max(weight.numel(), 1)


def promised_error(packed: Tensor, table: PackedTable) -> float:
    """An upper bound on the error of every value, from the packed rows alone.

    A code represents values within half a step, scale / 2. Rounding of scale and bias to float16
    adds errors: for values below the rounded bias, and above the last step. A row with one column
    has no step, and the error of its bias. ``tutorec.quant.packing.round_trip_bound`` gives a bound
    from the float values.

    Args:
        packed: The rows [R, row_bytes].
        table: Their layout.

    Returns:
        The bound of the worst row; 0 for FP32.

    Example:
        >>> import torch
        >>> from tutorec.quant.packing import pack_rows
        >>> from tutorec.types import DataType
        >>> rows = pack_rows(torch.tensor([[0.0, 0.4, 1.0]]), DataType.INT2)
        >>> table = PackedTable("t", 1, 3, DataType.INT2)
        >>> round(promised_error(rows, table), 3)  # half of a third
        0.167
    """
    layout = table.layout
    if layout.bits == 32:
        return 0.0

    worst = 0.0
    for _, rows in enumerate_chunks(packed):
        payload = rows[:, layout.scale_bytes : layout.scale_bytes + layout.payload_bytes]
        if layout.bits == 16:
            bound = _half_step(payload.contiguous().view(torch.float16).double()).amax()
        else:
            bound = _bound(rows, payload, layout.levels).amax()
        high = float(bound)
        worst = high if high != high or high > worst else worst
    return worst


def _bound(rows: Tensor, payload: Tensor, levels: int) -> Tensor:
    scale, bias = (
        column.view(torch.float16).double().squeeze(1)
        for column in rows[:, :4].contiguous().split(2, dim=1)
    )
    scale = scale.abs()  # negative if all values are below the rounded bias
    # Rows whose only code is 0 have step 1 instead of a step that float16 rounds to 0.
    flat = (scale == 1) & (payload == 0).all(1)
    step = torch.where(flat, levels * 2.0**-25, scale / 2)
    scale = torch.where(flat, 0.0, scale)

    missed = torch.maximum(_half_step(bias), levels * _half_step(scale))
    return torch.maximum(step, missed) + 2.0**-22 * (bias.abs() + scale * levels)


def _half_step(halves: Tensor) -> Tensor:
    """The maximum rounding error of each float16 value."""
    return halves.abs() * 2.0**-11 + 2.0**-25

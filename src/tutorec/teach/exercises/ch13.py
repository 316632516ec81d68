"""Exercises of chapter 13: two codes in a byte, and rows packed for other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.quant.packing import pack_rows, unpack_rows
from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import per_rank
from tutorec.types import DataType

__all__ = ["EXERCISES"]

_Unpack = Callable[[Sequence[int], float, float], list[float]]


def _unpack_with(
    code: Callable[[int, int], int], value: Callable[[int, float, float], float]
) -> _Unpack:
    """Build an unpacking function from a byte's codes and the number that a code represents."""

    def unpack_row(payload: Sequence[int], scale: float, bias: float) -> list[float]:
        return [value(code(byte, half), scale, bias) for byte in payload for half in (0, 1)]

    return unpack_row


def _low_first(byte: int, half: int) -> int:
    """The first number of a byte is in its low half."""
    return byte >> 4 * half & 15


def _high_first(byte: int, half: int) -> int:
    """As one reads hexadecimal digits, from the left."""
    return byte >> 4 * (1 - half) & 15


def _signed(byte: int, half: int) -> int:
    """Four bits in two's complement."""
    code = _low_first(byte, half)
    return code - 16 if code > 7 else code


def _number(code: int, scale: float, bias: float) -> float:
    """The number that a code represents."""
    return code * scale + bias


def _bias_in_steps(code: int, scale: float, bias: float) -> float:
    """The bias taken for a zero point, a number of steps."""
    return (code + bias) * scale


def _swap(messages: Tensor) -> Tensor:
    """Message r of every rank, on rank r."""
    arrived = torch.empty_like(messages)
    dist.all_to_all_single(arrived, messages)
    return arrived


def _packed(rows: Tensor) -> Tensor:
    """Rows in int8, without padding."""
    return pack_rows(rows, DataType.INT8, alignment=4)


def _read(packed: Tensor) -> Tensor:
    return unpack_rows(packed, packed.shape[1] - 4, DataType.INT8)


def _exchange(rows: Tensor) -> Tensor:
    """The grid of a row travels with its codes."""
    return _read(_swap(_packed(rows)))


def _as_floats(rows: Tensor) -> Tensor:
    """Nothing is packed."""
    return _swap(rows)


def _rounded(rows: Tensor) -> Tensor:
    """Packed and read on the sender, which sends floats."""
    return _swap(_read(_packed(rows)))


def _own_grid(rows: Tensor) -> Tensor:
    """Codes travel alone, and are read on the grid of the row that this rank sent."""
    packed = _packed(rows)
    codes = _swap(packed[:, 4:].contiguous())
    return _read(torch.cat([packed[:, :4], codes], dim=1))


def _codes_only(rows: Tensor) -> Tensor:
    """The codes are taken for the weights."""
    return _swap(_packed(rows))[:, 4:].float()


def _inputs(rank: int) -> tuple[Tensor]:
    """Two rows, a message for each rank."""
    steps = torch.arange(64.0, device=device())
    return (torch.stack([steps.sin() + rank, (2 + rank) * steps.cos()]),)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="13.1",
        compared="the numbers of the row, for every payload that was tried",
        solution=_unpack_with(_low_first, _number),
        cases=(
            ([0x21], 0.5, -1.0),
            ([0xF0, 0x7A], 0.25, 2.0),
            ([0x00, 0x88, 0x3C], 0.125, -0.75),
        ),
        mistakes=(
            Mistake(
                "reads a byte from the left, the high half first",
                _unpack_with(_high_first, _number),
                "Neighbours have changed places. Which half of a byte was filled first?",
            ),
            Mistake(
                "takes codes for signed numbers",
                _unpack_with(_signed, _number),
                "Small codes are right and large ones too small. A code counts steps from the "
                "smallest number of the row; can it be negative?",
            ),
            Mistake(
                "takes the bias for a zero point that counts steps",
                _unpack_with(_low_first, _bias_in_steps),
                "You multiply the bias by the scale. The bias is already a number of the row, the "
                "smallest one.",
            ),
        ),
        shape="a function that returns a list of numbers, two for each byte",
    ),
    Exercise(
        id="13.2",
        compared="the rows that arrive on two ranks, and the 136 bytes that each of them sends",
        solution=_exchange,
        measure=per_rank(2, _inputs, {"all_to_all_single": 1}),
        tolerance=1e-5,
        mistakes=(
            Mistake(
                "sends the rows as floats",
                _as_floats,
                "The rows arrive without any rounding, and each rank sends 512 bytes. Where are "
                "they packed?",
            ),
            Mistake(
                "rounds the rows and sends floats",
                _rounded,
                "The right rows arrive, but each rank sends 512 bytes. What has to be sent, the "
                "packed row or the weights that it represents?",
            ),
            Mistake(
                "reads the codes on the grid of its own rows",
                _own_grid,
                "The codes arrive. With which row's scale and bias do you read them, and who "
                "knows these two?",
            ),
            Mistake(
                "takes codes for weights",
                _codes_only,
                "These are the codes, 0 to 255. Which function makes weights of them?",
            ),
        ),
        shape="a function that returns the rows that arrived, float32 [2, 64]",
    ),
)

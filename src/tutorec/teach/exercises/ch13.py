"""Exercises of chapter 13: what a row takes, and two numbers in a byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

_Unpack = Callable[[Sequence[int], float, float], list[float]]


def _unpack_with(
    code: Callable[[int, int], int], value: Callable[[int, float, float], float]
) -> _Unpack:
    """Build an unpacking function from a code's offset and the number that a code stands for."""

    def unpack_row(payload: Sequence[int], scale: float, bias: float) -> list[float]:
        return [value(code(byte, half), scale, bias) for byte in payload for half in (0, 1)]

    return unpack_row


def _low_first(byte: int, half: int) -> int:
    """The first number of a byte stands in its low half."""
    return byte >> 4 * half & 15


def _high_first(byte: int, half: int) -> int:
    """As one reads hexadecimal digits, from the left."""
    return byte >> 4 * (1 - half) & 15


def _signed(byte: int, half: int) -> int:
    """Four bits in two's complement."""
    code = _low_first(byte, half)
    return code - 16 if code > 7 else code


def _number(code: int, scale: float, bias: float) -> float:
    """What a code stands for."""
    return code * scale + bias


def _bias_in_steps(code: int, scale: float, bias: float) -> float:
    """The bias taken for a zero point, a number of steps."""
    return (code + bias) * scale


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="13.1",
        compared="64, 64, 32 and 80 bytes: 52, 52 and 28 are padded, and fp16 needs no padding",
        solution=[64, 64, 32, 80],
        mistakes=(
            Mistake(
                misconception="forgets that a row carries its own scale and bias",
                answer=[48, 48, 24, 80],
                hint="By what is a code multiplied when it is read, and where does that number "
                "come from? It has to "
                "be stored somewhere.",
            ),
            Mistake(
                misconception="forgets the padding",
                answer=[52, 52, 28, 80],
                hint=("That is what a row holds. To which multiple of bytes is it padded here?"),
            ),
            Mistake(
                misconception="gives fp16 rows a scale and a bias, too",
                answer=[64, 64, 32, 96],
                hint="Three of four are right. A number in half precision has an exponent of its "
                "own; what would it "
                "need a scale for?",
            ),
        ),
        shape="a list of four numbers of bytes",
    ),
    Exercise(
        id="13.2",
        compared="the numbers of the row, for every payload that was tried",
        solution=_unpack_with(_low_first, _number),
        cases=(
            ([0x21], 0.5, -1.0),
            ([0xF0, 0x7A], 0.25, 2.0),
            ([0x00, 0x88, 0x3C], 0.125, -0.75),
        ),
        mistakes=(
            Mistake(
                misconception="reads a byte from the left, the high half first",
                answer=_unpack_with(_high_first, _number),
                hint="Neighbours have changed places. Which half of a byte was filled first?",
            ),
            Mistake(
                misconception="takes codes for signed numbers",
                answer=_unpack_with(_signed, _number),
                hint="Small codes are right and large ones too small. A code counts steps from the "
                "smallest number of "
                "the row; can it be negative?",
            ),
            Mistake(
                misconception="takes the bias for a zero point that counts steps",
                answer=_unpack_with(_low_first, _bias_in_steps),
                hint=(
                    "You multiply the bias by the scale. The bias is already a number of the row, "
                    "the smallest one."
                ),
            ),
        ),
        shape="a function that returns a list of numbers, two for each byte",
    ),
)

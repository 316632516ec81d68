"""Zeros that take memory page by page, when they are first written.

A table with room for many rows takes address space for all of them, and memory for those in use.
Linux and macOS give a process an anonymous page when it is first written; a page that was only read
is one page of zeros, shared by all.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["copy_written_rows", "is_all_zero", "unwritten_zeros"]

# Smaller tensors are left to torch's allocator, which keeps freed memory for the next one.
_LEAST_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 20


def unwritten_zeros(
    shape: Sequence[int] | int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Zeros of which, on the CPU, only the pages that are written take memory.

    On another device, on Windows, and below 256 KiB this is ``torch.zeros``. A page has 4 KiB, or 2
    MiB where Linux's setting of transparent huge pages is ``always``.

    Args:
        shape: Shape of the tensor.
        dtype: Its numbers.
        device: Where it lives.

    Example:
        >>> unwritten_zeros((1 << 20, 64))[7].sum()  # 256 MiB of address space
        tensor(0.)
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    number_of_bytes = math.prod(shape) * dtype.itemsize
    if (
        torch.device(device).type != "cpu"
        or sys.platform == "win32"
        or number_of_bytes < _LEAST_BYTES
    ):
        return torch.zeros(shape, dtype=dtype, device=device)

    pages = mmap.mmap(-1, number_of_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def is_all_zero(numbers: Tensor) -> bool:
    """Whether a tensor holds zeros only; a nonzero first or last element decides at once.

    Example:
        >>> is_all_zero(torch.zeros(3, 2)), is_all_zero(torch.tensor([0.0, -0.5, 0.0]))
        (True, False)
    """
    rows = numbers if numbers.dim() else numbers.view(1)
    return not (rows[:1].any() or rows[-1:].any() or rows.any())


def copy_written_rows(target: Tensor, source: Tensor) -> None:
    """Copy numbers [R, ...] block by block; where both are zero nothing is written.

    Args:
        target: What is overwritten.
        source: Of the same shape.

    Example:
        >>> target = unwritten_zeros((1 << 20, 64))
        >>> copy_written_rows(target, unwritten_zeros((1 << 20, 64)))  # takes no memory
    """
    if target.is_meta:
        return
    for rows in _blocks(source):
        if not (is_all_zero(source[rows]) and is_all_zero(target[rows])):
            target[rows] = source[rows]


def _blocks(numbers: Tensor) -> Iterator[slice]:
    """Ranges of rows of 1 MiB each, or one row."""
    step = max(1, _BLOCK_BYTES // max(1, numbers[:1].numel() * numbers.element_size()))
    return (slice(start, start + step) for start in range(0, numbers.shape[0], step))

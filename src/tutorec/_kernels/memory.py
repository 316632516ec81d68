"""Memory of this process: zeros that take it page by page, large pages, and what the system says.

A table with room for many rows takes address space for all of them, and memory for those in use.
Linux and macOS give a process an anonymous page when it is first written; a page that was only read
is one page of zeros, shared by all.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ask_for_large_pages",
    "copy_written_rows",
    "is_all_zero",
    "madvise",
    "memory_in_use",
    "return_freed_memory",
    "unwritten_zeros",
]

# Smaller tensors are left to torch's allocator, which keeps freed memory for the next one.
_LEAST_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 20
_LARGE_PAGE = 1 << 21
_PAGE = 1 << 12


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


def ask_for_large_pages(storage: Tensor) -> bool:
    """Ask the system to back a new buffer by large pages; a request that it may leave unheard.

    With pages of 4 KiB nearly every row of a large table is on a page whose place the processor has
    to look up first; of pages of 2 MiB it remembers enough. Linux gives them where a program asks
    for them, and its setting ``madvise``, which is the usual one, means just that.

    Nothing else changes, and small buffers are left alone. What pages hold is kept, but pages that
    are in use already stay as they are, so that the time to ask is before the first number is
    written.

    Args:
        storage: One contiguous tensor.

    Returns:
        Whether the system took the request.

    Example:
        >>> import torch
        >>> ask_for_large_pages(torch.empty(100))
        False
    """
    call = madvise()
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    small = storage.nbytes < 2 * _LARGE_PAGE
    if call is None or advice is None or storage.device.type != "cpu" or small:
        return False

    start = -(-storage.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
    stop = (storage.data_ptr() + storage.nbytes) // _PAGE * _PAGE
    return call(start, stop - start, advice) == 0


def return_freed_memory() -> None:
    """Return freed memory of this process to the system, where the C library can (glibc).

    A large block that lay among others is kept for the next one of its kind, which may never be
    wanted. Takes about a millisecond.

    Example:
        >>> return_freed_memory()
    """
    with suppress(OSError, AttributeError, TypeError):  # another system, another C library
        ctypes.CDLL(None).malloc_trim(0)


def memory_in_use() -> int:
    """Bytes that the C library has given out (glibc 2.33 or newer); elsewhere 0.

    The pages of the process say less: the library keeps freed ones for the next block.

    Example:
        >>> import torch
        >>> before = memory_in_use()
        >>> rows = torch.zeros(1_000_000)
        >>> memory_in_use() - before in range(4_000_000, 4_100_000) or not before
        True
    """
    call = _mallinfo2()
    if call is None:
        return 0
    info = call()
    return info.uordblks + info.hblkhd  # in the heaps, and in mappings of their own


class _Mallinfo2(ctypes.Structure):
    """glibc's memory statistics; `man mallinfo2` explains the fields."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@cache
def _mallinfo2() -> Any:
    """The library's call, or None where there is none."""
    with suppress(OSError, AttributeError, TypeError):
        call = ctypes.CDLL(None).mallinfo2
        call.restype = _Mallinfo2
        return call
    return None


@cache
def madvise() -> Any:
    """The system's call (address, bytes, advice), or None where there is none."""
    if not hasattr(mmap, "MADV_WILLNEED"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call

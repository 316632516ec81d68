"""What this process asks the system about the pages of its memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = [
    "ask_for_large_pages",
    "drop_pages",
    "madvise",
    "memory_in_use",
    "return_freed_memory",
]

_LARGE_PAGE = 1 << 21
_PAGE = 1 << 12
_MAPS = Path("/proc/self/maps")
_DESCRIPTORS = Path("/proc/self/fd")


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


def drop_pages(folder: str) -> bool:
    """Write this process's open files of a folder to disk, and drop their pages from memory.

    The next access reads from the disk. Where the folder itself is in memory, nothing is forgotten.

    Args:
        folder: Of tables in files.

    Returns:
        Whether the system was asked, which is possible on Linux only.

    Example:
        >>> drop_pages("/a folder without open files") in (True, False)
        True
    """
    advise = madvise()
    if advise is None or not _MAPS.exists():
        return False

    folder = os.path.join(folder, "")  # "/a/b" is not the beginning of "/a/bc/file"
    for start, length in _mapped_files(folder):
        advise(start, length, mmap.MADV_DONTNEED)
    for link in _DESCRIPTORS.iterdir():
        if os.path.islink(link) and os.readlink(link).startswith(folder):
            os.fdatasync(int(link.name))
            os.posix_fadvise(int(link.name), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _mapped_files(folder: str) -> Iterator[tuple[int, int]]:
    """Start and size of each shared mapping of a folder's files.

    What a process has changed in a private mapping, as in the data of a library that it has loaded,
    is nowhere else: dropped, it is lost.
    """
    for line in _MAPS.read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1].endswith("s") and fields[5].startswith(folder):
            start, stop = (int(number, 16) for number in fields[0].split("-"))
            yield start, stop - start

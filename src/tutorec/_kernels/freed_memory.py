"""Memory that was freed, and that the C library keeps for later."""

from __future__ import annotations

import ctypes
from contextlib import suppress

__all__ = ["return_freed_memory"]


def return_freed_memory() -> None:
    """Return freed memory of this process to the system, where the C library can (glibc).

    A large block that lay among others is kept for the next one of its kind, which may never be
    wanted. Takes about a millisecond.

    Example:
        >>> return_freed_memory()
    """
    with suppress(OSError, AttributeError, TypeError):  # another system, another C library
        ctypes.CDLL(None).malloc_trim(0)

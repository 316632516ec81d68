"""Memory that was freed, and that the C library keeps for later."""

from __future__ import annotations

import ctypes
from contextlib import suppress

__all__ = ["return_freed_memory"]


def return_freed_memory() -> None:
    """Give memory that this process has freed back to the system, where the C library can be asked to (glibc).

    A large block that lay among others is kept for the next one of its kind, which may never be wanted. Takes about a
    millisecond.

    Example:
        >>> return_freed_memory()
    """
    with suppress(OSError, AttributeError, TypeError):  # another system, another C library
        ctypes.CDLL(None).malloc_trim(0)

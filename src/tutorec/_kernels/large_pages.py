"""Large pages for tables of which a lookup reads rows here and there.

With pages of 4 KiB nearly every row of a large table is on a page whose place the processor has to
look up first; of pages of 2 MiB it remembers enough. Linux gives them where a program asks for
them, and its setting ``madvise``, which is the usual one, means just that.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from torch import Tensor

__all__ = ["ask_for_large_pages"]

_LARGE_PAGE, _PAGE = 1 << 21, 1 << 12
_HUGEPAGE = 14  # MADV_HUGEPAGE


def ask_for_large_pages(storage: Tensor) -> bool:
    """Ask the system to back a new buffer by large pages; a request that it may leave unheard.

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
    advise = _advise()
    if advise is None or storage.device.type != "cpu" or storage.nbytes < 2 * _LARGE_PAGE:
        return False
    start = -(-storage.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
    stop = (storage.data_ptr() + storage.nbytes) // _PAGE * _PAGE
    return advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _HUGEPAGE) == 0


@cache
def _advise() -> Any:
    """The system's call, or None where there is none."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None

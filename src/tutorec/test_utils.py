"""Helpers that tests written for TorchRec import: free ports, and tests that a sanitizer skips.

Names are those of ``torchrec.test_utils``. A new test starts its ranks with `tutorec.spmd.Ranks`,
which needs no port.
"""

from __future__ import annotations

import ctypes
import socket
import sys
import unittest
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SKIPPED = "Python runs under a sanitizer, which is too slow for this test"


def get_free_port() -> int:
    """A port of this machine that nothing listens to at the moment.

    Example:
        >>> from tutorec.test_utils import get_free_port
        >>> 0 < get_free_port() < 65536
        True
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _has_symbol(name: str) -> bool:
    """Whether this process has linked a library with this symbol."""
    return sys.platform != "win32" and hasattr(ctypes.CDLL(None), name)


def skip_if_asan(func: Callable[P, T]) -> Callable[P, T | None]:
    """A test that is skipped under a sanitizer: it raises ``unittest.SkipTest`` there.

    Example:
        >>> from tutorec.test_utils import skip_if_asan
        >>> skip_if_asan(lambda: "ran")()
        'ran'
    """
    return unittest.skipIf(_has_symbol("__asan_init") or _has_symbol("__tsan_init"), _SKIPPED)(func)

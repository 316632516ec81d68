"""Helpers that tests written for TorchRec import: free ports, process groups, skipped tests.

Names are those of ``torchrec.test_utils``. New tests need none of it: `tutorec.spmd.Ranks` starts
ranks without a port.
"""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import socket
import sys
import unittest
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist

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


def is_asan() -> bool:
    """Whether Python runs under the address sanitizer."""
    return _has_symbol("__asan_init")


def is_tsan() -> bool:
    """Whether Python runs under the thread sanitizer."""
    return _has_symbol("__tsan_init")


def is_asan_or_tsan() -> bool:
    """Whether Python runs under the address sanitizer or the thread sanitizer."""
    return is_asan() or is_tsan()


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
    return unittest.skipIf(is_asan_or_tsan(), _SKIPPED)(func)


def skip_if_asan_class(cls: T) -> T:
    """A class of tests that are skipped under a sanitizer."""
    return unittest.skipIf(is_asan_or_tsan(), _SKIPPED)(cls)  # pyright: ignore[reportArgumentType]


def seed_and_log(wrapped_func: Callable[P, T]) -> Callable[P, T]:
    """A function that first seeds torch, numpy and random with a new number, and prints it."""

    @wraps(wrapped_func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        seed = secrets.randbelow(2**31)
        print(f"Using random seed: {seed}")
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        return wrapped_func(*args, **kwargs)

    return wrapper


def init_distributed_single_host(
    rank: int, world_size: int, backend: str, local_size: int | None = None
) -> dist.ProcessGroup:
    """The default process group of ranks on this machine; leaves an earlier one first.

    The ranks meet at ``MASTER_ADDR`` and ``MASTER_PORT``. ``LOCAL_WORLD_SIZE`` and ``LOCAL_RANK``
    are set for hosts of ``local_size`` ranks.

    Args:
        rank: This process.
        world_size: W, ranks.
        backend: ``"gloo"``, ``"nccl"``, or one for each kind of device, as
            ``"cpu:gloo,cuda:nccl"``.
        local_size: Ranks of a simulated host; by default all are on one.
    """
    on_host = local_size or world_size
    os.environ |= {"LOCAL_WORLD_SIZE": str(on_host), "LOCAL_RANK": str(rank % on_host)}
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    group: Any = dist.group.WORLD
    return group


def init_process_group_single_rank(backend: str = "gloo", **kwargs: Any) -> None:
    """The default process group of this process alone, without a port that others could take.

    Args:
        backend: As in `init_distributed_single_host`.
        **kwargs: Of ``torch.distributed.init_process_group``, such as ``timeout``.
    """
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, **kwargs)

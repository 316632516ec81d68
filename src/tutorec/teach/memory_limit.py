"""A function in a process that may allocate only so much memory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutorec.spmd.pool import Ranks
from tutorec.teach.memory import status_bytes

_STATUS = Path("/proc/self/status")
# Modules that the child loads before the limit, so that their code does not count.
_LIBRARIES = ("tutorec", "fbgemm_gpu", "torch")


def under_limit(
    nbytes: int,
    function: Callable[..., Any],
    *args: Any,
    first: Callable[[], object] | None = None,
) -> Any:
    """Call a function in a process of its own, which may allocate so many more bytes.

    What the process holds before the call does not count: Python, torch and the modules of tutorec
    that are loaded here. Nor do pages of files, which the system keeps in memory where it has room.
    Linux can do this (``RLIMIT_DATA``); elsewhere a note is printed, and there is no limit.

    Args:
        nbytes: Bytes of private memory.
        function: A function of a module or of a notebook's cell.
        args: Of the function.
        first: Is called before the limit is set, such as the same with a small table: what a
            process allocates once, for threads and buffers, then does not count.

    Returns:
        What the function returns; of a module its printed form, as modules stay in their process.
        Where memory was short, the text of the error.

    Raises:
        RankError: The function fails for another reason.

    Example:
        >>> def zeros(rows):
        ...     return len(torch.zeros(rows, 256))
        >>> under_limit(64 * 2**20, zeros, 1024)
        1024
    """
    if not _STATUS.exists():
        print(f"no limit: this system ({sys.platform}) has no RLIMIT_DATA")
    loaded = [
        name for name in sys.modules if name.partition(".")[0] in _LIBRARIES and name != "torch"
    ]

    threads = torch.get_num_threads()
    with Ranks(1, timeout=600) as world:
        [result] = world.run(_limited, nbytes, loaded, threads, first, function, args)
    return result


def _limited(
    rank: int,
    nbytes: int,
    modules: list[str],
    threads: int,
    first: Callable[[], object] | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """In the child: prepare, limit, call."""
    torch.set_num_threads(threads)
    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)
    torch.ones(1, requires_grad=True).sum().backward()  # has autograd start its threads

    if first is not None:
        first()

    try:
        with _limited_memory(nbytes):
            result = function(*args)
    except (MemoryError, RuntimeError, OSError) as error:
        if not _lacks_memory(error):
            raise
        return str(error) or type(error).__name__
    return repr(result) if isinstance(result, nn.Module) else result


@contextmanager
def _limited_memory(nbytes: int) -> Iterator[None]:
    """This process may allocate so many bytes more, where the system can limit it."""
    if not _STATUS.exists():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)  # the process needs memory to end


def _lacks_memory(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or "memory" in text

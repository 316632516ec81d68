"""The fork server: a small process that has imported torch and forks ranks on request.

It is started as a fresh interpreter (see :mod:`tutorec._spmd_start`), so that it holds nothing of the caller: no CUDA
context, no threads, no locks. It ends when its caller ends, and the kernel then kills the ranks that it forked.

A rank that ends says which of the slow modules it needed, and the server imports them before it forks the next one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["serve"]

# Every rank of every pool imports them: 1.3 s for `DistributedDataParallel`, 0.3 s for the planner.
_SLOW_MODULES = ("torch._dynamo", "scipy.optimize")


def serve(fd: int, caller: int) -> None:
    """Answer requests on socket ``fd`` until the process ``caller`` closes it or ends.

    Requests are JSON lines: ``{"boot": {...}}`` forks a rank and is answered with its pid, ``{"poll": pid}``
    is answered with its exit code or null.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # A sixth of the time of the imports.
    import cloudpickle  # noqa: F401
    import torch
    import torch.distributed

    from tutorec import _spmd_rank  # noqa: F401

    _share_memory()
    gc.enable()
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    folders: set[str] = set()
    connection = socket.socket(fileno=fd)
    with connection, connection.makefile("rwb") as lines:
        for request in _requests(connection, lines, caller):
            if "boot" in request:
                folders.add(request["boot"]["folder"])
                _import_slow(read_end)
                reply = _fork(request["boot"], connection, write_end, torch.cuda.is_initialized())
            else:
                reply = {"code": _exit_code(request["poll"])}
            lines.write(json.dumps(reply).encode() + b"\n")
            lines.flush()
    for folder in folders:  # A caller that was killed could not remove them.
        shutil.rmtree(folder, ignore_errors=True)


def _requests(connection: socket.socket, lines: Any, caller: int) -> Iterator[dict[str, Any]]:
    """What the caller asks for, until it has gone: a fork of it may hold the other end of the connection."""
    while os.getppid() == caller:
        if select.select([connection], [], [], 1.0)[0]:
            line = lines.readline()
            if not line:
                return
            yield json.loads(line)


def _share_memory() -> None:
    """Keep the garbage collector off what is imported: ranks share these pages as long as nobody writes to them."""
    gc.collect()
    gc.freeze()


def _import_slow(read_end: int) -> None:
    """Import the slow modules that ranks named before they ended; where that fails, ranks do it themselves."""
    try:
        names = set(os.read(read_end, 65536).decode().split())
    except BlockingIOError:
        return
    for name in names.difference(sys.modules).intersection(_SLOW_MODULES):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
        _share_memory()


def _name_slow(write_end: int) -> None:
    """On a rank that ends: name the slow modules that it imported."""
    names = [name for name in _SLOW_MODULES if name in sys.modules]
    with contextlib.suppress(OSError):
        os.write(write_end, " ".join([*names, ""]).encode())


def _fork(boot: dict[str, Any], connection: socket.socket, write_end: int, cuda_in_use: bool) -> dict[str, Any]:
    """Fork one rank; refuse when a lock or a device could be left behind in the child."""
    threads = _thread_count()
    if threads != 1 or cuda_in_use:
        return {"refused": f"the fork server has {threads} threads, CUDA in use: {cuda_in_use}"}
    boot = {**boot, "parent": os.getpid(), "kernel": True}
    pid = os.fork()
    if pid:
        return {"pid": pid}
    try:
        os.close(connection.detach())
        _become(boot, functools.partial(_name_slow, write_end))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _thread_count() -> int:
    """Threads of this process as the kernel counts them, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))


def _become(boot: dict[str, Any], at_end: Callable[[], None]) -> None:
    """Turn this fork into the process that a fresh interpreter would have been, and run the rank."""
    os.environ.clear()
    os.environ.update(boot["environment"])
    os.chdir(boot["cwd"])
    sys.path[:] = boot["sys_path"]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Ranks must not share the server's global random state.
    from tutorec._spmd_rank import main

    main(boot, at_end)


def _exit_code(pid: int) -> int | None:
    """Exit code of a rank that has ended (minus the signal's number), None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None

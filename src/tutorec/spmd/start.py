"""Start ranks from a neutral main module, so that none imports the caller's script.

Messages travel through `multiprocess` connections. Its way of *starting* processes is not used: it
imports the caller's main module once more in every child, so that a script without a guard starts
children without end.

Two ways, the same process afterwards: it calls :func:`tutorec.spmd.worker.main` with a small
dictionary, the *boot*.

* ``spawn``: a fresh interpreter for each rank; 2 to 5 seconds, nearly all of it ``import torch``.
* ``fork``: one fresh interpreter, the *fork server*, imports torch once and forks the ranks; under
  0.1 s a rank after the first. The server is not a fork of the caller: it has no CUDA context and
  inherits no thread, and it refuses to fork (the caller then spawns) unless it has exactly one
  thread. It ends when its caller ends, and the kernel then kills the ranks that it forked. A rank
  that ends names the slow modules that it needed, and the server imports them before it forks the
  next one. Linux only.
"""

from __future__ import annotations

import atexit
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
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

METHOD_VARIABLE = "TUTOREC_RANKS_START"
REPLY_SECONDS = 120.0

_RANK_CODE = (
    "import json, sys; boot = json.loads(sys.stdin.readline()); sys.path[:] = boot['sys_path']; "
    "from tutorec.spmd.worker import main; main(boot)"
)
_SERVER_CODE = (
    "import json, sys; boot = json.loads(sys.argv[1]); sys.path[:] = boot['sys_path']; "
    "from tutorec.spmd.start import serve; serve(boot['fd'], boot['caller'])"
)
# A pool of threads in the fork server would make it refuse to fork, and a rank uses one thread
# anyway.
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
# Every rank of every pool imports them: 1.3 s for `DistributedDataParallel`, 0.3 s for the planner.
_SLOW_MODULES = ("torch._dynamo", "scipy.optimize")


def default_method() -> str:
    """``fork`` on Linux, ``spawn`` elsewhere; ``TUTOREC_RANKS_START`` overrides.

    Raises:
        ValueError: The variable names a way that this system does not have.
    """
    method = os.environ.get(METHOD_VARIABLE) or ("fork" if sys.platform == "linux" else "spawn")
    if method not in ("fork", "spawn") or (method == "fork" and sys.platform != "linux"):
        raise ValueError(f"{METHOD_VARIABLE}={method!r}: use 'spawn', or on Linux 'fork'")
    return method


def start_rank(boot: dict[str, Any], environment: Mapping[str, str]) -> RankProcess:
    """Start one rank process, by the fork server where that is safe, else as a fresh interpreter.

    Args:
        boot: What :func:`tutorec.spmd.worker.main` needs; JSON values only.
        environment: The rank's whole environment.
    """
    boot = {
        **boot,
        "sys_path": list(sys.path),
        "cwd": _working_folder(),
        "environment": dict(environment),
    }
    if default_method() == "fork":
        with contextlib.suppress(_ServerRefused, OSError):
            return _server().fork(boot)
    return Spawned(boot)


def _working_folder() -> str:
    """The current folder, or the root of the file system when the current one was deleted."""
    with contextlib.suppress(OSError):
        return os.getcwd()
    return os.sep


def _detached() -> dict[str, Any]:
    """Popen options that keep a Ctrl-C, meant for the caller, from the ranks."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


class Spawned:
    """A rank that is a fresh interpreter."""

    def __init__(self, boot: dict[str, Any]) -> None:
        # The kernel tells of the end of the thread that started a process: that of the main thread
        # is the caller's.
        by_kernel = (
            sys.platform == "linux" and threading.current_thread() is threading.main_thread()
        )
        boot = {**boot, "parent": os.getpid(), "kernel": by_kernel}
        environment = {
            **boot["environment"],
            "OMP_NUM_THREADS": boot["environment"].get("OMP_NUM_THREADS", "1"),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _RANK_CODE],
            stdin=subprocess.PIPE,
            env=environment,
            **_detached(),
        )
        assert self._process.stdin is not None, "stdin was asked for"
        with contextlib.suppress(OSError):  # A rank that ended at once is found by its exit code.
            self._process.stdin.write(json.dumps(boot).encode() + b"\n")
            self._process.stdin.close()

        self.pid, self.kill = self._process.pid, self._process.kill

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """Exit code, minus the signal's number, or None when it still runs after ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None


class _ServerRefused(Exception):
    """The fork server runs, but forking it would not be safe."""


class Forked:
    """A rank forked by the fork server, which alone can ask for its exit code."""

    def __init__(self, server: _ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self._code: int | None = None

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """Exit code, minus the signal's number, or None when it still runs after ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._code is None:
            try:
                self._code = self._server.ask({"poll": self.pid})["code"]
            except OSError:  # The server is gone, and the kernel ends its ranks with it.
                self._code = -signal.SIGKILL
            if self._code is None:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.01)
        return self._code

    def kill(self) -> None:
        """End the process now."""
        # The server has not collected a process whose code is unknown, so its number cannot belong
        # to another one.
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


RankProcess: TypeAlias = Spawned | Forked


class _ForkServer:
    """The caller's side of the fork server: one request, one answer, a JSON line each."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(REPLY_SECONDS)
        boot = json.dumps({"fd": theirs.fileno(), "caller": os.getpid(), "sys_path": sys.path})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVER_CODE, boot],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._replies = self._socket.makefile("rb")
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return (
            self.owner == os.getpid() and not self._replies.closed and self._process.poll() is None
        )

    def fork(self, boot: dict[str, Any]) -> Forked:
        """Fork a rank that starts from ``boot``."""
        reply = self.ask({"boot": boot})
        if "refused" in reply:
            raise _ServerRefused(reply["refused"])
        return Forked(self, reply["pid"])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send ``request`` and return the answer; OSError when the server is gone."""
        with self._lock:
            try:
                if self._replies.closed:
                    raise ConnectionError("the fork server has ended")
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                line = self._replies.readline()
                if not line:
                    raise ConnectionError("the fork server ended without an answer")
                return json.loads(line)
            except BaseException:
                # An answer that was not read (an interrupt, say) would be taken for the next one:
                # end the server.
                self.close()
                raise

    def close(self) -> None:
        """End the server and, with it, its ranks; in a fork of its owner only let go of it."""
        with contextlib.suppress(OSError):
            self._replies.close()
            self._socket.close()
        if self.owner != os.getpid():
            return
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)


_servers: list[_ForkServer] = []
_servers_lock = threading.Lock()


def _server() -> _ForkServer:
    """This process's fork server, started when there is none; it ends with this process."""
    with _servers_lock:
        if not _servers or not _servers[-1].alive:
            _servers[:] = [_ForkServer()]
        return _servers[-1]


def serve(fd: int, caller: int) -> None:
    """Answer requests on socket ``fd`` until the process ``caller`` closes it or ends.

    Requests are JSON lines: ``{"boot": {...}}`` forks a rank and is answered with its pid,
    ``{"poll": pid}`` is answered with its exit code or null.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # A sixth of the time of the imports.
    import cloudpickle  # noqa: F401
    import torch
    import torch.distributed

    import tutorec.spmd.worker  # noqa: F401

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
    """The caller's requests, until it has gone: a fork of it may hold the connection open."""
    while os.getppid() == caller:
        if select.select([connection], [], [], 1.0)[0]:
            line = lines.readline()
            if not line:
                return
            yield json.loads(line)


def _share_memory() -> None:
    """Freeze imported objects for the garbage collector: ranks then share their pages."""
    gc.collect()
    gc.freeze()


def _import_slow(read_end: int) -> None:
    """Import the slow modules that earlier ranks used; on failure, ranks import them."""
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


def _fork(
    boot: dict[str, Any], connection: socket.socket, write_end: int, cuda_in_use: bool
) -> dict[str, Any]:
    """Fork one rank; refuse when a lock or a device could be left behind in the child."""
    threads = len(os.listdir("/proc/self/task"))  # those of C libraries included
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


def _become(boot: dict[str, Any], at_end: Callable[[], None]) -> None:
    """Turn this fork into what a fresh interpreter would be, and run the rank."""
    os.environ.clear()
    os.environ.update(boot["environment"])
    os.chdir(boot["cwd"])
    sys.path[:] = boot["sys_path"]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Ranks must not share the server's global random state.
    from tutorec.spmd.worker import main

    main(boot, at_end)


def _exit_code(pid: int) -> int | None:
    """Exit code of a rank that has ended (minus the signal's number), None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None

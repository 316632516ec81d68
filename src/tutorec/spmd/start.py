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
import errno
import functools
import gc
import importlib
import itertools
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
from dataclasses import dataclass
from typing import Any, TypeAlias

from tutorec.spmd.messages import ending, working_folder
from tutorec.spmd.rank import loopback

METHOD_VARIABLE = "TUTOREC_RANKS_START"
REPLY_SECONDS = 120.0
_LOOK_SECONDS = 0.05
_REQUEST_BYTES = 2**22

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


@dataclass(frozen=True)
class WorkerOptions:
    """The options of a pool.

    Args:
        world_size: W, ranks.
        hosts: Simulated hosts that share them evenly.
        backend: ``auto``, ``gloo`` or ``nccl``, as ``Ranks`` takes it.
        timeout: Seconds that a run may take, and the end of the ranks.
    """

    world_size: int
    hosts: int
    backend: str
    timeout: float

    def environment(self, rank: int) -> dict[str, str]:
        """The variables by which a rank knows its place, as torchrun sets them."""
        local = self.world_size // self.hosts
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("TORCHELASTIC_")
        }
        variables = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": rank % local,
            "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": rank // local,
            "GROUP_WORLD_SIZE": self.hosts,
        }

        return {
            **loopback(),
            **inherited,
            **{name: str(value) for name, value in variables.items()},
        }


def finish(*steps: Callable[[], object]) -> None:
    """Take all steps, each of which may be taken twice; an interrupt comes after the last one.

    Several may come, one of each rank's or of each key: no step is left out.
    """
    left = [*steps]
    interrupt = None
    while left:
        try:
            while left:
                left[0]()
                del left[0]
        except KeyboardInterrupt as error:
            interrupt = error

    if interrupt is not None:
        raise interrupt


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
        "sys_path": search_path(),
        "cwd": working_folder(),
        "environment": dict(environment),
    }
    if default_method() == "fork":
        with contextlib.suppress(_ServerRefused, ConnectionError):
            return _server().fork(boot)

    return Spawned(boot)


def search_path() -> list[str]:
    """``sys.path`` as ranks get it: like imports, without entries that are not strings."""
    return [str.__str__(entry) for entry in sys.path if isinstance(entry, str)]


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
            cwd=boot["cwd"],
            **_detached(),
        )
        pipe = self._process.stdin
        assert pipe is not None, "stdin is a pipe"

        # A rank that ended at once is found by its exit code; the pipe is closed all the same.
        with contextlib.suppress(OSError), pipe:
            pipe.write(json.dumps(boot).encode() + b"\n")

        self.pid = self._process.pid
        self.kill = self._process.kill
        self.server_end = ""

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """Exit code, minus the signal's number, or None when it still runs after ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None


class _ServerRefused(Exception):
    """The fork server cannot fork this rank, or forking it would not be safe."""


class Forked:
    """A rank forked by the fork server, which alone receives its exit code."""

    def __init__(self, server: _ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self._code: int | None = None
        self.server_end = ""  # how the server ended, where it took the rank with it

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """Exit code, minus the signal's number, or None when it still runs after ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._code is None:
            try:
                self._code = self._server.ask({"poll": self.pid})["code"]
            except ConnectionError:  # The kernel ends its ranks with it.
                self._code = -signal.SIGKILL
                self.server_end = self._server.end
            if self._code is None:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.01)

        return self._code

    def kill(self) -> None:
        """End the process now."""
        # By the server: once it has collected the process, the number may belong to another one.
        if self._code is None:
            with contextlib.suppress(ConnectionError):
                self._server.ask({"kill": self.pid})


RankProcess: TypeAlias = Spawned | Forked


class _ForkServer:
    """The caller's side of the fork server: numbered requests and answers, a JSON message each.

    Messages travel whole or not at all. A signal handler or a finalizer may ask while its thread
    waits for an answer, and an exception may end a wait: an answer is taken by its number, and one
    that nobody waits for is dropped.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.end = ""
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        boot = {"fd": theirs.fileno(), "caller": os.getpid(), "sys_path": search_path()}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVER_CODE, json.dumps(boot)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_ONE_THREAD},
                cwd=working_folder(),
                start_new_session=True,
            )
        finally:
            theirs.close()

        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return (
            self.owner == os.getpid()
            and self._socket.fileno() != -1
            and self._process.poll() is None
        )

    def fork(self, boot: dict[str, Any]) -> Forked:
        """Fork a rank that starts from ``boot``."""
        reply = self.ask({"boot": boot})
        if "refused" in reply:
            raise _ServerRefused(reply["refused"])
        return Forked(self, reply["pid"])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send ``request`` and return the answer; ConnectionError when the server is gone."""
        deadline = time.monotonic() + REPLY_SECONDS
        with self._lock:
            number = next(self._numbers)
            message = json.dumps({**request, "number": number}).encode()

            self._answers[number] = None
            try:
                while not self._sent(message):
                    self._wait(select.POLLOUT, deadline)
                while (reply := self._answers[number]) is None:
                    self._wait(select.POLLIN, deadline)
                    self._receive()
                return reply
            except ConnectionError:
                self.close()
                raise
            finally:
                del self._answers[number]

    def _sent(self, message: bytes) -> bool:
        if self._socket.fileno() == -1:
            raise ConnectionError("the fork server has ended")
        try:
            self._socket.send(message)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise _ServerRefused(f"the environment has {len(message):,} bytes") from None
            raise

        return True

    def _wait(self, event: int, deadline: float) -> None:
        """Wait a moment for the server; what was waited for may be there already."""
        if time.monotonic() > deadline:
            self.end = f"did not answer within {REPLY_SECONDS:g} s"
            raise ConnectionError(self.end)

        if self._socket.fileno() != -1:
            poll = select.poll()
            poll.register(self._socket, event)
            poll.poll(1000 * _LOOK_SECONDS)

    def _receive(self) -> None:
        """Note the answers that have come."""
        if self._socket.fileno() == -1:
            raise ConnectionError("the fork server has ended")

        with contextlib.suppress(BlockingIOError):
            while line := self._socket.recv(_REQUEST_BYTES):
                reply = json.loads(line)
                if reply["number"] in self._answers:
                    self._answers[reply["number"]] = reply
            raise ConnectionError("the fork server has ended")

    def close(self) -> None:
        """End the server and, with it, its ranks; in a fork of its owner only let go of it."""
        self._socket.close()
        if self.owner != os.getpid():
            return

        code = self._process.poll()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = self._process.wait(5)
            code = ended if code is None else code
        self.end = self.end or ("ended" if code is None else ending(code))


_servers: list[_ForkServer] = []
_servers_lock = threading.RLock()  # A signal handler may start ranks, too.


def _server() -> _ForkServer:
    """This process's fork server, started when there is none; it ends with this process."""
    with _servers_lock:
        if not _servers or not _servers[-1].alive:
            try:
                _servers[:] = [_ForkServer()]
            except OSError as error:
                raise _ServerRefused(f"the fork server cannot be started: {error}") from error
        return _servers[-1]


def serve(fd: int, caller: int) -> None:
    """Answer requests on socket ``fd`` until the process ``caller`` closes it or ends.

    Requests are JSON messages: ``{"boot": {...}}`` forks a rank and is answered with its pid,
    ``{"poll": pid}`` is answered with its exit code or null, ``{"kill": pid}`` ends it. An answer
    has the request's number.
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
    codes: dict[int, int] = {}
    connection = socket.socket(fileno=fd)
    with connection:
        for request in _requests(connection, caller):
            _collect(codes)
            if "boot" in request:
                folders.add(request["boot"]["folder"])
                _import_slow(read_end)
                reply = _fork(request["boot"], connection, write_end, torch.cuda.is_initialized())
                codes.pop(reply.get("pid", 0), None)
            elif "kill" in request:
                reply = _kill(request["kill"], codes)
            else:
                reply = {"code": codes.get(request["poll"])}
            connection.send(json.dumps({**reply, "number": request["number"]}).encode())

    for folder in folders:  # A caller that was killed could not remove them.
        shutil.rmtree(folder, ignore_errors=True)


def _requests(connection: socket.socket, caller: int) -> Iterator[dict[str, Any]]:
    """The caller's requests, until it has gone: a fork of it may hold the connection open."""
    while os.getppid() == caller:
        if select.select([connection], [], [], 1.0)[0]:
            message = connection.recv(_REQUEST_BYTES)
            if not message:
                return
            yield json.loads(message)


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
    try:
        os.chdir(boot["cwd"])
    except OSError:  # It was removed meanwhile, or only the caller may enter it.
        os.chdir(os.sep)
    sys.path[:] = boot["sys_path"]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Ranks must not share the server's global random state.
    from tutorec.spmd.worker import main

    main(boot, at_end)


def _collect(codes: dict[int, int]) -> None:
    """Note exit codes of ranks that have ended (minus the signal's number), also if nobody asks."""
    with contextlib.suppress(ChildProcessError):  # No rank is left.
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            codes[pid] = os.waitstatus_to_exitcode(status)


def _kill(pid: int, codes: dict[int, int]) -> dict[str, Any]:
    if pid not in codes:
        os.kill(pid, signal.SIGKILL)
    return {}

"""One generation of rank processes, seen from the caller: start, hand out tasks, learn of failures, end."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from multiprocess import connection as mp_connection
from multiprocess.connection import Connection

from tutorec._spmd_device import loopback
from tutorec._spmd_progress import read_progress, share_progress, uneven_exchanges
from tutorec._spmd_rank import GREETING, outlives_its_folder
from tutorec._spmd_report import death_message, is_peer_loss, scrub, stall_message, uneven_message
from tutorec._spmd_side import live_tokens, name_of, take_dropped
from tutorec._spmd_start import RankProcess, start_rank
from tutorec._spmd_wire import FunctionPayload, dump, dump_function
from tutorec.errors import RankError, RankTimeoutError

__all__ = ["START_SECONDS", "Task", "WorkerOptions", "WorkerPool"]

START_SECONDS = 120.0  # Importing torch W times on a busy machine is slow, and is no fault of the caller's function.
ANSWER_SECONDS = 1.5  # How long a busy rank may take to say where it is before it counts as silent.
SAME_MOMENT_SECONDS = 0.1
AFTERMATH_SECONDS = 1.5  # How long to look for the cause when a rank only reports that another one has gone.
# What the ranks remember of functions that were sent, and of how many bytes; a forgotten one is sent again.
FUNCTIONS = 256
FUNCTION_BYTES = 8 * 2**20


@dataclass(frozen=True)
class WorkerOptions:
    """What a pool was asked for.

    Args:
        world_size: W, ranks.
        hosts: Simulated hosts that share them evenly.
        backend: ``auto``, ``gloo`` or ``nccl``, as ``Ranks`` takes it.
        timeout: Seconds that a run may take.
    """

    world_size: int
    hosts: int
    backend: str
    timeout: float

    def environment(self, rank: int) -> dict[str, str]:
        """The variables by which a rank knows its place, as torchrun sets them."""
        local = self.world_size // self.hosts
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        place = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": rank % local,
            "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": rank // local,
            "GROUP_WORLD_SIZE": self.hosts,
        }
        return {**loopback(), **inherited, **{name: str(value) for name, value in place.items()}}


@dataclass(frozen=True)
class Task:
    """A call, ready to travel.

    Args:
        name: The function's name, for messages.
        function: The function.
        arguments: Pickled positional and keyword arguments.
    """

    name: str
    function: FunctionPayload
    arguments: bytes


class WorkerPool:
    """The running processes of a pool.

    Args:
        options: What the pool was asked for.
        validate: The caller's validation switch, None when it has none.
    """

    def __init__(self, options: WorkerOptions, validate: bool | None) -> None:
        self.options = options
        self.token = secrets.token_hex(8)
        self.backend = ""
        self.owner = os.getpid()
        self._runs = 0
        # What the ranks know: functions, the latest last, with the names of their constants and their bytes.
        self._functions: dict[str, tuple[frozenset[str], int]] = {}
        self._constants: dict[str, str] = {}
        self._sys_path = list(sys.path)
        self._processes: list[RankProcess] = []
        self._tasks: dict[int, Connection] = {}
        self._controls: dict[int, Connection] = {}
        self._folder = tempfile.mkdtemp(prefix="tutorec-ranks-")
        self._progress = share_progress(self._folder, -1, options.world_size)
        try:
            self._start(validate)
        except BaseException:
            self.end()
            raise
        live_tokens.add(self.token)

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes]

    def _start(self, validate: bool | None) -> None:
        """Start the processes and wait until all have joined the group."""
        key = secrets.token_bytes(32)
        deadline = time.monotonic() + max(START_SECONDS, self.options.timeout)
        with _listener(self._folder) as listener:
            boot = {
                "world_size": self.options.world_size,
                "token": self.token,
                "address": [listener.family.name, listener.getsockname()],
                "key": key.hex(),
                "folder": self._folder,
                "backend": self.options.backend,
                # The caller's deadline comes first, so that the rank that stalls is named, not the one that waits.
                "timeout": 2 * max(START_SECONDS, self.options.timeout),
                "validate": validate,
            }
            for rank in range(self.options.world_size):
                self._processes.append(start_rank({**boot, "rank": rank}, self.options.environment(rank)))
            self._accept(listener, key, deadline)
        ready = self._gather("ready", "the start", deadline, max(START_SECONDS, self.options.timeout))
        self.backend = ready[0]
        if outlives_its_folder():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self, listener: socket.socket, key: bytes, deadline: float) -> None:
        """Wait for two connections from every rank. One that is silent or has another key changes nothing."""
        ended: set[int] = set()
        unknown: dict[socket.socket, bytes] = {}
        try:
            while len(self._tasks) + len(self._controls) < 2 * self.options.world_size:
                ready = _readable([listener, *unknown])
                if not ready or time.monotonic() > deadline:
                    ended = self._check_starting(deadline, ended)
                for sock in ready:
                    if sock is listener:
                        with contextlib.suppress(OSError):
                            unknown[listener.accept()[0]] = b""
                    else:
                        self._greet(sock, unknown, key)
        finally:
            for sock in unknown:
                sock.close()

    def _greet(self, sock: socket.socket, unknown: dict[socket.socket, bytes], key: bytes) -> None:
        """Read from a connection until it has told its key and its rank, or has ended."""
        try:
            part = sock.recv(GREETING.size - len(unknown[sock]))
        except OSError:
            part = b""
        unknown[sock] += part
        if part and len(unknown[sock]) < GREETING.size:
            return
        greeting = unknown.pop(sock)
        if len(greeting) < GREETING.size or not secrets.compare_digest(greeting[: len(key)], key):
            sock.close()
            return
        _, rank, purpose = GREETING.unpack(greeting)
        _limit_blocking(sock, max(self.options.timeout, 2.0))
        {b"tasks": self._tasks, b"control": self._controls}[purpose.rstrip(b"\0")][rank] = Connection(sock.detach())

    def _check_starting(self, deadline: float, ended: set[int]) -> set[int]:
        """Raise for a rank that ended without a message; returns those that have ended, of which ``ended`` is known.

        A rank that has connected says by itself why it ended. One may connect and end between two looks: it counts as
        dead when it was so at the look before, after which every connection that waited was accepted.
        """
        codes = {rank: process.exit_code() for rank, process in enumerate(self._processes) if rank not in self._tasks}
        dead = {rank: code for rank, code in codes.items() if code is not None}
        for rank, code in dead.items():
            if rank in ended:
                raise RankError(death_message(rank, code, "the start"), rank)
        if time.monotonic() > deadline:
            late = next(rank for rank in range(self.options.world_size) if rank not in self._tasks)
            raise RankTimeoutError(f"rank {late} did not start within {START_SECONDS:g} s", late)
        return set(dead)

    def prepare(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
        """Pickle a call; what cannot be pickled raises here and does the ranks no harm."""
        return Task(name_of(fn), dump_function(fn), dump((args, kwargs)))

    def run(self, task: Task) -> list[bytes]:
        """Run ``task`` on every rank; return the pickled values in rank order, or raise for the cause of a failure."""
        self._runs += 1
        news = self._news(task.function)
        message = {
            **news,
            "run": self._runs,
            "arguments": task.arguments,
            "sys_path": list(sys.path) if sys.path != self._sys_path else None,
            "forget": [*take_dropped(self.token), *news["forget"]],
        }
        self._sys_path = list(sys.path)
        deadline = time.monotonic() + self.options.timeout
        data = pickle.dumps(message)
        for rank in range(self.options.world_size):
            # A rank that has died or does not read is found, and named, by the wait below.
            with contextlib.suppress(OSError):
                self._tasks[rank].send_bytes(data)
        return self._gather("value", f"{task.name!r} (run {self._runs})", deadline, self.options.timeout)

    def _news(self, function: FunctionPayload) -> dict[str, Any]:
        """What the ranks do not know yet of a function and its constants, and which functions they forget."""
        constants = {n: value for n, value in function.constants.items() if self._constants.get(n) != value[0]}
        self._constants.update({name: value[0] for name, value in constants.items()})
        known = self._functions
        forget = [key for key, (names, _) in known.items() if not names.isdisjoint(constants)]  # hold old values
        for key in forget:
            del known[key]
        payload = None if function.key in known else function.payload
        known.pop(function.key, None)
        known[function.key] = frozenset(function.constants), len(function.payload)
        while len(known) > FUNCTIONS or (len(known) > 1 and sum(size for _, size in known.values()) > FUNCTION_BYTES):
            forget.append(next(iter(known)))
            del known[forget[-1]]
        return {"function": function.key, "payload": payload, "constants": constants, "forget": forget}

    def _gather(self, expected: str, doing: str, deadline: float, timeout: float) -> list[Any]:
        """One message of kind ``wanted`` from every rank, in rank order."""
        values: dict[int, Any] = {}
        failures: dict[int, dict[str, Any]] = {}
        while len(values) + len(failures) < self.options.world_size:
            pending = {conn: rank for rank, conn in self._tasks.items() if rank not in values and rank not in failures}
            ready = mp_connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready and failures:
                break
            if not ready:
                self._raise_stall(doing, timeout, list(pending.values()))
            for conn in ready:
                rank = pending[conn]  # pyright: ignore[reportArgumentType]
                kind, content = self._receive(rank)
                if kind == expected:
                    values[rank] = content
                    continue
                failures[rank] = content
                # Others may be about to report the cause of this, or the same at the same moment.
                patience = AFTERMATH_SECONDS if is_peer_loss(content) else SAME_MOMENT_SECONDS
                deadline = min(deadline, time.monotonic() + patience)
        if failures:
            self._raise_failure(doing, failures)
        return [values[rank] for rank in range(self.options.world_size)]

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            kind, run, content = pickle.loads(self._tasks[rank].recv_bytes())
        except (EOFError, OSError):
            code = self._processes[rank].exit_code(10.0)  # known at once, but on a busy machine
            return "death", {"kind": "death", "text": "", "code": code, "when": 0.0}
        if run != self._runs:
            text = f"it answered run {run} a second time; a function must not write to the connections of its rank"
            return "error", {"kind": "RankError", "text": text, "traceback": "", "when": time.time()}
        return kind, content

    def _raise_failure(self, doing: str, failures: dict[int, dict[str, Any]]) -> None:
        """Raise for the cause: a death before an exception, that before the loss of a peer, the earliest first."""

        def order(rank: int) -> tuple[int, float, int]:
            failure = failures[rank]
            same = [
                f["when"] for f in failures.values() if (f["kind"], f["text"]) == (failure["kind"], failure["text"])
            ]
            severity = 0 if failure["kind"] == "death" else 2 if is_peer_loss(failure) else 1
            return severity, min(same), rank

        rank = min(failures, key=order)
        failure = failures[rank]
        if failure["kind"] == "death":
            if failure["code"] == -signal.SIGABRT:
                uneven, skipped = uneven_exchanges(read_progress(self._progress))
                if uneven:
                    raise RankError(uneven_message(rank, doing, uneven), (skipped or [rank])[0])
            raise RankError(death_message(rank, failure["code"], doing), rank)
        trace = scrub(failure["traceback"])
        text = scrub(f"{failure['kind']}: {failure['text']}" if failure["text"] else failure["kind"])
        raise RankError(f"rank {rank} raised in {doing}: {text}\n\n{trace}", rank, trace)

    def _raise_stall(self, doing: str, timeout: float, pending: list[int]) -> None:
        rank, message = stall_message(doing, timeout, self._ask(pending), self.options.world_size)
        raise RankTimeoutError(message, rank, message)

    def _ask(self, ranks: list[int]) -> dict[int, dict[str, Any] | None]:
        """Ask busy ranks where they are; None for a rank that does not answer."""
        places: dict[int, dict[str, Any] | None] = dict.fromkeys(sorted(ranks))
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._controls[rank].send_bytes(b"where")
        deadline = time.monotonic() + ANSWER_SECONDS
        waiting = {self._controls[rank]: rank for rank in ranks}
        while waiting:
            ready = mp_connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for conn in ready:
                with contextlib.suppress(EOFError, OSError):
                    places[waiting[conn]] = pickle.loads(conn.recv_bytes())  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
                del waiting[conn]  # pyright: ignore[reportArgumentType]
        return places

    def end(self, grace: float = 0.0) -> None:
        """End all ranks, by force after ``grace`` seconds; calling it again does nothing."""
        if self.owner != os.getpid():  # A fork of the caller does not own the ranks.
            return
        live_tokens.discard(self.token)
        for conn in self._tasks.values() if grace else []:
            with contextlib.suppress(OSError):
                conn.send_bytes(pickle.dumps(None))
        deadline = time.monotonic() + grace
        for process in self._processes:
            if process.exit_code(max(0.0, deadline - time.monotonic())) is None:
                process.kill()
        for conn in [*self._tasks.values(), *self._controls.values()]:
            conn.close()
        for process in self._processes:
            process.exit_code(5.0)
        self._processes, self._tasks, self._controls = [], {}, {}
        self._progress.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _listener(folder: str) -> socket.socket:
    """A listening socket in ``folder`` where the system has such, on a free local port elsewhere."""
    path = os.path.join(folder, "socket")
    if hasattr(socket, "AF_UNIX") and sys.platform != "win32" and len(os.fsencode(path)) < 100:
        listener, address = socket.socket(socket.AF_UNIX), path
    else:
        listener, address = socket.socket(socket.AF_INET), ("127.0.0.1", 0)
    listener.bind(address)
    listener.listen(4096)  # The system lowers it to what it has.
    return listener


def _readable(sockets: list[socket.socket]) -> list[socket.socket]:
    """Sockets that have something to read or to accept, none after a moment."""
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            selector.register(sock, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(0.1)]  # pyright: ignore[reportReturnType]


def _limit_blocking(sock: socket.socket, seconds: float) -> None:
    """Make reads and writes give up, so that a rank stopped in the middle of a message cannot hang the caller."""
    sock.setblocking(True)
    if sys.platform != "win32":
        limit = struct.pack("ll", int(seconds), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

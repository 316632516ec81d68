"""The caller's side of a pool of ranks: start processes, hand out tasks, learn of failures, end."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from multiprocess import connection as mp_connection
from multiprocess.connection import Connection

from tutorec._check import is_int
from tutorec.errors import RankError, RankTimeoutError
from tutorec.spmd.devices import loopback, under_torchrun
from tutorec.spmd.messages import (
    death_message,
    is_peer_loss,
    read_progress,
    scrub,
    stall_message,
    uneven_exchanges,
    uneven_message,
)
from tutorec.spmd.pickling import (
    FunctionPayload,
    call_arguments,
    dump,
    dump_function,
    load,
    name_of,
)
from tutorec.spmd.progress import share_progress
from tutorec.spmd.start import RankProcess, start_rank
from tutorec.spmd.worker import (
    GREETING,
    Kept,
    RankWorld,
    checked_timeout,
    init,
    live_tokens,
    outlives_its_folder,
    restore_world,
    take_dropped,
)

if TYPE_CHECKING:
    import torch

_CLOSE_SECONDS = 2.0
# Importing torch W times on a busy machine is slow, and is not a fault of the caller's function.
START_SECONDS = 120.0
ANSWER_SECONDS = 1.5  # How long a busy rank may take to say where it is before it counts as silent.
SAME_MOMENT_SECONDS = 0.1
GREETING_SECONDS = 1.0  # How long a connection may take to name its rank.
# How long to look for the cause when a rank only reports that another one has gone.
AFTERMATH_SECONDS = 1.5
# What the ranks remember of functions that were sent, and of how many bytes; a forgotten one is
# sent again.
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
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("TORCHELASTIC_")
        }
        place = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": rank % local,
            "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": rank // local,
            "GROUP_WORLD_SIZE": self.hosts,
        }
        return {**loopback(), **inherited, **{name: str(value) for name, value in place.items()}}


class Ranks:
    """A pool of W rank processes with a process group, kept from call to call.

    The processes start at the first :meth:`run`. Functions, classes and constants of notebook cells
    and scripts travel to the ranks and keep their identity: a function is sent once, and an object
    of a class made in one call is an instance of that class in the next. A rank never imports the
    caller's script, which therefore needs no ``if __name__ == "__main__":``.

    On Linux the first pool of a program starts a *fork server*, a fresh process that imports torch
    once; ranks are forks of it and start in a moment. Where that would not be safe, on other
    systems, and with ``TUTOREC_RANKS_START=spawn``, every rank is a fresh interpreter that imports
    torch itself.

    When a rank raises, dies or stalls, all ranks are ended, the error names the rank and the place,
    and the next :meth:`run` starts new ones; what the old ones kept is gone.

    Args:
        world_size: W, the number of ranks.
        hosts: Number of simulated hosts that the ranks are split into, evenly and in order. It sets
            ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` and ``GROUP_RANK`` on each rank; all processes are
            on this machine all the same.
        backend: ``"auto"``: where there is a GPU for every rank, one process group that carries CPU
            tensors by gloo and CUDA tensors by NCCL, else gloo. ``"nccl"`` demands the first,
            ``"gloo"`` asks for the second.
        timeout: Seconds that one run may take, at most 1,000,000. Starting the ranks does not
            count.

    Raises:
        ValueError: No such number of ranks, hosts or seconds.

    Example:
        >>> import torch
        >>> def total(rank, x):
        ...     value = torch.tensor([x + rank])
        ...     torch.distributed.all_reduce(value)
        ...     return value.item()
        >>> with Ranks(2) as world:
        ...     world.run(total, 10)
        [21, 21]
    """

    def __init__(
        self, world_size: int, hosts: int | None = None, backend: str = "auto", timeout: float = 60
    ) -> None:
        count = 1 if hosts is None else hosts
        if not is_int(world_size, 1):
            raise ValueError(
                f"world_size must be a whole number of ranks, 1 or more, got {world_size!r}"
            )
        if not is_int(count, 1) or world_size % count:
            fits = [k for k in range(1, world_size + 1) if world_size % k == 0]
            raise ValueError(
                f"hosts={hosts!r} cannot share {world_size} ranks evenly; use one of {fits}"
            )
        if backend not in ("auto", "gloo", "nccl"):
            raise ValueError(f"backend must be 'auto', 'gloo' or 'nccl', got {backend!r}")
        self._options = WorkerOptions(world_size, count, backend, checked_timeout(timeout))
        self._lock = threading.Lock()
        self._closed = False
        self._pools: list[WorkerPool] = []
        self._finalizer = weakref.finalize(self, _end_pools, self._pools)

    @property
    def world_size(self) -> int:
        """W, the number of ranks."""
        return self._options.world_size

    @property
    def rank(self) -> int:
        """This process's rank: inside a run only."""
        raise AttributeError("a pool has a rank inside a run only, in the function given to run()")

    @property
    def device(self) -> torch.device:
        """The device of this process's rank, as :func:`device` gives it: inside a run only."""
        raise AttributeError(
            "ranks have a device each: read it inside of a run, in the function given to run(); "
            "tutorec.spmd.device() is the device of the process that calls it"
        )

    @property
    def hosts(self) -> int:
        """Simulated hosts that share the ranks."""
        return self._options.hosts

    @property
    def backend(self) -> str:
        """The backend in use, once the ranks run; before that the one asked for."""
        return self._pools[-1].backend if self._pools else self._options.backend

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks in rank order, empty while none run."""
        return self._pools[-1].pids if self._pools else []

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._pools else "not started"
        hosts = f", hosts={self.hosts}" if self.hosts > 1 else ""
        return f"Ranks({self.world_size}{hosts}, backend={self.backend!r}) {state}"

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn`` on every rank and return what each returned, in rank order.

        Parameters of ``fn`` named ``rank`` and ``world_size`` are filled in when the call leaves
        them out. Arguments are copied to every rank, except handles made by ``keep``, which become
        the object that the rank kept. Globals that ``fn`` uses are copied when first used and when
        the caller changes them: what a rank changes in them stays changed on that rank. Ranks
        forget functions when one of their globals changes, and those that were not used for longest
        when there are more than 256 of them or 8 MiB: pass large values as arguments, or ``keep``
        them. Tensors travel through CPU memory and arrive on the CPU, in both directions: move them
        to :func:`device` where they are used.

        Raises:
            RankError: A rank raised or died.
            RankTimeoutError: The ranks did not finish in time.
            RuntimeError: This process is a fork of the one that started the ranks.
            TypeError: The arguments do not fit ``fn``.
        """
        # Notebooks and pytest then show the caller's line and the rank's own traceback.
        __tracebackhide__ = True
        for pool in self._pools[-1:]:
            if pool.owner != os.getpid():
                raise RuntimeError(
                    f"process {pool.owner} started these ranks, and this is process {os.getpid()}, "
                    "a fork of it: each would get the other's values; make another "
                    f"Ranks({self.world_size}) in this process"
                )
        call_arguments(fn, args, kwargs, rank=0, world_size=self.world_size)
        with self._lock:
            if self._closed:
                raise ValueError(f"run() after close(); make another Ranks({self.world_size})")
            if not self._pools:
                self._pools.append(WorkerPool(self._options))
            # What cannot be pickled raises here and does the ranks no harm.
            function, arguments = dump_function(fn), dump((args, kwargs))
            try:
                values = self._pools[-1].run(name_of(fn), function, arguments)
            except RankError as error:
                _end_pools(self._pools)
                raise error.with_traceback(None) from None
            except BaseException:
                _end_pools(self._pools)
                raise
        return [load(value) for value in values]

    def keep(self, obj: Any) -> Kept:
        """Keep ``obj`` on a rank, inside a run; returns a handle that later runs resolve.

        Example:
            >>> world = Ranks(2)
            >>> def build():
            ...     return world.keep([0])
            >>> def count(state, step):
            ...     state[0] += step
            ...     return state[0]
            >>> handle = world.run(build)[0]
            >>> world.run(count, handle, 2), world.run(count, handle, 3)
            ([2, 2], [5, 5])
            >>> world.close()
        """
        raise RuntimeError(
            f"keep() was called outside of a run, with a {type(obj).__name__}: call it in the "
            "function given to run(), where it keeps the object on each rank"
        )

    def close(self) -> None:
        """End the ranks; what they kept is gone."""
        with self._lock:
            self._closed = True
            _end_pools(self._pools, _CLOSE_SECONDS)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., RankWorld], tuple[str, int]]:
        """Inside a run the pool is each rank's view of it."""
        return restore_world, (self._pools[-1].token if self._pools else "", self.hosts)


def _end_pools(pools: list[WorkerPool], grace: float = 0.0) -> None:
    """End running pools and forget them; also runs at garbage collection and exit."""
    while pools:
        pools.pop().end(grace)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    hosts: int | None = None,
    backend: str = "auto",
    timeout: float = 60,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn`` once on ``world_size`` ranks and return their values in rank order.

    Under ``torchrun`` this process already is one of several ranks: then ``fn`` is called here, in
    the group that torchrun describes (its number of ranks counts, not ``world_size``), and every
    process gets the values of all.

    Args:
        fn: Called on each rank; parameters named ``rank`` and ``world_size`` are filled in.
        world_size: W, the number of ranks to start.
        *args: Positional arguments of ``fn``.
        hosts: Simulated hosts, as in :class:`Ranks`.
        backend: As in :class:`Ranks`.
        timeout: Seconds that the call may take.
        **kwargs: Keyword arguments of ``fn``.

    Example:
        >>> run_ranks(lambda rank: rank * rank, 2)
        [0, 1]
    """
    __tracebackhide__ = True
    if under_torchrun():
        return _run_here(fn, args, kwargs, backend, timeout)
    with Ranks(world_size, hosts=hosts, backend=backend, timeout=timeout) as world:
        return world.run(fn, *args, **kwargs)


def _run_here(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: str,
    timeout: float,
) -> list[Any]:
    """Call ``fn`` in this process of several and exchange the values."""
    import torch.distributed as dist

    init(backend, timeout)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    args, kwargs = call_arguments(fn, args, kwargs, rank, world_size)
    payloads: list[Any] = [None] * world_size
    dist.all_gather_object(payloads, dump(fn(*args, **kwargs)))
    return [load(payload) for payload in payloads]


class WorkerPool:
    """The running processes of a pool.

    Args:
        options: What the pool was asked for.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.token = secrets.token_hex(8)
        self.backend = ""
        self.owner = os.getpid()
        self._runs = 0
        # What the ranks know: functions, the latest last, with the names of their constants and
        # their bytes.
        self._functions: dict[str, tuple[frozenset[str], int]] = {}
        self._constants: dict[str, str] = {}
        self._sys_path = list(sys.path)
        self._processes: list[RankProcess] = []
        self._tasks: dict[int, Connection] = {}
        self._controls: dict[int, Connection] = {}
        self._folder = tempfile.mkdtemp(prefix="tutorec-ranks-")
        self._progress = share_progress(self._folder, -1, options.world_size)
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        live_tokens.add(self.token)

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes]

    def _start(self) -> None:
        """Start the processes and wait until all have joined the group."""
        from tutorec._validation import validation_enabled

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
                # The caller's deadline comes first, so that the rank that stalls is named, not the
                # one that waits.
                "timeout": 2 * max(START_SECONDS, self.options.timeout),
                "validate": validation_enabled(),
            }
            for rank in range(self.options.world_size):
                self._processes.append(
                    start_rank({**boot, "rank": rank}, self.options.environment(rank))
                )
            self._accept(listener, key, deadline)
        ready = self._gather(
            "ready", "the start", deadline, max(START_SECONDS, self.options.timeout)
        )
        self.backend = ready[0]
        if outlives_its_folder():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self, listener: socket.socket, key: bytes, deadline: float) -> None:
        """Wait for two connections from every rank; strangers and silent ones are ignored."""
        ended: set[int] = set()
        listener.settimeout(0.1)
        while len(self._tasks) + len(self._controls) < 2 * self.options.world_size:
            try:
                sock, _ = listener.accept()
            except OSError:
                ended = self._check_starting(deadline, ended)
            else:
                self._greet(sock, key)

    def _greet(self, sock: socket.socket, key: bytes) -> None:
        """Read the key and the rank of a connection, which a rank sends at once."""
        sock.settimeout(GREETING_SECONDS)
        greeting = b""
        with contextlib.suppress(OSError):
            while len(greeting) < GREETING.size and (
                part := sock.recv(GREETING.size - len(greeting))
            ):
                greeting += part
        if len(greeting) < GREETING.size or not secrets.compare_digest(greeting[: len(key)], key):
            sock.close()
            return
        _, rank, purpose = GREETING.unpack(greeting)
        _limit_blocking(sock, max(self.options.timeout, 2.0))
        {b"tasks": self._tasks, b"control": self._controls}[purpose.rstrip(b"\0")][rank] = (
            Connection(sock.detach())
        )

    def _check_starting(self, deadline: float, ended: set[int]) -> set[int]:
        """Raise for a rank that ended without a message; returns those in ``ended`` and new ones.

        A rank that has connected says by itself why it ended. One may connect and end between two
        looks: it counts as dead when it was so at the look before, after which every connection
        that waited was accepted.
        """
        codes = {
            rank: process.exit_code()
            for rank, process in enumerate(self._processes)
            if rank not in self._tasks
        }
        dead = {rank: code for rank, code in codes.items() if code is not None}
        for rank, code in dead.items():
            if rank in ended:
                raise RankError(death_message(rank, code, "the start"), rank)
        if time.monotonic() > deadline:
            late = next(rank for rank in range(self.options.world_size) if rank not in self._tasks)
            raise RankTimeoutError(f"rank {late} did not start within {START_SECONDS:g} s", late)
        return set(dead)

    def run(self, name: str, function: FunctionPayload, arguments: bytes) -> list[bytes]:
        """Call a function on every rank; return pickled values in rank order, or raise the cause.

        Args:
            name: The function's name, for messages.
            function: The function.
            arguments: Pickled positional and keyword arguments.
        """
        self._runs += 1
        news = self._news(function)
        message = {
            **news,
            "run": self._runs,
            "arguments": arguments,
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
        return self._gather("value", f"{name!r} (run {self._runs})", deadline, self.options.timeout)

    def _news(self, function: FunctionPayload) -> dict[str, Any]:
        """What the ranks lack of a function and its constants, and functions to forget."""
        constants = {
            n: value
            for n, value in function.constants.items()
            if self._constants.get(n) != value[0]
        }
        self._constants.update({name: value[0] for name, value in constants.items()})
        known = self._functions
        # hold old values
        forget = [key for key, (names, _) in known.items() if not names.isdisjoint(constants)]
        for key in forget:
            del known[key]
        payload = None if function.key in known else function.payload
        known.pop(function.key, None)
        known[function.key] = frozenset(function.constants), len(function.payload)
        while len(known) > FUNCTIONS or (
            len(known) > 1 and sum(size for _, size in known.values()) > FUNCTION_BYTES
        ):
            forget.append(next(iter(known)))
            del known[forget[-1]]
        return {
            "function": function.key,
            "payload": payload,
            "constants": constants,
            "forget": forget,
        }

    def _gather(self, expected: str, doing: str, deadline: float, timeout: float) -> list[Any]:
        """One message of kind ``expected`` from every rank, in rank order."""
        values: dict[int, Any] = {}
        failures: dict[int, dict[str, Any]] = {}
        while len(values) + len(failures) < self.options.world_size:
            pending = {
                conn: rank
                for rank, conn in self._tasks.items()
                if rank not in values and rank not in failures
            }
            ready = mp_connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready and failures:
                break
            if not ready:
                places = self._ask(list(pending.values()))
                rank, message = stall_message(doing, timeout, places, self.options.world_size)
                raise RankTimeoutError(message, rank, message)
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
            text = (
                f"it answered run {run} a second time; a function must not write to the "
                "connections of its rank"
            )
            return "error", {
                "kind": "RankError",
                "text": text,
                "traceback": "",
                "when": time.time(),
            }
        return kind, content

    def _raise_failure(self, doing: str, failures: dict[int, dict[str, Any]]) -> None:
        """Raise the cause: a death before an exception before a lost peer; the earliest first."""

        def order(rank: int) -> tuple[int, float, int]:
            failure = failures[rank]
            same = [
                f["when"]
                for f in failures.values()
                if (f["kind"], f["text"]) == (failure["kind"], failure["text"])
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
        text = scrub(
            f"{failure['kind']}: {failure['text']}" if failure["text"] else failure["kind"]
        )
        raise RankError(f"rank {rank} raised in {doing}: {text}\n\n{trace}", rank, trace)

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
    """A listening socket in ``folder`` if the system has such, else on a free local port."""
    path = os.path.join(folder, "socket")
    if hasattr(socket, "AF_UNIX") and sys.platform != "win32" and len(os.fsencode(path)) < 100:
        listener, address = socket.socket(socket.AF_UNIX), path
    else:
        listener, address = socket.socket(socket.AF_INET), ("127.0.0.1", 0)
    listener.bind(address)
    listener.listen(4096)  # The system lowers it to what it has.
    return listener


def _limit_blocking(sock: socket.socket, seconds: float) -> None:
    """Limit reads and writes in time, so that a stopped rank cannot hang the caller."""
    sock.setblocking(True)
    if sys.platform != "win32":
        limit = struct.pack("ll", int(seconds), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

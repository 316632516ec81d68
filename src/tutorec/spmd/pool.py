"""The caller's side of a pool of ranks: start processes, hand out tasks, learn of failures, end."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import secrets
import selectors
import shutil
import signal
import socket
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tutorec._check import is_int
from tutorec.errors import RankError, RankTimeoutError
from tutorec.spmd.channel import Channel, listener
from tutorec.spmd.messages import (
    below_the_pool,
    death_message,
    end_message,
    first_failure,
    is_peer_loss,
    raised,
    read_progress,
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
from tutorec.spmd.rank import share_progress
from tutorec.spmd.start import RankProcess, WorkerOptions, finish, search_path, start_rank
from tutorec.spmd.worker import (
    GREETING,
    Kept,
    RankWorld,
    checked_timeout,
    live_tokens,
    outlives_its_folder,
    restore_world,
    take_dropped,
)

if TYPE_CHECKING:
    import torch

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
_READ = selectors.EVENT_READ
_WRITE = selectors.EVENT_WRITE
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)


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

    When a rank raises, dies or stalls, all ranks are ended at once, the error names the rank and
    the place, and the next :meth:`run` starts new ones; what the old ones kept is gone.

    When the pool is closed, at the end of a ``with`` block or of the program, or because nothing
    refers to it any more, each rank ends as a script does: its threads come to their end, functions
    of ``atexit`` are called, open files are written, pending asynchronous checkpoints, too.

    Args:
        world_size: W, the number of ranks.
        hosts: Number of simulated hosts that the ranks are split into, evenly and in order. It sets
            ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` and ``GROUP_RANK`` on each rank; all processes are
            on this machine all the same.
        backend: ``"auto"``: with a GPU for every rank, one process group that carries CPU
            tensors by gloo and CUDA tensors by NCCL, else gloo. ``"nccl"`` demands the first,
            ``"gloo"`` selects the second.
        timeout: Seconds that one run may take, at most 1,000,000: from when the arguments begin to
            travel until every value has come. Starting the ranks does not count. The end of the
            ranks, at close, may take as long again.

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

        self._options = WorkerOptions(
            int(world_size), int(count), backend, checked_timeout(timeout)
        )
        self._lock = threading.RLock()
        self._closed = False
        self._pools: list[WorkerPool] = []
        self._finalizer = weakref.finalize(self, _end_pools, self._pools, True)

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
        """The backend in use, once the ranks run; before that the one of the constructor."""
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
            RankError: A rank raised or died. Or the pool was closed during the run.
            RankTimeoutError: The ranks did not finish in time.
            RuntimeError: This process is a fork of the one that started the ranks. Or this thread
                is in a run of these ranks already.
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
        if self._in_call():
            raise RuntimeError(
                f"run() of {name_of(fn)!r} was called inside another call of the same ranks, by a "
                "signal handler or while an argument was pickled: a run begins when the one before "
                f"it has ended; use another Ranks({self.world_size}) there"
            )

        with self._lock:
            if self._closed:
                raise ValueError(f"run() after close(); make another Ranks({self.world_size})")
            try:
                values = self._call(fn, args, kwargs)
            except (RankError, KeyboardInterrupt) as error:
                raise error.with_traceback(below_the_pool(error)) from None
            except Exception as error:
                trace = below_the_pool(error)
                if trace is not None or isinstance(error, TypeError | pickle.PicklingError):
                    error.__traceback__ = trace
                raise

        return [load(value) for value in values]

    def _in_call(self) -> bool:
        """Whether this thread is in a call that uses the ranks."""
        return self._lock._is_owned()  # pyright: ignore[reportAttributeAccessIssue]

    def _call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[bytes]:
        """Start ranks if there are none, and have them call ``fn``."""
        try:
            if not self._pools:
                self._pools.append(WorkerPool(self._options))
                self._pools[-1].start()
        except BaseException:
            _end_pools(self._pools)
            raise

        # What cannot be pickled raises here and does the ranks no harm.
        function = dump_function(fn)
        arguments = dump((args, kwargs))
        closed = RankError(
            f"close() was called during the run of {name_of(fn)!r}, by a signal handler or while "
            "an argument was pickled, and the ranks were ended: what they had not written is lost"
        )
        try:
            if self._closed:
                raise closed
            return self._pools[-1].run(name_of(fn), function, arguments)
        except BaseException as error:
            _end_pools(self._pools)
            if self._closed and isinstance(error, RankError):
                raise closed from None
            raise
        finally:
            if self._closed:
                _end_pools(self._pools)

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
            f"keep() was called outside a run, with a {type(obj).__name__}: call it in the "
            "function given to run(), where it keeps the object on each rank"
        )

    def close(self) -> None:
        """End the ranks in order, as :class:`Ranks` describes; what they kept is gone.

        A rank whose end takes longer than ``timeout`` is ended by force, and a RuntimeWarning says
        what it waited for; likewise for one that died or raised since the last run. A run of
        another thread comes to its end first. A call inside a run of the same thread, by a signal
        handler say, ends the ranks at once, and so does one inside another ``close``.
        """
        __tracebackhide__ = True
        if self._in_call() or any(pool.owner != os.getpid() for pool in self._pools):
            self._closed = True
            for pool in [*self._pools]:
                pool.end(True)
            return

        with self._lock:
            self._closed = True
            try:
                _end_pools(self._pools, True)
            except KeyboardInterrupt as error:
                raise error.with_traceback(below_the_pool(error)) from None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        __tracebackhide__ = True
        self.close()

    def __reduce__(self) -> tuple[Callable[..., RankWorld], tuple[str, int]]:
        """Inside a run the pool is each rank's view of it."""
        return restore_world, (self._pools[-1].token if self._pools else "", self.hosts)


def _end_pools(pools: list[WorkerPool], in_order: bool = False) -> None:
    """End running pools and forget them; also runs at garbage collection."""
    while pools:
        try:
            pools[-1].end(in_order)
        finally:
            del pools[-1:]


class WorkerPool:
    """The processes of a pool.

    A signal handler, a finalizer or another thread may end them during any other call: then
    :meth:`end` only kills them, and the call, which learns of that as of any death, cleans up.

    Args:
        options: Those of :class:`Ranks`.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.token = secrets.token_hex(8)
        self.backend = ""
        self.owner = os.getpid()
        self._runs = 0
        self._busy = False
        self._killed = False
        # What the ranks know: functions, the latest last, with the names of their constants and
        # their bytes.
        self._functions: dict[str, tuple[frozenset[str], int]] = {}
        self._constants: dict[str, str] = {}
        self._sys_path = search_path()
        self._processes: list[RankProcess] = []
        self._tasks: dict[int, Channel] = {}
        self._controls: dict[int, Channel] = {}
        self._folder = tempfile.mkdtemp(prefix="tutorec-ranks-")
        self._progress = share_progress(self._folder, -1, options.world_size)

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes]

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Make a call of :meth:`end` meanwhile only kill the processes."""
        try:
            self._busy = True
            yield
        finally:
            self._busy = False

    def start(self) -> None:
        """Start the processes and wait until all have joined the group."""
        with self._in_use():
            self._start()
        live_tokens.add(self.token)
        atexit.register(self.end, True)  # after the fork server's: it comes before

    def _start(self) -> None:
        from tutorec._validation import validation_enabled

        key = secrets.token_bytes(32)
        deadline = time.monotonic() + max(START_SECONDS, self.options.timeout)

        with listener(self._folder) as listening:
            boot = {
                "world_size": self.options.world_size,
                "token": self.token,
                "address": [listening.family.name, listening.getsockname()],
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
            self._accept(listening, key, deadline)

        ready = self._gather(
            "ready", "the start", deadline, max(START_SECONDS, self.options.timeout)
        )
        self.backend = ready[0]
        if outlives_its_folder():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self, listener: socket.socket, key: bytes, deadline: float) -> None:
        """Wait for two connections from every rank; strangers and silent ones are ignored."""
        ended: set[int] = set()
        listener.setblocking(False)

        with _Selector() as selector:
            selector.register(listener, _READ)
            while len(self._tasks) + len(self._controls) < 2 * self.options.world_size:
                if not selector.select(0.1):
                    ended = self._check_starting(deadline, ended)
                    continue
                with contextlib.suppress(BlockingIOError, ConnectionError):  # It went again.
                    sock, _ = listener.accept()
                    self._greet(sock, key)

    def _greet(self, sock: socket.socket, key: bytes) -> None:
        """Read the key and the rank of a connection, which a rank sends at once."""
        sock.settimeout(GREETING_SECONDS)
        greeting = b""
        with contextlib.suppress(OSError):
            while len(greeting) < GREETING.size and (
                data := sock.recv(GREETING.size - len(greeting))
            ):
                greeting += data

        if len(greeting) < GREETING.size or not secrets.compare_digest(greeting[: len(key)], key):
            sock.close()
            return
        _, rank, purpose = GREETING.unpack(greeting)
        channels = {b"tasks": self._tasks, b"control": self._controls}[purpose.rstrip(b"\0")]
        channels[rank] = Channel(sock)

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
                raise self._death(rank, code, "the start")

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
        with self._in_use():
            self._runs += 1
            path = search_path()
            news = self._news(function)
            message = {
                **news,
                "run": self._runs,
                "arguments": arguments,
                "sys_path": path if path != self._sys_path else None,
                "forget": [*take_dropped(self.token), *news["forget"]],
            }
            self._sys_path = path
            deadline = time.monotonic() + self.options.timeout
            data = pickle.dumps(message)
            for channel in self._tasks.values():
                # A rank that has died is found, and named, by the wait below.
                with contextlib.suppress(ConnectionError):
                    channel.begin(data)
            doing = f"{name!r} (run {self._runs})"
            return self._gather("value", doing, deadline, self.options.timeout)

    def _news(self, function: FunctionPayload) -> dict[str, Any]:
        """The definitions of a function that the ranks lack, and functions to forget."""
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
        """One message of kind ``expected`` from every rank, in rank order.

        What is still to be sent is sent meanwhile. However much travels, ``deadline`` holds.
        """
        values: dict[int, Any] = {}
        failures: dict[int, dict[str, Any]] = {}
        with _Selector() as selector:
            for rank, channel in self._tasks.items():
                events = _READ | _WRITE if channel.sending else _READ
                selector.register(channel, events, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                come = 0
                for key, events in ready:
                    channel = self._tasks[key.data]
                    rank = key.data

                    if events & _WRITE and self._sent(channel):
                        selector.modify(channel, _READ, rank)
                    message = self._receive(rank) if events & _READ else None
                    if message is None:
                        continue

                    selector.unregister(channel)
                    come += 1
                    message_type, content = message
                    if message_type == expected:
                        values[rank] = content
                        continue

                    failures[rank] = content
                    # Others may be about to report the cause of this, or the same at the same
                    # moment.
                    patience = AFTERMATH_SECONDS if is_peer_loss(content) else SAME_MOMENT_SECONDS
                    deadline = min(deadline, time.monotonic() + patience)
                if not come and time.monotonic() >= deadline:
                    if failures:
                        break
                    pending = [key.data for key in selector.get_map().values()]
                    raise self._stall(pending, doing, timeout)

        if failures:
            raise self._cause(doing, failures)
        return [values[rank] for rank in range(self.options.world_size)]

    def _sent(self, channel: Channel) -> bool:
        """Send more of a message; returns whether nothing is left to send."""
        try:
            return channel.send()
        except ConnectionError:  # Reading tells why.
            return True

    def _receive(self, rank: int) -> tuple[str, Any] | None:
        """The rank's message, None while parts of it are still to come; or how the rank ended."""
        try:
            message = self._tasks[rank].receive()
        except ConnectionError:
            code = self._processes[rank].exit_code(10.0)  # known at once, but on a busy machine
            return "death", {"kind": "death", "text": "", "code": code, "when": 0.0}

        if message is None:
            return None
        message_type, run, content = pickle.loads(message)
        if message_type != "between" and run != self._runs:
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

        if message_type == "between":
            content["between"] = f"after run {run} and before {self._runs}"
        return message_type, content

    def _stall(self, pending: list[int], doing: str, timeout: float) -> RankTimeoutError:
        """The exception if the ranks in ``pending`` did not answer in time."""
        transfers = {
            rank: self._tasks[rank].transfer for rank in pending if self._tasks[rank].transfer
        }
        states = self._ask(pending)
        rank, message = stall_message(doing, timeout, states, self.options.world_size, transfers)
        return RankTimeoutError(message, rank, message)

    def _death(self, rank: int, code: int | None, doing: str) -> RankError:
        server_end = self._processes[rank].server_end
        return RankError(death_message(rank, code, doing, server_end), rank)

    def _cause(self, doing: str, failures: dict[int, dict[str, Any]]) -> RankError:
        rank = first_failure(failures)
        if failures[rank]["kind"] != "death":
            return raised(rank, failures[rank], f"in {doing}")
        if failures[rank]["code"] == -signal.SIGABRT:
            uneven, skipped = uneven_exchanges(read_progress(self._progress))
            if uneven:
                return RankError(uneven_message(rank, doing, uneven), (skipped or [rank])[0])

        return self._death(rank, failures[rank]["code"], doing)

    def _ask(self, ranks: list[int]) -> dict[int, dict[str, Any] | None]:
        """Ask busy ranks where they are; None for a rank that does not answer."""
        states: dict[int, dict[str, Any] | None] = dict.fromkeys(sorted(ranks))
        deadline = time.monotonic() + ANSWER_SECONDS

        with _Selector() as selector:
            for rank in ranks:
                with contextlib.suppress(ConnectionError):
                    self._controls[rank].begin(b"where")
                    selector.register(self._controls[rank], _READ, rank)
            while selector.get_map() and time.monotonic() < deadline:
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    reply: Any = b""  # of a rank that has gone
                    with contextlib.suppress(ConnectionError):
                        reply = self._controls[key.data].receive()
                    if reply is None:
                        continue
                    states[key.data] = pickle.loads(reply) if reply else None
                    selector.unregister(key.fileobj)

        return states

    def end(self, in_order: bool = False) -> None:
        """End all ranks; calling it again does nothing.

        Args:
            in_order: Give them ``timeout`` seconds to end as a script does, and warn of those that
                could not; else kill them.
        """
        if self.owner != os.getpid():  # A fork of the caller does not own the ranks.
            return
        if self._busy:
            self._killed = True
            self._kill()
            return

        live_tokens.discard(self.token)
        atexit.unregister(self.end)
        faults: list[str] = []
        with self._in_use():
            try:
                if in_order and len(self._tasks) == self.options.world_size:
                    faults = self._end_in_order()
            finally:
                finish(
                    self._kill,
                    *(
                        channel.close
                        for channel in (*self._tasks.values(), *self._controls.values())
                    ),
                    *(partial(process.exit_code, 5.0) for process in self._processes),
                    *(
                        collection.clear
                        for collection in (self._processes, self._tasks, self._controls)
                    ),
                    self._progress.close,
                    partial(shutil.rmtree, self._folder, ignore_errors=True),
                )

        if faults:
            warnings.warn("\n".join(faults), RuntimeWarning, stacklevel=4)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _end_in_order(self) -> list[str]:
        """Make the ranks exit, and wait for them; returns messages about those that could not."""
        for channel in self._tasks.values():
            with contextlib.suppress(ConnectionError):
                channel.begin(pickle.dumps(None))

        deadline = time.monotonic() + self.options.timeout
        codes = {
            rank: process.exit_code(max(0.0, deadline - time.monotonic()))
            for rank, process in enumerate(self._processes)
        }
        if self._killed:
            return []
        states = self._ask([rank for rank, code in codes.items() if code is None])
        faults = [end_message(rank, self.options.timeout, state) for rank, state in states.items()]
        for rank, code in codes.items():
            if code:
                doing = f"close(), or since run {self._runs}"
                message_type, content = self._receive(rank) or ("death", {})
                reported = message_type == "between"
                error = raised(rank, content, doing) if reported else self._death(rank, code, doing)
                faults.append(str(error))

        return faults

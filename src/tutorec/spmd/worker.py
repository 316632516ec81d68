"""A rank process: join the group, run tasks until the caller closes or disappears.

And what a process knows of the rank that it is, with the handles of objects that stay on the ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hmac
import io
import os
import pickle
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from multiprocess.connection import Connection

from tutorec.errors import RankError
from tutorec.spmd.messages import (
    Watch,
    failure_traceback,
    operations_begun,
    other_threads,
    whereabouts,
)
from tutorec.spmd.pickling import Constants, call_arguments, dump_value, load, name_of
from tutorec.spmd.rank import (
    BOTH_BACKENDS,
    device,
    give_threads_time,
    loopback,
    own_gpu,
    pick_backend,
    share_progress,
    under_torchrun,
)

if TYPE_CHECKING:
    import torch
    import torch.distributed
    from torch._C._distributed_c10d import FileStore, Store

GREETING = struct.Struct(">32sI8s")  # the pool's key, the rank, what the connection is for
_POLL_SECONDS = 1.0
_GROWTH = 8 * 2**20  # bytes
_LONGEST_SECONDS = 1_000_000  # Twice as many milliseconds is what the system's calls can wait.
_abandoning = threading.Lock()


@dataclass
class WorkerContext:
    """State of a rank process.

    Args:
        token: Names the pool and its generation; a handle of another one is refused.
        rank: This process's rank.
        world_size: W, ranks in the pool.
        kept_objects: Objects kept by :meth:`RankWorld.keep`, by key.
        run: Number of the run in progress, from 1.
        keep_counts: How often each line of code has called ``keep`` in this run.
        process: This process's id; a fork of it is not a rank.
        ending: The caller has closed the pool.
    """

    token: str
    rank: int
    world_size: int
    kept_objects: dict[str, Any] = field(default_factory=dict)
    run: int = 0
    keep_counts: dict[str, int] = field(default_factory=dict)
    process: int = field(default_factory=os.getpid)
    ending: bool = False


# The rank that this process is, if it is one; and the generations of pools that this process owns
# and that still run.
_side: list[WorkerContext] = []
live_tokens: set[str] = set()
# The caller has one handle for each key, and tells the ranks when it is garbage.
_handles: weakref.WeakValueDictionary[tuple[str, str], Kept] = weakref.WeakValueDictionary()
_dropped: dict[str, list[str]] = {}


def rank_side() -> WorkerContext | None:
    """The rank that this process is, or None in a caller's process."""
    return _side[0] if _side else None


@dataclass(frozen=True)
class Kept:
    """A handle of an object on the ranks; in a later ``run`` it is each rank's own object.

    Handles are made by ``world.keep(obj)`` inside a run. Ranks that keep at the same place of the
    code make the same handle, so that the one that any rank returned refers to the objects of all.

    Args:
        token: The pool's generation.
        key: The run and the place in the code that kept the object.
        type_name: Type name of the object, for the printed form.
        where: The run and the place as a reader knows them.
    """

    token: str
    key: str
    type_name: str = field(compare=False)
    where: str = field(compare=False)

    def __repr__(self) -> str:
        ended = "" if self.token in live_tokens or rank_side() is not None else ", ranks ended"
        return f"<{self.type_name} kept on the ranks by {self.where}{ended}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str, str, str]]:
        side = rank_side()
        if self.token not in live_tokens and (side is None or side.token != self.token):
            raise ValueError(
                f"{self!r} is a handle of ranks that have ended (the pool was closed, or a rank "
                "failed and all were restarted), so what it stood for is lost: run the function "
                "that keeps it again"
            )
        return _restore_kept, (self.token, self.key, self.type_name, self.where)


def _restore_kept(token: str, key: str, type_name: str, where: str) -> Any:
    """The kept object itself on a rank of the pool, the handle elsewhere."""
    side = rank_side()
    if side is None or token in live_tokens:
        return _caller_handle(token, key, type_name, where)
    if side.token != token:
        raise ValueError(
            f"the handle of a {type_name} kept by {where} belongs to another pool of ranks than "
            "this one"
        )
    if key not in side.kept_objects:
        raise ValueError(
            f"rank {side.rank} did not keep the {type_name} that another rank kept by {where}: "
            "call keep on every rank"
        )

    return side.kept_objects[key]


def _caller_handle(token: str, key: str, type_name: str, where: str) -> Kept:
    """The caller's one handle for ``key``; its end drops the objects on the ranks."""
    handle = _handles.get((token, key))
    if handle is None:
        handle = _handles[token, key] = Kept(token, key, type_name, where)
        weakref.finalize(handle, _drop, token, key).atexit = False
    return handle


def _drop(token: str, key: str) -> None:
    if token in live_tokens:
        _dropped.setdefault(token, []).append(key)


def take_dropped(token: str) -> list[str]:
    """Keys that the pool's ranks may forget; each is handed out once."""
    return _dropped.pop(token, [])


class RankWorld:
    """The pool's ``world`` inside a run: this rank's view of it.

    Args:
        side: The rank that this process is.
        hosts: Simulated hosts.
    """

    def __init__(self, side: WorkerContext, hosts: int) -> None:
        self._side = side
        self.rank: int = side.rank
        self.world_size: int = side.world_size
        self.hosts: int = hosts

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.world_size}>"

    def keep(self, obj: Any) -> Kept:
        """Keep ``obj`` on this rank and return a handle that later runs resolve to it."""
        side = self._side
        frame = sys._getframe(1)
        # The place, not a mere count: ranks that keep in different order or number still mean the
        # same objects.
        location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        nth = side.keep_counts[location] = side.keep_counts.get(location, 0) + 1
        key = f"{side.run}:{location}:{nth}"
        side.kept_objects[key] = obj
        where = f"run {side.run} in {frame.f_code.co_name}, line {frame.f_lineno}" + (
            f", number {nth}" if nth > 1 else ""
        )

        return Kept(side.token, key, type(obj).__name__, where)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return device()

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Refuse: a rank is already inside a run."""
        raise RuntimeError(
            f"run() was called inside rank {self.rank}: call {name_of(fn)}() directly"
        )


def restore_world(token: str, hosts: int) -> RankWorld:
    """This rank's view of the pool that was pickled.

    Raises:
        ValueError: This process is not a rank of that pool.
    """
    side = rank_side()
    if side is None or side.token != token:
        raise ValueError(
            "a Ranks object travels to its own ranks only: start another Ranks where it is needed"
        )
    return RankWorld(side, hosts)


def main(boot: dict[str, Any], at_end: Callable[[], None] | None = None) -> None:
    """Be one rank: the entry point of every rank process; never returns.

    Args:
        boot: ``rank``, ``world_size``, ``token``; ``address`` and ``key`` of the caller's listener;
            ``parent``, the process that started this one, and ``kernel``, whether the kernel can
            tell when that one ends; ``folder`` for the rendezvous; ``backend``; ``timeout`` of
            collectives in seconds; ``validate``.
        at_end: Called when the rank has been closed in order.
    """
    _end_with(boot["parent"], boot["kernel"])
    # Interrupts are for the caller, who then ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    for stream in (sys.stdout, sys.stderr):
        # A line leaves in one piece, also where Python runs unbuffered: ranks print at the same
        # time.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)

    side = WorkerContext(token=boot["token"], rank=boot["rank"], world_size=boot["world_size"])
    _side.append(side)
    try:
        control = connect(boot, "control")
        tasks = connect(boot, "tasks")
    except OSError:  # The caller has given up or ended.
        os._exit(1)

    threading.Thread(target=_answer, args=(control, side, boot), daemon=True).start()
    code = 1
    try:
        if _begin(tasks, side, boot) and _serve_until_closed(tasks, side):
            _end(side)
            if at_end is not None:
                at_end()
            code = 0
    except ConnectionError:
        _abandon(boot["folder"])
    except BaseException:
        traceback.print_exc()
    finally:
        # Threads and half-finished collectives of the process group must not keep the process.
        _exit(code)


def _exit(code: int) -> None:
    """End this process now, with what it has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _begin(tasks: Connection, side: WorkerContext, boot: dict[str, Any]) -> bool:
    """Join the group and tell the caller; returns whether there is one."""
    try:
        backend = _set_up(boot)
    except BaseException as error:
        _send(tasks, side, "error", _failure(error))
        return False

    _send(tasks, side, "ready", backend)
    return True


def _serve_until_closed(tasks: Connection, side: WorkerContext) -> bool:
    """Run tasks; returns whether the caller has closed the pool.

    Where a signal handler raises between two runs, the caller learns of it at its next call. Where
    the caller has gone, the rank ends.
    """
    try:
        _serve(tasks, side)
    except BaseException as error:
        _send(tasks, side, "between", _failure(error))
        return False
    return True


def _end(side: WorkerContext) -> None:
    """The steps of an interpreter's exit: threads, functions of ``atexit``, objects, open files.

    The interpreter itself goes on: it could wait for ever for threads of the process group, or
    abort under them.
    """
    side.ending = True
    steps: list[Callable[[], object]] = [
        threading._shutdown,  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs,
        _flush_files,  # Before cycles are collected: one may close a file under its buffer.
        side.kept_objects.clear,
        gc.collect,
        _close_archives,
        _flush_files,
    ]
    for step in steps:
        try:
            _call(step, (), {})
        except BaseException:
            traceback.print_exc()


def _open_files() -> list[io.IOBase]:
    """Files of this process, also those that nothing but an imported module refers to."""
    # by the type: an object may claim to be of any class
    return [obj for obj in gc.get_objects() if issubclass(type(obj), io.IOBase)]


def _flush_files() -> None:
    """Write what open files hold: text first, into the buffers below it."""
    files = _open_files()
    for file in [*(file for file in files if isinstance(file, io.TextIOBase)), *files]:
        _written(file, file.flush)


def _close_archives() -> None:
    """Close files that Python code implements: that of a gzip file, for one, writes its end."""
    printed = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    for file in _open_files():
        if type(file).__module__ != "_io" and not any(file is stream for stream in printed):
            _written(file, file.close)


def _written(file: io.IOBase, write: Callable[[], object]) -> None:
    try:
        if not file.closed:
            write()
    except ValueError:  # It was detached, or is not for writing.
        pass
    except Exception:
        traceback.print_exc()


def _end_with(parent: int, by_kernel: bool) -> None:
    """Ask the kernel to kill this process when its parent ends, even while the GIL is held."""
    if by_kernel:
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # 1 is PR_SET_PDEATHSIG.
    if os.getppid() != parent:  # It ended before the request.
        os._exit(1)


def connect(boot: dict[str, Any], purpose: str) -> Connection:
    """Connect to the caller's listener and say who this is."""
    import socket

    family, address = boot["address"]
    sock = socket.socket(socket.AddressFamily[family], socket.SOCK_STREAM)
    sock.connect(tuple(address) if isinstance(address, list) else address)
    sock.sendall(GREETING.pack(bytes.fromhex(boot["key"]), boot["rank"], purpose.encode()))
    return Connection(sock.detach())


def _set_up(boot: dict[str, Any]) -> str:
    """Import torch, apply the caller's settings, join the group; returns the backend."""
    import torch

    from tutorec._kernels.older_torch import gloo_connects_silently
    from tutorec._validation import validation

    torch.set_num_threads(1)
    validation(boot["validate"])
    rank = boot["rank"]
    world_size = boot["world_size"]
    store = file_store(boot["folder"], world_size)
    # Simulated hosts are this machine: each rank of the pool needs a GPU of it.
    with gloo_connects_silently():
        backend = join_group(
            boot["backend"], rank, world_size, store, boot["timeout"], local_rank=rank
        )
    prove(bytes.fromhex(boot["key"]))
    share_progress(boot["folder"], rank, world_size)
    # What was imported stays: it need not be looked at between runs, and not be taken down at the
    # end, which takes torch 0.2 s for its operators.
    gc.freeze()
    for finalizer in [*getattr(weakref.finalize, "_registry", ())]:
        finalizer.atexit = False
    return backend


def _serve(tasks: Connection, side: WorkerContext) -> None:
    """Run tasks in the order in which they come."""
    functions: dict[str, Any] = {}
    constants = Constants()
    size = 0

    while True:
        task = pickle.loads(tasks.recv_bytes())
        if task is None:
            return

        side.run = task["run"]
        side.keep_counts = {}
        for key in task["forget"]:
            side.kept_objects.pop(key, None)
            functions.pop(key, None)
        if task["sys_path"] is not None:
            sys.path[:] = task["sys_path"]
        try:
            value = _value(task, functions, constants, side)
        except BaseException as error:
            _send(tasks, side, "error", _failure(error))
        else:
            _send(tasks, side, "value", value)
        task = value = None
        size = _free_cycles(size)


def _value(
    task: dict[str, Any], functions: dict[str, Any], constants: Constants, side: WorkerContext
) -> bytes:
    """Run one task and pickle what its function returns."""
    constants.receive(task["constants"])
    if task["payload"] is not None:
        functions[task["function"]] = load(task["payload"], constants)
    fn = functions[task["function"]]
    args, kwargs = load(task["arguments"])
    args, kwargs = call_arguments(fn, args, kwargs, side.rank, side.world_size)

    return dump_value(_call(fn, args, kwargs))


def _free_cycles(size: int) -> int:
    """Collect garbage if the memory in use has grown beyond ``size`` bytes; returns what is in use.

    Python collects after so many objects, whatever their size, and a model whose optimizers run in
    backward is a reference cycle of few large ones. Looking at all objects can take 0.1 s, too long
    after every run.
    """
    from tutorec._kernels.memory import memory_in_use

    in_use = memory_in_use()
    if in_use - size > _GROWTH:
        gc.collect()
        return memory_in_use()
    return min(in_use, size)


def _call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The frame below which everything is the caller's code."""
    try:
        return fn(*args, **kwargs)
    finally:
        sys.stdout.flush()  # What was printed belongs to this call's cell.


def _failure(error: BaseException) -> dict[str, Any]:
    """The description of an exception for the caller."""
    type_name = type(error).__name__
    try:
        text = str(error)
    except Exception as second:  # Then the caller learns that, and not that this process has gone.
        text = f"its message cannot be shown, because __str__ raised {type(second).__name__}"
    return {
        "kind": type_name,
        "text": text,
        "traceback": failure_traceback(error),
        "when": time.time(),
    }


def _send(tasks: Connection, side: WorkerContext, message_type: str, content: Any) -> None:
    # The function forked, and this is the child: the parent answers.
    if os.getpid() != side.process:
        os._exit(0)
    message = pickle.dumps((message_type, side.run, content))
    try:
        tasks.send_bytes(message)
    except ConnectionError:
        raise
    except BaseException:  # of a signal handler; a part may have been sent
        traceback.print_exc()
        _exit(1)


def _answer(control: Connection, side: WorkerContext, boot: dict[str, Any]) -> None:
    """Answer "where are you?" while the main thread works; exit when the caller is gone.

    A process that the caller forked holds the caller's connections: that they are closed is not to
    be relied on.
    """
    main_thread = threading.main_thread().ident or 0
    try:
        while True:
            while not control.poll(_POLL_SECONDS):
                if os.getppid() != boot["parent"]:
                    raise EOFError("the caller has gone")

                # Cleaners of temporary files spare what was used of late.
                with contextlib.suppress(OSError):
                    os.utime(os.path.join(boot["folder"], "rendezvous"))

            control.recv_bytes()
            state = whereabouts(sys._current_frames().get(main_thread))
            begun = (operations_begun() or 1) - 1  # The first was the proof of the start.
            threads = other_threads() if side.ending else {}
            reply = {**state, "run": side.run, "collectives": begun, "threads": threads}
            control.send_bytes(pickle.dumps(reply))
    except (EOFError, OSError):
        _abandon(boot["folder"])


def _abandon(folder: str) -> None:
    """End this process because the caller has gone, and remove what the caller left."""
    with _abandoning:  # Both threads notice; neither may end the process under the other.
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def outlives_its_folder() -> bool:
    """Whether a file that is open can be opened again after its folder was removed, as on Linux."""
    return os.path.isdir("/proc/self/fd")


def file_store(folder: str, world_size: int) -> FileStore:
    """The rendezvous through a file in ``folder``; removable on Linux once all have joined."""
    from torch._C._distributed_c10d import FileStore

    path = os.path.join(folder, "rendezvous")
    # torch opens the file at every use; a cleaner of temporary files may have removed it.
    if outlives_its_folder():
        path = f"/proc/self/fd/{os.open(path, os.O_RDWR | os.O_CREAT, 0o600)}"
    return FileStore(path, world_size)


def prove(key: bytes) -> None:
    """Check that each connection of the default group leads to a rank with this pool's key.

    gloo takes the first process that connects to its port for the rank that it waits for, also when
    another user of this machine started it. Both ends of each connection send a code that needs the
    key, which serves one start. The codes travel as numbers: nothing that a stranger sends is
    unpickled.

    Raises:
        RankError: A connection leads to another process.
    """
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    world_size = dist.get_world_size()

    def code(sender: int, receiver: int) -> bytes:
        return hmac.digest(
            key, f"rank {sender} of {world_size} to rank {receiver}".encode(), "sha256"
        )

    sent = torch.frombuffer(
        bytearray(b"".join(code(rank, other) for other in range(world_size))), dtype=torch.uint8
    )
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    for other, digest in enumerate(received.view(world_size, -1).tolist()):
        if not hmac.compare_digest(bytes(digest), code(other, rank)):
            raise RankError(
                f"a process that this pool did not start took the place of rank {other} in the "
                f"process group of rank {rank}, and nothing was exchanged with it: another user of "
                "this machine may have connected to gloo's port; start the pool again, on a "
                "machine whose users you trust",
                other,
            )


def join_group(
    backend: str, rank: int, world_size: int, store: Store, timeout: float, local_rank: int = 0
) -> str:
    """Start the default process group and return the backend's name.

    Args:
        backend: ``"auto"``, ``"gloo"`` or ``"nccl"``, as :func:`pick_backend` reads them.
        rank: This process's rank.
        world_size: W, the number of ranks.
        store: The rendezvous.
        timeout: Seconds that one collective may take.
        local_rank: Index of this rank among those of its machine.
    """
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=timeout)
    gpu = own_gpu(local_rank)
    store.set_timeout(limit)
    name = pick_backend(backend, store, rank, world_size, gpu)
    if name == BOTH_BACKENDS:
        torch.cuda.set_device(gpu)
    dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=limit)
    return name


def init(backend: str = "auto", timeout: float = 600) -> torch.distributed.ProcessGroup:
    """The default process group of this process, started when there is none.

    Under torchrun it is the group that torchrun describes; on a rank of :class:`Ranks` it runs
    already; elsewhere, in a notebook say, it is a group of one. Calling it again returns the same
    group.

    Under torchrun a rank that has waited in a collective of gloo for ``timeout`` seconds asks the
    others where they are: the note of its uncaught error names who stalled and on which line, who
    only waits, and who has ended.

    Args:
        backend: As in :class:`Ranks`, used when a group is started.
        timeout: Seconds that one collective may take, at most 1,000,000: longer than any rank reads
            a batch or saves.

    Example:
        >>> init().size()
        1
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if not dist.is_initialized():
        limit = timedelta(seconds=checked_timeout(timeout))
        if under_torchrun():
            rank = int(os.environ["RANK"])
            world_size = int(os.environ["WORLD_SIZE"])
            store, _, _ = next(rendezvous("env://", rank, world_size, timeout=limit))
            join_group(backend, rank, world_size, store, timeout, int(os.environ["LOCAL_RANK"]))
            atexit.register(Watch(store, rank, world_size, timeout).end)
        else:
            _join_group_of_one(backend, timeout)
        atexit.register(_leave_group, os.getpid())
        _outlive_forks(weakref.ref(dist.group.WORLD))

    group = dist.group.WORLD
    assert group is not None, "the default group was started above"
    give_threads_time(group)
    return group


def _outlive_forks(group: weakref.ref[torch.distributed.ProcessGroup | None]) -> None:
    """Have a fork of this process never free ``group``.

    A fork has not the group's threads: the end of a group waits for them for ever.
    """
    if not hasattr(os, "register_at_fork"):
        return
    import ctypes

    keep = ctypes.pythonapi.Py_IncRef
    os.register_at_fork(after_in_child=lambda: keep(ctypes.py_object(group())))


def _join_group_of_one(backend: str, timeout: float) -> None:
    """Start a private group: its rendezvous is this process's memory, its interface loopback."""
    from torch._C._distributed_c10d import HashStore

    added = {name: value for name, value in loopback().items() if name not in os.environ}
    os.environ.update(added)
    try:
        join_group(backend, 0, 1, HashStore(), timeout)
    finally:
        for name in added:
            del os.environ[name]


def checked_timeout(timeout: float) -> float:
    """Seconds that every call of the system can wait.

    Raises:
        ValueError: It is not a number above 0, or too large.
    """
    if not 0 < timeout <= _LONGEST_SECONDS:
        raise ValueError(
            f"timeout must be a positive number of seconds, at most {_LONGEST_SECONDS:,}, got "
            f"{timeout!r}"
        )
    return float(timeout)


def _leave_group(process: int) -> None:
    """Leave the default group at the end of the program, as torch requires.

    A fork of ``process`` has not the group's threads, and would wait for them for ever.
    """
    import torch.distributed as dist

    if process == os.getpid() and dist.is_initialized():
        dist.destroy_process_group()

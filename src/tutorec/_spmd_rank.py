"""What runs in a rank process: join the group, then run tasks until the caller closes or disappears."""

from __future__ import annotations

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
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from multiprocess.connection import Connection

from tutorec._spmd_device import BOTH_BACKENDS, own_gpu, pick_backend
from tutorec._spmd_progress import operations_begun, share_progress
from tutorec._spmd_report import failure_traceback, whereabouts
from tutorec._spmd_side import WorkerContext, become_rank
from tutorec._spmd_wire import Constants, call_arguments, dump_value, load
from tutorec.errors import RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import FileStore, Store

__all__ = ["GREETING", "connect", "file_store", "join_group", "main", "outlives_its_folder", "prove"]

GREETING = struct.Struct(">32sI8s")  # the pool's key, the rank, what the connection is for
_POLL_SECONDS = 1.0
_GROWTH = 8 * 2**20  # bytes
_abandoning = threading.Lock()


def main(boot: dict[str, Any], at_end: Callable[[], None] | None = None) -> None:
    """Be one rank: the entry point of every rank process; never returns.

    Args:
        boot: ``rank``, ``world_size``, ``token``; ``address`` and ``key`` of the caller's listener; ``parent``, the
            process that started this one, and ``kernel``, whether the kernel can tell when that one ends; ``folder``
            for the rendezvous; ``backend``; ``timeout`` of collectives in seconds; ``validate``.
        at_end: Called when the rank has been closed in order.
    """
    _end_with(boot["parent"], boot["kernel"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Interrupts are for the caller, who then ends the ranks.
    for stream in (sys.stdout, sys.stderr):
        # A line leaves in one piece, also where Python runs unbuffered: ranks print at the same time.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    side = WorkerContext(token=boot["token"], rank=boot["rank"], world_size=boot["world_size"])
    become_rank(side)
    try:
        control = connect(boot, "control")
        tasks = connect(boot, "tasks")
    except OSError:  # The caller has given up or ended.
        os._exit(1)
    threading.Thread(target=_answer, args=(control, side, boot), daemon=True).start()
    try:
        try:
            backend = _set_up(boot)
        except BaseException as error:
            _send(tasks, side, "error", _failure(error))
        else:
            _send(tasks, side, "ready", backend)
            _serve(tasks, side)
            if at_end is not None:
                at_end()
    except (EOFError, OSError):
        _abandon(boot["folder"])
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Threads and half-finished collectives of the process group must not keep the process.
        os._exit(0)


def _end_with(parent: int, by_kernel: bool) -> None:
    """Ask the kernel to kill this process when its parent ends, also in code that holds Python's lock."""
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
    """Import torch, take the caller's settings and join the process group; return the backend's name."""
    import torch

    torch.set_num_threads(1)
    _inherit_validation(boot["validate"])
    rank, world_size = boot["rank"], boot["world_size"]
    store = file_store(boot["folder"], world_size)
    # Simulated hosts are this machine: each rank of the pool needs a GPU of it.
    backend = join_group(boot["backend"], rank, world_size, store, boot["timeout"], place=rank)
    prove(bytes.fromhex(boot["key"]))
    share_progress(boot["folder"], rank, world_size)
    gc.freeze()  # What was imported stays, and need not be looked at between runs.
    return backend


def _inherit_validation(on: bool | None) -> None:
    """Switch this rank's checks as the caller's were when the pool started."""
    if on is not None:
        from tutorec._validation import validation

        validation(on)


def outlives_its_folder() -> bool:
    """Whether a file that is open can be opened again after its folder was removed, as on Linux."""
    return os.path.isdir("/proc/self/fd")


def file_store(folder: str, world_size: int) -> FileStore:
    """The rendezvous through a file in ``folder``; on Linux the file may be removed once every rank has joined."""
    from torch._C._distributed_c10d import FileStore

    path = os.path.join(folder, "rendezvous")
    if outlives_its_folder():  # torch opens the file at every use; a cleaner of temporary files may have removed it.
        path = f"/proc/self/fd/{os.open(path, os.O_RDWR | os.O_CREAT, 0o600)}"
    return FileStore(path, world_size)


def prove(key: bytes) -> None:
    """Check that each connection of the default group leads to a rank that was started with this pool's key.

    gloo takes the first process that connects to its port for the rank that it waits for, also when another user of
    this machine started it. Both ends of each connection send a code that needs the key, which serves one start. The
    codes travel as numbers: nothing that a stranger sends is unpickled.

    Raises:
        RankError: A connection leads to another process.
    """
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()

    def code(sender: int, receiver: int) -> bytes:
        return hmac.digest(key, f"rank {sender} of {world_size} to rank {receiver}".encode(), "sha256")

    sent = torch.frombuffer(bytearray(b"".join(code(rank, other) for other in range(world_size))), dtype=torch.uint8)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    for other, digest in enumerate(received.view(world_size, -1).tolist()):
        if not hmac.compare_digest(bytes(digest), code(other, rank)):
            raise RankError(
                f"a process that this pool did not start took the place of rank {other} in the process group of rank "
                f"{rank}, and nothing was exchanged with it: another user of this machine may have connected to gloo's "
                "port; start the pool again, on a machine whose users you trust",
                other,
            )


def join_group(backend: str, rank: int, world_size: int, store: Store, timeout: float, place: int = 0) -> str:
    """Start the default process group and return the backend's name.

    Args:
        backend: ``"auto"``, ``"gloo"`` or ``"nccl"``, as :func:`pick_backend` reads them.
        rank: This process's rank.
        world_size: W, the number of ranks.
        store: The rendezvous.
        timeout: Seconds that one collective may take.
        place: Index of this rank among those of its machine.
    """
    import torch
    import torch.distributed as dist

    limit, gpu = timedelta(seconds=timeout), own_gpu(place)
    store.set_timeout(limit)
    name = pick_backend(backend, store, rank, world_size, gpu)
    if name == BOTH_BACKENDS:
        torch.cuda.set_device(gpu)
    dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=limit)
    return name


def _serve(tasks: Connection, side: WorkerContext) -> None:
    """Run tasks in the order in which they come."""
    functions: dict[str, Any] = {}
    constants = Constants()
    size = 0
    while True:
        task = pickle.loads(tasks.recv_bytes())
        if task is None:
            return
        side.run, side.places = task["run"], {}
        for key in task["forget"]:
            side.kept.pop(key, None)
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


def _value(task: dict[str, Any], functions: dict[str, Any], constants: Constants, side: WorkerContext) -> bytes:
    """Run one task and pickle what its function returns."""
    constants.receive(task["constants"])
    if task["payload"] is not None:
        functions[task["function"]] = load(task["payload"], constants)
    fn = functions[task["function"]]
    args, kwargs = load(task["arguments"])
    args, kwargs = call_arguments(fn, args, kwargs, side.rank, side.world_size)
    return dump_value(_call(fn, args, kwargs))


def _free_cycles(size: int) -> int:
    """Collect garbage where this process has grown since it was of ``size`` bytes; return its size after that.

    Python collects after so many objects, whatever their size, and a model whose optimizers run in backward is a
    reference cycle of few large ones. Looking at all objects can take 0.1 s, too long after every run.
    """
    if _resident() - size > _GROWTH:
        gc.collect()
        return _resident()
    return size


def _resident() -> int:
    """Bytes of this process in memory; 0 where the system does not tell, and Python alone decides when to collect."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The frame below which everything is the caller's code."""
    try:
        return fn(*args, **kwargs)
    finally:
        sys.stdout.flush()  # What was printed belongs to this call's cell.


def _failure(error: BaseException) -> dict[str, Any]:
    """What the caller is told about an exception."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception as second:  # Then the caller learns that, and not that this process has gone.
        text = f"its message cannot be shown, because __str__ raised {type(second).__name__}"
    return {"kind": kind, "text": text, "traceback": failure_traceback(error), "when": time.time()}


def _send(tasks: Connection, side: WorkerContext, kind: str, content: Any) -> None:
    if os.getpid() != side.process:  # The function forked, and this is the child: the parent answers.
        os._exit(0)
    tasks.send_bytes(pickle.dumps((kind, side.run, content)))


def _answer(control: Connection, side: WorkerContext, boot: dict[str, Any]) -> None:
    """Answer "where are you?" while the main thread is busy; end the process when the caller is gone.

    A process that the caller forked holds the caller's connections: that they are closed is not to be relied on.
    """
    main_thread = threading.main_thread().ident
    assert main_thread is not None, "the main thread runs"
    try:
        while True:
            while not control.poll(_POLL_SECONDS):
                if os.getppid() != boot["parent"]:
                    raise EOFError("the caller has gone")
                with contextlib.suppress(OSError):  # Cleaners of temporary files spare what was used of late.
                    os.utime(os.path.join(boot["folder"], "rendezvous"))
            control.recv_bytes()
            frame: FrameType | None = sys._current_frames().get(main_thread)
            place = whereabouts(frame)
            begun = (operations_begun() or 1) - 1  # The first was the proof of the start.
            control.send_bytes(pickle.dumps({**place, "run": side.run, "collectives": begun}))
    except (EOFError, OSError):
        _abandon(boot["folder"])


def _abandon(folder: str) -> None:
    """End this process because the caller has gone, and remove what the caller cannot remove any more."""
    with _abandoning:  # Both threads notice; neither may end the process under the other.
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

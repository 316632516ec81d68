"""What runs in a rank process: join the group, then run tasks until the caller closes or disappears."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

from multiprocess.connection import Connection

from tutorec._spmd_device import BOTH_BACKENDS, own_gpu, pick_backend
from tutorec._spmd_report import failure_traceback, whereabouts
from tutorec._spmd_side import RankSide, become_rank
from tutorec._spmd_wire import Constants, call_arguments, dump_value, load

__all__ = ["connect", "file_address", "join_group", "main"]

_abandoning = threading.Lock()


def main(boot: dict[str, Any], at_end: Callable[[], None] | None = None) -> None:
    """Be one rank: the entry point of every rank process; never returns.

    Args:
        boot: ``rank``, ``world_size``, ``token``; ``address`` and ``key`` of the caller's listener;
            ``folder`` for the rendezvous; ``backend``; ``timeout`` of collectives in seconds; ``validate``.
        at_end: Called when the rank has been closed in order.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Interrupts are for the caller, who then ends the ranks.
    for stream in (sys.stdout, sys.stderr):
        # A line leaves in one piece, also where Python runs unbuffered: ranks print at the same time.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    side = RankSide(token=boot["token"], rank=boot["rank"], world_size=boot["world_size"])
    become_rank(side)
    try:
        control = connect(boot, "control")
        tasks = connect(boot, "tasks")
    except OSError:  # The caller has given up or ended.
        os._exit(1)
    threading.Thread(target=_answer, args=(control, side, boot["folder"]), daemon=True).start()
    try:
        try:
            backend = _set_up(boot)
        except BaseException as error:
            _send(tasks, ("error", 0, _failure(error)))
        else:
            _send(tasks, ("ready", 0, backend))
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


def connect(boot: dict[str, Any], purpose: str) -> Connection:
    """Connect to the caller's listener and say who this is."""
    import socket

    family, address = boot["address"]
    sock = socket.socket(socket.AddressFamily[family], socket.SOCK_STREAM)
    sock.connect(tuple(address) if isinstance(address, list) else address)
    connection = Connection(sock.detach())
    connection.send_bytes(bytes.fromhex(boot["key"]))
    connection.send_bytes(pickle.dumps((boot["rank"], purpose)))
    return connection


def _set_up(boot: dict[str, Any]) -> str:
    """Import torch, take the caller's settings and join the process group; return the backend's name."""
    import torch

    torch.set_num_threads(1)
    _inherit_validation(boot["validate"])
    rank, world_size = boot["rank"], boot["world_size"]
    # Simulated hosts are this machine: each rank of the pool needs a GPU of it.
    return join_group(boot["backend"], rank, world_size, file_address(boot["folder"]), boot["timeout"], place=rank)


def _inherit_validation(on: bool | None) -> None:
    """Switch this rank's checks as the caller's were when the pool started."""
    if on is not None:
        from tutorec._validation import validation

        validation(on)


def file_address(folder: str) -> str:
    """The address of a rendezvous through a file in ``folder``."""
    path = os.path.join(folder, "rendezvous").replace(os.sep, "/")
    return f"file:///{path.lstrip('/')}"


def join_group(backend: str, rank: int, world_size: int, init_method: str, timeout: float, place: int = 0) -> str:
    """Start the default process group and return the backend's name.

    Args:
        backend: ``"auto"``, ``"gloo"`` or ``"nccl"``, as :func:`pick_backend` reads them.
        rank: This process's rank.
        world_size: W, the number of ranks.
        init_method: Address of the rendezvous.
        timeout: Seconds that one collective may take.
        place: Index of this rank among those of its machine.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    limit, gpu = timedelta(seconds=timeout), own_gpu(place)
    store, _, _ = next(rendezvous(init_method, rank, world_size, timeout=limit))
    store.set_timeout(limit)
    name = pick_backend(backend, store, rank, world_size, gpu)
    if name == BOTH_BACKENDS:
        torch.cuda.set_device(gpu)
    dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=limit)
    return name


def _serve(tasks: Connection, side: RankSide) -> None:
    """Run tasks in the order in which they come."""
    functions: dict[str, Any] = {}
    constants = Constants()
    while True:
        task = pickle.loads(tasks.recv_bytes())
        if task is None:
            return
        side.run, side.places = task["run"], {}
        for key in task["forget"]:
            side.kept.pop(key, None)
        if task["sys_path"] is not None:
            sys.path[:] = task["sys_path"]
        try:
            constants.receive(task["constants"])
            if task["payload"] is not None:
                functions[task["function"]] = load(task["payload"], constants)
            fn = functions[task["function"]]
            args, kwargs = load(task["arguments"])
            args, kwargs = call_arguments(fn, args, kwargs, side.rank, side.world_size)
            value = dump_value(_call(fn, args, kwargs))
        except BaseException as error:
            _send(tasks, ("error", side.run, _failure(error)))
        else:
            _send(tasks, ("value", side.run, value))


def _call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The frame below which everything is the caller's code."""
    try:
        return fn(*args, **kwargs)
    finally:
        sys.stdout.flush()  # What was printed belongs to this call's cell.


def _failure(error: BaseException) -> dict[str, Any]:
    """What the caller is told about an exception."""
    kind, text = type(error).__name__, str(error)
    return {"kind": kind, "text": text, "traceback": failure_traceback(error), "when": time.time()}


def _send(tasks: Connection, message: tuple[str, int, Any]) -> None:
    tasks.send_bytes(pickle.dumps(message))


def _answer(control: Connection, side: RankSide, folder: str) -> None:
    """Answer "where are you?" while the main thread is busy; end the process when the caller is gone."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None, "the main thread runs"
    try:
        while True:
            control.recv_bytes()
            frame: FrameType | None = sys._current_frames().get(main_thread)
            place = whereabouts(frame)
            control.send_bytes(pickle.dumps({**place, "run": side.run, "collectives": _collectives_begun()}))
    except (EOFError, OSError):
        _abandon(folder)


def _abandon(folder: str) -> None:
    """End this process because the caller has gone, and remove what the caller cannot remove any more."""
    with _abandoning:  # Both threads notice; neither may end the process under the other.
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _collectives_begun() -> int | None:
    """How many operations the default group has begun on this rank, None when there is no group that counts."""
    try:
        import torch.distributed as dist

        group: Any = dist.group.WORLD  # The counter is torch's own and may go: it only adds to a message.
        return None if group is None else int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError, ValueError):
        return None

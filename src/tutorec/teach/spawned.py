"""Ranks that a notebook spawns by itself: where their output goes, where they meet, and who failed.

A spawned process gives its parent an exit code and nothing else. Here its output goes to a file,
and the parent waits for all of them at once, so that a failure ends the wait and brings the rank's
own traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutorec.errors import RankError, RankTimeoutError
from tutorec.spmd.messages import is_peer_loss
from tutorec.spmd.worker import file_store, join_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["join_ranks", "log_output", "start_group"]


def log_output(folder: str | os.PathLike[str], rank: int) -> None:
    """Send all that this process prints from now on, errors too, to ``rank<r>.log`` in a folder.

    Args:
        folder: An existing folder, which the parent gives to `join_ranks`.
        rank: The number of this process.
    """
    log = os.open(_log(folder, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def start_group(
    folder: str | os.PathLike[str], rank: int, world_size: int, timeout: float = 60.0
) -> ProcessGroup:
    """The default process group of a spawned process: gloo, and NCCL where each rank has a GPU.

    The ranks meet at a file in the folder.

    Args:
        folder: An existing folder of this group alone, on the machine that all ranks share.
        rank: The number of this process.
        world_size: W, the number of processes.
        timeout: Seconds that one collective may take.
    """
    import torch.distributed as dist

    join_group(
        "auto", rank, world_size, file_store(os.fspath(folder), world_size), timeout, place=rank
    )
    group = dist.group.WORLD
    assert group is not None, "the default group was started above"
    return group


def join_ranks(
    processes: Sequence[Any], folder: str | os.PathLike[str], timeout: float = 60.0
) -> list[int]:
    """Join the started processes of all ranks and return their exit codes, which are zeros.

    The first process that fails ends the wait, and so does the deadline. The others are killed
    then: they may wait for it in a collective.

    Args:
        processes: Processes of `multiprocess` or `multiprocessing` in rank order, all started.
        folder: Holds what they have printed, by `log_output`.
        timeout: Seconds until all must have ended.

    Raises:
        RankError: A rank ended with another exit code; the message has the code and the end of its
            output.
        RankTimeoutError: Ranks still run after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    running = dict(enumerate(processes))
    try:
        while running:
            closed = wait(
                [process.sentinel for process in running.values()],
                max(0.0, deadline - time.monotonic()),
            )
            ended = {
                rank: process for rank, process in running.items() if process.sentinel in closed
            }
            for process in ended.values():
                process.join()
            failed = {rank: process.exitcode for rank, process in ended.items() if process.exitcode}
            if failed:
                raise _failure(failed, folder)
            if not ended:
                ranks = ", ".join(map(str, running))
                raise RankTimeoutError(
                    f"ranks {ranks} of {len(processes)} had not ended after {timeout:g} s; rank "
                    f"{min(running)} printed:\n{_printed(folder, min(running))}",
                    rank=min(running),
                )
            for rank in ended:
                del running[rank]
    finally:
        for process in running.values():
            process.kill()
        for process in processes:
            process.join()
    return [process.exitcode for process in processes]


def _failure(codes: Mapping[int, int], folder: str | os.PathLike[str]) -> RankError:
    """The error of the rank that failed first, not of one that merely lost another rank."""
    printed = {rank: _printed(folder, rank) for rank in codes}
    rank = min(
        codes,
        key=lambda rank: is_peer_loss({"kind": "", "text": printed[rank].rpartition("\n")[2]}),
    )
    code = codes[rank]
    cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return RankError(
        f"rank {rank} failed, {cause}:\n{printed[rank]}", rank=rank, child_traceback=printed[rank]
    )


def _log(folder: str | os.PathLike[str], rank: int) -> Path:
    return Path(folder) / f"rank{rank}.log"


def _printed(folder: str | os.PathLike[str], rank: int) -> str:
    """The end of what a rank has printed, from its last traceback on."""
    log = _log(folder, rank)
    text = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
    begin = text.rfind("Traceback (most recent call last)")
    return text[begin:] if begin >= 0 else "\n".join(text.splitlines()[-10:]) or "(nothing)"

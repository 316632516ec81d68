"""Error handling across the ranks of one save or load: an error of one rank is raised on all."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tutorec._text import named_ranks
from tutorec.distributed.core import messages
from tutorec.distributed.core.agreement import check_agreement
from tutorec.distributed.core.env import ShardingEnv
from tutorec.errors import CheckpointError

_STAGE = "checkpoint"
# Store keys: a rank sets the first at its first checkpoint, and the second when it learns that
# another rank has ended. A rank that sets the second may end too, but is not the cause.
_ARRIVED, _NOTIFIED = "tutorec/came/{}", "tutorec/told/{}"
# A process may end some time after its connections have closed.
_SECONDS_TO_END = 5.0
V = TypeVar("V")

# (host, process id) of each rank of a group, gathered once: a rank may end before the next save.
_processes: weakref.WeakKeyDictionary[dist.ProcessGroup, list[tuple[str, int]]] = (
    weakref.WeakKeyDictionary()
)


class RankBarrier:
    """Error handling for the ranks of one save or load.

    Args:
        group: The ranks; None for this process only.
        doing: The operation, for messages, e.g. ``"saving the checkpoint /runs/7"``.

    Raises:
        CheckpointError: A rank ended.

    Example:
        >>> alone = RankBarrier(None, "saving the checkpoint /runs/7")
        >>> alone.rank, alone.world_size, alone.gather("a")
        (0, 1, ['a'])
    """

    def __init__(self, group: dist.ProcessGroup | None, doing: str) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._doing = doing
        self.rank: int = self._group.rank() if self._group is not None else 0
        self.world_size: int = self._group.size() if self._group is not None else 1
        if self._group is not None and self._group not in _processes:
            _publish(self._group, _ARRIVED)
            _processes[self._group] = self.gather((socket.gethostname(), os.getpid()))

    def gather(self, value: V) -> list[V]:
        """Gather a picklable value from every rank, in rank order.

        Raises:
            CheckpointError: A rank ended.
        """
        return self._named(
            lambda group: messages.all_gather_objects(value, group, _STAGE), alone=[value]
        )

    def from_first(self, value: V) -> V:
        """Broadcast rank 0's value.

        Raises:
            CheckpointError: A rank ended.
        """
        return self._named(
            lambda group: messages.broadcast_object(value, 0, group, _STAGE), alone=value
        )

    def require_equal(self, facts: Mapping[str, str]) -> None:
        """Raise on every rank unless the facts are equal on all ranks.

        Raises:
            AgreementError: They are not.
            CheckpointError: A rank ended.
        """
        self._named(
            lambda group: check_agreement(
                self._doing, facts, ShardingEnv.from_process_group(group)
            ),
            alone=None,
        )

    def attempt(self, act: Callable[[], V], problem: Exception | None = None) -> V:
        """Call ``act`` and return its value; if it raises on any rank, raise on every rank.

        Args:
            act: Not a collective.
            problem: An error that this rank has met before; ``act`` is not called then.

        Raises:
            CheckpointError: ``act`` has failed on a rank, which the error names, or a rank ended.
            TypeError: This rank's problem is a TypeError, a mistake of the caller.
        """
        value, text = None, None
        try:
            if problem is not None:
                raise problem
            value = act()
        except Exception as error:  # any error: the other ranks must not wait for this rank
            problem, text = error, error_text(error)
        failures = [
            (rank, message) for rank, message in enumerate(self.gather(text)) if message is not None
        ]
        if not failures:
            return cast(V, value)
        if isinstance(problem, TypeError):
            raise problem
        if self.world_size == 1:
            if isinstance(problem, CheckpointError):
                raise problem
            raise CheckpointError(f"{self._doing} failed: {text}") from problem
        # All ranks that read a damaged file report the same error: name it once.
        lines = dict.fromkeys(message for _, message in failures)
        named = [
            f"{named_ranks([rank for rank, each in failures if each == line])}: {line}"
            for line in lines
        ]
        raise CheckpointError(f"{self._doing} failed on " + "; ".join(named)) from problem

    def _named(self, collective: Callable[[dist.ProcessGroup], V], alone: V) -> V:
        """The result of a collective, or ``alone`` in a single process; names ranks that ended."""
        if self._group is None:
            return alone
        try:
            return collective(self._group)
        except RuntimeError as error:
            _publish(self._group, _NOTIFIED)
            ended = _ended(self._group)
            if not ended:
                raise
            numbers = ", ".join(str(process) for process in ended.values())
            if None in ended.values():
                what = (
                    f"{named_ranks(list(ended))} did not come to it: ended before, or does "
                    "something else"
                )
            else:
                what = f"{named_ranks(list(ended))} ended meanwhile (process {numbers})"
            raise CheckpointError(
                f"{self._doing} failed: {what}; a checkpoint that was complete before still is: "
                "start the ranks again and load it"
            ) from error


def _publish(group: dist.ProcessGroup, key: str) -> None:
    """Publish this rank's process id in the group's store, which outlives the rank."""
    with suppress(RuntimeError, AttributeError):
        _store(group).set(key.format(group.rank()), f"{os.getpid()} {socket.gethostname()}")


def _published(group: dist.ProcessGroup, key: str) -> list[tuple[str, int] | None]:
    """(host, process id) that each rank has published, or None; empty if the store is lost."""
    try:
        store, processes = _store(group), []
        for rank in range(group.size()):
            name = key.format(rank)
            process, _, host = (
                store.get(name).decode().partition(" ") if store.check([name]) else ("", "", "")
            )
            processes.append((host, int(process)) if process else None)
    except (RuntimeError, AttributeError):
        return []
    return processes


def _store(group: dist.ProcessGroup) -> Any:
    """The rendezvous store of a group, hosted by torchrun, by rank 0, or in a file."""
    return distributed_c10d._get_process_group_store(group)


def _ended(group: dist.ProcessGroup) -> dict[int, int | None]:
    """Rank -> process id of local ranks that have ended; None for a rank that never connected."""
    this_host, deadline = socket.gethostname(), time.monotonic() + _SECONDS_TO_END
    known: Sequence[tuple[str, int] | None] = []
    gone: dict[int, int | None] = {}
    while time.monotonic() < deadline:
        known = _processes.get(group) or _published(group, _ARRIVED)
        gone = {
            rank: each[1]
            for rank, each in enumerate(known)
            if each and each[0] == this_host and not _runs(each[1])
        }
        if gone:
            notified = {rank for rank, each in enumerate(_published(group, _NOTIFIED)) if each}
            first = {rank: process for rank, process in gone.items() if rank not in notified}
            # A rank that noticed the end of another may exit before it.
            if first:
                return first
        if not known:
            return {}
        time.sleep(0.05)
    # A rank that never connected is the cause; ranks that ended noticed it.
    return {rank: None for rank, each in enumerate(known) if each is None} or gone


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        # A zombie: the process has ended, and its parent has not waited for it.
        status = Path(f"/proc/{process}/stat")
        return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
    except PermissionError:
        return True
    except OSError:
        return False


def error_text(problem: Exception) -> str:
    """An error as part of a message: its text, with the class of one that is not ours."""
    return (
        str(problem)
        if isinstance(problem, CheckpointError)
        else f"{type(problem).__name__}: {problem}"
    )

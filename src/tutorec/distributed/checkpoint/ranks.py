"""The ranks that save or load together: what one of them finds wrong, all of them are told."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from tutorec.distributed import comm
from tutorec.distributed.agreement import check_agreement
from tutorec.distributed.env import ShardingEnv
from tutorec.errors import CheckpointError

_STAGE = "checkpoint"
# A process whose connections are closed may take a moment to be gone.
_SECONDS_TO_END = 5.0
V = TypeVar("V")

# (host, process) of each rank of a group, asked for once: a rank may end before the next save begins.
_processes: weakref.WeakKeyDictionary[dist.ProcessGroup, list[tuple[str, int]]] = weakref.WeakKeyDictionary()


class Together:
    """The ranks of one save or load.

    Args:
        group: The ranks; None: this process alone.
        doing: What is being done, for messages, e.g. ``"saving the checkpoint /runs/7"``.

    Raises:
        CheckpointError: A rank ended.

    Example:
        >>> alone = Together(None, "saving the checkpoint /runs/7")
        >>> alone.rank, alone.world_size, alone.gather("a")
        (0, 1, ['a'])
    """

    def __init__(self, group: dist.ProcessGroup | None, doing: str) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._doing = doing
        self.rank: int = self._group.rank() if self._group is not None else 0
        self.world_size: int = self._group.size() if self._group is not None else 1
        if self._group is not None and self._group not in _processes:
            _processes[self._group] = self.gather((socket.gethostname(), os.getpid()))

    def gather(self, value: V) -> list[V]:
        """A picklable value of every rank, in rank order.

        Raises:
            CheckpointError: A rank ended.
        """
        group = self._group
        return [value] if group is None else self._named(lambda: comm.all_gather_objects(value, group, _STAGE))

    def from_first(self, value: V) -> V:
        """Rank 0's value.

        Raises:
            CheckpointError: A rank ended.
        """
        group = self._group
        return value if group is None else self._named(lambda: comm.broadcast_object(value, 0, group, _STAGE))

    def agree(self, facts: Mapping[str, str]) -> None:
        """Return when all ranks hold the same facts.

        Raises:
            AgreementError: They do not.
            CheckpointError: A rank ended.
        """
        group = self._group
        if group is not None:
            env = ShardingEnv.from_process_group(group)
            self._named(lambda: check_agreement(self._doing, facts, env))

    def settle(self, problem: Exception | None) -> None:
        """Return when no rank has a problem; else raise on every rank, with the rank that has it.

        Raises:
            CheckpointError: A rank has a problem, or ended.
            TypeError: This rank's problem is one: the caller's mistake.
        """
        text = None if problem is None else _text(problem)
        troubles = [(rank, found) for rank, found in enumerate(self.gather(text)) if found is not None]
        if not troubles:
            return
        if isinstance(problem, TypeError):
            raise problem
        if self.world_size == 1:
            if isinstance(problem, CheckpointError):
                raise problem
            raise CheckpointError(f"{self._doing} failed: {text}") from problem
        # A damaged file is the same trouble on every rank that has looked at it.
        lines = dict.fromkeys(found for _, found in troubles)
        named = [f"{_ranks([rank for rank, each in troubles if each == line])}: {line}" for line in lines]
        raise CheckpointError(f"{self._doing} failed on " + "; ".join(named)) from problem

    def _named(self, collective: Callable[[], V]) -> V:
        try:
            return collective()
        except RuntimeError as error:
            ended = self._ended()
            if not ended:
                raise
            numbers = ", ".join(str(process) for process in ended.values())
            raise CheckpointError(
                f"{self._doing} failed: {_ranks(list(ended))} ended meanwhile (process {numbers}); a checkpoint that "
                "was complete before still is: start the ranks again and load it"
            ) from error

    def _ended(self) -> dict[int, int]:
        """Rank -> process of those on this host that are gone."""
        known = _processes.get(self._group, []) if self._group is not None else []
        here, deadline = socket.gethostname(), time.monotonic() + _SECONDS_TO_END
        while known and time.monotonic() < deadline:
            found = {r: process for r, (host, process) in enumerate(known) if host == here and not _runs(process)}
            if found:
                return found
            time.sleep(0.05)
        return {}


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        # Ended, only not collected by its parent.
        status = Path(f"/proc/{process}/stat")
        return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
    except PermissionError:
        return True
    except OSError:
        return False


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _text(problem: Exception) -> str:
    return str(problem) if isinstance(problem, CheckpointError) else f"{type(problem).__name__}: {problem}"


__all__ = ["Together"]

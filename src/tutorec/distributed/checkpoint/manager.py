"""Numbered checkpoints of a run in one folder, with asynchronous saving and rotation."""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn

from tutorec.distributed.checkpoint.contents import group_of
from tutorec.distributed.checkpoint.folder import Folder, folder_of, path_below
from tutorec.distributed.checkpoint.loading import load_checkpoint
from tutorec.distributed.checkpoint.manifest import (
    MANIFEST,
    TRIES,
    remove_checkpoint,
    remove_interrupted,
)
from tutorec.distributed.checkpoint.ranks import RankBarrier
from tutorec.distributed.checkpoint.reading import (
    CheckpointInfo,
    subfolders,
    whole_step,
    whole_steps,
)
from tutorec.distributed.checkpoint.replicas import all_ranks_of, saved_by_the_first
from tutorec.distributed.checkpoint.saving import prepare_save, write_save
from tutorec.distributed.collectives.host_groups import twin_group
from tutorec.errors import AgreementError, CheckpointError
from tutorec.optim.keyed import KeyedOptimizer

_NUMBERED = re.compile(r"step-(0|[1-9]\d*)")


class CheckpointManager:
    """Checkpoints of one run, ``<folder>/step-100``, ``<folder>/step-200``, and so on.

    Every rank creates one. All methods except `latest` and `steps` are collectives. No file is
    overwritten, so a concurrent reader, for example an evaluation, can finish reading. Only
    checkpoints with such names are removed, and of those only the files that a save has written.
    Files of an interrupted save are removed by the next one; on storage without locks, such as an
    object store, only when they are a day old, because another process may still be writing them.

    With ``asynchronous=True``, `save` copies the values that this rank will write (memory for its
    part of the model and the optimizer state) and returns. A thread writes them, over its own
    process group, while training continues. One save runs at a time: the next one waits for it. An
    error is raised by the next `save`, `wait`, `load` or `close`, on every rank.

    Args:
        folder: Folder of the run, or an fsspec URL such as ``s3://bucket/run``; created if missing.
            Every rank must see it.
        keep: Number of checkpoints to keep; None for all.
        asynchronous: Return from `save` before the files are written. Close the manager at the end,
            or use ``with``; a script that exits without closing it waits, too.

    Raises:
        CheckpointError: The path cannot be a folder.
        ValueError: ``keep`` is less than 1.

    Example:
        >>> import tempfile, torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> with CheckpointManager(tempfile.mkdtemp(), keep=2, asynchronous=True) as manager:
        ...     for step in (10, 20, 30):
        ...         manager.save(layer, step=step, position={"batch": step})
        >>> manager.latest().name, manager.load(layer).position, manager.steps()
        ('step-30', {'batch': 30}, [20, 30])
    """

    def __init__(
        self, folder: str | os.PathLike[str], keep: int | None = 3, *, asynchronous: bool = False
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep}: give 1 or more checkpoints, or None for all")
        self._named, self._folder, self._keep = folder, folder_of(folder), keep
        self._thread = ThreadPoolExecutor(1, "tutorec-checkpoint") if asynchronous else None
        self._process = os.getpid()  # the one that has the thread
        # One entry per save of this rank: the ranks that wait for each other. Replicas write
        # nothing.
        self._under_way: list[tuple[list[Future[None]], dist.ProcessGroup | None]] = []
        # (the group that saves, a group of the same ranks for the thread)
        self._groups: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []
        weakref.finalize(self, _say_at_end, self._under_way, self._process)

    def save(
        self,
        model: nn.Module,
        optimizer: KeyedOptimizer | None = None,
        *,
        step: int,
        position: Any = None,
        extra: Any = None,
    ) -> None:
        """Save as ``step-<step>``, atomically, and remove surplus checkpoints. A collective.

        Args:
            model: As in `save_checkpoint`.
            optimizer: As in `save_checkpoint`.
            step: Steps made so far; not less than that of the latest checkpoint.
            position: As in `save_checkpoint`.
            extra: As in `save_checkpoint`.

        Raises:
            AgreementError: Ranks differ in what they save.
            CheckpointError: As in `save_checkpoint`; or the previous save has failed; or there is a
                later checkpoint.
        """
        self.wait()
        notes, begun = {"step": step, "position": position, "extra": extra}, []

        @saved_by_the_first
        def begin(folder: Folder, model: nn.Module) -> None:
            begun.extend(self._begin(folder, model, optimizer, notes))

        begin(self._folder.below(f"step-{step}"), model)
        if self._thread is not None:
            self._under_way.append((begun, all_ranks_of(model)))

    def latest(self) -> Path | str | None:
        """The complete checkpoint of the highest step, or None. Not a collective.

        Raises:
            CheckpointError: The folder cannot be listed.
        """
        steps = self.steps()
        return path_below(self._named, f"step-{steps[-1]}") if steps else None

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending.

        Raises:
            CheckpointError: The folder cannot be listed.
        """
        return sorted(whole_steps(self._folder, self._whole).values())

    def load(
        self,
        model: nn.Module,
        optimizer: KeyedOptimizer | None = None,
        *,
        optimizer_state: bool = True,
    ) -> CheckpointInfo | None:
        """Load the latest checkpoint. A collective.

        Args:
            model: As in `load_checkpoint`.
            optimizer: As in `load_checkpoint`.
            optimizer_state: As in `load_checkpoint`.

        Returns:
            The checkpoint's info; None if there is no checkpoint.

        Raises:
            AgreementError: As in `load_checkpoint`.
            CheckpointError: As in `load_checkpoint`.
        """
        self.wait()
        ranks = RankBarrier(all_ranks_of(model), f"loading the latest checkpoint in {self._folder}")
        latest = self._agreed_latest(ranks)
        for left in reversed(range(TRIES)):
            if latest is None:
                return None
            path = self._folder.below(f"step-{latest}")
            try:
                return load_checkpoint(str(path), model, optimizer, optimizer_state=optimizer_state)
            except (AgreementError, CheckpointError, TypeError):
                # Raised on every rank. The run may have removed this checkpoint meanwhile.
                later = self._agreed_latest(ranks)
                if later == latest or not left:
                    raise
                latest = later
        return None

    def wait(self) -> None:
        """Return when the pending save is complete. A collective if saves are asynchronous.

        Raises:
            CheckpointError: It has failed; the message names path, step and rank. Or this process
                is a fork of the one whose thread writes it.
        """
        self._own_thread()
        while self._under_way:
            problem, (_, group) = next(_problems(self._under_way), None), self._under_way.pop()
            problems = RankBarrier(group, "waiting for the checkpoint").gather(
                None if problem is None else str(problem)
            )
            if problem is not None:
                raise problem
            for text in problems:
                if text is not None:
                    raise CheckpointError(text)

    def close(self) -> None:
        """Wait as `wait` does, and stop the thread.

        Raises:
            CheckpointError: The pending save has failed.
        """
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def __enter__(self) -> CheckpointManager:
        """Return the manager."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it. After an error, do not communicate: the other ranks may not get here."""
        if error is None:
            self.close()
        elif self._thread is not None and self._process == os.getpid():
            self._thread.shutdown()
            for problem in _problems(self._under_way):
                error.add_note(str(problem))
            self._under_way.clear()

    def _own_thread(self) -> None:
        """In a fork of the process that made the manager: take a thread of this process.

        Raises:
            CheckpointError: A save of the other process is pending.
        """
        parent = self._process
        process = os.getpid()
        if self._thread is None or parent == process:
            return
        pending = bool(self._under_way)
        self._under_way.clear()
        self._thread = ThreadPoolExecutor(1, "tutorec-checkpoint")
        self._process = process
        weakref.finalize(self, _say_at_end, self._under_way, process)
        if pending:
            raise CheckpointError(
                f"process {parent} is writing a checkpoint in {self._folder}, and this is process "
                f"{process}, a fork of it, which cannot learn how that ends: wait() in process "
                f"{parent}, before the fork or after it"
            )

    def _whole(self, name: str) -> int | None:
        """The step of a complete checkpoint, if its name matches that step."""
        match = _NUMBERED.fullmatch(name)
        step = whole_step(self._folder.below(name)) if match else None
        return step if match and step == int(match[1]) else None

    def _check_order(self, step: int) -> None:
        """Raise if there is a checkpoint of a later step.

        Raises:
            CheckpointError: There is a checkpoint of a later step.
        """
        later = [each for each in self.steps() if each > step]
        if later:
            raise CheckpointError(
                f"{self._folder} has a checkpoint of step {later[-1]}, later than step {step}: "
                "latest() would go on from that one; load it first, or save into another folder, "
                "or remove the later ones"
            )

    def _agreed_latest(self, ranks: RankBarrier) -> int | None:
        """The latest step as rank 0 sees it; the other ranks may see an older or newer folder."""
        steps = ranks.attempt(lambda: self.steps() if ranks.rank == 0 else [])
        return ranks.from_first(steps[-1] if steps else None)

    def _begin(
        self,
        folder: Folder,
        model: nn.Module,
        optimizer: KeyedOptimizer | None,
        notes: Mapping[str, Any],
    ) -> list[Future[None]]:
        """Write the checkpoint, or start writing it; returns the futures of pending saves."""
        group = group_of(model)
        ranks, problem = RankBarrier(group, f"saving the checkpoint {folder}"), None
        if ranks.rank == 0:
            try:
                self._check_order(notes["step"])
            except Exception as error:
                problem = error
        save = prepare_save(
            ranks, folder, problem, (model, optimizer), notes, copy=self._thread is not None
        )

        def tidy() -> None:
            self._tidy(folder)

        if self._thread is None:
            write_save(save, ranks, tidy)
            return []
        twin = None if group is None or ranks.world_size == 1 else self._own_group(group)
        doing = f"saving the checkpoint {folder} in the background"
        # a barrier is made by the thread: it may communicate
        return [self._thread.submit(lambda: write_save(save, RankBarrier(twin, doing), tidy))]

    def _own_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The thread's process group: two threads on one group would mix up their collectives."""
        for original, twin in self._groups:
            if original is group:
                return twin
        twin = twin_group(group)
        self._groups.append((group, twin))
        return twin

    def _tidy(self, saved: Folder) -> None:
        """Remove old checkpoints and the files of interrupted saves.

        Raises:
            CheckpointError: A file cannot be removed; ``saved`` is complete nevertheless.
        """
        try:
            steps = self.steps()
            old = {
                f"step-{step}" for step in (steps[: -self._keep] if self._keep is not None else [])
            }
            for name in subfolders(self._folder):
                below = self._folder.below(name)
                if name in old:
                    remove_checkpoint(below)
                elif _NUMBERED.fullmatch(name) and MANIFEST not in below.sizes():
                    remove_interrupted(below)
        except Exception as error:
            raise CheckpointError(
                f"{saved} is complete, and an older one could not be removed ({error})"
            ) from error


def _problems(
    under_way: Sequence[tuple[list[Future[None]], dist.ProcessGroup | None]],
) -> Iterator[BaseException]:
    """Wait for pending saves and yield their errors."""
    for begun, _ in under_way:
        for future in begun:
            problem = future.exception()
            if problem is not None:
                yield problem


def _say_at_end(
    under_way: Sequence[tuple[list[Future[None]], dist.ProcessGroup | None]], process: int
) -> None:
    """Wait for a pending save at exit, and report its error; a fork of ``process`` does not."""
    if process != os.getpid():
        return
    for problem in _problems(under_way):
        sys.stderr.write(f"{type(problem).__name__}: {problem}\n")

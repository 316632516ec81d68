"""Numbered checkpoints of a run in one folder, with asynchronous saving and rotation."""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn

from tutorec.distributed.checkpoint.contents import process_group
from tutorec.distributed.checkpoint.folder import Folder, path_below
from tutorec.distributed.checkpoint.loading import load_checkpoint
from tutorec.distributed.checkpoint.manifest import MANIFEST, remove_checkpoint, remove_interrupted
from tutorec.distributed.checkpoint.ranks import CheckpointRanks, all_ranks, in_first_replica
from tutorec.distributed.checkpoint.reading import CheckpointInfo, complete_steps, load_one_save
from tutorec.distributed.checkpoint.saving import Notes, prepare_save, write_save
from tutorec.distributed.collectives.host_groups import twin_group
from tutorec.errors import CheckpointError
from tutorec.optim.keyed import KeyedOptimizer

_NUMBERED = re.compile(r"step-(0|[1-9]\d*)")


class CheckpointManager:
    """Checkpoints of one run, ``<folder>/step-100``, ``<folder>/step-200``, and so on.

    Every rank creates one. All methods except `latest` and `steps` are collectives. No file is
    overwritten, so a concurrent reader, for example an evaluation, can finish reading. Only
    checkpoints with such names are removed, and of those only the files that a save has written.
    Files of an interrupted save are removed by the next one; on storage without locks, such as an
    object store, when they are a day old: another process may still be writing them.

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
        self._path = folder
        self._folder = Folder.from_path(folder)
        self._keep = keep
        self._asynchronous = asynchronous
        # At most one pending save, and the ranks of all replicas, which wait for it.
        self._pending: list[tuple[_BackgroundSave, dist.ProcessGroup | None]] = []
        # Process group of a model -> a group of the same ranks for the background thread: two
        # threads on one group would mix up their collectives.
        self._twins: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        weakref.finalize(self, _report_at_exit, self._pending)

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
        path = path_below(self._path, f"step-{step}")
        operation = f"saving the checkpoint {path}"
        notes = Notes(step, position, extra)
        background = _BackgroundSave()

        def save() -> None:
            group = process_group(model)
            ranks = CheckpointRanks(group, operation)
            ranks.attempt(lambda: self._check_order(step) if ranks.rank == 0 else None)
            prepared = prepare_save(ranks, path, model, optimizer, notes, copy=self._asynchronous)

            def remove_old() -> None:
                self._remove_old(path)

            if self._asynchronous:
                ranks = CheckpointRanks(self._twin(group), f"{operation} in the background")
                background.start(lambda: write_save(prepared, ranks, remove_old))
            else:
                write_save(prepared, ranks, remove_old)

        in_first_replica(model, operation, save)
        if self._asynchronous:
            self._pending.append((background, all_ranks(model)))

    def latest(self) -> Path | str | None:
        """The complete checkpoint of the highest step, or None. Not a collective.

        Raises:
            CheckpointError: The folder cannot be listed.
        """
        steps = self.steps()
        return path_below(self._path, f"step-{steps[-1]}") if steps else None

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending.

        Raises:
            CheckpointError: The folder cannot be listed.
        """
        steps = complete_steps(self._folder)
        return sorted(step for name, step in steps.items() if name == f"step-{step}")

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
        operation = f"loading the latest checkpoint in {self._folder}"
        ranks = CheckpointRanks(all_ranks(model), operation)

        def current() -> Path | str | None:
            # The other ranks may see an older or newer folder than rank 0.
            if ranks.rank == 0:
                with suppress(CheckpointError):
                    return self.latest()
            return None

        def load() -> CheckpointInfo | None:
            latest = ranks.attempt(lambda: self.latest() if ranks.rank == 0 else None)
            latest = ranks.gather(latest)[0]
            if latest is None:
                return None
            return load_checkpoint(latest, model, optimizer, optimizer_state=optimizer_state)

        return load_one_save(ranks, current, load)

    def wait(self) -> None:
        """Return when the pending save is complete. A collective if saves are asynchronous.

        Raises:
            CheckpointError: It has failed; the message names path, step and rank.
        """
        while self._pending:
            background, group = self._pending.pop()
            errors = CheckpointRanks(group, "waiting for the checkpoint").gather(background.join())
            for error in errors:
                if error is not None:
                    raise CheckpointError(error)

    def close(self) -> None:
        """Wait as `wait` does.

        Raises:
            CheckpointError: The pending save has failed.
        """
        self.wait()

    def __enter__(self) -> CheckpointManager:
        """Return the manager."""
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it. After an error, do not communicate: the other ranks may not get here."""
        if error is None:
            self.close()
            return

        while self._pending:
            background, _ = self._pending.pop()
            text = background.join()
            if text is not None:
                error.add_note(text)

    def _twin(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The background thread's group of the same ranks."""
        if group is None or group.size() == 1:
            return None
        if group not in self._twins:
            self._twins[group] = twin_group(group)
        return self._twins[group]

    def _check_order(self, step: int) -> None:
        """Raise if there is a checkpoint of a later step.

        Raises:
            CheckpointError: There is a checkpoint of a later step.
        """
        steps = self.steps()
        if steps and steps[-1] > step:
            raise CheckpointError(
                f"{self._folder} has a checkpoint of step {steps[-1]}, later than step {step}: "
                "latest() would go on from that one; load it first, or save into another folder, "
                "or remove the later ones"
            )

    def _remove_old(self, saved: Path | str) -> None:
        """Remove old checkpoints and the files of interrupted saves.

        Raises:
            CheckpointError: A file cannot be removed; ``saved`` is complete nevertheless.
        """
        try:
            steps = self.steps()
            old_steps = [] if self._keep is None else steps[: -self._keep]
            for step in old_steps:
                remove_checkpoint(self._folder.below(f"step-{step}"))

            for name in self._folder.folders():
                folder = self._folder.below(name)
                if _NUMBERED.fullmatch(name) and MANIFEST not in folder.sizes():
                    remove_interrupted(folder)
        except Exception as error:
            raise CheckpointError(
                f"{saved} is complete, and an older one could not be removed ({error})"
            ) from error


class _BackgroundSave:
    """A save in a thread of its own, for whose end the interpreter waits when it exits."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Start a thread that writes."""

        def run() -> None:
            try:
                write()
            except Exception as error:
                self._error = error

        self._thread = Thread(target=run, name="tutorec-checkpoint")
        self._thread.start()

    def join(self) -> str | None:
        """Wait for the end, and return the text of its error."""
        if self._thread is not None:
            self._thread.join()
        return None if self._error is None else str(self._error)


def _report_at_exit(pending: list[tuple[_BackgroundSave, dist.ProcessGroup | None]]) -> None:
    """Report the error of a save that nobody has waited for."""
    for background, _ in pending:
        text = background.join()
        if text is not None:
            sys.stderr.write(f"CheckpointError: {text}\n")

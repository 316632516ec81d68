"""Errors across the ranks of a save or load: what one rank raises, every rank raises."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TypeVar, cast

import torch.distributed as dist
from torch import nn

from tutorec._text import named_ranks
from tutorec.distributed import comm
from tutorec.distributed.checkpoint.contents import process_group
from tutorec.distributed.core.agreement import check_agreement
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.model_parallel import DMPCollection
from tutorec.errors import CheckpointError

_STAGE = "checkpoint"
V = TypeVar("V")


class CheckpointRanks:
    """The ranks of one save or load.

    Args:
        group: The ranks; None for this process only.
        operation: What they do, for messages, e.g. ``"saving the checkpoint /runs/7"``.

    Example:
        >>> alone = CheckpointRanks(None, "saving the checkpoint /runs/7")
        >>> alone.rank, alone.world_size, alone.gather("a")
        (0, 1, ['a'])
    """

    def __init__(self, group: dist.ProcessGroup | None, operation: str) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._operation = operation
        self.rank: int = self._group.rank() if self._group is not None else 0
        self.world_size: int = self._group.size() if self._group is not None else 1

    def gather(self, value: V) -> list[V]:
        """Gather a picklable value from every rank, in rank order.

        Raises:
            CheckpointError: The exchange failed, for example because a rank has ended.
        """
        if self._group is None:
            return [value]

        with self._exchange():
            return comm.all_gather_objects(value, self._group, _STAGE)

    def require_equal(self, values: Mapping[str, str]) -> None:
        """Raise on every rank unless the values are equal on all ranks.

        Raises:
            AgreementError: They are not.
            CheckpointError: The exchange failed.
        """
        if self._group is not None:
            with self._exchange():
                env = ShardingEnv.from_process_group(self._group)
                check_agreement(self._operation, values, env)

    def attempt(self, action: Callable[[], V]) -> V:
        """Call an action and return its value; if it raises on any rank, raise on every rank.

        Args:
            action: Does not communicate with the ranks of this object.

        Raises:
            CheckpointError: The action failed on a rank, which the error names.
            TypeError: It raised a TypeError on this rank, a mistake of the caller.
        """
        value: V | None = None
        error: Exception | None = None
        try:
            value = action()
        except Exception as raised:  # any error: the other ranks must not wait for this rank
            error = raised

        texts = self.gather(None if error is None else error_text(error))
        if all(text is None for text in texts):
            return cast(V, value)

        if isinstance(error, TypeError):
            raise error
        if self._group is None and isinstance(error, CheckpointError):
            raise error
        if self._group is None:
            raise CheckpointError(f"{self._operation} failed: {texts[0]}") from error

        # Ranks that read a damaged file have equal errors and are named together.
        ranks_by_text: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            if text is not None:
                ranks_by_text.setdefault(text, []).append(rank)
        failures = [f"{named_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
        raise CheckpointError(f"{self._operation} failed on {'; '.join(failures)}") from error

    @contextmanager
    def _exchange(self) -> Generator[None, None, None]:
        """Turn the error of a failed collective into a CheckpointError with a remedy."""
        try:
            yield
        except RuntimeError as error:
            raise CheckpointError(
                f"{self._operation} failed in an exchange with the other ranks, one of which may "
                f"have ended ({error}); a checkpoint that was complete before still is: start the "
                "ranks again and load it"
            ) from error


def all_ranks(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that share a model, including those of all table replicas."""
    return model.dense_group if isinstance(model, DMPCollection) else process_group(model)


def in_first_replica(model: nn.Module, operation: str, save: Callable[[], None]) -> None:
    """Call ``save``; of a model with table replicas the ranks of the first replica call it.

    Replicas are averaged first with `DMPCollection.sync`. Otherwise the updates of the other
    replicas since the last sync would be lost.

    Raises:
        CheckpointError: It failed on a rank.
    """
    if not isinstance(model, DMPCollection):
        save()
        return

    model.sync()
    ranks = CheckpointRanks(model.dense_group, f"{operation}, of the first replica,")
    ranks.attempt(lambda: save() if model.replica == 0 else None)


def error_text(error: Exception) -> str:
    """An error as part of a message: its text, with the class of one that is not ours."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"

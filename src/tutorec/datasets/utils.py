"""Batch, how the rows of a data set are dealt out to ranks, and TorchRec's pipes of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from tutorec.datasets.pipes import (
    PATH_MANAGER_KEY,
    Limit,
    LoadFiles,
    ParallelReadConcat,
    ReadLinesFromCSV,
    idx_split_train_val,
    opener,
    rand_split_train_val,
    safe_cast,
    train_filter,
    val_filter,
)
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = [
    "PATH_MANAGER_KEY",
    "Batch",
    "Limit",
    "LoadFiles",
    "ParallelReadConcat",
    "ReadLinesFromCSV",
    "RowBatches",
    "check_whole",
    "idx_split_train_val",
    "opener",
    "rand_split_train_val",
    "rank_slices",
    "safe_cast",
    "split_evenly",
    "step_slices",
    "train_filter",
    "val_filter",
]


@dataclass
class Batch:
    """One batch of B samples: dense columns, ids, labels (TorchRec: ``torchrec.datasets.utils.Batch``).

    Attributes:
        dense_features: [B, D] float.
        sparse_features: the ids, a KeyedJaggedTensor of stride B.
        labels: [B].

    Example:
        >>> import torch
        >>> from tutorec.datasets.utils import Batch
        >>> from tutorec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> kjt = KeyedJaggedTensor(keys=["item"], values=torch.tensor([7, 1, 7]), lengths=torch.tensor([2, 1]))
        >>> batch = Batch(torch.zeros(2, 1), kjt, torch.tensor([1.0, 0.0]))
        >>> batch.to(torch.device("cpu")).labels
        tensor([1., 0.])
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return Batch(
            dense_features=self.dense_features.to(device=device, non_blocking=non_blocking),
            sparse_features=self.sparse_features.to(device=device, non_blocking=non_blocking),
            labels=self.labels.to(device=device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses this batch's memory (CUDA)."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which copies to a GPU need not wait."""
        return Batch(
            dense_features=self.dense_features.pin_memory(),
            sparse_features=self.sparse_features.pin_memory(),
            labels=self.labels.pin_memory(),
        )


def step_slices(
    rows: int, batch_size: int, world_size: int = 1, drop_last: bool = False
) -> list[list[tuple[int, int]]]:
    """How ``rows`` rows are dealt out: for each step, for each rank, the row range (start, stop) that it takes.

    A full step takes W * B consecutive rows, B for each rank in rank order. The rows after the last full step are dealt
    out evenly; when they are fewer than the ranks they join the last full step instead, because a rank whose batch
    is empty has no mean loss. Every rank takes part in every step.

    Args:
        rows: rows in all.
        batch_size: B, rows per rank in a full step.
        world_size: W.
        drop_last: leave out the rows after the last full step.

    Returns:
        ``steps[s][r] == (start, stop)``.

    Raises:
        ValueError: a size that is no whole number, a batch size or world size below 1, or too few rows for every rank
            to get one.

    Example:
        >>> from tutorec.datasets.utils import step_slices
        >>> step_slices(rows=10, batch_size=3, world_size=2)
        [[(0, 3), (3, 6)], [(6, 8), (8, 10)]]
    """
    steps = _steps(rows, batch_size, world_size, drop_last)
    return [split_evenly(start, stop, world_size) for start, stop in steps]


def rank_slices(
    rows: int, batch_size: int, rank: int = 0, world_size: int = 1, drop_last: bool = False
) -> list[tuple[int, int]]:
    """The row ranges (start, stop) that one rank takes, step by step; see :func:`step_slices`.

    Args:
        rows: rows in all.
        batch_size: B, rows per rank in a full step.
        rank: the rank.
        world_size: W.
        drop_last: leave out the rows after the last full step.

    Returns:
        One range per step.

    Raises:
        ValueError: no such rank, a size below 1, or too few rows for every rank to get one.

    Example:
        >>> from tutorec.datasets.utils import rank_slices
        >>> rank_slices(rows=10, batch_size=3, rank=1, world_size=2)
        [(3, 6), (8, 10)]
    """
    check_whole("world_size", world_size)
    check_whole("rank", rank, least=None)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not a rank of world_size={world_size}: ranks are 0..{world_size - 1}")
    steps = _steps(rows, batch_size, world_size, drop_last)
    ranges = [(start + rank * batch_size, start + (rank + 1) * batch_size) for start, _ in steps]
    ranges[-1] = split_evenly(*steps[-1], world_size)[rank]
    return ranges


class RowBatches(Iterator[Batch]):
    """One rank's batches over numbered rows, which know where they stand: training goes on from there, in any world.

    Ranks are dealt out the rows as :func:`step_slices` says. Where a run goes on inside an epoch, the rows that are
    left of it are dealt out in the same way: with the same W * B the steps are those of a run that never stopped. Fewer
    rows than ranks make no step then, and are left out.

    Args:
        read: makes a batch of the rows start..stop-1.
        rows: rows of an epoch.
        batch_size: B, rows per batch on this rank.
        rank: this rank.
        world_size: W.
        epochs: how often the rows are gone through, those before ``start`` counted.
        drop_last: leave out the rows after the last full step of an epoch.
        start: the :attr:`position` of a run to go on from.

    Attributes:
        position: rows that all ranks together have taken so far, over all epochs; equal on all ranks. It counts what
            ``next`` has given out, which a pipeline that looks ahead takes before it trains with it.

    Raises:
        ValueError: no such rank or position, a size below 1, or too few rows for every rank to get one.

    Example:
        >>> from tutorec.datasets.random import shop
        >>> batches = shop(rows=100, test_rows=50).batches(16, rank=0, world_size=2)
        >>> first, second = next(batches), next(batches)
        >>> batches.position
        64
    """

    def __init__(
        self,
        read: Callable[[int, int], Batch],
        rows: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        epochs: int = 1,
        drop_last: bool = False,
        start: int = 0,
    ) -> None:
        rank_slices(rows, batch_size, rank, world_size, drop_last)  # refuses what cannot be dealt out
        check_whole("epochs", epochs, least=0)
        if isinstance(start, bool) or not isinstance(start, Integral):
            raise ValueError(
                f"start={start!r} is no position: give the .position of the batches of the run to go on from, as its "
                "checkpoint holds it"
            )
        if not 0 <= start <= epochs * rows:
            raise ValueError(
                f"start={start} is no position in {epochs} epoch(s) of {rows} rows: there are 0 to {epochs * rows}"
            )
        self._read, self._rows, self._epochs = read, int(rows), int(epochs)
        self._batch_size, self._rank, self._world_size = int(batch_size), int(rank), int(world_size)
        self._drop_last = drop_last
        # Python's own: a checkpoint writes it as JSON, which knows no numbers of numpy.
        self.position: int = int(start)
        self._positions = [self.position]
        self._steps: Iterator[tuple[int, tuple[int, int]]] = iter(())

    def __next__(self) -> Batch:
        step = next(self._steps, None)
        while step is None:
            if self.position >= self._epochs * self._rows:
                raise StopIteration
            self._steps = self._rest_of_epoch()
            step = next(self._steps, None)
        self.position, (first, stop) = step
        self._positions.append(self.position)
        return self._read(first, stop)

    def position_after(self, steps: int) -> int:
        """The position after this many batches; `position` is ahead of it where batches are loaded ahead of a step."""
        return self._positions[steps]

    def map(self, change: Callable[[Batch], Batch]) -> RowBatches:
        """The batches from here on, changed as they are read: moved to a device, say; with a position of their own."""
        read = self._read
        return RowBatches(
            lambda first, stop: change(read(first, stop)),
            self._rows,
            self._batch_size,
            self._rank,
            self._world_size,
            self._epochs,
            self._drop_last,
            self.position,
        )

    def __length_hint__(self) -> int:
        """The steps that are left, or about so many: an epoch that was begun in another world may have one less."""
        epoch, done = divmod(self.position, self._rows)
        step = self._batch_size * self._world_size
        whole = len(step_slices(self._rows, self._batch_size, self._world_size, self._drop_last))
        return max((self._epochs - epoch) * whole - done // step, 0)

    def _rest_of_epoch(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """The position after each step of the current epoch, and the rows that this rank takes in it."""
        epoch, done = divmod(self.position, self._rows)
        left, step = self._rows - done, self._batch_size * self._world_size
        if done and left < (step if self._drop_last else self._world_size):
            self.position = (epoch + 1) * self._rows  # not one step more: on to the next epoch
            return iter(())
        steps = step_slices(left, self._batch_size, self._world_size, self._drop_last)
        # what the last step leaves out is behind us, too
        ends = [*(step[-1][1] for step in steps[:-1]), left]
        base = self.position
        return iter(
            [
                (base + end, (done + step[self._rank][0], done + step[self._rank][1]))
                for end, step in zip(ends, steps, strict=True)
            ]
        )


def check_whole(name: str, number: Any, least: int | None = 1) -> None:
    """Refuse what is no whole number, or is below ``least``.

    Raises:
        ValueError: it is one of these.

    Example:
        >>> from tutorec.datasets.utils import check_whole
        >>> check_whole("epochs", 1.5)
        Traceback (most recent call last):
        ValueError: epochs=1.5 must be a whole number, at least 1
    """
    whole = isinstance(number, Integral) and not isinstance(number, bool)
    if not whole or (least is not None and number < least):
        raise ValueError(f"{name}={number!r} must be a whole number" + ("" if least is None else f", at least {least}"))


def split_evenly(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """The range start..stop-1 as consecutive ranges whose sizes differ by at most 1, the larger ones first.

    Example:
        >>> from tutorec.datasets.utils import split_evenly
        >>> split_evenly(0, 7, 3)
        [(0, 3), (3, 5), (5, 7)]
    """
    each, more = divmod(stop - start, parts)
    ends = [start + part * each + min(part, more) for part in range(parts + 1)]
    return list(pairwise(ends))


def _steps(rows: int, batch_size: int, world_size: int, drop_last: bool) -> list[tuple[int, int]]:
    """The range of rows that all ranks together take in each step."""
    for name, number, least in (("rows", rows, 0), ("batch_size", batch_size, None), ("world_size", world_size, None)):
        check_whole(name, number, least)
    if batch_size < 1 or world_size < 1:
        raise ValueError(f"batch_size={batch_size} and world_size={world_size} must both be at least 1")
    step = batch_size * world_size
    full = rows // step
    ends = [s * step for s in range(full + 1)]
    rest = rows - full * step
    if rest and not drop_last:
        ends[len(ends) if rest >= world_size else -1 :] = [rows]
    if ends[-1] == 0 or len(ends) == 1:
        raise ValueError(
            f"{rows} rows are not enough for one step of {world_size} rank(s) with batch_size={batch_size}"
            f"{' and drop_last' if drop_last else ''}: use fewer ranks or a smaller batch_size"
        )
    return list(pairwise(ends))

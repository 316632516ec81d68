"""Batch, and how the rows of a data set are dealt out to ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


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
        ValueError: a batch size or world size below 1, or too few rows for every rank to get one.

    Example:
        >>> from tutorec.datasets.utils import step_slices
        >>> step_slices(rows=10, batch_size=3, world_size=2)
        [[(0, 3), (3, 6)], [(6, 8), (8, 10)]]
    """
    if batch_size < 1 or world_size < 1:
        raise ValueError(f"batch_size={batch_size} and world_size={world_size} must both be at least 1")
    step = batch_size * world_size
    full = rows // step
    starts = [s * step for s in range(full)] + [full * step]
    rest = rows - full * step
    if drop_last or rest == 0:
        stops = starts[1:]
    elif rest >= world_size:
        stops = [*starts[1:], rows]
    else:
        stops = [*starts[1:-1], rows] if full else []
    if not stops:
        raise ValueError(
            f"{rows} rows are not enough for one step of {world_size} rank(s) with batch_size={batch_size}"
            f"{' and drop_last' if drop_last else ''}: use fewer ranks or a smaller batch_size"
        )
    return [_deal(start, stop, world_size) for start, stop in zip(starts, stops, strict=False)]


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
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not a rank of world_size={world_size}: ranks are 0..{world_size - 1}")
    return [step[rank] for step in step_slices(rows, batch_size, world_size, drop_last)]


def _deal(start: int, stop: int, world_size: int) -> list[tuple[int, int]]:
    """Split start..stop-1 into W consecutive ranges whose sizes differ by at most 1, the larger ones first."""
    each, more = divmod(stop - start, world_size)
    ranges = []
    for rank in range(world_size):
        end = start + each + (rank < more)
        ranges.append((start, end))
        start = end
    return ranges

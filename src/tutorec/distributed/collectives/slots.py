"""Which parts of a batch go to which rank: the keys of every rank's slots, cut out of the batch and packed in one copy.

A *slot* is one feature on one rank: a feature that two ranks look up, or two tables of one rank, has two of them. The
batch is cut at every key where a run of slots begins or ends, and the pieces are put one behind the other:

    keys of the batch      a b c d                order   [2, 3 | 0, 1, 2]        splits [2, 3]
    cut at                 0   2   3 4            pieces  rank 0: cd, rank 1: ab, c

so that neighbours travel as one piece, and a batch whose keys stand in rank order is not cut more often than there are
ranks. No permuted copy of the batch is made on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import torch

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


class Slots:
    """The slots of every rank, as positions of their keys in the batch that is sent.

    Args:
        splits: How many slots each rank has: W numbers.
        order: For each slot, rank after rank, the position of its key; None: the keys as they stand.

    Raises:
        ValueError: ``order`` has another number of slots than ``splits``, or a negative position.

    Example:
        >>> slots = Slots([2, 3], order=[2, 3, 0, 1, 2])
        >>> slots.positions_of(rank=1), slots.pieces
        ([0, 1, 2], [[1, 2], [0, 1]])
    """

    def __init__(self, splits: Sequence[int], order: Sequence[int] | None = None) -> None:
        self.splits = list(splits)
        total = sum(self.splits)
        positions = list(range(total)) if order is None else list(order)
        if len(positions) != total:
            raise ValueError(
                f"order names {len(positions)} keys and splits {self.splits} ask for {total}: "
                "give one position for each slot"
            )
        if positions and min(positions) < 0:
            raise ValueError(f"order {positions} holds a negative position; positions of keys count from 0")
        ends = list(accumulate(self.splits))
        self._positions = [positions[end - size : end] for size, end in zip(self.splits, ends, strict=True)]
        self._exact = order is None
        self.needs = 1 + max(positions, default=-1)
        self.is_identity = positions == list(range(total))
        runs = [_runs(of_rank) for of_rank in self._positions]
        self._cuts = sorted({0, *chain.from_iterable(chain.from_iterable(runs))})
        number = {cut: index for index, cut in enumerate(self._cuts)}
        # Pieces of each rank, as numbers of the parts that lie between two cuts.
        self.pieces = [
            [piece for first, end in of_rank for piece in range(number[first], number[end])] for of_rank in runs
        ]
        # Where each part goes exactly once and in its place, what is sent lies in the batch as it is.
        flat = list(chain.from_iterable(self.pieces))
        self._in_place = flat == list(range(len(flat)))

    def positions_of(self, rank: int) -> list[int]:
        """Positions of the keys of one rank's slots."""
        return self._positions[rank]

    def check(self, keys: Sequence[str]) -> None:
        """Refuse a batch that has not the keys that are to be sent."""
        if len(keys) < self.needs or (self._exact and len(keys) > self.needs):
            raise ValueError(
                f"the batch has {len(keys)} keys {list(keys)}, and splits {self.splits} "
                f"{'send' if self._exact else 'and the order need'} {self.needs}"
            )

    def sums(self, starts: Sequence[int]) -> list[int]:
        """How much each rank is sent, W numbers, of what begins at ``starts [F + 1]`` for each key."""
        sizes = self._sizes(starts)
        return [sum([sizes[piece] for piece in of_rank]) for of_rank in self.pieces]

    def per_slot(self, starts: Sequence[int]) -> list[list[int]]:
        """How much each rank is sent, slot by slot, of what begins at ``starts [F + 1]`` for each key."""
        return [[starts[at + 1] - starts[at] for at in of_rank] for of_rank in self._positions]

    def cut(self, tensor: torch.Tensor, starts: Sequence[int]) -> list[list[torch.Tensor]]:
        """The pieces of each rank: views of a tensor in which key f begins at ``starts[f]``."""
        parts = tensor.split_with_sizes(self._sizes(starts))
        return [[parts[piece] for piece in of_rank] for of_rank in self.pieces]

    def gather(self, tensor: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        """The pieces of all ranks end to end; the tensor itself where that is what it is."""
        pieces = list(chain.from_iterable(self.cut(tensor, starts)))
        if self._in_place and sum(piece.numel() for piece in pieces) == tensor.numel():
            return tensor.contiguous()
        return torch.cat(pieces) if pieces else tensor[:0]

    def pack(self, features: KeyedJaggedTensor, dtype: torch.dtype) -> torch.Tensor:
        """Lengths and ids for rank 0, lengths and ids for rank 1, ...: one buffer of ``dtype``.

        Args:
            features: The batch.
            dtype: Of what is sent; an id that it does not hold is changed without notice.
        """
        # Casting whole tensors first takes half the time of a cat that casts piece by piece.
        lengths = self.cut(features.lengths().to(dtype), features.lengths_offset_per_key())
        values = self.cut(features.values().to(dtype), features.offset_per_key())
        pieces = [piece for heads, ids in zip(lengths, values, strict=True) for piece in (*heads, *ids)]
        return torch.cat(pieces) if pieces else features.values()[:0].to(dtype)

    def _sizes(self, starts: Sequence[int]) -> list[int]:
        """Of every part of the batch, the one behind the last cut included."""
        bounds = [starts[cut] for cut in self._cuts]
        bounds.append(starts[-1])
        return [end - first for first, end in pairwise(bounds)]


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours as (first, end): ``[3, 4, 0]`` gives ``[(3, 5), (0, 1)]``."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


def feature_major(of_ranks: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """What came rank after rank, feature after feature: ``counts[rank][feature]`` elements each.

    Example:
        >>> feature_major([torch.tensor([1, 2]), torch.tensor([3, 4, 5])], [[1, 1], [2, 1]])
        tensor([1, 3, 4, 2, 5])
    """
    pieces = [part.split_with_sizes(list(sizes)) for part, sizes in zip(of_ranks, counts, strict=True)]
    return torch.cat([piece for of_feature in zip(*pieces, strict=True) for piece in of_feature])


__all__ = ["Slots", "feature_major"]

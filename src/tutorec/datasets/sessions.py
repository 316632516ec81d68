"""Sessions of a shop: items in the order in which they were viewed, from a planted model.

The next item depends on the last two, and on nothing else::

    0.5   one of the 5 followers of the last item
    0.3   one of the 5 items that come two after the item before it
    0.2   any item, popular ones more often
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tutorec._check import require_int
from tutorec.datasets.random import Split
from tutorec.datasets.utils import Batch, RowBatches
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_FOLLOWERS = np.array([0.4, 0.25, 0.15, 0.12, 0.08])  # how often each follower of an item comes
# A step follows the last item, or the one before it; else it is drawn by popularity.
_AFTER_ONE = 0.5
_AFTER_TWO = 0.3


class Sessions:
    """Histories of items and the item that came next, with the best possible recall.

    Args:
        items: number of items; ids are 0 .. items-1.
        rows: sessions of the training split.
        test_rows: sessions of the held-out split.
        longest: items of the longest history; the shortest has 2.
        seed: everything is a function of it and of the arguments above.

    Raises:
        ValueError: a size is not a whole number, or too small.

    Example:
        >>> from tutorec.datasets.sessions import Sessions
        >>> batch = next(Sessions(items=50, rows=100, test_rows=10, longest=4).batches(8))
        >>> batch.sparse_features.keys(), batch.sparse_features["item"].lengths().tolist()
        (['history', 'item'], [1, 1, 1, 1, 1, 1, 1, 1])
    """

    def __init__(
        self,
        items: int = 200,
        rows: int = 60_000,
        test_rows: int = 5_000,
        longest: int = 10,
        seed: int = 0,
    ) -> None:
        least = {"items": len(_FOLLOWERS), "rows": 1, "test_rows": 1, "longest": 2, "seed": 0}
        for name, number in zip(least, (items, rows, test_rows, longest, seed), strict=True):
            require_int(f"Sessions: {name}", number, least[name])

        self.items = items
        self.longest = longest
        self.seed = seed
        rng = np.random.default_rng([seed, 0])
        # Different followers for each item, [items, 5].
        self._after_one, self._after_two = (
            np.stack([rng.choice(items, len(_FOLLOWERS), replace=False) for _ in range(items)])
            for _ in range(2)
        )

        weights = np.arange(1, items + 1) ** -0.8
        self._popular = rng.permutation(weights / weights.sum())
        self._split = {"train": self._walk(rows, 1), "test": self._walk(test_rows, 2)}

    def __repr__(self) -> str:
        rows, test_rows = (len(self._split[split][1]) for split in ("train", "test"))
        return (
            f"Sessions(items={self.items:,}, rows={rows:,}, test_rows={test_rows:,}, "
            f"longest={self.longest})"
        )

    def batches(
        self,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        split: Split = "train",
        epochs: int = 1,
        start: int = 0,
    ) -> RowBatches:
        """This rank's batches; see :class:`tutorec.datasets.utils.RowBatches`.

        Args:
            batch_size: B, sessions per batch on this rank.
            rank: this rank.
            world_size: W.
            split: "train" or "test".
            epochs: how often the split is gone through.
            start: the position of an earlier run's batches.

        Returns:
            Batches with the features ``history`` (oldest item first) and ``item`` (the one that
            came next), no dense columns [B, 0], and labels [B] of 1.0: every session ends with a
            click.
        """
        walks, lengths = self._split[split]

        def read(first: int, stop: int) -> Batch:
            # A history ends in the column before the last.
            columns = np.arange(self.longest)
            is_item = columns >= self.longest - lengths[first:stop, None]
            ids = torch.from_numpy(
                np.concatenate([walks[first:stop, :-1][is_item], walks[first:stop, -1]])
            )
            counts = torch.from_numpy(
                np.concatenate([lengths[first:stop], np.ones(stop - first, dtype=np.int64)])
            )
            features = KeyedJaggedTensor(["history", "item"], ids, lengths=counts)
            return Batch(torch.empty(stop - first, 0), features, torch.ones(stop - first))

        return RowBatches(read, len(lengths), batch_size, rank, world_size, epochs, start=start)

    def best_recall(self, k: int) -> float:
        """Share of held-out sessions whose next item is among the k likeliest of the model."""
        walks, _ = self._split["test"]

        rows = np.arange(len(walks))[:, None]
        # The probability of each next item, [rows, items].
        chance = np.tile((1 - _AFTER_ONE - _AFTER_TWO) * self._popular, (len(walks), 1))
        # An item's followers differ, so no entry is added to twice.
        chance[rows, self._after_one[walks[:, -2]]] += _AFTER_ONE * _FOLLOWERS
        chance[rows, self._after_two[walks[:, -3]]] += _AFTER_TWO * _FOLLOWERS
        best = np.argsort(-chance, axis=1, kind="stable")[:, :k]
        return float((best == walks[:, -1:]).any(axis=1).mean())

    def _walk(self, rows: int, stream: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Items [rows, longest + 1], the next item last, and the length [rows] of each history."""
        rng = np.random.default_rng([self.seed, stream])
        # Items by popularity alone; steps overwrite those that follow another item.
        walks = rng.choice(self.items, (rows, self.longest + 1), p=self._popular)
        for step in range(2, self.longest + 1):
            follower = rng.choice(len(_FOLLOWERS), rows, p=_FOLLOWERS)
            draw = rng.random(rows)
            by_last = draw < _AFTER_ONE
            by_earlier = (draw >= _AFTER_ONE) & (draw < _AFTER_ONE + _AFTER_TWO)
            walks[by_last, step] = self._after_one[walks[by_last, step - 1], follower[by_last]]
            walks[by_earlier, step] = self._after_two[
                walks[by_earlier, step - 2], follower[by_earlier]
            ]

        return walks, rng.integers(2, self.longest + 1, rows)

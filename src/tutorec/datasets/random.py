"""The shop: click data from a seeded generator, with a truth that is known because it was planted.

A user looks at an item; the user's recent clicks and a few dense columns (hour, price, age,
discount) are known; did the user click? Every user and every item has a hidden vector, and the
probability of a click is::

    sigmoid(bias + <user, item> + <recent clicks, item> + popularity of both + dense terms)

No model can rank better than these probabilities do, so the best possible AUC is known
(:attr:`Shop.best_auc`).

Rows are generated in blocks of fixed size, each from a generator of its own that is seeded by
(seed, split, block). So the rows do not depend on the batch size, nor on how they are split over
ranks, and memory is bounded however many rows there are.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutorec._check import require_finite, require_int
from tutorec.datasets.criteo_files import (
    CAT_FEATURE_COUNT,
    INT_FEATURE_COUNT,
    ArrayColumns,
    CriteoColumns,
    write_rows,
)
from tutorec.datasets.random_rec import RandomRecDataset
from tutorec.datasets.utils import Batch, RowBatches
from tutorec.models.metrics import auc
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = [
    "CRITEO_FEATURES",
    "DENSE_NAMES",
    "SPARSE_NAMES",
    "RandomRecDataset",
    "Shop",
    "ShopRows",
    "Split",
    "shop",
]

Split = Literal["train", "test"]

SPARSE_NAMES: tuple[str, ...] = ("user", "item", "clicked")
DENSE_NAMES: tuple[str, ...] = ("hour", "price", "age", "discount")

_CRITEO_CLICKED = 8  # columns of a Criteo row that hold recent clicks
CRITEO_FEATURES: dict[str, list[str]] = {
    "user": ["cat_0"],
    "item": ["cat_1"],
    "clicked": [f"cat_{i}" for i in range(2, 2 + _CRITEO_CLICKED)],
}

# Weights of the planted truth: user with item, recent clicks with item. With this bias a third of
# the rows are clicks.
_AFFINITY = 1.6
_RECENT = 0.6
_BIAS = -1.0

_BLOCK_ROWS = 16_384
_CACHED_BLOCKS = 32
_CANDIDATES = 4  # a recent click is the best liked of so many items that popularity offered
_SPLIT_CODE = {"train": 1, "test": 2}


@dataclass(frozen=True)
class ShopRows(ArrayColumns):
    """Some rows of the shop, column by column: B rows, N recent clicks in all.

    ``clicked`` holds the recent clicks of all rows one after the other, ``clicked_lengths`` [B] how
    many belong to each row, and ``dwell`` [N] the share of the user's attention that each of them
    got (a row's shares sum to 1).
    """

    user: NDArray[np.int64]
    item: NDArray[np.int64]
    clicked: NDArray[np.int64]
    clicked_lengths: NDArray[np.int64]
    dwell: NDArray[np.float32]
    dense: NDArray[np.float32]
    probability: NDArray[np.float64]
    label: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.user)

    def slice(self, start: int, stop: int) -> ShopRows:
        """Rows start..stop-1."""
        ends = np.concatenate([[0], np.cumsum(self.clicked_lengths)])
        clicks = slice(ends[start], ends[stop])
        rows = super().slice(start, stop)
        return replace(rows, clicked=self.clicked[clicks], dwell=self.dwell[clicks])


def shop(
    *,
    users: int = 500,
    items: int = 200,
    rows: int = 120_000,
    test_rows: int = 20_000,
    exponent: float = 0.8,
    max_clicked: int = 8,
    factors: int = 3,
    seed: int = 0,
) -> Shop:
    """A shop with planted truth, the running example of the book.

    Args:
        users: number of users; ids are 0 .. users-1.
        items: number of products; ids are 0 .. items-1.
        rows: rows of the training split.
        test_rows: rows of the held-out split.
        exponent: the k-th most popular id appears in proportion to ``k ** -exponent`` (0: all
            alike). An id says nothing about its popularity: popularity ranks are assigned at
            random.
        max_clicked: the longest list of recent clicks; a list can be empty.
        factors: length of the hidden vectors.
        seed: everything is a function of it and of the arguments above.

    Returns:
        The shop; nothing is generated before it is requested.

    Raises:
        ValueError: a size is not a positive whole number, or ``seed`` or ``exponent`` is negative
            or not a number.

    Example:
        >>> from tutorec.datasets.random import shop
        >>> small = shop(users=20, items=10, rows=100, test_rows=50)
        >>> [len(batch.labels) for batch in small.batches(64)]
        [64, 36]
        >>> next(small.batches(64)).sparse_features.keys()
        ['user', 'item', 'clicked']
    """
    sizes = {
        "users": users,
        "items": items,
        "rows": rows,
        "test_rows": test_rows,
        "factors": factors,
    }
    for name, size in sizes.items():
        require_int(f"shop: {name}", size, 1)
    require_int("shop: max_clicked", max_clicked, 0)
    require_int("shop: seed", seed, 0)
    require_finite("shop: exponent", exponent, 0)

    return Shop(
        counts={"train": rows, "test": test_rows},
        table_rows={"user": users, "item": items},
        exponent=exponent,
        max_clicked=max_clicked,
        factors=factors,
        seed=seed,
    )


class Shop:
    """Click data with named columns and a known truth; made by :func:`shop`.

    Attributes:
        table_rows: rows that the embedding tables need: 'user' and 'item' (the ids of ``clicked``
            are items).
        counts: rows of each split.
        hidden_user: [users, factors], the planted vectors.
        hidden_item: [items, factors].
    """

    sparse_names = SPARSE_NAMES
    dense_names = DENSE_NAMES

    def __init__(
        self,
        counts: dict[Split, int],
        table_rows: dict[str, int],
        exponent: float,
        max_clicked: int,
        factors: int,
        seed: int,
    ) -> None:
        self.counts = counts
        self.table_rows = table_rows
        self.exponent = exponent
        self.max_clicked = max_clicked
        self.seed = seed

        rng = np.random.default_rng([seed, 0])
        users = table_rows["user"]
        items = table_rows["item"]
        self.hidden_user = _hidden(rng, users, factors)
        self.hidden_item = _hidden(rng, items, factors)
        self._user_liking = 0.4 * rng.standard_normal(users)
        self._item_liking = 0.4 * rng.standard_normal(items)
        self._age = rng.integers(18, 80, users)
        self._price = np.round(np.exp(3.0 + 0.7 * rng.standard_normal(items)), 2)

        self._user_draw = _PowerLaw(users, exponent, rng)
        self._item_draw = _PowerLaw(items, exponent, rng)
        self._blocks: OrderedDict[tuple[Split, int], ShopRows] = OrderedDict()

    def __repr__(self) -> str:
        return (
            f"Shop(users={self.table_rows['user']:,}, items={self.table_rows['item']:,}, "
            f"rows={self.counts['train']:,}, test_rows={self.counts['test']:,}, "
            f"exponent={self.exponent}, seed={self.seed})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling, without the blocks, which the copy generates when it needs them."""
        return {**self.__dict__, "_blocks": OrderedDict()}

    def rows(self, start: int, stop: int, split: Split = "train") -> ShopRows:
        """Rows start..stop-1 of a split, as columns."""
        self._check_rows(start, stop, split)
        blocks = []
        for block in range(start // _BLOCK_ROWS, max(start, stop - 1) // _BLOCK_ROWS + 1):
            base = block * _BLOCK_ROWS
            blocks.append(
                self._block(split, block).slice(max(start - base, 0), min(stop - base, _BLOCK_ROWS))
            )

        return ShopRows.concat(blocks)

    def batches(
        self,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        split: Split = "train",
        epochs: int = 1,
        weighted: bool = False,
        drop_last: bool = False,
        start: int = 0,
    ) -> RowBatches:
        """This rank's batches of B rows each, in order; every rank gets the same number of them.

        At step s the W ranks together take the next W * B rows, rank 0 the first B of them: the
        ranks' batches, one after the other, are the batch that one process with ``batch_size=W *
        B`` sees.

        Args:
            batch_size: B, rows per batch on this rank.
            rank: this rank.
            world_size: W.
            split: "train" or "test".
            epochs: how often the split is gone through.
            weighted: give every id a weight: its dwell share for ``clicked``, 1 for ``user`` and
                ``item``.
            drop_last: leave out the rows after the last full step; else they are split evenly.
            start: go on where an earlier run stood, at its batches' ``position``; its world may
                have been another one.

        Returns:
            An iterator of batches with dense [B, 4], ids of 'user', 'item', 'clicked', and labels
            [B]. It knows its ``position``: see :class:`tutorec.datasets.utils.RowBatches`.
        """

        def read(first: int, stop: int) -> Batch:
            return _to_batch(self.rows(first, stop, split), weighted)

        return RowBatches(
            read, self._count(split), batch_size, rank, world_size, epochs, drop_last, start
        )

    def probabilities(self, split: Split = "test") -> Tensor:
        """The planted probability of a click [N] for every row of a split."""
        return torch.from_numpy(self.rows(0, self._count(split), split).probability.copy())

    def labels(self, split: Split = "test") -> Tensor:
        """The labels [N] of a split: 1.0 for a click."""
        return torch.from_numpy(self.rows(0, self._count(split), split).label.astype(np.float32))

    @cached_property
    def best_auc(self) -> float:
        """AUC of the planted probabilities on the test split: what a perfect model reaches."""
        return auc(self.labels("test"), self.probabilities("test"))

    def best_items(self, k: int, start: int, stop: int, split: Split = "test") -> Tensor:
        """The k items [stop - start, k] that each row's user most probably clicks, best first.

        What a perfect retrieval model answers, which knows the user and the recent clicks and
        nothing of the item: items by how often they are shown times the planted probability of a
        click, over all hours and discounts.
        """
        rows = self.rows(start, stop, split)
        hours = 0.5 * np.cos((np.arange(24) - 20) * (2 * math.pi / 24))
        discounts = 2.0 * (np.arange(11) * 0.05 - 0.25)
        terms = (hours[:, None] + discounts).reshape(-1)

        known = (
            _BIAS
            + self._taste(rows.user, rows.clicked, rows.clicked_lengths, rows.dwell)
            @ self.hidden_item.T
            + self._user_liking[rows.user][:, None]
            + self._item_liking
        )
        # A function of one number: between points of a fine grid it is almost a straight line.
        grid = np.linspace(known.min(), known.max(), 2000)
        chance = np.interp(
            known, grid, (1.0 / (1.0 + np.exp(-(grid[:, None] + terms)))).mean(axis=1)
        )
        best = np.argsort(-chance * self._item_draw.share, axis=1, kind="stable")[:, :k]
        return torch.from_numpy(np.ascontiguousarray(best))

    def best_recall(self, k: int) -> float:
        """The share of the test split's clicks whose item is among the k of :meth:`best_items`."""
        label = self.labels("test").numpy() != 0
        hit_count = 0
        for start in range(0, self.counts["test"], _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, self.counts["test"])
            hits = (
                self.best_items(k, start, stop).numpy()
                == self.rows(start, stop, "test").item[:, None]
            )
            hit_count += int((hits.any(axis=1) & label[start:stop]).sum())
        return hit_count / int(label.sum())

    def head(self, n: int = 5, split: Split = "train") -> str:
        """The first n rows as a small text table, in the units of the shop."""
        titles = ["click", "user", "item", "clicked", "dwell", *self.dense_names]
        lines = [titles]
        rows = self.rows(0, min(n, self._count(split)), split)
        for i in range(len(rows)):
            row = rows.slice(i, i + 1)
            dwell = " ".join(f"{share:.2f}" for share in row.dwell)
            hour, price, age, discount = row.dense[0]
            ids = [
                str(row.label[0]),
                str(row.user[0]),
                str(row.item[0]),
                " ".join(map(str, row.clicked)) or "-",
                dwell or "-",
            ]
            lines.append(
                [*ids, f"{hour:.0f}", f"{price:.2f}", f"{age:.0f}", f"{100 * discount:.0f} %"]
            )

        widths = [max(len(line[c]) for line in lines) for c in range(len(titles))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in lines
        )

    def write_criteo(
        self, path: str | Path, rows: int | None = None, split: Split = "train", start: int = 0
    ) -> Path:
        """Write rows of a split as a Criteo TSV (``.gz`` compresses); returns the path.

        Integer columns: 0 hour, 1 price in cents, 2 age, 3 discount in percent, 4 number of recent
        clicks, 5..12 their dwell shares in percent. Categorical columns: 0 user, 1 item, 2..9 the
        recent clicks (item ids), 10..25 empty. ``CriteoDataset(path, rows,
        features=CRITEO_FEATURES)`` reads the ids back as the shop's three features.
        """
        count = self._count(split)
        stop = count if rows is None else start + rows
        self._check_rows(start, stop, split)
        blocks = (
            self.rows(at, min(at + _BLOCK_ROWS, stop), split)
            for at in range(start, stop, _BLOCK_ROWS)
        )
        return write_rows(Path(path), (_criteo_columns(block) for block in blocks))

    def _check_rows(self, start: int, stop: int, split: Split) -> None:
        count = self._count(split)
        require_int("shop: start", start)
        require_int("shop: stop", stop)
        if not 0 <= start <= stop <= count:
            raise ValueError(
                f"shop: rows {start}..{stop} requested, and split '{split}' has rows 0..{count}"
            )

    def _count(self, split: Split) -> int:
        if split not in self.counts:
            raise ValueError(f"shop: no split '{split}'; there are {sorted(self.counts)}")
        return self.counts[split]

    def _block(self, split: Split, block: int) -> ShopRows:
        """One block of a split: generated, or remembered if it was used lately."""
        key = (split, block)
        if key not in self._blocks:
            self._blocks[key] = self._generate(
                np.random.default_rng([self.seed, _SPLIT_CODE[split], block])
            )
            if len(self._blocks) > _CACHED_BLOCKS:
                self._blocks.popitem(last=False)

        self._blocks.move_to_end(key)
        return self._blocks[key]

    def _generate(self, rng: np.random.Generator) -> ShopRows:
        count = _BLOCK_ROWS
        user = self._user_draw(rng, count)
        item = self._item_draw(rng, count)
        lengths = np.minimum(rng.geometric(0.25, count) - 1, self.max_clicked)
        clicked = self._recent_clicks(rng, np.repeat(user, lengths))
        dwell = _shares(rng.exponential(1.0, len(clicked)) + 0.25, lengths)

        hour = rng.integers(0, 24, count)
        discount = rng.integers(0, 11, count) * 0.05
        taste = self._taste(user, clicked, lengths, dwell)
        logit = (
            _BIAS
            + np.einsum("bd,bd->b", taste, self.hidden_item[item])
            + self._user_liking[user]
            + self._item_liking[item]
            + 0.5 * np.cos((hour - 20) * (2 * math.pi / 24))
            + 2.0 * (discount - 0.25)
        )

        probability = 1.0 / (1.0 + np.exp(-logit))
        dense = np.stack([hour, self._price[item], self._age[user], discount], axis=1).astype(
            np.float32
        )
        label = (rng.random(count) < probability).astype(np.int64)

        return ShopRows(
            user, item, clicked, lengths, dwell.astype(np.float32), dense, probability, label
        )

    def _taste(
        self,
        user: NDArray[np.int64],
        clicked: NDArray[np.int64],
        lengths: NDArray[np.int64],
        dwell: NDArray[np.floating],
    ) -> NDArray[np.float64]:
        """Preferences of each row's user [B, factors]; an item's inner product favours a click."""
        recent = np.zeros((len(user), self.hidden_item.shape[1]))
        np.add.at(
            recent,
            np.repeat(np.arange(len(user)), lengths),
            self.hidden_item[clicked] * dwell[:, None],
        )
        return _AFFINITY * self.hidden_user[user] + _RECENT * recent

    def _recent_clicks(
        self, rng: np.random.Generator, user: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """One recent click [N] for each entry of user [N]: the best of a few popular items."""
        offered = self._item_draw(rng, len(user) * _CANDIDATES).reshape(len(user), _CANDIDATES)
        liking = np.einsum("nd,ncd->nc", self.hidden_user[user], self.hidden_item[offered])
        return offered[np.arange(len(user)), liking.argmax(axis=1)]


class _PowerLaw:
    """Draws ids 0..n-1; the k-th most popular has probability k ** -exponent, in shuffled order."""

    def __init__(self, n: int, exponent: float, rng: np.random.Generator) -> None:
        mass = np.arange(1, n + 1, dtype=np.float64) ** -exponent
        self._cdf = np.cumsum(mass) / mass.sum()
        self._cdf[-1] = 1.0
        self._id_of_rank = rng.permutation(n)
        # The share of draws that is each id.
        self.share = np.empty(n)
        self.share[self._id_of_rank] = mass / mass.sum()

    def __call__(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        return self._id_of_rank[np.searchsorted(self._cdf, rng.random(size), side="right")]


def _hidden(rng: np.random.Generator, n: int, factors: int) -> NDArray[np.float64]:
    """Vectors [n, factors] whose inner products have a standard deviation of about 1."""
    vectors = rng.standard_normal((n, factors))
    return vectors * (factors**0.25 / np.sqrt((vectors**2).sum(axis=1).mean()))


def _shares(amounts: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Amounts [N] over the sum of their row."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return amounts / np.bincount(row, weights=amounts, minlength=len(lengths))[row]


def _to_batch(rows: ShopRows, weighted: bool) -> Batch:
    count = len(rows)
    ones = np.ones(count, dtype=np.int64)
    weights = (
        np.concatenate([np.ones(2 * count, dtype=np.float32), rows.dwell]) if weighted else None
    )

    hour, price, age, discount = rows.dense.T
    # Centred and scaled: a model should not have to learn the units first.
    dense = np.stack(
        [
            (hour - 11.5) / 6.9,
            (np.log(price) - 3.0) / 0.7,
            (age - 48.5) / 17.9,
            (discount - 0.25) / 0.16,
        ]
    )
    kjt = KeyedJaggedTensor(
        keys=list(SPARSE_NAMES),
        values=torch.from_numpy(np.concatenate([rows.user, rows.item, rows.clicked])),
        weights=None if weights is None else torch.from_numpy(weights),
        lengths=torch.from_numpy(
            np.concatenate([ones, ones, rows.clicked_lengths]).astype(np.int32)
        ),
    )
    labels = torch.from_numpy(rows.label.astype(np.float32))

    return Batch(torch.from_numpy(np.ascontiguousarray(dense.T, dtype=np.float32)), kjt, labels)


def _criteo_columns(rows: ShopRows) -> CriteoColumns:
    """The shop's columns laid out as write_criteo documents."""
    count = len(rows)
    ints, cats = (
        np.zeros((count, columns), np.int64) for columns in (INT_FEATURE_COUNT, CAT_FEATURE_COUNT)
    )
    ints_known = ints.astype(bool)
    cats_known = cats.astype(bool)

    hour, price, age, discount = rows.dense.T
    ints[:, :5] = np.rint(
        np.stack([hour, price * 100, age, discount * 100, rows.clicked_lengths], axis=1)
    )
    ints_known[:, :5] = True
    cats[:, 0] = rows.user
    cats[:, 1] = rows.item
    cats_known[:, :2] = True

    row = np.repeat(np.arange(count), rows.clicked_lengths)
    column = np.arange(len(row)) - np.repeat(
        np.cumsum(rows.clicked_lengths) - rows.clicked_lengths, rows.clicked_lengths
    )
    fits = column < _CRITEO_CLICKED
    row = row[fits]
    column = column[fits]
    ints[row, 5 + column] = np.rint(rows.dwell[fits] * 100)
    ints_known[row, 5 + column] = True
    cats[row, 2 + column] = rows.clicked[fits]
    cats_known[row, 2 + column] = True

    return CriteoColumns(rows.label, ints, ints_known, cats, cats_known)

"""Permutations between the caller's order of features and columns and the order of the exchanges.

Ids are sent grouped by the rank that owns their table, and pooled columns return grouped by the
rank that looked them up. Features are permuted on the way in and columns on the way out; both steps
are skipped if the orders agree. What depends only on keys is computed once per order of keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_MAX_CACHED_ORDERS = 64


class FeatureOrder:
    """Permutes the features of a batch into the order in which they are sent.

    Args:
        wanted: Features in sending order; a feature that two tables read occurs twice.
        tables_of: Feature -> the tables that read it, for error messages.

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(
        ...     ["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2])
        ... )
        >>> FeatureOrder(["b", "a"], {}).arrange(batch).values()
        tensor([2, 3, 1])
    """

    def __init__(self, wanted: Sequence[str], tables_of: Mapping[str, Sequence[str]]) -> None:
        self._wanted = list(wanted)
        self._tables_of = tables_of
        self._positions: dict[tuple[str, ...], list[int] | None] = {}

    @property
    def wanted(self) -> list[str]:
        """Features in sending order."""
        return self._wanted

    def arrange(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the features in sending order; the batch itself if it has that order.

        Raises:
            KeyError: A feature is missing.
        """
        if features.keys() == self._wanted:
            return features

        keys = tuple(features.keys())
        if keys not in self._positions:
            if len(self._positions) == _MAX_CACHED_ORDERS:
                self._positions.clear()
            self._positions[keys] = self._find(keys)
        positions = self._positions[keys]
        return features if positions is None else features.permute(positions)

    def _find(self, keys: tuple[str, ...]) -> list[int] | None:
        """Position of each wanted feature; None if the order is already right."""
        key_positions = {key: index for index, key in enumerate(keys)}
        for feature in self._wanted:
            if feature not in key_positions:
                tables = " and ".join(repr(table) for table in self._tables_of.get(feature, ()))
                raise KeyError(
                    f"the batch has no feature {feature!r}, which table {tables} reads; its "
                    f"keys are {list(keys)}"
                )

        positions = [key_positions[feature] for feature in self._wanted]
        return None if positions == list(range(len(keys))) else positions


@dataclass(frozen=True)
class OutputColumns:
    """Consecutive columns of one output, which are sent together.

    Args:
        key: The output.
        offset: Their first column in the output; not 0 for later column shards.
        columns: Number of columns.
    """

    key: str
    offset: int
    columns: int


class ColumnOrder:
    """Permutes pooled columns from the order in which they arrive into the caller's order.

    Args:
        arriving: Column ranges in order of arrival; they cover every column of every key once.
        wanted: The keys in the caller's order.

    Example:
        >>> import torch
        >>> arriving = [
        ...     OutputColumns("item", 0, 1),
        ...     OutputColumns("user", 1, 1),
        ...     OutputColumns("user", 0, 1),
        ... ]
        >>> order = ColumnOrder(arriving, wanted=["user", "item"])
        >>> order.length_per_key, order.arrange(torch.tensor([[7, 8, 9]]))
        ([2, 1], tensor([[9, 8, 7]]))
    """

    def __init__(self, arriving: Sequence[OutputColumns], wanted: Sequence[str]) -> None:
        key_positions = {key: index for index, key in enumerate(wanted)}
        assert {shard.key for shard in arriving} == set(wanted), f"{arriving} for {list(wanted)}"
        width = Counter[str]()
        for shard in arriving:
            width[shard.key] += shard.columns
        self.length_per_key: list[int] = [width[key] for key in wanted]
        self._columns = [shard.columns for shard in arriving]
        self._keys = len(wanted)

        order = sorted(
            range(len(arriving)), key=lambda i: (key_positions[arriving[i].key], arriving[i].offset)
        )
        self._order = order
        self._places = [key_positions[arriving[i].key] for i in order]
        self._in_order = order == list(range(len(order)))

        # Ranges that are neighbors in both orders are copied as one block.
        targets = [0] * len(order)
        for target, shard in enumerate(order):
            targets[shard] = target
        starts = [i for i, to in enumerate(targets) if i == 0 or to != targets[i - 1] + 1]
        ends = [*starts[1:], len(targets)] if starts else []
        offsets = [0, *accumulate(self._columns)]
        self._block_columns = [
            offsets[end] - offsets[start] for start, end in zip(starts, ends, strict=True)
        ]
        self._block_order = sorted(range(len(starts)), key=lambda block: targets[starts[block]])

    def arrange(self, pooled: torch.Tensor) -> torch.Tensor:
        """``[B, D]`` in order of arrival -> ``[B, D]`` in the caller's order."""
        if self._in_order:
            return pooled
        blocks = pooled.split(self._block_columns, dim=1)
        return torch.cat([blocks[block] for block in self._block_order], dim=1)

    def by_key(self, flat: torch.Tensor, samples: Sequence[int]) -> list[torch.Tensor]:
        """Columns of a variable batch, flat -> ``[B_key, D]`` of each key, in the caller's order.

        Args:
            flat: ``[samples, columns]`` of each arriving range, flattened.
            samples: Number of samples of each arriving range.
        """
        sizes = [count * columns for count, columns in zip(samples, self._columns, strict=True)]
        shards = [
            block.view(count, columns)
            for block, count, columns in zip(flat.split(sizes), samples, self._columns, strict=True)
        ]

        shards_by_key: list[list[torch.Tensor]] = [[] for _ in range(self._keys)]
        for key, shard in zip(self._places, self._order, strict=True):
            shards_by_key[key].append(shards[shard])
        return [
            blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1) for blocks in shards_by_key
        ]

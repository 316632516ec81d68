"""Compressions of a table: which smaller tables are stored instead, and how their rows become its rows.

A compression turns one table of R rows and D columns into *parts*, plain tables that are looked up, sharded and trained
as any other. ``modules/compressed_collection.py`` puts them into collections.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.sparse.hashing import mixing_hash

Operation = Literal["multiply", "add", "concatenate"]


class IdMap(NamedTuple):
    """Ids made of a feature's ids: what is appended to the feature's name, and which row each id means."""

    suffix: str
    rows: Callable[[Tensor], Tensor] | None = None


class Part(NamedTuple):
    """A plain table that stores a part of a compressed one, and the ids that look it up: one lookup for each map."""

    table: EmbeddingBagConfig
    maps: tuple[IdMap, ...] = (IdMap(""),)


class Compression(ABC):
    """How one table is stored in others."""

    @property
    def per_id(self) -> bool:
        """Whether rows are combined id by id, before a bag is pooled: where the pooled rows would not do."""
        return False

    @property
    def bounded(self) -> bool:
        """Whether ids of the table are below its ``num_embeddings`` while none of the parts can check that."""
        return False

    def width(self, table: EmbeddingBagConfig) -> int:
        """Columns of what ``combine`` gives; a matrix widens them where they are fewer than the table's."""
        return table.embedding_dim

    @abstractmethod
    def parts(self, table: EmbeddingBagConfig) -> list[Part]:
        """The plain tables that are stored instead of a table."""

    def combine(self, found: Sequence[Tensor]) -> Tensor:
        """What the parts' lookups found, in the order of parts and maps, as rows of the table [N, D]: here the sum."""
        return sum(found[1:], start=found[0])


@dataclass(frozen=True)
class QR(Compression):
    """Quotient and remainder: row i is made of row i // buckets of one table and row i % buckets of another.

    No two ids share both rows, and about ``2 * sqrt(R)`` rows are stored instead of R. Rows are multiplied id by id,
    before bags are pooled: the product of two sums is not the sum of the products.

    Args:
        num_buckets: Rows of the remainder table; by default the root of R, which needs the fewest rows.
        operation: How the two rows become one. ``"multiply"``; ``"add"``; ``"concatenate"``, each of half the columns.

    Raises:
        ValueError: There are no buckets, or there is no such operation.

    Example:
        >>> [tuple(part.table.name.split("_")[1:]) for part in QR(4).parts(EmbeddingBagConfig(10, 8, "item"))]
        [('quotient',), ('remainder',)]
        >>> [part.table.num_embeddings for part in QR(4).parts(EmbeddingBagConfig(10, 8, "item"))]
        [3, 4]

    Source:
        Shi et al., *Compositional Embeddings Using Complementary Partitions* (2020).
    """

    num_buckets: int | None = None
    operation: Operation = "multiply"

    def __post_init__(self) -> None:
        if self.num_buckets is not None and self.num_buckets < 1:
            raise ValueError(
                f"QR: num_buckets={self.num_buckets} must be at least 1; the root of R stores the fewest rows"
            )
        if self.operation not in get_args(Operation):
            raise ValueError(f"QR: operation={self.operation!r}; there are {', '.join(get_args(Operation))}")

    @property
    def per_id(self) -> bool:
        """Whether the rows are multiplied."""
        return self.operation == "multiply"

    @property
    def bounded(self) -> bool:
        """The remainder of any id is a row, and so is a quotient slightly beyond the table's end."""
        return True

    def parts(self, table: EmbeddingBagConfig) -> list[Part]:
        """The tables of quotients and of remainders, drawn so that what they combine to is in the table's range."""
        buckets = self.num_buckets or math.isqrt(table.num_embeddings - 1) + 1
        first = last = table.embedding_dim
        ends = table.get_weight_init_min(), table.get_weight_init_max()
        if self.operation == "multiply":
            root = math.sqrt(max(map(abs, ends)))
            ends = -root, root
        elif self.operation == "add":
            ends = ends[0] / 2, ends[1] / 2
        else:
            first, last = table.embedding_dim // 2, table.embedding_dim - table.embedding_dim // 2
        quotients = _part(table, "quotient", -(-table.num_embeddings // buckets), first, ends)
        remainders = _part(table, "remainder", buckets, last, ends)
        divide = partial(torch.div, other=buckets, rounding_mode="floor")
        return [
            Part(quotients, (IdMap(f"//{buckets}", divide),)),
            Part(remainders, (IdMap(f"%{buckets}", partial(torch.remainder, other=buckets)),)),
        ]

    def combine(self, found: Sequence[Tensor]) -> Tensor:
        """Rows of the quotients and of the remainders, multiplied, added or side by side."""
        if self.operation == "add":
            return found[0] + found[1]
        return found[0] * found[1] if self.per_id else torch.cat(list(found), dim=-1)


@dataclass(frozen=True)
class Hash(Compression):
    """Ids hashed to few rows: row i is the sum of one row for each of several hashes.

    Two ids that share a row under one hash seldom share all of them. Ids may be any int64 numbers. With importance
    weights, each id learns by how much it multiplies each of its rows (hash embeddings), and ids are below R again.

    Args:
        rows: Rows of the table that is stored.
        hashes: Rows that are summed for an id.
        importance: Whether each of the R ids has ``hashes`` weights of its own, which begin as 1.

    Raises:
        ValueError: There are no rows or no hashes.

    Example:
        >>> table = EmbeddingBagConfig(1000, 8, "item")
        >>> [(part.table.num_embeddings, part.table.embedding_dim) for part in Hash(50, 2, True).parts(table)]
        [(50, 8), (1000, 2)]

    Source:
        Weinberger et al., *Feature Hashing* (2009), for one hash; Svenstrup et al., *Hash Embeddings* (2017).
    """

    rows: int
    hashes: int = 1
    importance: bool = False

    def __post_init__(self) -> None:
        if self.rows < 1 or self.hashes < 1:
            raise ValueError(f"Hash: rows={self.rows} and hashes={self.hashes} must be at least 1")

    @property
    def per_id(self) -> bool:
        """Whether each id has weights of its own."""
        return self.importance

    def parts(self, table: EmbeddingBagConfig) -> list[Part]:
        """The rows that ids share, drawn so that their sum is in the table's range, and the ids' own weights."""
        ends = table.get_weight_init_min() / self.hashes, table.get_weight_init_max() / self.hashes
        hashes = {seed: partial(mixing_hash, rows=self.rows, seed=seed) for seed in range(self.hashes)}
        maps = tuple(IdMap(f"#{seed}%{self.rows}", hashed) for seed, hashed in hashes.items())
        parts = [Part(_part(table, "hashed", self.rows, table.embedding_dim, ends), maps)]
        if self.importance:
            importance = _part(table, "importance", table.num_embeddings, self.hashes, (1.0, 1.0))
            parts.append(Part(replace(importance, init_fn=None)))
        return parts

    def combine(self, found: Sequence[Tensor]) -> Tensor:
        """The sum of the hashes' rows, each times its weight."""
        if self.importance:
            *found, weights = found
            found = [rows * weights[:, seed, None] for seed, rows in enumerate(found)]
        return super().combine(found)


@dataclass(frozen=True)
class Block(Compression):
    """Narrow rows and one matrix: row i [D] is a stored row [columns] times a matrix [columns, D] that all rows share.

    Args:
        columns: Of the table that is stored; with D of them there is no matrix.

    Raises:
        ValueError: There are no columns, or more than the table has.

    Example:
        >>> Block(4).parts(EmbeddingBagConfig(1000, 16, "item"))[0].table.embedding_dim
        4

    Source:
        The columns of a table may depend on how popular its rows are, see ``mixed_dimensions``.
    """

    columns: int

    def width(self, table: EmbeddingBagConfig) -> int:
        """The columns that are stored."""
        return self.columns

    def parts(self, table: EmbeddingBagConfig) -> list[Part]:
        """The table with fewer columns."""
        if not 1 <= self.columns <= table.embedding_dim:
            raise ValueError(
                f"table {table.name!r} has {table.embedding_dim} columns, and Block stores {self.columns} of them; "
                f"choose from 1 to {table.embedding_dim}"
            )
        return [Part(replace(table, name=f"{table.name}_block", embedding_dim=self.columns))]


@dataclass(frozen=True)
class Whole(Compression):
    """No compression: the table itself."""

    def parts(self, table: EmbeddingBagConfig) -> list[Part]:
        """The table."""
        return [Part(table)]


def _part(
    table: EmbeddingBagConfig, kind: str, rows: int, columns: int, ends: tuple[float, float]
) -> EmbeddingBagConfig:
    """A table of other rows and columns, with initial values between two ends; the rest is the table's."""
    return replace(
        table,
        name=f"{table.name}_{kind}",
        num_embeddings=rows,
        embedding_dim=columns,
        weight_init_min=ends[0],
        weight_init_max=ends[1],
    )


def mixed_dimensions(popularity: Mapping[str, float], base: int, alpha: float) -> dict[str, int]:
    """Columns for each table, the more the more often a row of it is looked up: ``base * (p / max(p)) ** alpha``.

    Args:
        popularity: For each table, lookups per row, in any unit. For tables that are looked up equally often, 1 / R.
        base: D, columns of the most popular table.
        alpha: With 0 every table has D columns, with 1 columns are proportional to popularity.

    Returns:
        For each table a power of two from 4 on, and at most ``base``: what ``Block`` stores.

    Raises:
        ValueError: A popularity is not positive.

    Example:
        >>> mixed_dimensions({"country": 1 / 200, "item": 1 / 2_000_000}, base=64, alpha=0.3)
        {'country': 64, 'item': 4}

    Source:
        Ginart et al., *Mixed Dimension Embeddings with Application to Memory-Efficient Recommendation Systems* (2019).
    """
    wrong = {name: one for name, one in popularity.items() if not one > 0}
    if wrong:
        raise ValueError(f"lookups per row must be positive, got {wrong}; leave out tables that nobody looks up")
    top = max(popularity.values(), default=1.0)
    widths = {name: base * (one / top) ** alpha for name, one in popularity.items()}
    return {name: min(base, max(4, 2 ** round(math.log2(one)))) for name, one in widths.items()}

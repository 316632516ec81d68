"""Compressions of a table: the smaller tables that are stored, and how their rows are combined.

A compression replaces a table of R rows and D columns by *parts*, plain tables that can be looked
up, sharded and trained. ``modules/compressed_collection.py`` puts them into collections.
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
    """A map from a feature's ids to rows of a part, and a suffix for the feature's name."""

    suffix: str
    rows: Callable[[Tensor], Tensor] | None = None


class Part(NamedTuple):
    """A plain table that stores a part of a compressed one; it is looked up once per id map."""

    table: EmbeddingBagConfig
    maps: tuple[IdMap, ...] = (IdMap(""),)


class Compression(ABC):
    """Base of compressions of a table."""

    @property
    def per_id(self) -> bool:
        """Whether rows must be combined per id, before pooling."""
        return False

    @property
    def bounded(self) -> bool:
        """Whether ids must be less than ``num_embeddings`` although no part checks that."""
        return False

    def width(self, table: EmbeddingBagConfig) -> int:
        """Columns of ``combine``'s result; if fewer than the table's, a matrix expands them."""
        return table.embedding_dim

    @abstractmethod
    def parts(self, table: EmbeddingBagConfig) -> list[Part]:
        """The plain tables that are stored instead of a table."""

    def combine(self, results: Sequence[Tensor]) -> Tensor:
        """Combine the results of parts and maps, in order, to [N, D]: here their sum."""
        return sum(results[1:], start=results[0])


@dataclass(frozen=True)
class QR(Compression):
    """Quotient-remainder trick: row i combines row i // buckets and row i % buckets of two tables.

    No two ids share both rows, and about ``2 * sqrt(R)`` rows are stored instead of R. Rows are
    multiplied per id before pooling: the product of two sums is not the sum of the products.

    Args:
        num_buckets: Rows of the remainder table; by default the square root of R, which stores the
            fewest rows.
        operation: How two rows are combined: ``"multiply"``, ``"add"``, or ``"concatenate"`` with
            half of the columns each.

    Raises:
        ValueError: There are no buckets, or the operation is unknown.

    Example:
        >>> [
        ...     tuple(part.table.name.split("_")[1:])
        ...     for part in QR(4).parts(EmbeddingBagConfig(10, 8, "item"))
        ... ]
        [('quotient',), ('remainder',)]
        >>> [
        ...     part.table.num_embeddings
        ...     for part in QR(4).parts(EmbeddingBagConfig(10, 8, "item"))
        ... ]
        [3, 4]

    Source:
        Shi et al., *Compositional Embeddings Using Complementary Partitions* (2020).
    """

    num_buckets: int | None = None
    operation: Operation = "multiply"

    def __post_init__(self) -> None:
        if self.num_buckets is not None and self.num_buckets < 1:
            raise ValueError(
                f"QR: num_buckets={self.num_buckets} must be at least 1; the square root of R "
                "stores the fewest rows"
            )

        if self.operation not in get_args(Operation):
            raise ValueError(
                f"QR: operation={self.operation!r}; there are {', '.join(get_args(Operation))}"
            )

    @property
    def per_id(self) -> bool:
        """Whether the rows are multiplied."""
        return self.operation == "multiply"

    @property
    def bounded(self) -> bool:
        """True: an invalid id has a valid remainder, and perhaps a valid quotient."""
        return True

    def parts(self, table: EmbeddingBagConfig) -> list[Part]:
        """The tables of quotients and remainders; initial combined rows have the table's range."""
        buckets = self.num_buckets or math.isqrt(table.num_embeddings - 1) + 1
        first = last = table.embedding_dim
        ends = table.get_weight_init_min(), table.get_weight_init_max()

        if self.operation == "multiply":
            root = math.sqrt(max(map(abs, ends)))
            ends = -root, root
        elif self.operation == "add":
            ends = ends[0] / 2, ends[1] / 2
        else:
            first = table.embedding_dim // 2
            last = table.embedding_dim - table.embedding_dim // 2

        quotients = _part(table, "quotient", -(-table.num_embeddings // buckets), first, ends)
        remainders = _part(table, "remainder", buckets, last, ends)
        divide = partial(torch.div, other=buckets, rounding_mode="floor")
        return [
            Part(quotients, (IdMap(f"//{buckets}", divide),)),
            Part(remainders, (IdMap(f"%{buckets}", partial(torch.remainder, other=buckets)),)),
        ]

    def combine(self, results: Sequence[Tensor]) -> Tensor:
        """Multiply, add or concatenate rows of quotients and remainders."""
        if self.operation == "add":
            return results[0] + results[1]
        return results[0] * results[1] if self.per_id else torch.cat(list(results), dim=-1)


@dataclass(frozen=True)
class Hash(Compression):
    """Hashing: row i is the sum of the rows to which several hashes map i.

    Two ids that share a row under one hash rarely share all rows. Ids may be any int64. With
    importance weights (hash embeddings), each id also learns a factor for each of its rows, and ids
    must be less than R.

    Args:
        rows: Rows of the stored table.
        hashes: Number of rows that are summed per id.
        importance: Whether each of the R ids has ``hashes`` weights, which are initially 1.

    Raises:
        ValueError: There are no rows or no hashes.

    Example:
        >>> table = EmbeddingBagConfig(1000, 8, "item")
        >>> [
        ...     (part.table.num_embeddings, part.table.embedding_dim)
        ...     for part in Hash(50, 2, True).parts(table)
        ... ]
        [(50, 8), (1000, 2)]

    Source:
        Weinberger et al., *Feature Hashing* (2009), for one hash; Svenstrup et al., *Hash
        Embeddings* (2017).
    """

    rows: int
    hashes: int = 1
    importance: bool = False

    def __post_init__(self) -> None:
        if self.rows < 1 or self.hashes < 1:
            raise ValueError(f"Hash: rows={self.rows} and hashes={self.hashes} must be at least 1")

    @property
    def per_id(self) -> bool:
        """Whether each id has importance weights."""
        return self.importance

    def parts(self, table: EmbeddingBagConfig) -> list[Part]:
        """The shared rows, whose initial sums have the table's range, and importance weights."""
        ends = table.get_weight_init_min() / self.hashes, table.get_weight_init_max() / self.hashes
        hashes = {
            seed: partial(mixing_hash, rows=self.rows, seed=seed) for seed in range(self.hashes)
        }
        maps = tuple(IdMap(f"#{seed}%{self.rows}", hashed) for seed, hashed in hashes.items())
        parts = [Part(_part(table, "hashed", self.rows, table.embedding_dim, ends), maps)]

        if self.importance:
            importance = _part(table, "importance", table.num_embeddings, self.hashes, (1.0, 1.0))
            parts.append(Part(replace(importance, init_fn=None)))
        return parts

    def combine(self, results: Sequence[Tensor]) -> Tensor:
        """The sum of the hashes' rows, each times its weight."""
        if self.importance:
            *results, weights = results
            results = [rows * weights[:, seed, None] for seed, rows in enumerate(results)]
        return super().combine(results)


@dataclass(frozen=True)
class Block(Compression):
    """Low-rank table: row i is a stored row [columns] times a shared matrix [columns, D].

    Args:
        columns: Columns of the stored table; if it has D, there is no matrix.

    Raises:
        ValueError: There are no columns, or more than the table has.

    Example:
        >>> Block(4).parts(EmbeddingBagConfig(1000, 16, "item"))[0].table.embedding_dim
        4

    Source:
        ``mixed_dimensions`` chooses columns by popularity.
    """

    columns: int

    def width(self, table: EmbeddingBagConfig) -> int:
        """The stored columns."""
        return self.columns

    def parts(self, table: EmbeddingBagConfig) -> list[Part]:
        """The table with fewer columns."""
        if not 1 <= self.columns <= table.embedding_dim:
            raise ValueError(
                f"table {table.name!r} has {table.embedding_dim} columns, and Block stores "
                f"{self.columns} of them; choose from 1 to {table.embedding_dim}"
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
    """The table with other rows, columns and range of initial values."""
    return replace(
        table,
        name=f"{table.name}_{kind}",
        num_embeddings=rows,
        embedding_dim=columns,
        weight_init_min=ends[0],
        weight_init_max=ends[1],
    )


def mixed_dimensions(popularity: Mapping[str, float], base: int, alpha: float) -> dict[str, int]:
    """Columns per table that grow with its popularity p: ``base * (p / max(p)) ** alpha``.

    Args:
        popularity: Lookups per row of each table, in any unit. Use 1 / R for tables with equal
            numbers of lookups.
        base: D, columns of the most popular table.
        alpha: With 0 every table has D columns, with 1 columns are proportional to popularity.

    Returns:
        For each table a power of two from 4 to ``base``: the stored columns of its ``Block``.

    Raises:
        ValueError: A popularity is not positive.

    Example:
        >>> mixed_dimensions({"country": 1 / 200, "item": 1 / 2_000_000}, base=64, alpha=0.3)
        {'country': 64, 'item': 4}

    Source:
        Ginart et al., *Mixed Dimension Embeddings with Application to Memory-Efficient
        Recommendation Systems* (2019).
    """
    wrong = {name: value for name, value in popularity.items() if not value > 0}
    if wrong:
        raise ValueError(
            f"lookups per row must be positive, got {wrong}; leave out tables that nobody looks up"
        )

    top = max(popularity.values(), default=1.0)
    widths = {name: base * (value / top) ** alpha for name, value in popularity.items()}
    return {name: min(base, max(4, 2 ** round(math.log2(value)))) for name, value in widths.items()}

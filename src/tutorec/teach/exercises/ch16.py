"""Exercises of chapter 16: rows of a quotient-remainder table, twins of a bag, a compression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tutorec.modules.compressed_collection import CompressedEmbeddingBagCollection
from tutorec.modules.compressions import Compression, IdMap, Part
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.sparse.hashing import mixing_hash
from tutorec.sparse.lists import kjt_from_lists
from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


def _unsorted_twin(first: int, second: int, buckets: int) -> list[int]:
    """The two ids with the same quotients and the same remainders, paired the other way."""
    return [
        first // buckets * buckets + second % buckets,
        second // buckets * buckets + first % buckets,
    ]


def _twin(first: int, second: int, buckets: int) -> list[int]:
    return sorted(_unsorted_twin(first, second, buckets))


def _twin_of_distinct_pairs(first: int, second: int, buckets: int) -> list[int]:
    """Swaps the ids' places in the bag where there is nothing to swap."""
    twin = _twin(first, second, buckets)
    return [second, first] if twin == sorted([first, second]) else twin


class _PartlyShared(Compression):
    """Shared columns first, an id's own columns last."""

    def __init__(self, rows: int, own: int) -> None:
        self.rows = rows
        self.own = own

    def map_ids(self, ids: Tensor) -> Tensor:
        """The shared row of each id."""
        return mixing_hash(ids, self.rows)

    def parts(self, table: EmbeddingBagConfig) -> list[Part]:
        shared = replace(
            table,
            name=f"{table.name}_shared",
            num_embeddings=self.rows,
            embedding_dim=table.embedding_dim - self.own,
        )

        own = replace(table, name=f"{table.name}_own", embedding_dim=self.own)
        return [Part(shared, (IdMap("#", self.map_ids),)), Part(own)]

    def combine(self, results: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(results), dim=-1)


class _OwnFirst(_PartlyShared):
    """The own columns first."""

    def combine(self, results: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(reversed(results)), dim=-1)


class _Remainder(_PartlyShared):
    """Takes the remainder of the id for its hash."""

    def map_ids(self, ids: Tensor) -> Tensor:
        return ids % self.rows


class _WidthsSwapped(_PartlyShared):
    """Shares `own` columns, and gives each id the others."""

    def parts(self, table: EmbeddingBagConfig) -> list[Part]:
        swapped = _PartlyShared(self.rows, table.embedding_dim - self.own)
        return swapped.parts(table)


_TABLE = EmbeddingBagConfig(10, 8, "item_table", feature_names=["item"])
_SHARED_ROWS = 3
_OWN_COLUMNS = 2
# A bag for each id, and one of three ids.
_BAGS = kjt_from_lists({"item": [*([one] for one in range(10)), [7, 2, 2]]})


def _pooled(answer: Any) -> Any:
    """The pooled rows of a compression with known weights.

    Row r of a part with as many rows as the table holds 100 + r, row r of another holds r.

    Raises:
        ValueError: It cannot be made or looked up, or its results have another shape.
    """
    try:
        compression = answer(_SHARED_ROWS, _OWN_COLUMNS)
        if (
            compression.parts(_TABLE) is ...
            or compression.combine([torch.zeros(1, 6), torch.zeros(1, 2)]) is ...
        ):
            return ...
        collection = CompressedEmbeddingBagCollection([_TABLE], {"item_table": compression})
        with torch.no_grad():
            for weight in collection.parameters():
                first = 100.0 if len(weight) == _TABLE.num_embeddings else 0.0
                weight.copy_(torch.arange(first, first + len(weight))[:, None].expand_as(weight))
            pooled = collection(_BAGS).values()
    except Exception as error:
        raise ValueError(f"It ends with {type(error).__name__}: {error}") from error

    if pooled.shape != (_BAGS.stride(), _TABLE.embedding_dim):
        raise ValueError(
            f"Its rows for {_BAGS.stride()} bags have shape {list(pooled.shape)}, and the table "
            f"has {_TABLE.embedding_dim} columns."
        )
    return pooled.tolist()


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="16.1",
        compared="the stored rows of four quotient-remainder tables",
        solution=lambda rows, buckets: -(-rows // buckets) + buckets,
        cases=((12, 4), (13, 4), (1024, 32), (1_000_000, 5_000)),
        mistakes=(
            Mistake(
                "forgets the rows after the last full bucket",
                lambda rows, buckets: rows // buckets + buckets,
                "With 12 rows and 4 buckets it is right. Of 13 rows the last is row 12: what is "
                "its quotient?",
            ),
            Mistake(
                "takes both tables to be equally long",
                lambda rows, buckets: 2 * buckets,
                "The remainder table has as many rows as there are buckets. What is the largest "
                "quotient?",
            ),
            Mistake(
                "takes the number of buckets to be the root",
                lambda rows, buckets: 2 * math.ceil(math.sqrt(rows)),
                "That is the fewest rows that any number of buckets gives. How many does this "
                "number give?",
            ),
        ),
        shape="a function that returns one number of rows",
    ),
    Exercise(
        id="16.2",
        compared="the two ids of the twins of five bags, the smaller first",
        solution=_twin,
        cases=((1, 6, 4), (1, 2, 4), (5, 1, 4), (8, 7, 4), (5, 1000, 32)),
        mistakes=(
            Mistake(
                "leaves the ids in the order in which it computes them",
                _unsorted_twin,
                "The ids are right. For ids 1 and 2 with 4 buckets the larger one comes first: "
                "put them in order.",
            ),
            Mistake(
                "swaps the ids where they share a quotient or a remainder",
                _twin_of_distinct_pairs,
                "Look at ids that share a quotient or a remainder, such as 1 and 2 with 4 "
                "buckets: in which order do you return them?",
            ),
            Mistake(
                "returns the bag itself",
                lambda first, second, buckets: sorted([first, second]),
                "This bag has the same rows in both tables. Which other two ids have these four "
                "rows, too?",
            ),
            Mistake(
                "adds the quotient itself to the remainder",
                lambda first, second, n: sorted([first // n + second % n, second // n + first % n]),
                "You put an id together as q + r. Id 6 has quotient q = 1 and remainder r = 2 "
                "with 4 buckets: what is done to q before r is added?",
            ),
            Mistake(
                "keeps the sum of the ids",
                lambda first, second, buckets: sorted([first + 1, second - 1]),
                "The ids add up to the same number, but no table is looked up by a sum. Which "
                "rows do these ids read, table by table?",
            ),
        ),
        shape="a function that returns a list of two ids, the smaller first",
    ),
    Exercise(
        id="16.3",
        compared="the rows of ten ids, and the sum of a bag of three",
        solution=_PartlyShared,
        measure=_pooled,
        mistakes=(
            Mistake(
                "puts the own columns first",
                _OwnFirst,
                "Each row has the right numbers in another order of columns. Which part comes "
                "last?",
            ),
            Mistake(
                "takes the remainder for a hash",
                _Remainder,
                "The shared row is the remainder of the id here. Which function of the library "
                "chooses it?",
            ),
            Mistake(
                "shares the columns that are an id's own",
                _WidthsSwapped,
                "`own` columns are shared here, and the others are not. How wide is each of the "
                "two parts?",
            ),
        ),
        shape="a class with `parts` and `combine`",
    ),
)

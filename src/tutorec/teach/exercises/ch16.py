"""Exercises of chapter 16: rows of a quotient-remainder table, twins of a bag, a compression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutorec.modules.compressed_collection import CompressedEmbeddingBagCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.sparse.hashing import mixing_hash
from tutorec.sparse.lists import kjt_from_lists
from tutorec.teach.grading import Exercise

_TABLE = EmbeddingBagConfig(10, 8, "item_table", feature_names=["item"])
_IDS = torch.arange(10)
_HASHED = mixing_hash(_IDS, 3)


def _pooled(answer: Any) -> Any:
    """The pooled rows of a compression with known weights, for each id, and for 7, 2 and 2.

    Row r of a part with as many rows as the table holds 100 + r, row r of another holds r.

    Raises:
        ValueError: It cannot be made or looked up, or its results have another shape.
    """
    bags = kjt_from_lists({"item": [*_IDS[:, None].tolist(), [7, 2, 2]]})
    try:
        compression = answer(3, 2)
        halves = [torch.zeros(1, 6), torch.zeros(1, 2)]
        if compression.parts(_TABLE) is ... or compression.combine(halves) is ...:
            return ...
        collection = CompressedEmbeddingBagCollection([_TABLE], {"item_table": compression})
        with torch.no_grad():
            for weight in collection.parameters():
                first = 100.0 if len(weight) == 10 else 0.0
                weight.copy_(torch.arange(first, first + len(weight))[:, None].expand_as(weight))
            pooled = collection(bags).values()
    except Exception as error:
        raise ValueError(f"It ends with {type(error).__name__}: {error}") from error

    if pooled.shape != (11, 8):
        raise ValueError(
            f"Its rows for 11 bags have shape {list(pooled.shape)}, and the table has 8 columns."
        )
    return pooled


def _rows(left: Tensor, right: Tensor, width: int) -> Tensor:
    """Rows of ids, and their sum for 7, 2 and 2: so many columns of one number, the others."""
    rows = torch.cat([left[:, None].expand(-1, width), right[:, None].expand(-1, 8 - width)], 1)
    return torch.cat([rows, rows[[7, 2, 2]].sum(0, keepdim=True)])


EXERCISES = (
    Exercise(
        "16.1",
        compared="the stored rows of four quotient-remainder tables",
        right=[7, 8, 64, 5200],
        cases=((12, 4), (13, 4), (1024, 32), (1_000_000, 5_000)),
        mistakes={
            "With 12 rows and 4 buckets it is right. Of 13 rows the last is row 12: what is "
            "its quotient?": [7, 7, 64, 5200],
            "The remainder table has as many rows as there are buckets. What is the largest "
            "quotient?": [8, 8, 64, 10_000],
            "That is the fewest rows that any number of buckets gives. How many does this "
            "number give?": [8, 8, 64, 2000],
        },
        shape="a function that returns one number of rows",
    ),
    Exercise(
        "16.2",
        compared="the two ids of the twins of three bags, the smaller first",
        right=[[2, 5], [1, 2], [1, 5]],
        cases=((1, 6, 4), (1, 2, 4), (5, 1, 4)),
        mistakes={
            "The ids are right. For ids 1 and 2 with 4 buckets the larger one comes first: "
            "put them in order.": [[2, 5], [2, 1], [5, 1]],
            "Look at ids that share a quotient or a remainder, such as 1 and 2 with 4 "
            "buckets: in which order do you return them?": [[2, 5], [2, 1], [1, 5]],
            "This bag has the same rows in both tables. Which other two ids have these four "
            "rows, too?": [[1, 6], [1, 2], [1, 5]],
            "You put an id together as q + r. Id 6 has quotient q = 1 and remainder r = 2 "
            "with 4 buckets: what is done to q before r is added?": [[2, 2], [1, 2], [1, 2]],
            "The ids add up to the same number, but no table is looked up by a sum. Which "
            "rows do these ids read, table by table?": [[2, 5], [1, 2], [0, 6]],
        },
        shape="a function that returns a list of two ids, the smaller first",
    ),
    Exercise(
        "16.3",
        compared="the rows of ten ids, and the sum of a bag of three",
        right=_rows(_HASHED, 100 + _IDS, 6),
        measure=_pooled,
        mistakes={
            "Each row has the right numbers in another order of columns. Which part comes "
            "last?": _rows(100 + _IDS, _HASHED, 2),
            "The shared row is the remainder of the id here. Which function of the library "
            "chooses it?": _rows(_IDS % 3, 100 + _IDS, 6),
            "`own` columns are shared here, and the others are not. How wide is each of the "
            "two parts?": _rows(_HASHED, 100 + _IDS, 2),
        },
        shape="a class with `parts` and `combine`",
    ),
)

"""Exercises of chapter 14: a request in flat lists, a traced counter, a table on two machines."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding_bag

from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import per_rank

__all__ = ["EXERCISES"]

_Batch = dict[str, list[list[int]]]
_Request = tuple[list[int], list[int]]


def _request_of(
    lists: Callable[[_Batch, list[str]], list[list[int]]],
) -> Callable[[_Batch, list[str]], _Request]:
    """A function that flattens the lists of ids, in the order in which another one brings them."""

    def request_by_hand(batch: _Batch, features: list[str]) -> _Request:
        ordered = lists(batch, features)
        return [identifier for ids in ordered for identifier in ids], [len(ids) for ids in ordered]

    return request_by_hand


def _feature_by_feature(batch: _Batch, features: list[str]) -> list[list[int]]:
    return [ids for feature in features for ids in batch[feature]]


def _as_they_come(batch: _Batch, features: list[str]) -> list[list[int]]:
    return [ids for feature in batch.values() for ids in feature]


def _visitor_by_visitor(batch: _Batch, features: list[str]) -> list[list[int]]:
    return [
        ids
        for visitor in zip(*(batch[feature] for feature in features), strict=True)
        for ids in visitor
    ]


def _without_empty(batch: _Batch, features: list[str]) -> list[list[int]]:
    return [ids for ids in _feature_by_feature(batch, features) if ids]


def _offsets(batch: _Batch, features: list[str]) -> _Request:
    """Where each list begins, instead of how long it is."""
    values, lengths = _request_of(_feature_by_feature)(batch, features)
    return values, [0, *accumulate(lengths)]


def _length_of_feature(batch: _Batch, features: list[str]) -> _Request:
    """One length for each feature."""
    values, _ = _request_of(_feature_by_feature)(batch, features)
    return values, [sum(map(len, batch[feature])) for feature in features]


_ROWS_OF_A_RANK = 4
_IDS = (7, 1, 5, 5, 0, 3)  # of rows 0 to 7; the second bag is empty
_STARTS = (0, 4, 4)


def _sums(rows: Tensor, mine: Tensor, counted: Tensor, starts: Tensor) -> Tensor:
    """The pooled rows of one rank, each as often as it counts."""
    weights = counted.to(rows.dtype)
    return embedding_bag(mine, rows, starts, mode="sum", per_sample_weights=weights)


def _own_sums(rank: int, rows: Tensor, ids: Tensor, starts: Tensor) -> Tensor:
    """The sums of the rows of this rank alone."""
    local_ids = ids - rank * len(rows)
    is_local = (local_ids >= 0) & (local_ids < len(rows))
    return _sums(rows, torch.where(is_local, local_ids, 0), is_local, starts)


def _serve(rank: int, rows: Tensor, ids: Tensor, starts: Tensor) -> Tensor:
    """The sums of both ranks."""
    sums = _own_sums(rank, rows, ids, starts)
    dist.all_reduce(sums)
    return sums


def _stand_ins_counted(rank: int, rows: Tensor, ids: Tensor, starts: Tensor) -> Tensor:
    """Ids of the other rank read the nearest row of this one."""
    local_ids = (ids - rank * len(rows)).clamp(0, len(rows) - 1)
    sums = _sums(rows, local_ids, torch.ones_like(local_ids), starts)
    dist.all_reduce(sums)
    return sums


def _ids_not_moved(rank: int, rows: Tensor, ids: Tensor, starts: Tensor) -> Tensor:
    """Each rank looks up the ids that are smaller than the number of its rows."""
    is_local = ids < len(rows)
    sums = _sums(rows, torch.where(is_local, ids, 0), is_local, starts)
    dist.all_reduce(sums)
    return sums


def _inputs(rank: int) -> tuple[int, Tensor, Tensor, Tensor]:
    """The rows of a rank, and a request that both get."""
    first = 100.0 * rank
    rows = torch.arange(first, first + 2 * _ROWS_OF_A_RANK, device=device()).view(-1, 2)
    ids = torch.tensor(_IDS, device=device())
    return rank, rows, ids, torch.tensor(_STARTS, device=device())


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="14.1",
        compared=(
            "four batches: two features of two visitors, a visitor without clicks, keys in "
            "another order"
        ),
        solution=_request_of(_feature_by_feature),
        cases=(
            ({"product": [[7, 1], [5]], "user": [[3], [4, 1]]}, ["product", "user"]),
            (
                {"user": [[7]], "item": [[2]], "clicked": [[]]},
                ["user", "item", "clicked"],
            ),
            ({"user": [[3], [4, 1]], "product": [[7, 1], [5]]}, ["product", "user"]),
            (
                {"item": [[9], [8], [7]], "clicked": [[4, 5], [], [6]], "user": [[1], [2], [3]]},
                ["user", "item", "clicked"],
            ),
        ),
        mistakes=(
            Mistake(
                "takes features in the order in which the batch has them",
                _request_of(_as_they_come),
                "Right as long as the batch has the served order. Which numbers does the model "
                "take for products when `user` comes first?",
            ),
            Mistake(
                "goes through the batch visitor by visitor",
                _request_of(_visitor_by_visitor),
                "All numbers are there, visitor by visitor. A table reads all lists of one "
                "feature together: in which order must they be stored?",
            ),
            Mistake(
                "sends offsets instead of lengths",
                _offsets,
                "The ids are right. Your second list says where each list begins, and has one "
                "number too many. What does the request want instead?",
            ),
            Mistake(
                "gives one length for each feature",
                _length_of_feature,
                "The ids are right. From the sum of a feature's lengths nobody can tell whose ids "
                "they are.",
            ),
            Mistake(
                "leaves empty lists out",
                _request_of(_without_empty),
                "A visitor who has clicked nothing has a list, too. What happens to all lists "
                "that come after it?",
            ),
        ),
        shape="a function that returns two lists of numbers, values and lengths",
    ),
    Exercise(
        id="14.2",
        compared="10, 10 and 10: the counter stood at 1 while the graph was written down",
        solution=[10, 10, 10],
        mistakes=(
            Mistake(
                "believes that a graph keeps the state of the module",
                [10, 20, 30],
                "That is what the module would answer. A graph records operations on `x`. Is "
                "`self.calls += 1` one of them?",
            ),
            Mistake(
                "believes that the graph goes on counting where tracing stopped",
                [20, 30, 40],
                "You are right that tracing was a call. Who would count the next ones? Print the "
                "graph's code.",
            ),
            Mistake(
                "forgets that tracing runs the code once",
                [0, 0, 0],
                "Right, nothing counts any more. What was the counter when `x * self.calls` was "
                "recorded?",
            ),
        ),
        shape="a list of three numbers",
    ),
    Exercise(
        id="14.3",
        compared="the pooled rows of three bags, bit for bit the same on both ranks",
        solution=_serve,
        measure=per_rank(2, _inputs),
        tolerance=0.0,
        mistakes=(
            Mistake(
                "returns the sums of its own rows",
                _own_sums,
                "The rows of this rank are in the sums. Who adds the rows that the other rank has?",
            ),
            Mistake(
                "counts the row that stands in for a row of the other rank",
                _stand_ins_counted,
                "Both ranks add something for every id, so each id is counted twice. What must a "
                "rank add for an id whose row it does not have?",
            ),
            Mistake(
                "looks up ids of the whole table in its own half",
                _ids_not_moved,
                "Rank 0 is right. The first row of rank 1 is row 4 of the table: which id does "
                "your rank 1 look up there?",
            ),
        ),
        shape="a function that returns a tensor [bags, columns] on each rank",
    ),
)

"""The exercise of *TorchRec in 300 lines*: a fifth way to shard a table."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tutorec.nano import (
    Batch,
    Collection,
    Group,
    Rows,
    Table,
    run_ranks,
    sgd,
)
from tutorec.teach.grading import Exercise

_TABLE = Table("product", rows=9, columns=4, features=("viewed",))
_START = torch.arange(36.0).view(9, 4)


def _batch(rank: int) -> Batch:
    draw = torch.Generator().manual_seed(rank)
    lengths = torch.randint(4, (1, 5), generator=draw)
    values = torch.randint(9, (int(lengths.sum()),), generator=draw)
    return Batch(["viewed"], values, lengths)


def _trained(way: Any) -> list[Any]:
    """Regions of four ranks, the sums that they get, and the table after a step.

    Raises:
        ValueError: The way has no region for a rank, or fails.
    """

    def train(group: Group) -> tuple[Tensor, Tensor]:
        start = Rows(_START, torch.zeros(9, 4))
        tables = Collection(
            group, [_TABLE], {"product": way}, {"product": start}, partial(sgd, rate=0.5)
        )
        sums = tables(_batch(group.rank))["viewed"]
        sums.square().sum().backward()
        return sums.detach(), tables.save()["product"].weight

    try:
        way = way() if isinstance(way, type) else way
        shapes = [[*_START[way.region(_TABLE, rank, 4)].shape] for rank in range(4)]
        return [shapes, *run_ranks(4, train)]
    except Exception as error:
        raise ValueError(f"On four ranks it ends with {type(error).__name__}: {error}") from error


def _one_process(rows: int = 9) -> tuple[list[Tensor], Tensor]:
    """Sums of four batches, and the table after a step; only ids below `rows` are read."""
    weight = _START.clone().requires_grad_()
    sums = []
    for rank in range(4):
        batch = _batch(rank)
        starts = batch.lengths[0].cumsum(0) - batch.lengths[0]
        is_read = (batch.values < rows).float()
        sums.append(
            embedding_bag(batch.values, weight, starts, mode="sum", per_sample_weights=is_read)
        )
    [gradient] = torch.autograd.grad(torch.cat(sums).square().sum() / 4, weight)
    return [rank_sums.detach() for rank_sums in sums], _START - 0.5 * gradient


def _answer(sums: list[Tensor], table: Tensor) -> list[Any]:
    return [[[5, 2], [5, 2], [4, 2], [4, 2]], *((rank_sums, table) for rank_sums in sums)]


_SUMS, _AFTER = _one_process()
_LEFT = torch.tensor([1, 1, 0, 0])

EXERCISES = (
    Exercise(
        "nano.1",
        compared="four ranks hold what they should, and train the table that one rank would",
        right=_answer(_SUMS, _AFTER),
        measure=_trained,
        mistakes={
            "Half of the columns of every sum are zeros. How many ranks hold a part of an "
            "id's row, and which of them were told of it?": _answer(
                [sums * _LEFT for sums in _SUMS], torch.where(_LEFT > 0, _AFTER, _START)
            ),
            "Some sums are too small. The ids of a bag may lie in several blocks of rows.": _answer(
                *_one_process(rows=5)
            ),
            "The numbers are right and stand in the wrong columns: even ranks hold the left "
            "half.": _answer([sums.roll(2, 1) for sums in _SUMS], _AFTER),
        },
        tolerance=0.0001,
        shape="a class with region, send_ids and send_rows_back",
    ),
)

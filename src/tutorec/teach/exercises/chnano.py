"""The exercise of *TorchRec in 300 lines*: a fifth way to shard a table."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tutorec.nano import (
    Bags,
    Batch,
    Collection,
    Group,
    Rows,
    Table,
    all_to_all_ids,
    all_to_all_rows,
    block,
    run_ranks,
    sgd,
    split_by_row,
)
from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]

_TABLE = Table("product", rows=9, columns=4, features=("viewed",))
_START = Rows(torch.arange(36.0).view(9, 4), torch.zeros(9, 4))


class _Grid:
    """Two halves of the columns; the rows of each in W / 2 blocks."""

    def region(self, table: Table, rank: int, size: int) -> tuple[slice, slice]:
        return block(table.rows, rank // 2, size // 2), block(table.columns, rank % 2, 2)

    def send_ids(self, group: Group, table: Table, bags: Bags) -> list[Bags]:
        split = split_by_row(bags, table.rows, group.size // 2)
        return all_to_all_ids(group, [split[rank // 2] for rank in range(group.size)])

    def send_rows_back(self, group: Group, sums: Any) -> torch.Tensor:
        received = all_to_all_rows(group, sums)
        left = torch.stack(received[0::2]).sum(dim=0)
        right = torch.stack(received[1::2]).sum(dim=0)
        return torch.cat([left, right], dim=1)


class _IdsToOneHalf(_Grid):
    def send_ids(self, group: Group, table: Table, bags: Bags) -> list[Bags]:
        split = split_by_row(bags, table.rows, group.size // 2)
        nothing = Bags(bags.values[:0], torch.zeros_like(bags.lengths))
        halves = [nothing if rank % 2 else split[rank // 2] for rank in range(group.size)]
        return all_to_all_ids(group, halves)


class _SumsOfOneBlock(_Grid):
    def send_rows_back(self, group: Group, sums: Any) -> torch.Tensor:
        return torch.cat(all_to_all_rows(group, sums)[:2], dim=1)


class _HalvesSwapped(_Grid):
    def send_rows_back(self, group: Group, sums: Any) -> torch.Tensor:
        left, right = super().send_rows_back(group, sums).chunk(2, dim=1)
        return torch.cat([right, left], dim=1)


def _trained(way: Any) -> list[Any]:
    """Regions of four ranks, the sums that they get, and the table after a step.

    Raises:
        ValueError: The way has no region for a rank, or fails.
    """

    def train(group: Group) -> list[Any]:
        tables = Collection(
            group, [_TABLE], {"product": way}, {"product": _START}, partial(sgd, rate=0.5)
        )

        draw = torch.Generator().manual_seed(group.rank)
        lengths = torch.randint(4, (1, 5), generator=draw)
        values = torch.randint(9, (int(lengths.sum()),), generator=draw)
        sums = tables(Batch(["viewed"], values, lengths))["viewed"]
        sums.square().sum().backward()
        return [sums.detach(), tables.save()["product"].weight]

    shapes = []
    table = torch.empty(9, 4)
    try:
        way = way() if isinstance(way, type) else way
        for rank in range(4):
            shapes.append([*table[way.region(_TABLE, rank, 4)].shape])
        return [shapes, *run_ranks(4, train)]
    except Exception as error:
        raise ValueError(f"On four ranks it ends with {type(error).__name__}: {error}") from error


EXERCISES = (
    Exercise(
        id="nano.1",
        compared="four ranks hold what they should, and train the table that one rank would",
        solution=_Grid,
        measure=_trained,
        mistakes=(
            Mistake(
                "a row has one owner",
                _IdsToOneHalf,
                "Half of the columns of every sum are zeros. How many ranks hold a part of an "
                "id's row, and which of them were told of it?",
            ),
            Mistake(
                "a bag lies in one block",
                _SumsOfOneBlock,
                "Some sums are too small. The ids of a bag may lie in several blocks of rows.",
            ),
            Mistake(
                "columns come in any order",
                _HalvesSwapped,
                "The numbers are right and stand in the wrong columns: even ranks hold the left "
                "half.",
            ),
        ),
        tolerance=1e-4,
        shape="a class with region, send_ids and send_rows_back",
    ),
)

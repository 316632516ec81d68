from __future__ import annotations

import torch

OFFSET = 10


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def add_ranks(rank, world_size, x):
    value = torch.tensor([x + rank + OFFSET])
    torch.distributed.all_reduce(value)
    return rank, world_size, value.item()


def test_run_returns_values_in_rank_order(ranks):
    assert ranks(2).run(add_ranks, 7) == [(0, 2, 35), (1, 2, 35)]
    assert ranks(2).run(add_ranks, x=8) == [(0, 2, 37), (1, 2, 37)]


def make_point(rank):
    return Point(rank)


def is_point(point):
    return isinstance(point, Point), type(point).__module__


def test_class_of_an_unimportable_module_keeps_its_identity(ranks):
    points = ranks(2).run(make_point)
    assert [type(p) for p in points] == [Point, Point]
    assert [same for same, _ in ranks(2).run(is_point, points[1])] == [True, True]

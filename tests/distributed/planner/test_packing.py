"""Tables on ranks: what is taken off and put back leaves no trace."""

from __future__ import annotations

import numpy as np
from distributed.planner.instances import model

from tutorec.distributed.planner.packing import Packing


def _packed() -> Packing:
    packing = Packing(model(0, 12, 4, 2, 0.5))
    for table in range(12):
        place = packing.best(table)
        assert place is not None, "there is room"
        packing.put(table, place)
    return packing


def test_tables_that_are_lifted_are_off_and_what_is_left_is_added_up() -> None:
    packing = _packed()
    was = packing.lift([1, 5, 7])
    assert list(was) == [1, 5, 7]
    assert [table for table, place in enumerate(packing.places) if place is None] == [1, 5, 7]
    assert not {1, 5, 7}.intersection(*map(set, packing.on_rank))
    filled, weights = packing.loads()
    packing.settle()
    np.testing.assert_allclose(packing.filled, filled, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(packing.weights, weights, rtol=1e-9)


def test_tables_that_are_put_back_lie_where_they_lay() -> None:
    packing = _packed()
    places, loads, on_rank = list(packing.places), packing.loads(), [set(tables) for tables in packing.on_rank]
    before = packing.loads()
    was = packing.lift([0, 3, 4, 11])
    place = packing.best(3)
    assert place is not None, "there is room"
    packing.put(3, place)
    packing.put_back(was, before)
    assert packing.places == places
    assert [set(tables) for tables in packing.on_rank] == on_rank
    for now, then in zip(packing.loads(), loads, strict=True):
        np.testing.assert_array_equal(now, then)


def test_of_some_stacks_only_the_best_of_those_is_found() -> None:
    packing = _packed()
    packing.lift([2])
    for stack in packing.stacks[2]:
        place = packing.best(2, [stack])
        assert place is None or place.number in stack.numbers

"""What ranks bring: classes of ranks, expected numbers, counted ones; and the exchanges' sums."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from distributed.byte_formulas import StepBatches
from hypothesis import given
from hypothesis import strategies as st
from strategies import jagged_batches

from tutorec.distributed.simulate.exchanges import Exchange, Reach
from tutorec.distributed.simulate.ids import PowerLaw, Uniform
from tutorec.distributed.simulate.loads import Load, MeasuredLoads, rank_loads
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

ALL = np.array([0]), np.array([8])


def test_ranks_of_one_batch_size_are_one_class():
    loads = Load([4, 2, 4, 4], pooling_factor=3).of_ranks(4)
    assert loads.classes.tolist() == [1, 0, 1, 1]
    assert loads.members.tolist() == [1, 3]
    assert loads.samples("any").tolist() == [2, 4]
    assert loads.ids("any", 8, np.array([0, 6]), np.array([6, 8])).tolist() == [[4.5, 1.5], [9, 3]]
    assert not loads.variable


def test_features_may_have_factors_and_laws_of_their_own():
    load = Load(10, {"f": 2, "g": 1}, {"f": Uniform(), "g": PowerLaw(1.0)}).of_ranks(2)
    assert load.ids("f", 4, np.array([0]), np.array([1])).tolist() == [[5.0]]
    assert load.ids("g", 3, np.array([0]), np.array([1]))[0, 0] == pytest.approx(10 * 6 / 11)
    # Row 0: 5 ids of f and 4.8 of g on each of two ranks.
    row, reads = load.hottest(["f", "g"], 4, 1)[0]
    assert (row, reads) == (0, pytest.approx(2 * (5 + 10 * 12 / 25)))
    # Two features of one law are one feature with the ids of both.
    both = Load(10, 1).of_ranks(1).distinct(["f", "g"], 5, np.array([0]), np.array([5]))
    assert both[0] == pytest.approx(5 * (1 - (4 / 5) ** 20))


@given(
    st.lists(jagged_batches(rows={"f": 8, "g": 8}, weighted=False), min_size=1, max_size=3),
    st.integers(0, 3),
)
def test_counted_numbers_of_batches_are_those_of_step_batches(drawn, more):
    batches = [one.kjt() for one in drawn]
    world_size = len(batches) + more
    repeated = [batches[rank % len(batches)] for rank in range(world_size)]
    measured, counted = MeasuredLoads(batches, world_size), StepBatches.of(repeated)
    starts, ends = np.array([0, 3, 3]), np.array([3, 3, 8])
    for feature in ("f", "g"):
        samples = measured.samples(feature)[measured.classes]
        assert samples.tolist() == [of_rank[feature] for of_rank in counted.samples]
        ids = measured.ids(feature, 8, starts, ends)[measured.classes]
        ranges = list(zip(starts.tolist(), ends.tolist(), strict=True))
        assert ids.tolist() == [
            [counted.ids(rank, feature, *each) for each in ranges] for rank in range(world_size)
        ]
    every = [number for one in repeated for number in one.values().tolist()]
    assert measured.distinct(["f", "g"], 8, *ALL).tolist() == [len(set(every))]
    hot = measured.hottest(["f", "g"], 8, 3)
    assert [reads for _, reads in hot] == sorted(
        (every.count(number) for number in set(every)), reverse=True
    )[:3]
    assert all(every.count(row) == reads for row, reads in hot)


def test_loads_that_do_not_fit_the_ranks_are_refused():
    batch = KeyedJaggedTensor(["f"], torch.tensor([0, 9]), lengths=torch.tensor([2]))
    with pytest.raises(ValueError, match=r"\[1, 2\] for 3 ranks"):
        rank_loads(Load([1, 2]), 3)
    with pytest.raises(ValueError, match="batch_size=-1 for 2 ranks"):
        rank_loads(Load(-1), 2)
    for size in (float("nan"), [8]):
        with pytest.raises(ValueError, match=re.escape(f"batch_size={size!r} for 2 ranks")):
            rank_loads(Load(size), 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"pooling_factor=-2 of feature 'f'"):
        rank_loads(Load(1, {"f": -2}), 2)
    with pytest.raises(ValueError, match="pooling_factor=nan"):
        rank_loads(Load(1, float("nan")), 2)
    with pytest.raises(ValueError, match="2 ranks got 3 batches"):
        rank_loads([batch] * 3, 2)
    with pytest.raises(ValueError, match="2 ranks got 0 batches"):
        rank_loads([], 2)
    with pytest.raises(ValueError, match=r"batch 0: id 9.*feature 'f'.*8 rows.*0 to 7"):
        rank_loads(batch, 2).ids("f", 8, *ALL)
    with pytest.raises(ValueError, match=r"no.*feature 'g'.*\['f'\]"):
        rank_loads(batch, 2).ids("g", 8, *ALL)
    with pytest.raises(ValueError, match=r"pooling_factor.*no.*feature 'g'"):
        rank_loads(Load(1, {"f": 1}), 2).ids("g", 8, *ALL)


@given(st.data(), st.sampled_from([(1, 1), (4, 2), (6, 3), (4, 4), (3, 1)]), st.sampled_from(Reach))
def test_sums_of_an_exchange_are_those_of_its_matrix(data, hosts, reach):
    world_size, local_size = hosts
    terms = data.draw(st.integers(1, 3))
    numbers = st.lists(st.integers(0, 50), min_size=world_size * terms, max_size=world_size * terms)
    left = np.array(data.draw(numbers), dtype=np.float64).reshape(world_size, terms)
    right = np.array(data.draw(numbers), dtype=np.float64).reshape(terms, world_size)
    exchange = Exchange("output rows", "", left, right, local_size, reach)
    matrix = exchange.matrix()
    host = np.arange(world_size) // local_size
    same = host[:, None] == host
    assert exchange.sent.tolist() == [
        (matrix * same).sum(axis=1).tolist(),
        (matrix * ~same).sum(axis=1).tolist(),
    ]
    assert exchange.received.tolist() == [
        (matrix * same).sum(axis=0).tolist(),
        (matrix * ~same).sum(axis=0).tolist(),
    ]
    assert np.diag(matrix).tolist() == [0.0] * world_size
    if reach is Reach.HOST:
        assert not (matrix * ~same).any()
    if reach is Reach.PEERS:
        number = np.arange(world_size) % local_size
        assert not (matrix * (number[:, None] != number)).any()
    assert exchange.connects == bool(
        {
            Reach.ALL: world_size > 1,
            Reach.HOST: local_size > 1,
            Reach.PEERS: world_size > local_size,
        }[reach]
    )


def test_a_matrix_of_a_thousand_ranks_is_not_made():
    exchange = Exchange("output rows", "", np.ones((1024, 1)), np.ones((1, 1024)), 8)
    with pytest.raises(ValueError, match=r"1024 x 1024 ranks.* at most 512"):
        exchange.matrix()
    assert exchange.sent[:, 5].tolist() == [7, 1016]

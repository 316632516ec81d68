"""The exchanges by themselves: what arrives, in which order, and how many bytes that took."""

from __future__ import annotations

import random
import time

import pytest
import torch
from distributed.cases import group, on_rank
from hypothesis import given
from hypothesis import strategies as st
from strategies import DrawnBatch, examples, jagged_batches

from tutorec.distributed import comm
from tutorec.distributed.collectives.kjt import KJTAllToAll
from tutorec.distributed.collectives.row_sums import PooledEmbeddingsReduceScatter
from tutorec.distributed.collectives.rows import PooledEmbeddingsAllToAll
from tutorec.distributed.traffic import count_traffic
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

Received = tuple[
    list[str], list[list[list[int]]], list[list[list[float]]] | None, list[int], dict[str, int]
]


def exchange(rank: int, batches: list[DrawnBatch], splits: list[int]) -> Received:
    """Ids, weights and samples that arrive at this rank, as plain lists; and what it sent."""
    with count_traffic() as traffic:
        arrival = KJTAllToAll(group(), splits)(on_rank(batches[rank].kjt())).wait()
        features = arrival.wait()
    bags, keys = features.to_dict(), features.keys()
    ids = [[bag.tolist() for bag in bags[key].to_dense()] for key in keys]
    weights = None
    if features.weights_or_none() is not None:
        weights = [[bag.tolist() for bag in bags[key].to_dense_weights() or []] for key in keys]
    return keys, ids, weights, arrival.batch_size_per_rank, traffic.by_stage()


def arriving(batches: list[DrawnBatch], keys: list[str]) -> tuple[list, list | None]:
    """What a rank with these keys is due: feature by feature, the samples of rank 0, then those of
    rank 1.
    """
    ids = [[bag for batch in batches for bag in batch.ids[key]] for key in keys]
    if batches[0].weights is None:
        return ids, None
    return ids, [[bag for batch in batches for bag in (batch.weights or {})[key]] for key in keys]


@examples(40)
@given(data=st.data())
def test_kjt_all_to_all_delivers_every_bag_to_its_feature(ranks, data):
    weighted = data.draw(st.booleans())
    features = data.draw(st.integers(1, 4))
    rows = {f"f{index}": 9 for index in range(features)}
    batches = [data.draw(jagged_batches(rows, weighted=weighted)) for _ in range(2)]
    first = data.draw(st.integers(0, features))
    splits = [first, features - first]
    received = ranks(2).run(exchange, batches, splits)
    keys = list(rows)
    itemsize = max(torch.tensor([], dtype=batch.ids_dtype).element_size() for batch in batches)
    for rank, (got_keys, ids, weights, samples, sent) in enumerate(received):
        mine = keys[:first] if rank == 0 else keys[first:]
        theirs = keys[first:] if rank == 0 else keys[:first]
        assert got_keys == mine
        assert (ids, weights) == arriving(batches, mine)
        assert samples == [batch.samples for batch in batches]
        count = sum(len(bag) for key in theirs for bag in batches[rank].ids[key])
        due = {
            "input sizes": 24,
            "input ids": itemsize * (len(theirs) * batches[rank].samples + count),
        }
        assert sent == due | ({"input weights": 4 * count} if weighted else {})


def pool_home(rank: int, world_size: int, samples: list[int], columns: list[int]) -> tuple:
    """Row s of rank r's pooled rows holds (owner of the sample, sample, rank that looked it up) in
    its columns.
    """
    owner = torch.repeat_interleave(torch.arange(world_size), torch.tensor(samples))
    number = torch.cat([torch.arange(count) for count in samples])
    tag = on_rank((100 * owner + 10 * number + rank).float())
    pooled = tag.unsqueeze(1).expand(sum(samples), columns[rank]).clone().requires_grad_()
    with count_traffic() as traffic:
        home = PooledEmbeddingsAllToAll(group(), columns)(pooled, samples).wait()
        (home * (rank + 1)).sum().backward()
    return home.detach(), pooled.grad, traffic.by_stage()


@pytest.mark.parametrize(
    ("samples", "columns"),
    [([2, 3], [4, 2]), ([0, 2], [1, 3]), ([2, 1], [0, 5]), ([0, 0], [2, 2])],
    ids=["uneven", "rank without samples", "rank without tables", "no samples"],
)
def test_pooled_all_to_all_brings_rows_home_and_gradients_back(ranks, samples, columns):
    results = ranks(2).run(pool_home, samples=samples, columns=columns)
    for rank, (home, gradient, sent) in enumerate(results):
        assert home.shape == (samples[rank], sum(columns))
        for number in range(samples[rank]):
            tags = [
                100 * rank + 10 * number + source
                for source in range(2)
                for _ in range(columns[source])
            ]
            assert home[number].tolist() == tags
        # Each rank's gradient is (its number + 1) everywhere; what comes back is that over W.
        due = torch.repeat_interleave(torch.tensor([1.0, 2.0]) / 2, torch.tensor(samples))
        assert torch.equal(gradient, due.unsqueeze(1).expand(sum(samples), columns[rank]))
        other = 1 - rank
        assert sent["output rows"] == 4 * samples[other] * columns[rank]
        assert sent["output gradients"] == 4 * samples[rank] * columns[other]


def late(rank: int, world_size: int, seed: int, asleep: bool) -> list[torch.Tensor]:
    """Four exchanges in flight at once, collected last first."""
    draw = random.Random(1000 * seed + rank)

    def sleep(_: comm.Issue) -> None:
        time.sleep(draw.random() / 50)

    observed = [sleep] if asleep else []
    comm.observers.extend(observed)
    try:
        moves = [PooledEmbeddingsAllToAll(group(), [2] * world_size) for _ in range(4)]
        rows = [
            torch.full((world_size, 2), 10.0 * i + rank, requires_grad=True, device=device())
            for i in range(4)
        ]
        flights = [move(row, [1] * world_size) for move, row in zip(moves, rows, strict=True)]
        home = [flight.wait() for flight in reversed(flights)]
        sum((i + 1) * h.square().sum() for i, h in enumerate(home)).backward()
    finally:
        for sleeper in observed:
            comm.observers.remove(sleeper)
    return [h.detach() for h in home] + [row.grad for row in rows if row.grad is not None]


def test_exchanges_in_flight_do_not_meet_when_ranks_are_late(ranks):
    calm = ranks(2).run(late, seed=0, asleep=False)
    for seed in range(3):
        shaken = ranks(2).run(late, seed=seed, asleep=True)
        assert all(
            torch.equal(a, b)
            for of, at in zip(calm, shaken, strict=True)
            for a, b in zip(of, at, strict=True)
        )
    assert calm[1][0].tolist() == [[30.0, 30.0, 31.0, 31.0]]


def two_threads(rank: int, world_size: int) -> str:
    import threading

    errors: list[str] = []
    comm.all_gather_ints([rank], group(), "test")

    def other() -> None:
        try:
            comm.all_gather_ints([rank], group(), "test")
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other, name="second")
    thread.start()
    thread.join()
    return "".join(errors)


def test_a_second_thread_on_one_group_is_refused(ranks):
    for message in ranks(2).run(two_threads):
        assert message.startswith("thread 'second' issues a collective on a process group")
        assert "new_group()" in message


def double_backward(rank: int, world_size: int) -> str:
    rows = torch.ones(world_size, 2, requires_grad=True, device=device())
    home = PooledEmbeddingsAllToAll(group(), [2] * world_size)(rows, [1] * world_size).wait()
    (gradient,) = torch.autograd.grad(home.square().sum(), rows, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_second_derivatives_are_refused(ranks):
    assert all("once_differentiable" in message for message in ranks(2).run(double_backward))


def unwatched(rank: int, world_size: int) -> tuple[bool, bool]:
    """A promise that is first waited for under no_grad keeps its place in the graph."""
    rows = torch.ones(world_size, 2, requires_grad=True, device=device())
    flight = PooledEmbeddingsAllToAll(group(), [2] * world_size)(rows, [1] * world_size)
    with torch.no_grad():
        flight.wait()
    flight.wait().sum().backward()
    with torch.no_grad():
        quiet = PooledEmbeddingsAllToAll(group(), [2] * world_size)(rows, [1] * world_size).wait()
    return rows.grad is not None, quiet.requires_grad


def test_waiting_under_no_grad_keeps_the_graph_of_the_issue(ranks):
    assert ranks(2).run(unwatched) == [(True, False)] * 2


def test_in_a_world_of_one_nothing_moves():
    features = KeyedJaggedTensor(["a"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    with count_traffic() as traffic:
        assert KJTAllToAll(None, [1])(features).wait().wait() is features
        rows = torch.ones(2, 3)
        assert PooledEmbeddingsAllToAll(None, [3])(rows, [2]).wait() is rows
    assert traffic.total() == 0


def equal_shares(
    rank: int, world_size: int
) -> tuple[list[list[float]], list[list[float]], list[str]]:
    rows = on_rank(torch.arange(4.0).view(4, 1) + 10 * rank)
    to_ranks = PooledEmbeddingsAllToAll(group(), [1] * world_size, device())
    added = PooledEmbeddingsReduceScatter(group())
    refused: list[str] = []
    for wrong in (lambda: to_ranks(rows[:3]), lambda: added(rows[:3]), lambda: added(rows, [1, 2])):
        with pytest.raises(ValueError, match="pooled rows") as caught:
            wrong()
        refused.append(str(caught.value))
    with pytest.raises(ValueError, match=r"dim_sum_per_rank \[8\].*1 ranks.*2"):
        PooledEmbeddingsAllToAll(group(), [8])
    return to_ranks(rows).wait().tolist(), added(rows).wait().tolist(), refused


def test_without_batch_sizes_every_rank_has_an_equal_share(ranks):
    for rank, (joined, summed, refused) in enumerate(ranks(2).run(equal_shares)):
        mine = [2.0 * rank, 2.0 * rank + 1]
        assert joined == [[row, row + 10] for row in mine]
        assert summed == [[2 * row + 10] for row in mine]
        unequal = (
            "3 pooled rows cannot be divided equally among 2 ranks: give "
            "batch_size_per_rank, the number of samples"
        )
        assert [text.startswith(unequal) for text in refused] == [True, True, False]
        assert (
            "[1, 2] is for 2 ranks and 3 samples, and there are 2 ranks and 4 pooled rows"
            in refused[2]
        )

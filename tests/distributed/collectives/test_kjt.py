"""Ids on their way to slots: keys in any order and number, variable batch, dtypes, and what is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from distributed.cases import group, on_rank
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DrawnBatch, DrawnVariableBatch, jagged_batches

from tutorec.awaitable import NoWait
from tutorec.distributed import comm
from tutorec.distributed.collectives.kjt import KJTAllToAll
from tutorec.distributed.traffic import count_traffic
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# Every drawn example is a list of cases, which one run of the ranks takes.
FEW_EXAMPLES = settings(max_examples=10)


@dataclass(frozen=True)
class Case:
    """One exchange: every rank's batch, and what each rank is to get of it."""

    batches: list[DrawnBatch]
    splits: list[int]
    order: list[int] | None
    ids_dtype: torch.dtype | None
    stagger: int

    def slots(self, rank: int) -> list[str]:
        """Features of a rank's slots."""
        keys = self.batches[0].keys
        order = list(range(len(keys))) if self.order is None else self.order
        end = sum(self.splits[: rank + 1])
        return [keys[position] for position in order[end - self.splits[rank] : end]]

    def samples_in_order(self) -> list[int]:
        """Ranks in the order in which their samples arrive."""
        world_size = len(self.batches)
        hosts = torch.arange(world_size).view(self.stagger, -1)
        return hosts.t().reshape(-1).tolist()


@dataclass(frozen=True)
class Got:
    """What a rank received, as plain numbers."""

    keys: list[str]
    ids: list[list[list[int]]]
    weights: list[list[list[float]]] | None
    dtype: torch.dtype
    batch_sizes: list[int]
    strides: list[list[int]] | None
    strides_of_keys: list[list[int]]
    by_rank: tuple[list[int], list[list[int]]]
    sent: list[list[int]]
    bytes: dict[str, int]
    rounds: dict[str, int]


def bags_of(features: KeyedJaggedTensor, values: torch.Tensor) -> list[list[list]]:
    """Bags of each key, of ids or of weights."""
    pieces = [piece.tolist() for piece in values.split(features.lengths().tolist())]
    ends = list(accumulate(features.stride_per_key()))
    return [
        pieces[end - size : end] for size, end in zip(features.stride_per_key(), ends, strict=True)
    ]


def exchange(rank: int, world_size: int, cases: list[Case]) -> list[Got]:
    found = []
    for case in cases:
        move = KJTAllToAll(
            group(), case.splits, case.stagger, order=case.order, ids_dtype=case.ids_dtype
        )
        with count_traffic() as traffic:
            arrival = move(on_rank(case.batches[rank].kjt())).wait()
            by_rank, features = arrival.wait_by_rank(), arrival.wait()
        weights = features.weights_or_none()
        assert features.length_per_key() == features.unsync().length_per_key()
        found.append(
            Got(
                features.keys(),
                bags_of(features, features.values()),
                None if weights is None else bags_of(features, weights),
                features.values().dtype,
                arrival.batch_size_per_rank,
                arrival.batch_size_per_rank_per_feature,
                features.stride_per_key_per_rank(),
                (by_rank.values.tolist(), by_rank.counts),
                arrival.sent_counts,
                traffic.by_stage(),
                dict(traffic.issues),
            )
        )
    return found


@st.composite
def batches_of_ranks(draw: st.DrawFn, keys: list[str], ranks: int) -> list[DrawnBatch]:
    """A batch for each rank; variable ones among others."""
    weighted = draw(st.booleans())
    batches: list[DrawnBatch] = []
    variable = draw(st.sampled_from(["none", "some", "all"]))
    for _ in range(ranks):
        drawn = draw(jagged_batches(dict.fromkeys(keys, 9), weighted=weighted))
        if variable == "none" or (variable == "some" and draw(st.booleans())):
            batches.append(drawn)
            continue
        counts = [draw(st.integers(0, drawn.samples)) for _ in keys]
        ids = {key: drawn.ids[key][:count] for key, count in zip(keys, counts, strict=True)}
        weights = (
            {key: drawn.weights[key][: len(ids[key])] for key in keys}
            if drawn.weights is not None
            else None
        )
        strides = [[count] for count in counts]
        form = (drawn.ids_dtype, drawn.lengths_dtype, drawn.from_offsets)
        batches.append(
            DrawnVariableBatch(ids, weights, max(counts), *form, strides, draw(st.booleans()))
        )
    return batches


@st.composite
def cases(draw: st.DrawFn, ranks: int) -> Case:
    keys = [f"f{index}" for index in range(draw(st.integers(1, 4)))]
    order, total = None, len(keys)
    if draw(st.booleans()):
        order = draw(st.lists(st.integers(0, len(keys) - 1), max_size=7))
        total = len(order)
    ends = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    splits = [end - start for start, end in zip([0, *ends], [*ends, total], strict=True)]
    return Case(
        draw(batches_of_ranks(keys, ranks)),
        splits,
        order,
        draw(st.sampled_from([None, torch.int32, torch.int64])),
        draw(st.sampled_from([stagger for stagger in (1, 2) if ranks % stagger == 0])),
    )


def check_arrival(case: Case, rank: int, got: Got) -> None:
    """Every bag at its slot, in the order of ranks; the counts of everything; not a byte more than
    said.
    """
    slots, ranks = case.slots(rank), range(len(case.batches))
    variable = any(isinstance(batch, DrawnVariableBatch) for batch in case.batches)
    strides = [[len(batch.ids[key]) for key in slots] for batch in case.batches]
    in_order = case.samples_in_order()
    assert got.keys == slots
    assert got.ids == [
        [bag for source in in_order for bag in case.batches[source].ids[key]] for key in slots
    ]
    assert got.batch_sizes == [batch.kjt().stride() for batch in case.batches]
    assert got.strides == (strides if variable else None)
    if variable:
        assert got.strides_of_keys == [
            [strides[source][slot] for source in in_order] for slot in range(len(slots))
        ]
    flat = [
        number
        for batch in case.batches
        for key in slots
        for bag in batch.ids[key]
        for number in bag
    ]
    counts = [[sum(len(bag) for bag in batch.ids[key]) for key in slots] for batch in case.batches]
    assert got.by_rank == (flat, counts)
    mine = case.batches[rank]
    sent = [[sum(len(bag) for bag in mine.ids[key]) for key in case.slots(to)] for to in ranks]
    assert got.sent == sent
    weighted = mine.weights is not None
    assert (got.weights is not None) == weighted
    if weighted:
        everyone = [batch.weights or {} for batch in case.batches]
        assert got.weights == [
            [bag for source in in_order for bag in everyone[source][key]] for key in slots
        ]
    widest = max((batch.ids_dtype for batch in case.batches), key=lambda dtype: dtype.itemsize)
    assert got.dtype == (case.ids_dtype or widest)
    others = [to for to in ranks if to != rank]
    lists = sum(len(mine.ids[key]) for to in others for key in case.slots(to))
    count = sum(sum(sent[to]) for to in others)
    due = {"input sizes": 24 * len(others), "input ids": got.dtype.itemsize * (lists + count)}
    due |= {"input strides": 8 * sum(case.splits[to] for to in others)} if variable else {}
    due |= {"input weights": 4 * count} if weighted else {}
    assert got.bytes == due
    assert got.rounds == dict.fromkeys(due, 1)


@FEW_EXAMPLES
@given(drawn=st.lists(cases(2), min_size=1, max_size=12))
def test_two_ranks_get_every_bag_of_their_slots(ranks, drawn):
    for rank, found in enumerate(ranks(2).run(exchange, cases=drawn)):
        for case, got in zip(drawn, found, strict=True):
            check_arrival(case, rank, got)


@pytest.mark.world4
@FEW_EXAMPLES
@given(drawn=st.lists(cases(4), min_size=1, max_size=8))
def test_four_ranks_get_every_bag_of_their_slots(ranks, drawn):
    for rank, found in enumerate(ranks(4).run(exchange, cases=drawn)):
        for case, got in zip(drawn, found, strict=True):
            check_arrival(case, rank, got)


def some_have_weights(rank: int, world_size: int) -> str:
    weights = torch.ones(2) if rank == 1 else None
    batch = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2]), weights, lengths=torch.tensor([1, 1])
    )
    try:
        KJTAllToAll(group(), [1, 1])(on_rank(batch)).wait().wait()
    except ValueError as error:
        return str(error)
    return ""


def test_weights_on_some_ranks_only_are_refused_on_every_rank(ranks):
    due = (
        "the batches of ranks [1] have weights, those of ranks [0] do not: "
        "give every rank's batch weights=, or none of them"
    )
    assert ranks(2).run(some_have_weights) == [due, due]


def three_in_flight(rank: int, world_size: int) -> list[list[int]]:
    """Sizes and ids of several batches on the wire at once, collected last first."""
    move = KJTAllToAll(group(), [1] * world_size)
    keys = [f"f{index}" for index in range(world_size)]
    numbers = [torch.arange(world_size) + 10 * rank + 100 * index for index in range(3)]
    batches = [
        KeyedJaggedTensor(keys, ids, lengths=torch.ones(world_size, dtype=torch.int64))
        for ids in numbers
    ]
    arrivals = [sizes.wait() for sizes in [move(on_rank(batch)) for batch in batches]]
    return [arrival.wait().values().tolist() for arrival in reversed(arrivals)][::-1]


def test_batches_in_flight_do_not_meet(ranks):
    for rank, found in enumerate(ranks(2).run(three_in_flight)):
        assert found == [[rank + 100 * index, rank + 10 + 100 * index] for index in range(3)]


def small_batch(weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 3]), weights, lengths=torch.tensor([1, 0, 1, 1])
    )


def test_at_home_a_batch_in_order_is_passed_on():
    batch = small_batch()
    for move in (
        KJTAllToAll(None, [2]),
        KJTAllToAll(None, [2], order=[0, 1], ids_dtype=torch.int32),
    ):
        arrival = move(batch).wait()
        assert arrival.wait() is batch
        assert arrival.wait_by_rank().values is batch.values()
    assert (arrival.batch_size_per_rank, arrival.batch_size_per_rank_per_feature) == ([2], None)
    assert arrival.sent_counts == arrival.wait_by_rank().counts == [[1, 2]]


def test_at_home_keys_are_repeated_and_left_out():
    arrival = KJTAllToAll(None, [3], order=[1, 1, 1])(
        small_batch(torch.tensor([0.5, 1.0, 2.0]))
    ).wait()
    features = arrival.wait()
    assert features.keys() == ["b", "b", "b"]
    assert features.values().tolist() == [2, 3] * 3
    assert features.weights().tolist() == [1.0, 2.0] * 3
    assert arrival.sent_counts == [[2, 2, 2]]
    assert KJTAllToAll(None, [1], order=[0])(small_batch()).wait().wait().keys() == ["a"]


def test_at_home_a_variable_batch_tells_its_samples():
    batch = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 0, 2]),
        stride_per_key_per_rank=[[1], [2]],
    )
    arrival = KJTAllToAll(None, [2], order=[1, 0])(batch).wait()
    assert arrival.batch_size_per_rank_per_feature == [[2, 1]]
    assert arrival.wait().values().tolist() == [2, 3, 1]


def test_a_rank_without_a_batch_sends_its_status_on_the_device_of_the_others(monkeypatch):
    sent = []

    class TwoRanks:
        def size(self) -> int:
            return 2

    def all_to_all(send: torch.Tensor, *_: object) -> NoWait[torch.Tensor]:
        sent.append(send)
        return NoWait(send)

    monkeypatch.setattr(comm, "all_to_all", all_to_all)
    KJTAllToAll(TwoRanks(), [1, 1]).send_status(-2, torch.device("meta"))
    [message] = sent
    assert message.device.type == "meta"


def test_its_printed_form_is_torchrecs():
    assert repr(KJTAllToAll(None, [1])) == "KJTAllToAll()"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: KJTAllToAll(None, [1, 1]),
            ValueError,
            r"splits \[1, 1\] are for 2 ranks, and there are 1",
        ),
        (
            lambda: KJTAllToAll(None, [1], stagger=2),
            ValueError,
            "stagger 2 does not divide the 1 ranks",
        ),
        (
            lambda: KJTAllToAll(None, [2], order=[0]),
            ValueError,
            r"order names 1 keys and splits \[2\] ask for 2",
        ),
        (
            lambda: KJTAllToAll(None, [1])(small_batch()),
            ValueError,
            r"the batch has 2 keys .* splits \[1\] send 1",
        ),
        (
            lambda: KJTAllToAll(None, [3])(small_batch()),
            ValueError,
            r"the batch has 2 keys .* splits \[3\] send 3",
        ),
        (
            lambda: KJTAllToAll(None, [1], order=[2])(small_batch()),
            ValueError,
            r"the batch has 2 keys \['a', 'b'\], and splits \[1\] and the order need 3",
        ),
        (
            lambda: KJTAllToAll(None, [1])(
                KeyedJaggedTensor(["a"], torch.ones(1), lengths=torch.tensor([1]))
            ),
            TypeError,
            r"the batch has values of torch.float32, which cannot be ids: \['a'\]; give integers",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    call: Callable[[], object], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        call()

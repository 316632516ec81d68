"""Pooled rows and rows of ids on their way home: what arrives, what the gradients are, how many
bytes that took.

Every rank draws from its number, so that the test can draw the same and add it up by itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tutorec.awaitable import Awaitable
from tutorec.distributed import comm
from tutorec.distributed.collectives.host_groups import host_groups
from tutorec.distributed.collectives.row_sums import (
    HostPooledEmbeddings,
    PooledEmbeddingsReduceScatter,
)
from tutorec.distributed.collectives.rows import (
    GRADIENTS_STAGE,
    ROWS_STAGE,
    PooledEmbeddingsAllToAll,
)
from tutorec.distributed.collectives.sequence import SequenceEmbeddingsAllToAll
from tutorec.distributed.core.qcomm import CommCodec, QuantizedCommCodecs
from tutorec.distributed.traffic import count_traffic
from tutorec.spmd import device

HALF = QuantizedCommCodecs(CommCodec(torch.float16), CommCodec(torch.bfloat16))


@dataclass(frozen=True)
class Case:
    """One move home.

    Args:
        kind: "all-to-all", "reduce-scatter", "hosts" or "sequence".
        samples: B of each rank.
        columns: D_r of each rank (all-to-all), [D] (reduce-scatter) or D_h of each host (hosts).
        local_size: Ranks of a host.
        variable: Flat rather than a matrix: then every rank's samples count differently in each
            column.
        codecs: In what type it travels.
    """

    kind: str
    samples: list[int]
    columns: list[int]
    local_size: int = 1
    variable: bool = False
    codecs: QuantizedCommCodecs | None = None

    @property
    def world_size(self) -> int:
        return len(self.samples)

    def source(self, rank: int) -> int:
        """Which of ``columns`` a rank holds."""
        return {"all-to-all": rank, "reduce-scatter": 0, "hosts": rank // self.local_size}[
            self.kind
        ]

    def elements(self, rank: int, source: int) -> int:
        """Elements of the columns of ``source`` for the samples of ``rank``."""
        if self.variable:
            # Column c has B + c samples: a variable batch.
            return sum(self.samples[rank] + column for column in range(self.columns[source]))
        return self.samples[rank] * self.columns[source]

    def sent(self, rank: int) -> list[Tensor]:
        """What a rank has for each rank, flat."""
        draw = torch.Generator().manual_seed(rank)
        source = self.source(rank)
        return [
            torch.randn(self.elements(to, source), generator=draw) for to in range(self.world_size)
        ]

    def gradient(self, rank: int) -> list[Tensor]:
        """The gradient of what arrives at a rank from each source, flat."""
        draw = torch.Generator().manual_seed(100 + rank)
        return [
            torch.randn(self.elements(rank, source), generator=draw)
            for source in range(len(self.columns))
        ]


@dataclass
class Outcome:
    arrived: Tensor
    gradient: Tensor
    sent: dict[tuple[str, int, int], int] = field(default_factory=dict)


def group() -> dist.ProcessGroup:
    world = comm.default_group()
    assert world is not None, "tests of several ranks run inside a pool"
    return world


def begin(case: Case, rank: int, sent: Tensor) -> Awaitable[Tensor]:
    counts_out = [case.elements(to, case.source(rank)) for to in range(case.world_size)]
    counts_in = [case.elements(rank, source) for source in range(len(case.columns))]
    if case.kind == "all-to-all":
        move = PooledEmbeddingsAllToAll(group(), case.columns, codecs=case.codecs)
        return (
            move.variable(sent, counts_out, counts_in)
            if case.variable
            else move(sent, case.samples)
        )
    if case.kind == "reduce-scatter":
        move = PooledEmbeddingsReduceScatter(group(), case.codecs)
        return move.variable(sent, counts_out) if case.variable else move(sent, case.samples)
    hosts = host_groups(group(), case.local_size)
    move = HostPooledEmbeddings(hosts, rank, case.local_size, case.columns, codecs=case.codecs)
    return move.variable(sent, counts_out, counts_in) if case.variable else move(sent, case.samples)


def run_cases(rank: int, cases: list[Case]) -> list[Outcome]:
    outcomes = []
    for case in cases:
        sent = torch.cat(case.sent(rank)).to(device())
        gradient = [part.to(device()) for part in case.gradient(rank)]
        if case.variable:
            coefficients = torch.cat(gradient)
        else:
            sent = sent.view(sum(case.samples), case.columns[case.source(rank)])
            blocks = [
                part.view(case.samples[rank], width)
                for part, width in zip(gradient, case.columns, strict=True)
            ]
            coefficients = torch.cat(blocks, dim=1)
        sent.requires_grad_()
        with count_traffic() as traffic:
            arrived = begin(case, rank, sent).wait()
            (arrived * coefficients).sum().backward()
        assert sent.grad is not None, "a move has a way back"
        outcomes.append(Outcome(arrived.detach(), sent.grad, dict(traffic.bytes)))
    return outcomes


def added(parts: list[Tensor]) -> Tensor:
    """The sum, from the first on."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def due_arrival(case: Case, rank: int) -> list[Tensor]:
    """What each source has for a rank: one rank's rows, or the sum over the ranks that
    hold parts.
    """
    holders: dict[int, list[int]] = {}
    for other in range(case.world_size):
        holders.setdefault(case.source(other), []).append(other)
    return [
        added([case.sent(other)[rank] for other in holders[source]])
        for source in range(len(case.columns))
    ]


def due_bytes(case: Case, rank: int) -> dict[tuple[str, int, int], int]:
    """Bytes to every other rank, forward and back; ranks that are sent nothing are left out."""
    due: Counter[tuple[str, int, int]] = Counter()
    there = 2 if case.codecs else 4
    world, size, source = range(case.world_size), case.local_size, case.source(rank)
    if case.kind == "hosts":
        host, place = divmod(rank, size)
        for peer in world:
            if peer // size == host:
                elements = sum(
                    case.elements(to, source) for to in world if to % size == peer % size
                )
                due[ROWS_STAGE, rank, peer] += there * elements
                own = sum(case.elements(to, source) for to in world if to % size == place)
                due[GRADIENTS_STAGE, rank, peer] += there * own
            if peer % size == place:
                due[ROWS_STAGE, rank, peer] += there * case.elements(peer, source)
                due[GRADIENTS_STAGE, rank, peer] += there * case.elements(rank, case.source(peer))
    else:
        for peer in world:
            due[ROWS_STAGE, rank, peer] += there * case.elements(peer, source)
            due[GRADIENTS_STAGE, rank, peer] += there * case.elements(rank, case.source(peer))
    return {key: count for key, count in due.items() if key[2] != rank and count}


def check(cases: list[Case], results: list[list[Outcome]]) -> None:
    for index, case in enumerate(cases):
        for rank, outcomes in enumerate(results):
            got = outcomes[index]
            assert {key: count for key, count in got.sent.items() if count} == due_bytes(
                case, rank
            ), (case, rank)
            parts = due_arrival(case, rank)
            gradients = [
                case.gradient(other)[case.source(rank)] / case.world_size
                for other in range(case.world_size)
            ]
            if case.variable:
                arrived = torch.cat(parts)
            else:
                blocks = [
                    part.view(case.samples[rank], -1) if part.numel() else part for part in parts
                ]
                assert got.arrived.shape == (case.samples[rank], sum(case.columns))
                arrived = (
                    torch.cat([b for b in blocks if b.numel()], dim=1)
                    if got.arrived.numel()
                    else got.arrived
                )
            near = 2**-7 if case.codecs else 0.0
            torch.testing.assert_close(got.arrived, arrived, rtol=near, atol=near)
            torch.testing.assert_close(
                got.gradient.view(-1), torch.cat(gradients), rtol=near, atol=near
            )


SAMPLES_OF_TWO = ([2, 3], [0, 2], [0, 0])


def test_pooled_rows_come_home_and_gradients_go_back(ranks):
    cases = [
        Case(kind, samples, columns, variable=variable)
        for samples, variable in product(SAMPLES_OF_TWO, (False, True))
        for kind, columns in (
            ("reduce-scatter", [3]),
            ("reduce-scatter", [0]),
            ("all-to-all", [4, 2]),
        )
    ]
    cases += [Case("all-to-all", [2, 1], [0, 5], variable=variable) for variable in (False, True)]
    check(cases, ranks(2).run(run_cases, cases=cases))


@st.composite
def cases_of_two(draw: st.DrawFn) -> Case:
    """Any move between two ranks, on one host or on two."""
    few = st.integers(0, 4)
    samples = [draw(few), draw(few)]
    kind = draw(st.sampled_from(["all-to-all", "reduce-scatter", "hosts"]))
    local_size = draw(st.sampled_from([1, 2]))
    sources = {"all-to-all": 2, "reduce-scatter": 1, "hosts": 2 // local_size}[kind]
    return Case(kind, samples, [draw(few) for _ in range(sources)], local_size, draw(st.booleans()))


@settings(max_examples=12)
@given(cases=st.lists(cases_of_two(), min_size=1, max_size=8))
def test_any_move_between_two_ranks_is_the_sum_it_says(ranks, cases):
    check(cases, ranks(2).run(run_cases, cases=cases))


@pytest.mark.world4
def test_rows_are_summed_inside_hosts_and_joined_across(ranks):
    hosts = ((1, [2, 1, 3, 2]), (2, [3, 2]), (2, [0, 4]), (4, [3]))
    cases = [
        Case("hosts", samples, columns, local_size, variable=variable)
        for samples, variable in product(([2, 3, 1, 2], [0, 4, 0, 1]), (False, True))
        for local_size, columns in hosts
    ]
    cases += [
        Case("reduce-scatter", [2, 0, 1, 3], [5], variable=variable) for variable in (False, True)
    ]
    check(cases, ranks(4).run(run_cases, cases=cases))


@pytest.mark.world4
def test_sums_inside_hosts_cross_between_hosts_once(ranks):
    """Reduce-scatter over all ranks hands each rank's part to every other host; the two steps hand
    over sums.
    """
    samples, columns = [2, 2, 2, 2], 8
    whole, split = (
        Case("reduce-scatter", samples, [columns]),
        Case("hosts", samples, [columns, columns], 2),
    )
    crossing = [0, 0]
    for outcomes in ranks(4).run(run_cases, cases=[whole, split]):
        for index, outcome in enumerate(outcomes):
            crossing[index] += sum(
                count
                for (of, a, b), count in outcome.sent.items()
                if of == ROWS_STAGE and a // 2 != b // 2
            )
    # Each of 4 ranks sends 2 samples x 8 columns x 4 bytes to 2 ranks of the other host, or to 1.
    assert crossing == [4 * 2 * 64, 4 * 64]


def test_narrow_rows_take_half_the_bytes_and_stay_near(ranks):
    cases = [
        Case(kind, [2, 3], columns, variable=variable, codecs=HALF)
        for kind, columns in (("reduce-scatter", [5]), ("all-to-all", [4, 2]))
        for variable in (False, True)
    ]
    cases += [
        Case("hosts", [2, 3], [4], 2, codecs=HALF),
        Case("hosts", [2, 3], [4, 1], 1, codecs=HALF),
    ]
    check(cases, ranks(2).run(run_cases, cases=cases))


def exchange_rows(
    rank: int, world_size: int, counts: list[list[int]], codecs: QuantizedCommCodecs | None
) -> tuple:
    """``counts[r][s]`` elements go from r to s; element i of them is 100 r + 10 s + i."""
    parts = [100.0 * rank + 10 * to + torch.arange(counts[rank][to]) for to in range(world_size)]
    rows = torch.cat(parts).to(device()).requires_grad_(sum(counts[rank]) > 0)
    with count_traffic() as traffic:
        move = SequenceEmbeddingsAllToAll(group(), codecs=codecs)
        home = move.flat(rows, counts[rank], [of[rank] for of in counts]).wait()
        (home * (rank + 1)).sum().backward()
    return (
        home.detach().tolist(),
        None if rows.grad is None else rows.grad.tolist(),
        traffic.by_stage(),
    )


FEATURES_OF = [[0], [1, 2]]  # of each rank
EVEN = [[[1, 2], [1, 1], [2, 1]], [[1, 2], [2, 1], [3, 1]]]  # ids: rank, feature, sample
UNEVEN = [[[1, 2], [1, 1], [2, 1]], [[2], [0], [3]]]


def send_rows_home(rank: int, world_size: int, ids: list[list[list[int]]], given: bool) -> tuple:
    """Row i of a feature's sample b on rank s is 1000 f + 100 s + 10 b + i."""

    def rows_of(source: int, feature: int) -> list[float]:
        return [
            1000.0 * feature + 100 * source + 10 * sample + i
            for sample, count in enumerate(ids[source][feature])
            for i in range(count)
        ]

    mine, sources = FEATURES_OF[rank], range(world_size)
    looked_up = [row for feature in mine for source in sources for row in rows_of(source, feature)]
    lengths = torch.tensor([n for feature in mine for of in ids for n in of[feature]])
    # samples as they arrived, source after source, counted in lookup order
    arrived = [
        (source, feature, sample)
        for source in sources
        for feature in mine
        for sample in range(len(ids[source][feature]))
    ]
    recat = torch.tensor(
        sorted(range(len(arrived)), key=lambda k: (arrived[k][1], arrived[k][0], arrived[k][2]))
    )
    sent = [sum(sum(ids[rank][feature]) for feature in of_rank) for of_rank in FEATURES_OF]
    rows = torch.tensor(looked_up, device=device()).view(-1, 1).repeat(1, 2).requires_grad_()
    move = SequenceEmbeddingsAllToAll(group(), [len(of_rank) for of_rank in FEATURES_OF])
    home = move(
        local_embs=rows,
        lengths=lengths.to(device()),
        input_splits=sent,
        output_splits=[sum(sum(ids[source][feature]) for feature in mine) for source in sources],
        unbucketize_permute_tensor=torch.arange(sum(sent), device=device()).flip(0),
        sparse_features_recat=recat.to(device()) if given else None,
    ).wait()
    home.sum().backward()
    expected = [
        row for of_rank in FEATURES_OF for feature in of_rank for row in rows_of(rank, feature)
    ]
    return home[:, 1].tolist(), expected[::-1], rows.grad


@pytest.mark.parametrize(("ids", "given"), [(EVEN, False), (EVEN, True), (UNEVEN, True)])
def test_rows_of_ids_come_home_in_the_order_in_which_they_were_sent(ranks, ids, given):
    for home, expected, gradient in ranks(2).run(send_rows_home, ids=ids, given=given):
        assert home == expected
        assert (gradient == 0.5).all()


@pytest.mark.parametrize("codecs", [None, HALF], ids=["wide", "narrow"])
@pytest.mark.parametrize("counts", [[[1, 2], [3, 1]], [[0, 0], [2, 0]], [[0, 0], [0, 0]]])
def test_sequence_rows_come_home_and_gradients_go_back(ranks, counts, codecs):
    itemsize = 2 if codecs else 4
    for rank, (home, gradient, sent) in enumerate(
        ranks(2).run(exchange_rows, counts=counts, codecs=codecs)
    ):
        # Whole numbers up to 112 and halves are exact in 16 bits.
        assert home == [
            100.0 * source + 10 * rank + i
            for source in range(2)
            for i in range(counts[source][rank])
        ]
        if sum(counts[rank]):
            assert gradient == [(to + 1) / 2 for to in range(2) for _ in range(counts[rank][to])]
        else:
            # It has nothing to train, and still received what the others sent back.
            assert gradient is None
        assert sent == {
            ROWS_STAGE: itemsize * counts[rank][1 - rank],
            GRADIENTS_STAGE: itemsize * counts[1 - rank][rank],
        }


def late_hosts(rank: int, world_size: int, asleep: bool) -> list[Tensor]:
    """Three moves of two steps in flight at once, with ranks that are late at every step."""
    import random
    import time

    draw = random.Random(rank)

    def sleep(_: comm.Issue) -> None:
        time.sleep(draw.random() / 100)

    observed = [sleep] if asleep else []
    comm.observers.extend(observed)
    try:
        move = HostPooledEmbeddings(host_groups(group(), 2), rank, 2, [2, 1])
        shape = world_size, [2, 1][rank // 2]
        sent = [
            torch.full(shape, 10.0 * i + rank, requires_grad=True, device=device())
            for i in range(3)
        ]
        home = [flight.wait() for flight in [move(rows, [1] * world_size) for rows in sent]]
        torch.stack([(i + 1) * h.square().sum() for i, h in enumerate(home)]).sum().backward()
    finally:
        for sleeper in observed:
            comm.observers.remove(sleeper)
    return [h.detach() for h in home] + [rows.grad for rows in sent if rows.grad is not None]


@pytest.mark.world4
def test_moves_of_two_steps_do_not_meet_when_ranks_are_late(ranks):
    calm = ranks(4).run(late_hosts, asleep=False)
    shaken = ranks(4).run(late_hosts, asleep=True)
    assert [len(of) for of in calm] == [6] * 4
    assert all(
        torch.equal(a, b)
        for of, at in zip(calm, shaken, strict=True)
        for a, b in zip(of, at, strict=True)
    )
    assert calm[0][1].tolist() == [[21.0, 21.0, 25.0]]


def test_in_a_world_of_one_nothing_moves_and_nothing_is_rounded():
    rows = torch.tensor([[1.0 + 2**-20]])
    with count_traffic() as traffic:
        assert PooledEmbeddingsReduceScatter(None, HALF)(rows, [1]).wait() is rows
        assert PooledEmbeddingsReduceScatter(None, HALF).variable(rows, [1]).wait() is rows
        assert HostPooledEmbeddings(None, 0, 1, [1], HALF)(rows, [1]).wait() is rows
        assert HostPooledEmbeddings(None, 0, 1, [1], HALF).variable(rows, [1], [1]).wait() is rows
        assert (
            PooledEmbeddingsAllToAll(None, [1], codecs=HALF).variable(rows, [1], [1]).wait() is rows
        )
        assert SequenceEmbeddingsAllToAll(None, codecs=HALF).flat(rows, [1], [1]).wait() is rows
    assert traffic.total() == 0


def slices_with_gaps(rank: int, world_size: int) -> list[list[float]]:
    group = dist.group.WORLD
    wide = torch.arange(8.0, device=device()).view(2, 4) + 10 * rank
    summed = PooledEmbeddingsReduceScatter(group)(wide[:, :1], [1, 1]).wait()
    joined = PooledEmbeddingsAllToAll(group, [1, 1])(wide[:, :1], [1, 1]).wait()
    return [summed.flatten().tolist(), joined.flatten().tolist()]


def test_a_column_of_a_wider_tensor_travels(ranks):
    assert ranks(2).run(slices_with_gaps) == [[[10.0], [0.0, 10.0]], [[18.0], [4.0, 14.0]]]

"""Cost of pieces: the bytes of the traffic formulas, the number of exchanges of real steps, times
by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from distributed.byte_formulas import (
    COPIES_IDS,
    COPIES_ROWS,
    COPIES_SUMS,
    COPIES_WEIGHTS,
    GRADIENTS,
    IDS,
    ROWS,
    WEIGHTS,
    Bytes,
    StepBatches,
    step_traffic,
)
from distributed.cases import KINDS, batch, collection, shard
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

from tutorec.distributed.core.tables import Table
from tutorec.distributed.plan.geometry import (
    TableShard,
    column_wise_shards,
    data_parallel_shards,
    grid_shards,
    host_ranks,
    row_wise_shards,
    table_wise_shards,
)
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ShardingType
from tutorec.distributed.planner import cost
from tutorec.distributed.planner.cost import (
    WORK,
    KernelModel,
    Work,
    exchanges,
    fixed_cost,
    for_each_size,
    kernel_model,
    register_kernel,
    registered_kernels,
    shard_perf,
)
from tutorec.distributed.planner.options import TableProfile
from tutorec.distributed.planner.topology import Floats, Topology
from tutorec.distributed.traffic import count_traffic
from tutorec.errors import PlannerError, PlannerErrorType


def facts(rows: int = 1000, columns: int = 32, **changes: Any) -> TableProfile:
    words: dict[str, Any] = {"features": ("f",), "samples": (10.0,), "ids": (20.0,)}
    return TableProfile("", "t", rows, columns, **(words | changes))


@dataclass(frozen=True)
class Case:
    """A table, how it is cut, and the world."""

    table: TableProfile
    kind: ShardingType
    pieces: list[TableShard]
    hosts: int
    local_size: int

    def sizes(self) -> Any:
        return np.array([[piece.rows, piece.columns] for piece in self.pieces])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    hosts, local_size = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 4), (3, 2), (1, 1)]))
    world_size = hosts * local_size
    kind = draw(st.sampled_from(list(ShardingType)))
    rows, columns = draw(st.sampled_from([3, 8, 50, 2**31])), draw(st.sampled_from([4, 6, 12]))
    features = draw(st.integers(1, 2))
    wire = draw(st.sampled_from([2, 4]))
    pooled = draw(st.booleans())
    table = facts(
        rows,
        columns,
        pooled=pooled,
        weighted=pooled and draw(st.booleans()),
        features=("f", "g")[:features],
        # Of copies that have as many samples each: padding is none of the planner's business.
        samples=(float(draw(st.integers(1, 9))),) * features,
        ids=tuple(float(draw(st.integers(0, 30))) for _ in range(features)),
        row_wire_bytes=wire,
        gradient_wire_bytes=draw(st.sampled_from([2, 4])),
    )
    host = draw(st.integers(0, hosts - 1))
    some_ranks = st.lists(st.integers(0, world_size - 1), min_size=2, max_size=2)
    local_ranks = st.lists(st.sampled_from(host_ranks(host, local_size)), min_size=2, max_size=2)
    halves = [columns // 2, columns - columns // 2]
    pieces = {
        ShardingType.TABLE_WISE: lambda: table_wise_shards(
            rows, columns, draw(st.integers(0, world_size - 1))
        ),
        ShardingType.COLUMN_WISE: lambda: column_wise_shards(rows, halves, draw(some_ranks)),
        ShardingType.TABLE_COLUMN_WISE: lambda: column_wise_shards(rows, halves, draw(local_ranks)),
        ShardingType.ROW_WISE: lambda: row_wise_shards(rows, columns, range(world_size)),
        ShardingType.TABLE_ROW_WISE: lambda: row_wise_shards(
            rows, columns, host_ranks(host, local_size)
        ),
        ShardingType.GRID_SHARD: lambda: grid_shards(
            rows, halves, [host, hosts - 1 - host], local_size
        ),
        ShardingType.DATA_PARALLEL: lambda: data_parallel_shards(rows, columns, world_size),
    }[kind]()
    return Case(table, kind, pieces, hosts, local_size)


def expected_traffic(case: Case) -> Bytes:
    """What the formulas of layer 4 say of batches whose ids spread evenly."""
    table = case.table
    ids = dict(zip(table.features, table.ids, strict=True))
    placed = Table(
        name=table.name,
        rows=table.rows,
        columns=table.columns,
        dtype=torch.float32,
        pooling="sum" if table.pooled else "none",
        weighted=table.weighted,
        features=table.features,
        output_keys=table.features,
        sharding_type=case.kind,
        kernel=EmbeddingComputeKernel.FUSED,
        optimizer=None,
        shards=tuple(case.pieces),
    )
    samples: Any = [dict(zip(table.features, table.samples, strict=True))] * (
        case.hosts * case.local_size
    )

    def evenly(rank: int, feature: str, first: int, end: int) -> Any:
        return ids[feature] * (end - first) / table.rows

    return step_traffic(
        [placed],
        StepBatches(samples, evenly),
        case.local_size,
        row_bytes=table.row_wire_bytes,
        gradient_bytes=table.gradient_wire_bytes,
    )


def of_rank(
    sent: Bytes, stages: tuple[str, ...], rank: int, local_size: int, arriving: bool
) -> list[float]:
    """Bytes of a rank inside its host and across hosts."""
    found = [0.0, 0.0]
    for (stage, source, destination), count in sent.items():
        mine, other = (destination, source) if arriving else (source, destination)
        if stage in stages and mine == rank:
            found[mine // local_size != other // local_size] += count
    return found


def summed(case: Case, works: list[Work], legs: str, rank: int) -> list[float]:
    """Bytes of the pieces of a rank, inside its host and across hosts."""
    mine = [work for piece, work in zip(case.pieces, works, strict=True) if piece.rank == rank]
    return [
        sum(getattr(leg, side) for work in mine for leg in getattr(work, legs))
        for side in ("inside", "across")
    ]


@examples(150)
@given(cases())
def test_bytes_of_pieces_are_those_of_the_traffic_formulas(case):
    topology = Topology.hosts(case.hosts, case.local_size)
    works = [
        WORK[case.kind](case.table, (piece.rows, piece.columns), topology) for piece in case.pieces
    ]
    sent = expected_traffic(case)
    for rank in range(case.hosts * case.local_size):
        if case.kind is ShardingType.DATA_PARALLEL:
            stages = (COPIES_IDS, COPIES_WEIGHTS, COPIES_ROWS, COPIES_SUMS)
            due = of_rank(sent, stages, rank, case.local_size, arriving=False)
            # A rank sums whole numbers of elements: W bytes of 8 more or less.
            slack = 8.0 * case.hosts * case.local_size
            assert summed(case, works, "gradients_back", rank) == pytest.approx(due, abs=slack)
            assert summed(case, works, "ids_in", rank) == [0, 0]
            continue
        for legs, stages, arriving in (
            ("ids_in", (IDS, WEIGHTS), True),
            ("rows_home", (ROWS,), False),
            ("gradients_back", (GRADIENTS,), True),
        ):
            due = of_rank(sent, stages, rank, case.local_size, arriving)
            assert summed(case, works, legs, rank) == pytest.approx(due), (stages, rank)


@examples(100)
@given(cases(), st.sampled_from(["fused", "dense"]))
def test_times_are_finite_and_none_is_negative(case, kernel):
    topology = Topology.hosts(case.hosts, case.local_size)
    perf = shard_perf(case.table, case.kind, kernel, case.sizes(), topology)
    assert perf.shape == (len(case.pieces), 6)
    assert np.isfinite(perf).all()
    assert (perf >= 0).all()
    assert (perf[:, 5] == 0).all()


def one(
    table: TableProfile,
    kind: ShardingType,
    topology: Topology,
    kernel: str = "fused",
    pieces: Any = None,
) -> Floats:
    sizes = np.array([[table.rows, table.columns]]) if pieces is None else np.array(pieces)
    return shard_perf(table, kind, kernel, sizes, topology)


UNIT = Topology(2, "cuda", hbm_mem_bw=1.0, intra_host_bw=1.0)


def test_time_of_a_table_is_that_of_the_hand():
    # 2 ranks with 20 ids in 10 bags: 40 ids of 8 bytes and rows of 128, 20 bags of 128 bytes;
    # backward twice that.
    fwd = 40 * (8 + 128) + 20 * 128
    assert one(facts(), ShardingType.TABLE_WISE, UNIT).tolist() == [
        [fwd, 1280, 2 * fwd, 1280, 4 * 30, 0]
    ]
    # Narrow rows are read as 128 bytes, wide ones as they are.
    narrow = one(facts(columns=4), ShardingType.TABLE_WISE, UNIT)
    assert narrow[0, 0] == 40 * (8 + 128) + 20 * 16
    assert one(facts(columns=64), ShardingType.TABLE_WISE, UNIT)[0, 0] == 40 * (8 + 256) + 20 * 256


def test_rows_cut_in_two_are_looked_up_half_and_sent_whole():
    whole = one(facts(), ShardingType.TABLE_WISE, UNIT)[0]
    halves = one(facts(), ShardingType.ROW_WISE, UNIT, pieces=[[500, 32], [500, 32]])
    assert (halves[0] == halves[1]).all()
    assert halves[0, 1] == whole[1]
    assert halves[0, 0] == 20 * (8 + 128) + 20 * 128
    assert halves[0, 4] == 4 * (10 + 10)


def test_the_slower_wire_is_the_time_of_an_exchange():
    topology = Topology.hosts(2, 2, "cuda", intra_host_bw=1.0, inter_host_bw=0.5)
    row = one(facts(), ShardingType.TABLE_WISE, topology)[0]
    # to two ranks of the other host, while one of this host waits for less
    assert row[1] == 2 * 1280 / 0.5
    fast = Topology.hosts(2, 2, "cuda", intra_host_bw=1.0, inter_host_bw=100.0)
    assert one(facts(), ShardingType.TABLE_WISE, fast)[0, 1] == 1280


def test_sums_inside_a_host_cross_once():
    topology = Topology.hosts(2, 2, "cuda", intra_host_bw=1.0, inter_host_bw=0.5)
    halves = one(facts(), ShardingType.TABLE_ROW_WISE, topology, pieces=[[500, 32], [500, 32]])
    # Inside: the sums for 2 hosts to one other rank; then the own sums to one rank of the other
    # host.
    assert halves[0, 1] == 2 * 1280 + 1280 / 0.5
    rows = one(facts(), ShardingType.ROW_WISE, topology, pieces=[[250, 32]] * 4)
    assert rows[0, 1] == 2 * 1280 / 0.5


def test_copies_send_their_batch_or_their_sums_whichever_is_less():
    large = one(facts(rows=10**6), ShardingType.DATA_PARALLEL, UNIT, pieces=[[10**6, 32]] * 2)[0]
    assert large[3] == 4 * (10 + 20) + 10 * 128
    assert large[:2].tolist() == [20 * 136 + 10 * 128, 0]
    # a second lookup, and the update, of both ranks' batches
    assert large[2] == (1 + 2) * (40 * 136 + 20 * 128)
    small = one(facts(rows=4), ShardingType.DATA_PARALLEL, UNIT, pieces=[[4, 32]] * 2)[0]
    assert small[3] == 8 * 4 * 32 / 2
    assert small[2] == 2 * (20 * 136 + 10 * 128) + 5 * 4 * 4 * 32
    alone = one(facts(rows=4), ShardingType.DATA_PARALLEL, Topology(1, "cuda", hbm_mem_bw=1.0))[0]
    assert alone[[1, 3, 4]].tolist() == [0, 0, 0]


def test_a_dense_kernel_takes_longer_the_larger_its_table_is():
    fused, dense = (
        one(facts(), ShardingType.TABLE_WISE, UNIT, kernel)[0] for kernel in ("fused", "dense")
    )
    assert dense[0] == 2 * fused[0]
    assert dense[2] == 2 * fused[2] + 2 * 5 * 4 * 32_000
    assert (dense[[1, 3, 4]] == fused[[1, 3, 4]]).all()


def test_distinct_rows_of_an_update_have_a_price_of_their_own():
    plain, priced = (
        one(facts(), ShardingType.TABLE_WISE, Topology(2, "cuda", hbm_mem_bw=1.0, row_ms=price))[0]
        for price in (0, 7)
    )
    distinct = 1000 * (1 - (1 - 1 / 1000) ** 40)  # of 40 ids that spread evenly over 1,000 rows
    assert (priced - plain)[[0, 1, 3, 4, 5]].tolist() == [0] * 5
    assert (priced - plain)[2] == pytest.approx(7 * distinct)


def test_weights_of_ids_travel_and_may_slow_the_update():
    topology = Topology(
        2, "cuda", hbm_mem_bw=1.0, intra_host_bw=1.0, weighted_feature_bwd_compute_multiplier=3.0
    )
    plain, weighted = (
        one(facts(weighted=flag), ShardingType.TABLE_WISE, topology)[0] for flag in (False, True)
    )
    assert weighted[4] - plain[4] == 4 * 20
    assert weighted[2] == 3 * plain[2]


def test_tables_without_ids_or_rows_have_a_time():
    for table in (facts(ids=(0.0,)), facts(rows=0), facts(samples=(0.0,), ids=(0.0,))):
        for kind in (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL):
            assert np.isfinite(one(table, kind, UNIT, pieces=[[table.rows, 32]])).all()


def test_pieces_of_any_sizes_are_estimated_each_as_if_alone():
    sizes = np.array([[3, 4], [3, 4], [0, 4], [3, 8], [0, 4], [3, 4]])
    asked = []
    lines = for_each_size(sizes, lambda size: asked.append(size) or size, 2, np.int64)
    assert sorted(asked) == [(0, 4), (3, 4), (3, 8)]
    assert lines.tolist() == sizes.tolist()
    together = one(facts(rows=9), ShardingType.COLUMN_WISE, UNIT, pieces=sizes)
    alone = [
        one(facts(rows=9), ShardingType.COLUMN_WISE, UNIT, pieces=[size])[0].tolist()
        for size in sizes.tolist()
    ]
    assert together.tolist() == alone
    assert shard_perf(
        facts(), ShardingType.COLUMN_WISE, "fused", np.empty((0, 2), dtype=np.int64), UNIT
    ).shape == (
        0,
        6,
    )


def test_fixed_cost_is_latency_for_each_exchange():
    one_host, two_hosts = Topology(4, "cpu", latency_ms=0.5), Topology.hosts(2, 2, latency_ms=0.5)
    assert fixed_cost(one_host, "row_wise", pooled=True) == 2.0
    assert fixed_cost(two_hosts, "table_row_wise", pooled=True) == 3.0
    assert fixed_cost(two_hosts, "table_row_wise", pooled=False) == 2.0
    assert fixed_cost(two_hosts, "data_parallel", pooled=True) == 1.5
    assert fixed_cost(Topology(1, "cpu"), "table_wise", pooled=True) == 0.0


def count_exchanges(rank: int, world_size: int, kind: str) -> int:
    """Exchanges of a second step on this rank."""
    sharded = shard(collection(), kind=kind)

    def step() -> None:
        sharded(batch(rank, 3)).wait().values().sum().backward()

    step()
    with count_traffic() as traffic:
        step()
    return sum(traffic.issues.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("world_size", "hosts"),
    [(2, 1), (2, 2), pytest.param(4, 2, marks=[pytest.mark.world4, pytest.mark.slow])],
)
def test_exchanges_of_a_step_are_as_many_as_are_counted(ranks, kind, world_size, hosts):
    counted = ranks(world_size, hosts=hosts).run(count_exchanges, kind)
    due = exchanges(Topology.hosts(hosts, world_size // hosts), ShardingType(kind), pooled=True)
    if kind == "data_parallel":
        # Gradients of small tables are summed in two issues, and one of sizes; of large ones sizes,
        # ids and rows.
        assert set(counted) <= {due, due + 2}
    else:
        assert counted == [due] * world_size


def test_a_kernel_that_is_registered_is_estimated(monkeypatch):
    monkeypatch.setattr(cost, "_kernels", dict(cost._kernels))
    with pytest.raises(
        PlannerError,
        match=r"cannot.*kernel 'quant_uvm'.*fused_uvm",
    ):
        kernel_model("quant_uvm")
    register_kernel("quant_uvm", KernelModel(lambda topology: 0.5, devices=("cuda",)))
    slow = one(facts(), ShardingType.TABLE_WISE, UNIT, "quant_uvm")[0]
    assert slow[0] == 2 * one(facts(), ShardingType.TABLE_WISE, UNIT)[0, 0]
    assert set(registered_kernels("cuda")) - set(registered_kernels("cpu")) == {"quant_uvm"}


def test_a_kernel_of_an_unknown_name_cannot_be_registered():
    with pytest.raises(PlannerError, match=r"'magic' is unknown.*dense, fused") as caught:
        register_kernel("magic", KernelModel())
    assert caught.value.error_type is PlannerErrorType.INVALID_COMPUTE_KERNEL

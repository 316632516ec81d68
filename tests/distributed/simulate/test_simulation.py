"""Time, hot rows, stragglers and the report of simulated steps: by hand, against the planner's
estimate, at scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from distributed.byte_formulas import COPIES_SUMS, GRADIENTS, IDS, ROWS, SIZES
from matplotlib.colors import to_hex

from tutorec._style import RANK_COLORS
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.plan.geometry import (
    TableShard,
    column_wise_shards,
    data_parallel_shards,
    grid_shards,
    host_ranks,
    parameter_sharding,
    row_wise_shards,
    table_wise_shards,
)
from tutorec.distributed.plan.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ShardingPlan,
    ShardingType,
)
from tutorec.distributed.planner.cost import fixed_cost, shard_perf
from tutorec.distributed.planner.options import ParameterConstraints, TableProfile
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
from tutorec.distributed.planner.problem import place_options
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.simulate.ids import PowerLaw
from tutorec.distributed.simulate.loads import Load
from tutorec.distributed.simulate.simulation import simulate
from tutorec.distributed.simulate.step import PHASES, Simulation
from tutorec.errors import PlannerError
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

KINDS: dict[ShardingType, Callable[[int, int, Topology], list[TableShard]]] = {
    ShardingType.TABLE_WISE: lambda rows, columns, _: table_wise_shards(rows, columns, 1),
    ShardingType.COLUMN_WISE: lambda rows, columns, _: column_wise_shards(
        rows, [columns // 2] * 2, [1, 0]
    ),
    ShardingType.TABLE_COLUMN_WISE: lambda rows, columns, _: column_wise_shards(
        rows, [columns // 2] * 2, [1, 0]
    ),
    ShardingType.ROW_WISE: lambda rows, columns, top: row_wise_shards(
        rows, columns, range(top.world_size)
    ),
    ShardingType.TABLE_ROW_WISE: lambda rows, columns, top: row_wise_shards(
        rows, columns, host_ranks(0, top.local_world_size)
    ),
    ShardingType.GRID_SHARD: lambda rows, columns, top: grid_shards(
        rows, [columns // 2] * 2, [0, top.num_hosts - 1], top.local_world_size
    ),
    ShardingType.DATA_PARALLEL: lambda rows, columns, top: data_parallel_shards(
        rows, columns, top.world_size
    ),
}


def item(rows: int = 8, columns: int = 4, name: str = "item") -> EmbeddingBagConfig:
    return EmbeddingBagConfig(rows, columns, name, feature_names=[name])


def entry(kind: ShardingType, config: Any, topology: Topology, kernel: str = "fused") -> Any:
    pieces = KINDS[kind](config.num_embeddings, config.embedding_dim, topology)
    return parameter_sharding(
        kind,
        pieces,
        "cpu",
        topology.local_world_size,
        compute_kernel=EmbeddingComputeKernel(kernel),
    )


def one_table(
    kind: ShardingType,
    topology: Topology,
    load: Load,
    rows: int = 8,
    columns: int = 4,
    **words: Any,
):
    config = item(rows, columns)
    return simulate({"item": entry(kind, config, topology)}, topology, [config], load, **words)


def test_time_of_a_table_on_one_rank_is_that_of_the_hand():
    # 2 hosts of 1: every byte crosses. A byte takes a ms of memory, 10 ms of wire; an exchange 100
    # ms.
    topology = Topology(
        2,
        "cuda",
        local_world_size=1,
        hbm_mem_bw=1.0,
        inter_host_bw=0.1,
        latency_ms=100.0,
        bwd_compute_multiplier=3.0,
    )
    step = one_table(ShardingType.TABLE_WISE, topology, Load(3, pooling_factor=2))
    # Rank 0 sends 24 bytes of sizes, and 4 * (3 + 6) of ids; rank 1, which has the table, sends 24
    # of sizes.
    assert step.phases["ids"].tolist() == pytest.approx([100 + 240 + 100 + 360] * 2)
    # 12 rows of 128 bytes (they are shorter), their ids of 8, and 6 bags of 16.
    moved = 12 * (128 + 8) + 6 * 16
    assert step.phases["lookup"].tolist() == [0, moved]
    assert step.phases["update"].tolist() == [0, 3 * moved]
    # 3 samples of 16 bytes home, as many back.
    assert (
        step.phases["rows"].tolist()
        == step.phases["gradients"].tolist()
        == pytest.approx([100 + 480] * 2)
    )
    assert step.step_ms == pytest.approx(800 + 4 * moved + 2 * 580)
    assert step.rank_ms.tolist() == pytest.approx([800 + 1160, step.step_ms])
    assert step.step_parts == pytest.approx(
        {"memory": 4 * moved, "inside hosts": 0, "across hosts": 600 + 960, "latency": 400}
    )
    assert step.host_sent(ROWS).tolist() == [0, 48]


def test_a_rank_waits_for_the_slower_of_its_links_and_ranks_for_one_another():
    topology = Topology.hosts(2, 2, intra_host_bw=100.0, inter_host_bw=1.0, latency_ms=0.0)
    step = one_table(ShardingType.TABLE_WISE, topology, Load(1))
    # The holder sends 16 bytes inside and 32 across; 16 / 100 ms pass beside 32 ms. Others of its
    # host get 16 inside.
    assert step.phases["rows"].tolist() == pytest.approx([0.16, 32.0, 16.0, 16.0])
    # The slowest rank of each phase: rank 1, and it is its link to the other host that counts.
    assert step.step_parts["inside hosts"] == 0
    assert sum(step.step_parts.values()) == pytest.approx(step.step_ms)
    near = one_table(ShardingType.TABLE_ROW_WISE, topology, Load(1))
    rows = near.components["rows"]
    # Partial sums of two samples of 16 bytes inside; then a sum of 16 bytes goes across.
    assert (rows["inside hosts"].tolist(), rows["across hosts"].tolist()) == (
        [0.32, 0.32, 0, 0],
        [16.0] * 4,
    )
    # Two ranks that are slow in different phases hold all others up in both.
    alone = one_table(
        ShardingType.ROW_WISE, topology, Load([9, 1, 1, 1], law=PowerLaw(3.0)), slow={3: 50.0}
    )
    assert alone.step_ms > alone.rank_ms.max()
    assert alone.step_ms == pytest.approx(sum(times.max() for times in alone.phases.values()))


@pytest.mark.parametrize("kernel", ["fused", "dense"])
@pytest.mark.parametrize(
    ("kind", "rows"), [*((kind, 1200 * 1024) for kind in KINDS), (ShardingType.DATA_PARALLEL, 60)]
)
@pytest.mark.parametrize(
    ("hosts", "ranks_per_host", "device"), [(1, 2, "cuda"), (2, 2, "cpu"), (3, 4, "cuda")]
)
def test_time_under_even_ids_is_what_the_planner_estimates(
    kind, rows, kernel, hosts, ranks_per_host, device
):
    topology = Topology.hosts(hosts, ranks_per_host, device)
    config = item(rows, columns=64)
    samples, ids = 500.0, 4000.0
    step = simulate(
        {"item": entry(kind, config, topology, kernel)},
        topology,
        [config],
        Load(int(samples), ids / samples),
    )
    pieces = KINDS[kind](config.num_embeddings, config.embedding_dim, topology)
    facts = TableProfile(
        "", "item", config.num_embeddings, 64, 4, ("item",), True, False, (samples,), (ids,)
    )
    sizes = np.array([[piece.rows, piece.columns] for piece in pieces])
    perf = shard_perf(facts, kind, kernel, sizes, topology)
    own = np.zeros((topology.world_size, 6))
    np.add.at(own, [piece.rank for piece in pieces], perf)
    fixed = fixed_cost(topology, kind.value, pooled=True)
    # Sizes, 24 bytes to each rank, are all that the planner does not count.
    if rows > 60:  # sums take an exchange more than the planner reckons with
        assert step.rank_ms.max() == pytest.approx(float(own.sum(axis=1).max()) + fixed, rel=2e-3)
    assert step.phases["lookup"].tolist() == pytest.approx(own[:, 0].tolist(), rel=1e-6)
    assert step.phases["update"].tolist() == pytest.approx(own[:, 2].tolist(), rel=1e-6)


def test_a_planned_model_takes_what_its_planner_says_and_more_where_a_row_is_hot():
    topology = Topology.preset("8xH100x4")
    tables = [
        item(10**5 * (1 + index % 7) ** 2, 32 * (1 + index % 4), f"t{index}") for index in range(24)
    ]
    model = EmbeddingBagCollection(tables, device=torch.device("meta"))
    constraints = {table.name: ParameterConstraints(pooling_factors=[8.0]) for table in tables}
    planner = EmbeddingShardingPlanner(topology, batch_size=1024, constraints=constraints)
    plan = planner.plan(model, [EmbeddingBagCollectionSharder()])
    even = simulate(plan, topology, model, Load(1024, 8))
    report = plan.report
    assert report is not None
    own = np.zeros((topology.world_size, 6))
    for option in place_options(report.inputs.problem, report.placement):
        pieces = option.shard_arrays()
        np.add.at(own, pieces.ranks, pieces.perf)
    for phase, column in {"lookup": 0, "update": 2}.items():
        assert even.phases[phase].tolist() == pytest.approx(own[:, column].tolist(), rel=1e-6), (
            phase
        )
    # The planner counts the holder's end of a wire. The other end comes on top, and nothing else.
    for phase, stage, column in (("ids", IDS, 4), ("rows", ROWS, 1), ("gradients", GRADIENTS, 3)):
        wires = even.phases[phase] - even.components[phase]["latency"]
        ends = (even.sent(stage) + even.received(stage)) / topology.inter_host_bw
        assert (wires >= own[:, column] * (1 - 1e-6)).all(), phase
        assert (wires <= own[:, column] + ends).all(), phase
    assert even.step_ms >= even.rank_ms.max()
    rows = {t.name: entry(ShardingType.ROW_WISE, t, topology) for t in tables}
    hot = simulate(rows, topology, model, Load(1024, 8, PowerLaw(1.05)))
    assert hot.step_ms > simulate(rows, topology, model, Load(1024, 8)).step_ms > even.step_ms


def test_small_replicated_tables_are_added_up_whole():
    topology = Topology(4, "cpu", ddr_mem_bw=1.0)
    step = one_table(ShardingType.DATA_PARALLEL, topology, Load(100, 10), rows=8)
    assert step.sent(COPIES_SUMS).tolist() == [2 * 3 * 4 * 8] * 4
    assert step.issues()[COPIES_SUMS] == 2
    assert step.phases["ids"].tolist() == step.phases["rows"].tolist() == [0.0] * 4
    assert step.phases["gradients"].min() > 0
    assert step.work.lookups.tolist() == [1000.0] * 4


def test_worlds_of_one_look_up_and_send_nothing():
    for kind in (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL):
        step = one_table(kind, Topology(1, "cpu"), Load(3, 2))
        assert (step.total(), step.issues(), step.work.lookups.tolist()) == (0.0, {}, [6.0])
        assert step.step_ms == pytest.approx(
            float(step.phases["lookup"][0] + step.phases["update"][0])
        )
    empty = one_table(ShardingType.ROW_WISE, Topology(2, "cpu"), Load(0))
    assert empty.hot_rows == []
    assert empty.work.lookups.tolist() == [0.0, 0.0]


def test_hot_rows_name_the_row_its_rank_and_its_share():
    topology = Topology.hosts(2, 2)
    law = PowerLaw(1.0)
    step = one_table(ShardingType.ROW_WISE, topology, Load(11, pooling_factor=2, law=law), rows=3)
    hot = step.hot_rows[0]
    # 3 rows on 4 ranks: 6/11, 3/11, 2/11 of 88 ids, each on a rank of its own.
    assert (hot.table, hot.row, hot.ranks) == ("item", 0, (0,))
    assert (hot.reads, hot.table_share, hot.rank_share) == pytest.approx((48.0, 6 / 11, 1.0))
    assert step.work.lookups.tolist() == pytest.approx([48, 24, 16, 0])
    cut = one_table(ShardingType.COLUMN_WISE, topology, Load(11, pooling_factor=2, law=law), rows=3)
    assert (cut.hot_rows[0].ranks, cut.hot_rows[0].rank_share) == ((0, 1), pytest.approx(6 / 11))
    entries = {
        "item": parameter_sharding(
            ShardingType.COLUMN_WISE, column_wise_shards(3, [1, 2, 1], [0, 2, 0]), "cpu"
        )
    }
    twice = simulate(entries, topology, [item(3)], Load(11, pooling_factor=2, law=law))
    assert twice.work.lookups.tolist() == pytest.approx([176, 0, 88, 0])
    assert (twice.hot_rows[0].ranks, twice.hot_rows[0].rank_share) == (
        (0, 2),
        pytest.approx(6 / 11),
    )
    copied = one_table(
        ShardingType.DATA_PARALLEL, topology, Load(11, pooling_factor=2, law=law), rows=3
    )
    assert (copied.hot_rows[0].ranks, copied.hot_rows[0].rank_share) == (
        (0, 1, 2, 3),
        pytest.approx(6 / 11),
    )
    assert [each.row for each in step.hot_rows] == [0, 1, 2]


def test_stragglers_are_named_with_their_reason():
    topology = Topology.preset("8xH100")
    load = Load(4096, 20, PowerLaw(1.2))
    step = one_table(ShardingType.ROW_WISE, topology, load, rows=10**7, columns=128)
    first, *others = step.stragglers()
    assert (first.rank, others) == (0, [])
    assert first.behind == pytest.approx(step.rank_ms[0] / step.rank_ms.mean() - 1)
    assert "row 0 of table 'item'" in first.reason
    assert "times the mean of rows looked up" in first.reason
    even = one_table(ShardingType.ROW_WISE, topology, Load(4096, 20), rows=10**7, columns=128)
    assert even.stragglers() == []
    assert even.step_ms < step.step_ms
    slow = one_table(
        ShardingType.ROW_WISE, topology, Load(4096, 20), rows=10**7, columns=128, slow={5: 3.0}
    )
    assert [each.rank for each in slow.stragglers()] == [5]
    assert slow.stragglers()[0].phase == "update"
    assert slow.phases["update"][5] == pytest.approx(3 * even.phases["update"][5])
    assert slow.phases["rows"].tolist() == even.phases["rows"].tolist()


def test_ids_that_are_hashed_spread_the_rows_of_a_row_wise_table():
    topology = Topology.preset("8xH100")
    by_use = one_table(ShardingType.ROW_WISE, topology, Load(4096, 20, PowerLaw(1.05)), rows=10**7)
    hashed = one_table(
        ShardingType.ROW_WISE, topology, Load(4096, 20, PowerLaw(1.05, scattered=1)), rows=10**7
    )
    assert by_use.work.lookups.max() / by_use.work.lookups.mean() > 5
    assert hashed.work.lookups.max() / hashed.work.lookups.mean() < 2
    assert hashed.step_ms < by_use.step_ms
    assert hashed.work.distinct.sum() == pytest.approx(by_use.work.distinct.sum(), rel=1e-6)


def big(world_size: int, tables: int = 40) -> Simulation:
    topology = Topology.hosts(world_size // 8, 8, "cuda")
    kinds = list(KINDS)
    configs = [item(10**6 + index, 64, f"t{index}") for index in range(tables)]
    plan = {c.name: entry(kinds[i % len(kinds)], c, topology) for i, c in enumerate(configs)}
    return simulate(plan, topology, configs, Load(512, 5, PowerLaw(1.05)))


def test_thousands_of_ranks_are_simulated_whole():
    step = big(4096)
    assert step.rank_ms.shape == (4096,)
    ids = 512 * 5 * 4096
    # Rows of tables that are cut in columns are looked up twice: three types of seven.
    twice = sum(index % 7 in (1, 2, 5) for index in range(40))
    assert step.work.lookups.sum() == pytest.approx(ids * (40 + twice))
    assert step.sent().sum() == pytest.approx(step.received().sum())
    for stage in (IDS, ROWS, GRADIENTS):
        assert step.sent(stage, crossing=True).sum() == pytest.approx(
            step.received(stage, crossing=True).sum()
        )
        assert step.host_sent(stage).shape == (512,)
    assert step.total(SIZES) == 24 * 6 * 4096 * 4095
    with pytest.raises(ValueError, match="4096 x 4096"):
        step.matrix(ROWS)


def test_more_hosts_send_more_across_and_sums_by_rank_are_those_of_the_matrix():
    step = big(64)
    matrix = step.matrix()
    assert step.sent() == pytest.approx(matrix.sum(axis=1))
    assert step.received() == pytest.approx(matrix.sum(axis=0))
    host = np.arange(64) // 8
    assert step.sent(crossing=True) == pytest.approx((matrix * (host[:, None] != host)).sum(axis=1))
    assert step.host_sent() == pytest.approx(
        (matrix * (host[:, None] != host)).sum(axis=1).reshape(8, 8).sum(axis=1)
    )
    assert step.by_stage(crossing=True)[ROWS] == pytest.approx(
        (step.matrix(ROWS) * (host[:, None] != host)).sum()
    )


def test_models_of_several_collections_have_their_own_exchanges():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = EmbeddingBagCollection([item()])
            self.rows = EmbeddingCollection([EmbeddingConfig(8, 4, "item", feature_names=["item"])])

    topology = Topology(2, "cpu")
    model, plan = Model(), ShardingPlan()
    for path in ("bags", "rows"):
        entries = {"item": entry(ShardingType.ROW_WISE, item(), topology)}
        plan.plan[path] = EmbeddingModuleShardingPlan(entries)
    step = simulate(plan, topology, model, Load(3, 2))
    # 3 bags of 4 numbers from each rank, and the rows of 3 ids.
    assert step.matrix(ROWS).tolist() == [[0, 48 + 48], [48 + 48, 0]]
    assert step.issues() == {SIZES: 2, IDS: 2, ROWS: 2, GRADIENTS: 2}
    by_path = {path: [item()] for path in ("bags", "rows")}
    assert simulate(plan, topology, by_path, Load(3, 2)).issues() == step.issues()
    with pytest.raises(ValueError, match=r"modules \['bags', 'rows'\]: give"):
        simulate(plan, topology, [item()], Load(3))


def test_arguments_that_do_not_belong_together_are_refused():
    topology = Topology(2, "cpu")
    plan = {"item": entry(ShardingType.ROW_WISE, item(), topology)}
    with pytest.raises(ValueError, match="says nothing about table 'user'"):
        simulate(plan, topology, [item(), item(name="user")], Load(1))
    with pytest.raises(
        ValueError,
        match=r"table 'item'.*8 x 4 rows.*9 x 4",
    ):
        simulate(plan, topology, [item(9)], Load(1))
    with pytest.raises(ValueError, match=r"on each of ranks 0 to 3"):
        simulate(plan, Topology(4, "cpu"), [item()], Load(1))
    everywhere = {"item": entry(ShardingType.DATA_PARALLEL, item(), topology)}
    with pytest.raises(ValueError, match=r"every rank of 4.* ranks \[0, 1\]"):
        simulate(everywhere, Topology(4, "cpu"), [item()], Load(1))
    with pytest.raises(ValueError, match=r"slow=\{2: 2.0\} for 2 ranks"):
        simulate(plan, topology, [item()], Load(1), slow={2: 2.0})
    with pytest.raises(ValueError, match=r"stragglers\(behind=-1\)"):
        simulate(plan, topology, [item()], Load(1)).stragglers(-1)
    plan["item"].sharding_type = "by_moon"
    with pytest.raises(ValueError, match=r"'by_moon'.*not.*ShardingType"):
        simulate(plan, topology, [item()], Load(1))
    plan["item"].sharding_type, plan["item"].compute_kernel = "row_wise", "fused_uvm"
    with pytest.raises(PlannerError, match="compute kernel 'fused_uvm'"):
        simulate(plan, topology, [item()], Load(1))


def test_the_report_says_what_the_numbers_say():
    topology = Topology.hosts(2, 2)
    step = one_table(ShardingType.ROW_WISE, topology, Load(11, 2, PowerLaw(1.0)), rows=3)
    text = str(step)
    assert text.startswith(
        f"a step of 1 table on 4 ranks, 2 hosts of 2 takes {step.step_ms:.3g} ms"
    )
    line = next(line for line in text.splitlines() if line.startswith("rows looked up")).split()
    assert line == ["rows", "looked", "up", "22", "48", "rank", "0", "2.18"]
    assert "bytes that leave a host" in text
    assert f"{100 * step.step_parts['latency'] / step.step_ms:.0f} % latency" in text
    assert all(f"ms, {phase}" in text for phase in PHASES)
    assert all(stage in text for stage in step.issues())
    assert "row" in text and "48" in text and "54.5 %" in text
    page = step._repr_html_()
    assert page.count("<table") == 3
    assert "54.5 %" in page
    alone = str(one_table(ShardingType.ROW_WISE, Topology(2, "cpu"), Load(1)))
    assert "host" in alone and "leave a host" not in alone


def test_the_figure_draws_every_phase_and_both_links():
    figure = one_table(ShardingType.ROW_WISE, Topology.hosts(2, 2), Load(11)).plot()
    above, below = figure.axes
    assert [text.get_text() for text in above.get_legend().get_texts()] == list(PHASES)
    assert [text.get_text() for text in below.get_legend().get_texts()] == [
        "sent inside the host",
        "sent to other hosts",
    ]
    assert below.get_xlabel() == "rank"
    drawn = {to_hex(patch.get_facecolor()) for axes in (above, below) for patch in axes.patches}
    assert len(drawn) == 2 and not drawn & set(RANK_COLORS)
    figure.canvas.draw()  # pyright: ignore[reportAttributeAccessIssue]

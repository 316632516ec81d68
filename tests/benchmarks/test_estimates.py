"""`bench estimates` on a few small plans: what it draws, measures and judges."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import estimates
from benchmarks.estimates import draw_plan, draw_tables, rank_correlation
from benchmarks.harness import Bar
from benchmarks.runner import Options
from tutorec._calibration import Calibration
from tutorec.distributed.calibration import Cut, TableSize, estimated_ms
from tutorec.distributed.plan.geometry import exact_cover
from tutorec.distributed.planner.cost import fixed_cost
from tutorec.distributed.planner.topology import Topology


def test_drawn_plans_cover_their_tables_and_differ() -> None:
    tables = draw_tables(10)
    plans = [draw_plan(tables, number) for number in range(30)]
    kinds = {cut.kind for plan in plans for cut in plan.values()}
    assert kinds == {"table_wise", "row_wise", "column_wise", "data_parallel"}
    for plan in plans:
        for table in tables:
            pieces = plan[table.name].pieces(table, 2)
            copies = 2 if plan[table.name].kind == "data_parallel" else 1
            for first in range(copies):
                assert exact_cover(pieces[first::copies], table.rows, table.columns)
    assert len({str(plan) for plan in plans}) == 30


def test_estimate_of_a_plan_is_the_slowest_rank_and_the_exchanges() -> None:
    topology = Topology.laptop(2)
    tables = [TableSize("t0", 1000, 16, 4), TableSize("t1", 1000, 16, 4)]

    def of(*cuts: Cut) -> float:
        return estimated_ms(
            tables, {f"t{index}": cut for index, cut in enumerate(cuts)}, 64, topology
        )

    apart = of(Cut("table_wise", (0,)), Cut("table_wise", (1,)))
    together = of(Cut("table_wise", (1,)), Cut("table_wise", (1,)))
    once = fixed_cost(topology, "table_wise", pooled=True)
    assert together - once == pytest.approx(2 * (apart - once))
    mixed = of(Cut("table_wise", (0,)), Cut("row_wise", ()))
    assert mixed > 2 * once


def test_rank_correlation_looks_at_order_alone() -> None:
    assert rank_correlation([1.0, 2.0, 3.0], [10.0, 500.0, 501.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert rank_correlation(np.array([1.0, 2.0, 3.0, 4.0]), [1.0, 3.0, 2.0, 4.0]) == pytest.approx(
        0.8
    )


def test_every_plan_is_measured_and_both_clocks_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PLANS": 4, "TABLES": 2, "SAMPLES": 3, "MOST_ROWS": 1500}.items():
        monkeypatch.setattr(estimates, name, value)
    speeds = {"cpu": {"ddr_mem_bw": 5e6, "row_ms": 2e-5, "latency_ms": 0.5}}
    monkeypatch.setattr(
        estimates, "calibrate", lambda devices: Calibration("2026-11-22", {}, speeds)
    )
    report = estimates.run(Options(rounds=2))
    assert [len(samples) for samples in report.samples.values()] == [2] * 4
    bars = [Bar("at least", 0.8), Bar("at most", 1.5)]
    assert [(c.clock, c.bar, c.verdict) for c in report.comparisons] == [
        (clock, bar, "undecided") for clock in ("wall", "cpu") for bar in bars
    ]
    assert all(-1 <= c.ratio.median <= 1 for c in report.comparisons[::2])
    assert all(c.ratio.median >= 1 for c in report.comparisons[1::2])
    assert report.notes[0].startswith(
        "measured on this machine on 2026-11-22: rows of a lookup 4.66 GiB/s"
    )
    assert "rank correlation" in str(report)

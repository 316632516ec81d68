"""Plans side by side: the numbers are those of their reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from distributed.planner.planned_cases import GIB, SHOP, inputs_of, planned, report_of

from tutorec.distributed.core.cache_params import CacheParams
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.planner import ParameterConstraints, PlanComparison, Topology, compare
from tutorec.distributed.planner.report import PlannedSharding
from tutorec.errors import PlannerError

MACHINE = Topology(4, "cuda", hbm_cap=4 * GIB)


def plan_of(types: Mapping[str, str] | None = None, seconds: float = 0.0) -> PlannedSharding:
    """A plan of the shop's tables, some of which have a sharding type."""
    constraints = {
        table: ParameterConstraints(sharding_types=[kind]) for table, kind in (types or {}).items()
    }
    return planned(inputs_of(SHOP, MACHINE, constraints=constraints), seconds)


@pytest.fixture(scope="module")
def plans():
    by_rows = dict.fromkeys(SHOP, "row_wise") | {"day": "data_parallel"}
    return {
        "free": plan_of(seconds=0.25),
        "rows": plan_of(by_rows),
        "free again": plan_of(seconds=1.5),
    }


@pytest.fixture(scope="module")
def compared(plans):
    return compare(plans)


def test_numbers_are_those_of_the_reports(plans, compared):
    assert list(compared) == list(plans)
    best = min(report_of(plan).cost for plan in plans.values())
    for name, plan in plans.items():
        row = compared[name]
        report = report_of(plan)
        assert row.ms == report.cost
        assert row.above_best == report.cost / best - 1
        assert row.bound_ms == report.bound.ms <= row.ms
        assert row.largest_rank_bytes == max(sum(held) for held in report.rank_memory.tolist())
        assert sum(row.parts.values()) == pytest.approx(row.ms)
        assert sum(row.types.values()) == len(SHOP)
    assert compared.best == "free"
    assert [row.seconds for row in compared.values()] == [0.25, None, 1.5]


def test_types_are_counted_and_copies_named(compared):
    assert compared["rows"].types == {"row_wise": 4, "data_parallel": 1}
    assert compared["rows"].copied == ("day",)


def test_comparison_prints_as_a_table_with_a_line_for_each_plan(compared):
    head, _, free, rows, again = str(compared).splitlines()
    assert head.split("  ")[0] == "plan"
    assert "best  " in free
    assert "0.25" in free
    assert f"{100 * compared['rows'].above_best:.1f} %" in rows
    assert "4 row_wise, 1 data_parallel" in rows
    assert " day " in rows
    assert "1.50" in again


def test_notebook_shows_the_names_as_text(plans):
    html = compare({"a < b": plans["free"]})._repr_html_()
    assert "<table>" in html
    assert "a &lt; b" in html


def test_only_some_of_many_copies_are_named(compared):
    many = replace(compared["rows"], copied=tuple("abcdef"))
    assert "a, b, c and 3 more" in str(PlanComparison({"many": many}))


def test_plan_without_report_or_tables_is_named():
    plan = plan_of()
    by_hand = ShardingPlan(plan.plan)
    with pytest.raises(PlannerError, match=r"plan 'by hand'.*no report.*estimate"):
        compare({"by hand": by_hand})  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlannerError, match="plan 'loaded' has no report"):
        compare({"made": plan, "loaded": PlannedSharding(plan.plan)})
    with pytest.raises(PlannerError, match="plan 'empty' has no table"):
        compare({"empty": PlannedSharding()})
    with pytest.raises(ValueError, match="at least one plan"):
        compare({})


def test_bytes_of_weights_and_state_are_those_of_the_shards(plans):
    report = report_of(plans["rows"])
    rows = {table: size[0] for table, size in SHOP.items()}
    weights = 0
    for table, (_, columns) in SHOP.items():
        on_first = rows[table] if table == "day" else -(-rows[table] // 4)
        weights += 4 * on_first * columns
    assert report.weight_bytes[0] == weights
    copies = 3 * 4 * rows["day"] * SHOP["day"][1]
    all_weights = sum(4 * rows * columns for rows, columns in SHOP.values())
    assert sum(report.weight_bytes) == all_weights + copies
    assert report.held_bytes == report.weight_bytes, "sharders without an optimizer have no state"
    held = report.rank_memory.sum(axis=1).tolist()
    assert all(mine <= whole for mine, whole in zip(report.held_bytes, held, strict=True))


def test_load_factor_is_that_of_the_cache():
    constraints = {
        "item": ParameterConstraints(
            compute_kernels=["fused_uvm_caching"], cache_params=CacheParams(load_factor=0.3)
        ),
        "user": ParameterConstraints(compute_kernels=["fused_uvm"]),
    }
    plan = planned(inputs_of(SHOP, Topology(2, "cpu"), constraints=constraints))
    in_memory = dict.fromkeys(("word", "city", "day"), 1.0)
    assert plan.load_factors() == {"item": 0.3, "user": 0.0} | in_memory


def test_tables_of_one_name_are_told_apart_by_their_path():
    entries = plan_of().plan[""]
    item = type(entries)(item=entries["item"], user=entries["user"])
    other = type(entries)(item=entries["item"])
    plan = PlannedSharding({"left": item, "right": other})
    assert set(plan.load_factors()) == {"left.item", "right.item", "user"}

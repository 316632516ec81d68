"""A plan with its reasons is a plan like any other: compared, copied, sent and stored."""

from __future__ import annotations

import copy
import pickle

import pytest
from distributed.planner.planned_cases import SHOP, inputs_of, planned, report_of

from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.planner.report import PlannedSharding
from tutorec.distributed.planner.topology import Topology
from tutorec.errors import PlannerError


@pytest.fixture(scope="module")
def plan():
    return planned(inputs_of(SHOP, Topology.hosts(2, 2)))


def test_plan_with_reasons_equals_the_plain_one(plan):
    plain = ShardingPlan(dict(plan.plan))
    assert plan == plain
    assert plain == plan
    other = ShardingPlan(
        {"": type(plan.plan[""])({name: plan.plan[""][name] for name in ("item", "user")})}
    )
    assert plan != other
    assert other != plan
    assert plan != 3


def test_plan_prints_as_the_plain_one(plan):
    assert str(plan) == str(ShardingPlan(plan.plan))
    assert "report" not in repr(plan)


def test_pickled_plan_explains_itself(plan):
    text = str(plan.explain())
    sent = pickle.loads(pickle.dumps(plan))
    assert sent == plan
    assert str(sent.explain()) == text
    assert sent.report.inputs.remake is None
    assert "chosen" in str(sent.explain("item"))


def test_pickled_plan_is_small(plan):
    assert len(pickle.dumps(plan)) < 200_000


def test_copied_plan_explains_itself(plan):
    assert str(copy.deepcopy(plan).explain()) == str(plan.explain())


def test_stored_plan_is_the_plan_without_reasons(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = ShardingPlan.load(tmp_path / "plan.json")
    assert type(loaded) is ShardingPlan
    assert loaded == plan
    assert not plan.diff(loaded)
    loaded = PlannedSharding.load(tmp_path / "plan.json")
    assert loaded == plan
    with pytest.raises(PlannerError, match="without the report"):
        loaded.explain()
    with pytest.raises(PlannerError, match="without the report"):
        loaded.plot()


def test_html_of_a_plan_lists_every_table(plan):
    html = plan._repr_html_()
    assert all(name in html for name in SHOP)


def test_report_numbers_agree_with_the_plan(plan):
    report = report_of(plan)
    held = {rank: 0 for rank in range(4)}
    for (_, entry), choice in zip(plan.plan[""].items(), report.choices, strict=True):
        assert entry.sharding_type == choice.options[0].sharding_type
        for rank, size in zip(entry.ranks, choice.memory.sum(axis=1).tolist(), strict=True):
            held[rank] += size
    assert report.rank_memory.sum(axis=1).tolist() == list(held.values())

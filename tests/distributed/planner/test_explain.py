"""Explanations of plans: the numbers are those of the plan, and the lines are readable."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from distributed.planner.planned_cases import GIB, SHOP, inputs_of, planned, report_of
from hypothesis import given
from hypothesis import strategies as st

from tutorec._text import WIDTH, Explanation, Facts
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.distributed.planner.problem import (
    Choice,
    Placement,
    PlacementRule,
    PlanningProblem,
    broken_rules,
    cost,
    rank_memory,
    rank_time,
)
from tutorec.distributed.planner.report import (
    PlanInputs,
    find_table,
    sharding_text,
    steps_of_choices,
)
from tutorec.distributed.planner.search import with_choice
from tutorec.distributed.planner.topology import Topology

TOLD = ["item", "word", "day"]
TWO_HOSTS = Topology.hosts(2, 2, "cuda", hbm_cap=4 * GIB)


@pytest.fixture(scope="module")
def plan():
    return planned(inputs_of(SHOP, TWO_HOSTS, percentage=0.25))


@pytest.fixture(scope="module")
def stories(plan):
    """Of the whole plan (None) and of some tables."""
    return {name: str(plan.explain(name)) for name in (None, *TOLD)}


def lines_of(text: object) -> list[str]:
    return str(text).splitlines()


def fields(line: str) -> list[str]:
    return [field for field in re.split(r"  +", line.strip()) if field and not set(field) <= {"#"}]


def test_plan_story_gives_the_numbers_of_the_plan(plan):
    report = report_of(plan)
    text = " ".join(str(plan.explain()).split())
    times = rank_time(report.problem, report.placement)
    assert "5 tables on 4 cuda ranks (2 hosts of 2), with 512 samples on each rank" in text
    assert f"{report.cost:.3f} ms expected" in text
    assert "1.00 GiB of its 4.00 GiB are kept for everything else" in text
    rows = [fields(line) for line in lines_of(plan.explain()) if re.match(r" +[0-3]  ", line)]
    assert [int(row[0]) for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert float(row[1]) == pytest.approx(times[int(row[0])], rel=0.01)
        assert float(row[2]) + float(row[3]) == pytest.approx(times[int(row[0])], rel=0.02)
    for name in SHOP:
        assert len([line for line in lines_of(plan.explain()) if line.startswith(f"{name} ")]) == 1


@pytest.mark.parametrize("name", [None, *TOLD])
def test_texts_fit_a_page(stories, name):
    assert stories[name].isascii()
    assert max(len(line) for line in stories[name].splitlines()) <= WIDTH


def test_long_names_are_cut_to_the_page():
    tables = {
        f"a_table_with_a_very_long_name_indeed_{number}" * 2: (1000, 64) for number in range(3)
    }
    plan = planned(replace(inputs_of(tables, TWO_HOSTS), remake=None))
    assert max(len(line) for line in lines_of(plan.explain())) <= WIDTH
    assert max(len(line) for line in lines_of(plan.explain(next(iter(tables))))) <= WIDTH


def test_many_ranks_and_tables_are_summed_up():
    tables = {f"t{number}": (1000 * (number + 1), 64) for number in range(40)}
    text = str(planned(inputs_of(tables, Topology.hosts(8, 4, "cuda"))).explain())
    assert len(text.splitlines()) < 60
    assert "16 tables that take less time" in text
    assert re.search(r"\d+ other ranks take .* to .* ms and hold", text)


def test_a_single_piece_that_limits_the_step_is_named():
    only = {"item": ParameterConstraints(sharding_types=["table_wise"])}
    plan = planned(
        inputs_of({"item": (1_000_000, 512), "day": (7, 16)}, Topology(2, "cuda"), constraints=only)
    )
    assert "has a single shard, of table 'item': no other place" in " ".join(
        str(plan.explain()).split()
    )
    both = planned(inputs_of({"item": (1_000_000, 512)}, Topology(1, "cuda"), constraints=only))
    assert "single shard" not in str(both.explain())


def test_html_escapes_and_says_the_same(plan):
    assert repr(plan.explain()) == str(plan.explain())
    html = plan.explain()._repr_html_()
    assert html.count("<table>") == 3
    assert "item" in html
    assert "##" in str(plan.explain()) and "##" not in html and "height:0.6em" in html
    assert "<b>" not in Explanation(["<b>", Facts([("<i>", "<script>")])])._repr_html_()
    assert "&lt;script&gt;" in Explanation([Facts([("<i>", "<script>")])])._repr_html_()


@pytest.mark.parametrize("name", TOLD)
def test_table_story_names_choice_and_every_option(plan, stories, name):
    report = report_of(plan)
    text = stories[name]
    table, option = find_table(report, name)
    assert option.name == name
    rows, columns = SHOP[name]
    assert f"{rows:,} rows of {columns} columns" in text
    chosen = [line for line in text.splitlines() if line.endswith("  chosen")]
    assert [fields(line)[0] for line in chosen] == [sharding_text(report.choices[table])]
    for choice in report.problem.choices[table]:
        row = next(
            fields(line)
            for line in text.splitlines()
            if re.match(rf"{sharding_text(choice)}  +\d", line)
        )
        assert int(row[1]) == len(choice.time)
        assert float(row[2]) == pytest.approx(choice.time.max(), rel=0.01)
        assert float(row[3].replace(",", "")) == pytest.approx(choice.time.sum(), rel=0.01)


def test_steps_of_other_options_are_steps_of_placements(plan, stories):
    report = report_of(plan)
    problem, (table, _) = report.problem, find_table(report, "item")
    for index, choice in enumerate(problem.choices[table]):
        row = next(
            fields(line)
            for line in lines_of(stories["item"])
            if re.match(rf"{sharding_text(choice)}  +\d", line)
        )
        placement = with_choice(problem, report.placement, table, index)
        assert placement is not None
        assert float(row[6].replace(",", "")) == pytest.approx(cost(problem, placement), rel=0.01)


def test_explaining_searches_nothing(plan, monkeypatch):
    monkeypatch.setattr(
        "tutorec.distributed.planner.search.search", lambda *_: pytest.fail("searched")
    )
    monkeypatch.setattr(PlanInputs, "remade", lambda *_: pytest.fail("planned"))
    assert str(plan.explain("item")) != str(plan.explain("word")) != str(plan.explain())


def test_reasons_of_refused_options_are_told(plan, stories):
    text = " ".join(stories["item"].split())
    for refusal in report_of(plan).inputs.refusals:
        if refusal.table == "item":
            assert refusal.reason in text


def test_memory_that_forces_a_choice_is_told():
    tight = inputs_of(
        {"item": (100_000, 128)}, Topology(2, "cuda", hbm_cap=40 * 1024**2), batch_size=64
    )
    plan = planned(tight)
    assert plan.plan[""]["item"].sharding_type == "row_wise"
    text = str(plan.explain("item"))
    assert re.search(r"table_wise .*  -  over by", text)


def test_tables_that_lie_together_are_told_together():
    together = {name: ParameterConstraints(colocate="a") for name in ("user", "city")}
    plan = planned(replace(inputs_of(SHOP, TWO_HOSTS, constraints=together), remake=None))
    assert "user + city" in str(plan.explain())
    assert "colocated with  city" in str(plan.explain("user"))
    assert "colocated with  user" in str(plan.explain("city"))


def test_unknown_tables_are_refused_with_those_near(plan):
    with pytest.raises(KeyError, match=r"no table 'itme'; see 'item'"):
        plan.explain("itme")


def test_steps_of_choices_are_no_faster_than_the_bound(plan):
    report = report_of(plan)
    assert report.bound is not None
    for table in range(len(SHOP)):
        steps = steps_of_choices(report, table)
        assert steps[int(report.placement.chosen[table])] == report.cost
        assert min(steps.values()) >= report.bound.ms * (1 - 1e-9)


@st.composite
def problems(draw: st.DrawFn) -> PlanningProblem:
    """A few tables of every spread on two hosts of two ranks."""
    numbers = st.integers(0, 6)

    def choice(spread: PlacementRule, pieces: int) -> Choice:
        time = np.array([float(draw(numbers)) for _ in range(pieces)])
        memory = np.array([[draw(numbers), draw(numbers)] for _ in range(pieces)])
        allowed = (
            np.array([draw(st.booleans()) for _ in range(4)])
            if draw(st.integers(0, 3)) == 0
            else None
        )
        return Choice(time, memory, spread, (draw(st.integers(0, 2)),), 0, allowed)

    shapes = [
        (PlacementRule.ANY_RANK, 1),
        (PlacementRule.ANY_RANK, 3),
        (PlacementRule.ONE_HOST, 2),
        (PlacementRule.ROWS_ON_HOST, 2),
        (PlacementRule.ROW_BLOCKS_ON_HOSTS, 4),
    ]
    tables = []
    for _ in range(draw(st.integers(1, 3))):
        picked = draw(
            st.lists(
                st.sampled_from([*shapes, (PlacementRule.EVERY_RANK, 4)]), min_size=1, max_size=4
            )
        )
        tables.append(tuple(choice(*shape) for shape in picked))
    capacity = np.array([[draw(st.integers(0, 15)), draw(st.integers(0, 15))] for _ in range(4)])
    return PlanningProblem(4, 2, capacity, tuple(tables), np.array([0.5, 0.0, 2.0]))


@given(problems(), st.data())
def test_another_choice_for_one_table_breaks_no_rule_and_moves_no_other(problem, data):
    """Starting from an answer that fits, if the drawn problem has one that is found greedily."""
    chosen: list[int] = []
    ranks: list[np.ndarray] = []
    for table, choices in enumerate(problem.choices):
        roomy = replace(problem, choices=problem.choices[: table + 1])
        for index in range(len(choices)):
            first = Placement(
                np.array([*chosen, index]),
                [*ranks, np.zeros(len(choices[index].time), dtype=np.int64)],
            )
            found = with_choice(roomy, first, table, index)
            if found is not None and not broken_rules(roomy, found):
                chosen, ranks = found.chosen.tolist(), found.ranks
                break
        else:
            return
    placement = Placement(np.array(chosen), ranks)
    assert broken_rules(problem, placement) == []
    table = data.draw(st.integers(0, len(problem.choices) - 1))
    index = data.draw(st.integers(0, len(problem.choices[table]) - 1))
    other = with_choice(problem, placement, table, index)
    if other is None:
        return
    assert broken_rules(problem, other) == []
    assert other.chosen[table] == index
    for number, where in enumerate(placement.ranks):
        assert number == table or (other.ranks[number] == where).all()
    assert (rank_memory(problem, other) <= problem.capacity).all()
    assert math.isfinite(cost(problem, other))

"""The figure of a plan: one bar for each rank, as long as the numbers, in the colours
of the book.
"""

from __future__ import annotations

import io

import matplotlib.colors
import pytest
from distributed.planner.planned_cases import GIB, SHOP, inputs_of, planned, report_of

from tutorec._style import RANK_COLORS
from tutorec.distributed.planner.problem import rank_time
from tutorec.distributed.planner.topology import Topology


@pytest.fixture(scope="module")
def plan():
    return planned(inputs_of(SHOP, Topology.hosts(2, 2, "cuda", hbm_cap=4 * GIB)))


def test_bars_are_as_long_as_the_numbers(plan):
    report = report_of(plan)
    time_axes, memory_axes = plan.plot().axes
    lookup, exchange = time_axes.containers[:2]
    lengths = [a.get_width() + b.get_width() for a, b in zip(lookup, exchange, strict=True)]
    assert lengths == pytest.approx(rank_time(report.problem, report.placement).tolist())
    room, held = memory_axes.containers[:2]
    assert [bar.get_width() for bar in room] == pytest.approx([4.0] * 4)
    assert [bar.get_width() for bar in held] == pytest.approx(
        (report.rank_memory[:, 0] / GIB).tolist()
    )
    colors = [matplotlib.colors.to_hex(bar.get_facecolor()) for bar in held]
    assert colors == list(RANK_COLORS[:4])


def test_title_is_filled_with_the_numbers(plan):
    report = report_of(plan)
    slowest = int(rank_time(report.problem, report.placement).argmax())
    assert f"Rank {slowest} takes" in plan.plot().get_suptitle()
    assert plan.plot("{memory} of rank {fullest}").get_suptitle().startswith("HBM of rank ")
    with pytest.raises(KeyError, match=r"'speed'.*slowest"):
        plan.plot("{speed}")


def test_bars_of_many_ranks_are_as_long_and_have_no_labels():
    plan = planned(inputs_of(SHOP, Topology.hosts(16, 4, "cuda")))
    report = report_of(plan)
    figure = plan.plot()
    lookup, exchange = figure.axes[0].containers[:2]
    lengths = [a.get_width() + b.get_width() for a, b in zip(lookup, exchange, strict=True)]
    assert lengths == pytest.approx(rank_time(report.problem, report.placement).tolist())
    assert len(lengths) == 64
    assert not figure.axes[0].texts


def test_figure_is_drawn_without_touching_matplotlib(plan):
    before = dict(matplotlib.rcParams)
    for suffix in ("png", "svg"):
        out = io.BytesIO()
        plan.plot().savefig(out, format=suffix)
        assert out.getvalue()
    assert dict(matplotlib.rcParams) == before

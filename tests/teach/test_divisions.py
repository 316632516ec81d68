"""Rows of features on ranks, drawn."""

from __future__ import annotations

from tutorec.balance import LoadBalanceManager
from tutorec.teach import draw


def written(chart):
    """All that is written in a figure."""
    return [text.get_text() for text in chart.figure.axes[0].texts]


def test_a_line_has_the_rows_of_its_rank_and_names_a_feature_once():
    fair = LoadBalanceManager([3, 6, 3], 3)
    chart = draw.divisions({"fair": fair}, claim="{fewest} and {most} rows")
    assert chart.claim == "12 and 12 rows"
    cells = [text for text in written(chart) if text[:1].isdigit()]
    assert cells == ["0:0", "1", "2", "1:0", "1:1", "2", "3", "4", "1:5", "2:0", "1", "2"]


def test_rows_that_are_not_counted_have_a_thick_frame():
    # The document gives each rank 13 // 2 rows, and the last one has a row more.
    chart = draw.divisions({"": LoadBalanceManager([4, 9], 2, compat=True)}, claim="")
    thick = [patch for patch in chart.figure.axes[0].patches if patch.get_linewidth() > 2]
    assert len(thick) == 1
    assert written(chart).count("counts 6") == 2


def test_a_feature_without_rows_is_named():
    chart = draw.divisions({"": LoadBalanceManager([4, 4], 2, compat=True)}, claim="")
    assert "counts 4, lists feature 1" in written(chart)

import pytest

from tutorec.teach import draw

# A memory of 10 GB/s and 100 Gflop/s of arithmetic meet at 10 operations a byte.
MACHINE = {"bandwidth": 10e9, "peak": 100e9, "claim": "{intensity:.2g} a byte, {of_roof:.0%}"}


def test_title_says_which_share_of_the_slope_a_lookup_reaches():
    chart = draw.roofline({"lookup": (1e9, 4e9, 0.5)}, **MACHINE)
    assert chart.claim == "0.25 a byte, 80 %"
    assert chart.facts["of_roof"] == pytest.approx(0.8)


def test_work_beyond_the_ridge_is_held_to_the_peak():
    chart = draw.roofline({"multiply": (100e9, 1e9, 2.0)}, **MACHINE)
    assert chart.facts["of_roof"] == 0.5


def test_points_lie_where_they_were_measured():
    axes = draw.roofline({"lookup": (1e9, 4e9, 0.5)}, **MACHINE).figure.axes[0]
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in points] == [(0.25, 2.0)]


def test_each_side_of_the_ridge_says_what_limits_there():
    axes = draw.roofline({"lookup": (1e9, 4e9, 0.5)}, **MACHINE).figure.axes[0]
    sides = {text.get_text().strip(): text.get_horizontalalignment() for text in axes.texts}
    assert sides["memory is the limit"] == "right"  # ends at the ridge
    assert sides["arithmetic is the limit"] == "left"

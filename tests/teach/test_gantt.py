"""The gantt of chapter 15: a line for each batch, drawn from recorded steps."""

from __future__ import annotations

from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from teach.test_network import recorded

from tutorec.teach import draw


def widths(chart, hollow):
    """Milliseconds of the hollow or of the filled bars."""
    [axes] = chart.figure.axes
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    return [bar.get_width() for bar in bars if (to_rgba(bar.get_facecolor())[3] == 0) is hollow]


def test_the_title_adds_up_the_hollow_bars():
    steps = recorded()
    chart = draw.gantt({"the loop": steps})
    assert chart.claim == "the loop waits 500 of 1,000 ms"
    assert sum(widths(chart, hollow=True)) == 2 * steps.waiting_ms()


def test_waiting_is_cut_out_of_the_bars():
    chart = draw.gantt({"the loop": recorded()})
    assert widths(chart, hollow=False) == [125, 125, 125, 125]


def test_panels_have_one_scale_and_numbers_of_their_own():
    chart = draw.gantt({"one": recorded(), "two": recorded()})
    assert chart.claim == "one waits 500 of 1,000 ms, two waits 500 of 1,000 ms"
    first, second = chart.figure.axes
    assert first.get_xlim() == second.get_xlim() == (0, 1000)
    labels = [label.get_text() for label in first.get_yticklabels()]
    assert labels == ["batch 4", "batch 5"]

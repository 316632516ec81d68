"""The gantt of chapter 15: a line for each batch, drawn from recorded steps."""

from __future__ import annotations

from dataclasses import replace

from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation
from teach.test_network import recorded

from tutorec.teach import draw
from tutorec.teach.canvas import PAPER


def widths(chart, hollow):
    """Milliseconds of the hollow or of the filled bars."""
    [axes] = chart.figure.axes
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    return [bar.get_width() for bar in bars if (to_hex(bar.get_facecolor()) == PAPER) is hollow]


def test_the_title_adds_up_the_hollow_bars():
    steps = recorded()
    chart = draw.gantt({"the loop": steps})
    assert chart.claim == "the loop waits 500 of 1,000 ms"
    assert sum(widths(chart, hollow=True)) == 2 * steps.waiting_ms()


def test_waits_are_in_front_of_the_bars_that_they_interrupt():
    [axes] = draw.gantt({"the loop": recorded()}).figure.axes
    boxes = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    bars = {(box.get_width(), box.get_zorder()) for box in boxes}
    assert bars == {(500, 1), (250, 2)}


def test_a_window_goes_from_sending_to_waiting():
    messages = [replace(one, sent=one.sent + 0.015625) for one in recorded().messages]
    steps = replace(recorded(), messages=messages)
    [axes] = draw.gantt({"the loop": steps}, window="input ids").figure.axes
    [arrow] = [text for text in axes.texts if isinstance(text, Annotation)]
    assert (arrow.xyann, arrow.xy) == ((15.625, 0), (125, 0))


def test_panels_have_one_scale_and_numbers_of_their_own():
    chart = draw.gantt({"one": recorded(), "two": recorded()})
    assert chart.claim == "one waits 500 of 1,000 ms, two waits 500 of 1,000 ms"
    first, second = chart.figure.axes
    assert first.get_xlim() == second.get_xlim() == (0, 1000)
    labels = [label.get_text() for label in first.get_yticklabels()]
    assert labels == ["batch 4", "batch 5"]

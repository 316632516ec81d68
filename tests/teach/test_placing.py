"""Figures of chapters 09 and 09b: tables placed step by step, estimates beside a clock."""

from matplotlib.patches import Rectangle

from tutorec.teach import draw

MS = {"a": 3, "b": 2}
PLANS = [{}, {"a": 0}, {"a": 0, "b": 1}, {"a": 0, "b": 0}]


def test_placing_draws_each_table_as_long_as_it_takes_and_frames_what_moved():
    chart = draw.placing(PLANS, MS, claim="three steps")
    assert chart.claim == "three steps"
    boxes = [patch for patch in chart.figure.axes[0].patches if isinstance(patch, Rectangle)]
    widths = [box.get_width() for box in boxes]
    assert [round(3 * width / widths[0], 3) for width in widths] == [3, 3, 2, 3, 2]
    framed = [box.get_linewidth() > 1 for box in boxes]
    assert framed == [True, False, True, False, True]
    texts = [text.get_text() for text in chart.figure.axes[0].texts]
    assert [text for text in texts if text.endswith(" ms")] == [
        "3 ms",
        "0 ms",
        "3 ms",
        "2 ms",
        "5 ms",
        "0 ms",
    ]
    assert texts[0] == "put a" and "put b" in texts and "move b" in texts


def test_placing_begins_with_a_plan_that_is_there_and_says_what_is_taken_off():
    chart = draw.placing([{"a": 0, "b": 1}, {"b": 1}, {"b": 1}], MS, claim="")
    texts = [text.get_text() for text in chart.figure.axes[0].texts]
    assert texts[0] == "the plan before" and "take off a" in texts and "as it was" in texts
    boxes = [patch for patch in chart.figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert not any(box.get_linewidth() > 1 for box in boxes)


def test_dots_have_a_mark_for_each_number_and_write_the_first():
    rows = {"whole": {"clock": 2.0, "estimate": 3.0}, "rows": {"clock": 4.0, "estimate": 4.0}}
    chart = draw.dots(rows, unit="ms", claim="")
    assert [text.get_text() for text in chart.figure.axes[0].texts] == ["2", "4"]
    marks = [
        line for line in chart.figure.axes[0].lines if line.get_marker() not in ("None", None, "")
    ]
    assert [list(line.get_xdata()) for line in marks] == [[2.0, 4.0], [3.0, 4.0]]
